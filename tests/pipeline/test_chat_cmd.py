"""`earlyfusion chat` with piped lines, as a user types them."""

import fcntl
import io
import os
import re
import select
import signal
import subprocess
import sys
import termios

import pytest
from PIL import Image as PILImage
from serve_model import write_model

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import generate
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    PILImage.radial_gradient("L").resize((60, 40)).convert("RGB").save(path)
    return path


def talk(folder, monkeypatch, capsys, lines: str, *options: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert cli.main(["chat", "--model", str(folder), "--max-new-tokens", "6", *options]) == 0
    out, err = capsys.readouterr()
    assert err.count("attached a.png (60 x 40)") == f"{lines} {options}".count("a.png"), (
        "pictures are confirmed"
    )
    return out


def test_the_answer_is_what_generate_gives_for_the_same_document(folder, picture, monkeypatch, capsys):
    shown = talk(folder, monkeypatch, capsys, f"/image {picture}\nwhat color?\n")
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    message = Message("user", (Image(picture.read_bytes()), Text("what color?")))
    prompt = encode_chat([message], tokenizer, model.config.vision, template="qa")
    assert shown == generate(model, tokenizer, [prompt], max_new_tokens=6)[0] + "\n"


def test_a_second_turn_sees_the_first_and_reset_forgets_it(folder, monkeypatch, capsys, tmp_path):
    saved = tmp_path / "said.txt"
    talk(folder, monkeypatch, capsys, f"one\ntwo\n/save {saved}\n")
    roles = re.findall(r"^(user|assistant):", saved.read_text(), re.M)
    assert roles == ["user", "assistant", "user", "assistant"]
    first = talk(folder, monkeypatch, capsys, "two\n", "--template", "chat")
    again = talk(folder, monkeypatch, capsys, "one\n/reset\ntwo\n", "--template", "chat")
    assert again.endswith(first)


def test_a_path_inside_the_message_attaches_the_picture(folder, picture, monkeypatch, capsys):
    by_command = talk(folder, monkeypatch, capsys, f"/image {picture}\nwhat color?\n")
    assert talk(folder, monkeypatch, capsys, f"@{picture} what color?\n") == by_command
    assert talk(folder, monkeypatch, capsys, "what color?\n", "--image", str(picture)) == by_command


def test_mistakes_are_told_and_the_chat_goes_on(folder, monkeypatch, capsys, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    lines = f"/image missing.png\n/image {bad}\n/dance\n/image\n/help\nhello\n/quit\nnever\n"
    shown = talk(folder, monkeypatch, capsys, lines)
    errors = [line for line in shown.splitlines() if line.startswith("error:")]
    assert len(errors) == 4 and "/reset" in shown
    assert "missing.png" in errors[0] and "bad.png" in errors[1] and "/dance" in errors[2]


AT_A_TERMINAL = """
import sys, readline
from earlyfusion.pipeline import chat

class Echo:
    def say(self, text, out):
        print(f"heard {text}", flush=True)
        if text == "long":
            raise KeyboardInterrupt

chat.converse(Echo(), sys.stdout, typed=True)
print("ended", flush=True)
"""


def at_the_terminal() -> None:
    """In the child: the terminal is its own, and Ctrl-C counts even where the tests run in the background of
    a shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_at_a_terminal_arrow_keys_edit_and_ctrl_c_ends_a_line_or_an_answer_but_not_the_chat():
    """Keys go in one after the other, each when the answer to the one before has come."""
    leader, follower = os.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    shell = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL],
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=at_the_terminal,
        **terminal,
    )
    os.close(follower)
    seen = ""

    def until(text):
        nonlocal seen
        while text not in seen:
            assert select.select([leader], [], [], 60)[0], repr(seen)
            seen += os.read(leader, 4096).decode()
        seen = seen.partition(text)[2]

    # Two arrows to the left, then X; the arrow up brings the line back.
    keys = {b"abc\x1b[D\x1b[DX\r": "heard aXbc", b"\x1b[A\r": "heard aXbc", b"given up": "given up"}
    for typed, answer in keys.items():
        until("> ")
        os.write(leader, typed)
        until(answer)
    for _ in range(6):  # a signal between two waits of readline is seen with the next one
        os.write(leader, b"\x03")
        if select.select([leader], [], [], 5)[0]:
            break
    for typed, answer in {b"long\r": "heard long", b"\x04": "ended"}.items():
        until("> ")
        os.write(leader, typed)
        until(answer)
    assert shell.wait(timeout=60) == 0
    os.close(leader)
