"""docs/tutorial.md as a reader follows it: its blocks in order, in one folder; trainings are two steps."""

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
# What makes a command small: the same code on a handful of tokens.
SMALL = {
    "pretrain": "--steps 2 --stages.0.tokens 512 --stages.0.length 256 --eval.tasks [] --eval.every 0"
    " --eval.samples 0 --eval.heldout 4 --train.threads 1",
    "rl": "--steps 1 --eval.problems 4 --rollout.prompts 4 --rollout.group_size 4 --train.threads 1",
    "serve": "--port 0",
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def blocks():
    """(language, the text before, the block) of every block of the page."""
    found = re.findall(r"([^\n]*(?:\n[^\n`]+)*)\n+^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [(language, before, block) for before, language, block in found]


def lines():
    """The commands of the page, in order."""
    return [line for language, _, block in blocks() if language == "bash" for line in block.splitlines()]


def command(line):
    """A line of the page as the program that a reader's shell starts, in its smallest form."""
    name, verb, *words = shlex.split(line)
    assert name == "earlyfusion", f"the page names a command this test does not know: {line}"
    # The console script: unlike `python -m` it does not see modules in the folder by itself.
    return [
        str(Path(sys.executable).with_name("earlyfusion")),
        verb,
        *words,
        *shlex.split(SMALL.get(verb, "")),
    ]


def run(line, folder):
    """What a command printed; it must end well."""
    done = subprocess.run(
        command(line), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def served(line, folder):
    """The page of the server, and its answer to a question with a picture."""
    with subprocess.Popen(
        command(line), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            address, front = (server.stdout.readline().split()[-1] for _ in range(2))
            with urllib.request.urlopen(front, timeout=60) as answer:
                page = answer.read().decode()
            picture = base64.b64encode((folder / "photos" / "000.png").read_bytes()).decode()
            shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
            asked = {"type": "text", "text": "what color is it?"}
            body = {"messages": [{"role": "user", "content": [shown, asked]}], "max_tokens": 4}
            request = urllib.request.Request(
                f"{address}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                choice = json.load(answer)["choices"][0]
        finally:
            server.send_signal(signal.SIGTERM)
        # uvicorn hands the signal on when it has stopped.
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)
    return page, choice


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which the page was followed, and what its commands printed: line -> text."""
    folder, printed = tmp_path_factory.mktemp("tutorial"), {}
    for language, before, block in blocks():
        named = re.findall(r"`([\w.]+\.(?:py|toml))`", before)
        if language == "bash":
            for line in block.splitlines():
                printed[line] = (served if " serve " in line else run)(line, folder)
        elif named:
            (folder / named[-1]).write_text(block, encoding="utf-8")
        else:
            done = subprocess.run(
                [sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
    return folder, printed


def test_the_page_has_every_step_from_a_folder_to_the_browser():
    verbs = [line.split()[1] for line in lines()]
    assert verbs == ["init", "prepare", "pretrain", "generate", "serve", "rl", "generate"]
    assert [language for language, *_ in blocks()].count("python") == 3


@pytest.mark.slow
def test_every_block_runs_as_it_stands(followed):
    folder, printed = followed
    assert set(printed) == set(lines())
    assert len(list((folder / "photos").glob("*.png"))) == 600
    assert (folder / "shapes" / "recipe.toml").is_file()
    assert (folder / "runs" / "shapes" / "report.html").is_file()


@pytest.mark.slow
def test_what_init_says_to_type_next_is_what_the_page_says(followed):
    _, printed = followed
    (told,) = (text for line, text in printed.items() if line.split()[1] == "init")
    for line in lines()[1:3]:
        assert line in told


@pytest.mark.slow
def test_the_browser_gets_a_page_and_the_page_an_answer(followed):
    _, printed = followed
    ((page, choice),) = (found for line, found in printed.items() if line.split()[1] == "serve")
    assert "<html" in page and choice["message"]["role"] == "assistant"


@pytest.mark.slow
def test_both_rewards_were_asked(followed):
    folder, _ = followed
    records = [json.loads(line) for line in (folder / "runs/taught/metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    assert {"reward_of/task", "reward_of/brief"} <= names
    assert (folder / "runs" / "taught" / "report.html").is_file()
