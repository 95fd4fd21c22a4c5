"""`earlyfusion generate`: answers on standard output; one clear line and exit code 2 for input that cannot
work."""

import importlib.util
import sys
from pathlib import Path

import pytest
from PIL import Image

from earlyfusion.pipeline.cli import main

_path = Path(__file__).parent.parent / "model" / "fusion_cases.py"
_spec = importlib.util.spec_from_file_location("fusion_cases", _path)
cases = sys.modules.setdefault("fusion_cases", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from earlyfusion.model.hub.folder import save_model

    folder = tmp_path_factory.mktemp("generate")
    tokenizer = cases.tiny_tokenizer()
    save_model(cases.tiny_model(cases.tiny_config(tokenizer)), tokenizer, folder / "model")
    Image.new("RGB", (40, 24), (10, 120, 60)).save(folder / "green.png")
    Image.new("RGBA", (9, 50), (200, 120, 60, 90)).save(folder / "tall.webp")
    (folder / "notes.png").write_text("not a picture")
    (folder / "torn.png").write_bytes((folder / "green.png").read_bytes()[:60])
    return folder


def ask(directory, *arguments):
    words = f"generate --model {directory / 'model'} --device cpu --max-new-tokens 8"
    return main([*words.split(), *arguments])


def test_pictures_and_text_give_an_answer(directory, capsys):
    picture = ["--image", str(directory / "green.png")]
    answers = []
    for more in ([], ["--image", str(directory / "tall.webp")]):
        assert ask(directory, *picture, *more, "--question", "what color is the shape?") == 0
        answers.append(capsys.readouterr().out)
    assert all(answer.endswith("\n") for answer in answers)
    assert ask(directory, *picture, "--question", "what color is the shape?") == 0
    assert capsys.readouterr().out == answers[0]  # greedy: the same again
    assert ask(directory, *picture, "--prompt", "\nQ: what color is the shape?\nA:") == 0
    assert capsys.readouterr().out == answers[0]  # --question is that prompt
    assert ask(directory, "--prompt", "the quick") == 0


def test_sampling_follows_the_seed(directory, capsys):
    outputs = []
    for seed in ("1", "1", "2", "3"):
        assert ask(directory, "--prompt", "the", "--temperature", "2", "--top-p", "0.95", "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and len(set(outputs)) > 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--image", "nowhere.png"], "no such file"),
        (["--image", "{}/notes.png"], "not an image Pillow can read"),
        (["--image", "{}/torn.png"], "cannot be decoded"),
        (["--image", "{}"], "cannot be read"),
        ([], "nothing to continue"),
        (["--prompt", "x", "--model", "{}/.."], "not a model directory"),
        (["--prompt", "x", "--top-p", "7"], "top_p=7.0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--device", "abacus"], "--device abacus"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_input_that_cannot_work_is_one_line_and_exit_code_2(directory, capsys, arguments, said):
    assert ask(directory, *(argument.format(directory) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err, captured.err
