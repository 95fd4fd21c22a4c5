"""`earlyfusion generate`: answers on standard output; one clear line and exit code 2 for input that cannot
work."""

import pytest
from PIL import Image
from serve_model import write_model

from earlyfusion.pipeline.cli import main


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    write_model(folder / "model")
    Image.new("RGB", (40, 24), (10, 120, 60)).save(folder / "green.png")
    Image.new("RGBA", (9, 50), (200, 120, 60, 90)).save(folder / "tall.webp")
    (folder / "notes.png").write_text("not a picture")
    (folder / "torn.png").write_bytes((folder / "green.png").read_bytes()[:60])
    return folder


def ask(directory, *arguments):
    words = f"generate --model {directory / 'model'} --device cpu --max-new-tokens 8"
    return main([*words.split(), *arguments])


def test_pictures_and_text_give_an_answer(directory, capsys):
    green, tall = (f"--image {directory / name}".split() for name in ("green.png", "tall.webp"))
    question, prompt = ["--question", "what color?"], ["--prompt", "\nQ: what color?\nA:"]
    answers = []
    # Greedy: the same again; a question is that prompt.
    for words in ([*green, *question], [*green, *question], [*green, *prompt], [*green, *tall, *question]):
        assert ask(directory, *words) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2] and all(answer.endswith("\n") for answer in answers)


def test_sampling_follows_the_seed(directory, capsys):
    outputs = []
    for seed in ("1", "1", "2", "3"):
        assert ask(directory, "--prompt", "the", "--temperature", "2", "--top-p", "0.95", "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and len(set(outputs)) > 1


BAD = """
--image nowhere.png | no such file
--image {}/notes.png | not an image Pillow can read
--image {}/torn.png | cannot be decoded
--image {} | cannot be read
 | nothing to continue
--prompt x --model {}/.. | not a model directory
--prompt x --top-p 7 | top_p=7.0
--prompt x --temperature -1 | temperature=-1.0
--prompt x --device abacus | --device abacus
--prompt x --max-new-tokens 0 | --max-new-tokens
"""


@pytest.mark.parametrize("line", BAD.strip("\n").splitlines())
def test_input_that_cannot_work_is_one_line_and_exit_code_2(directory, capsys, line):
    words, said = line.format(directory).split(" | ")
    assert ask(directory, *words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err, captured.err
