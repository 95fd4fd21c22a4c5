"""`import earlyfusion` as a user has it: docs/python.md and the docstrings run, names are what they say, and
a wheel works outside the checkout."""

import ast
import doctest
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

import earlyfusion
from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image as Picture
from earlyfusion.data.sample import Text, answer_text, question_text
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline import load as module

ROOT = Path(__file__).resolve().parent.parent
FRONT = ROOT / "pipeline" / "package" / "__init__.py"
FP32 = 1e-5  # fp32 sums in another order
QUESTION = "how many objects are there?"


@pytest.fixture(scope="module")
def picture():
    made = Image.new("RGB", (48, 40), "white")
    draw = ImageDraw.Draw(made)
    draw.ellipse((6, 6, 20, 20), fill="red")
    draw.rectangle((26, 18, 40, 32), fill="blue")
    return made


@pytest.fixture
def model():
    return earlyfusion.load("embedded:skills")


def test_the_page_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict = {}
    shown = 0
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert len(expected) == block.count("print(")
        with redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        assert out.getvalue().splitlines() == expected
        shown += len(expected)
    assert shown > 12


@pytest.mark.parametrize("where", [earlyfusion, module], ids=["package", "load"])
def test_examples_of_the_docstrings_hold(where, picture, model):
    globs = {"earlyfusion": earlyfusion, "picture": picture, "model": model, **vars(module)}
    done = [
        doctest.DocTestRunner(verbose=False).run(test)
        for test in doctest.DocTestFinder(exclude_empty=True).find(where, where.__name__, globs=globs)
    ]
    assert sum(found.attempted for found in done) > 2 and not any(found.failed for found in done)


def test_every_name_is_the_object_that_its_module_defines():
    """PLACES, __all__ and what a type checker reads agree."""
    (typed,) = (node for node in ast.parse(FRONT.read_text()).body if isinstance(node, ast.If))
    named = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in typed.body
        for alias in node.names
    }
    assert named == earlyfusion.PLACES
    assert set(earlyfusion.__all__) == {*named, "VERB_MODULES", "__version__"} <= set(dir(earlyfusion))
    for name, place in named.items():
        where, _, attribute = place.partition(":")
        assert getattr(earlyfusion, name) is getattr(importlib.import_module(where), attribute)
    with pytest.raises(AttributeError, match="no attribute 'Mamba'; it has Decoder"):
        earlyfusion.Mamba  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    code = "import earlyfusion, sys; dir(earlyfusion); print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_loss_is_that_of_the_same_tokens_by_hand(model, picture):
    """Cross entropy of whole logits over the learned tokens of each document alone."""
    samples = [[picture, Text("\nQ: colour?\nA:", loss=0.0), " red"], "Two documents in one row."]
    total, count = 0.0, 0
    for sample in samples:
        batch = model.batch([sample])
        logits = model.model.logits(model.model.hidden(batch)).double()
        nll = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="sum")
        total, count = total + float(nll.detach()), count + int((batch.labels >= 0).sum())
    torch.testing.assert_close(float(model.loss(samples).detach()), total / count, rtol=FP32, atol=0.0)
    # " red" and [EOS] alone of the first one.
    assert int((model.batch(samples[:1]).labels >= 0).sum()) == len(model.tokenizer.encode(" red")) + 1


def test_a_conversation_is_the_document_of_the_form_the_model_was_trained_on(model, picture):
    talk = [{"role": "user", "content": [picture, QUESTION]}, {"role": "assistant", "content": "2"}]
    by_hand = [picture, Text(question_text(QUESTION), loss=0.0), answer_text("2")]
    ours, same = model.encode(talk), model.encode(by_hand)
    assert torch.equal(ours.ids, same.ids) and torch.equal(ours.loss_weights, same.loss_weights)
    typed = [Message("user", (Picture(picture), Text(QUESTION))), Message("assistant", (Text("2"),))]
    assert torch.equal(model.encode(typed).ids, same.ids)
    chat = earlyfusion.LoadedModel(model.model, model.tokenizer, "chat").encode(talk)
    assert model.tokenizer.open_id in chat.ids and model.tokenizer.open_id not in ours.ids


def test_a_picture_may_come_in_any_form(model, picture, tmp_path):
    picture.save(tmp_path / "a.png")
    stored = (tmp_path / "a.png").read_bytes()
    decoded = torch.tensor(list(picture.tobytes()), dtype=torch.uint8).view(40, 48, 3).numpy()
    first, *others = (
        model.encode([form, "x"]).patches
        for form in (picture, tmp_path / "a.png", stored, decoded, Picture(picture))
    )
    assert all(torch.equal(first, other) for other in others)


def test_answers_do_not_depend_on_what_is_asked_beside_them(model, picture):
    prompts = [
        [picture, question_text(QUESTION)],
        "The import statement",
        [{"role": "user", "content": "2 + 2?"}],
    ]
    together = model.generate(prompts, max_new_tokens=8)
    assert together == [text for prompt in prompts for text in model.generate([prompt], max_new_tokens=8)]
    drawn = [model.generate(prompts, max_new_tokens=8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_chat_model_keeps_its_form_and_its_thoughts(model, tmp_path, monkeypatch):
    chat = earlyfusion.LoadedModel(model.model, model.tokenizer, "chat")
    again = earlyfusion.load(chat.save(tmp_path / "saved"))
    assert again.template == "chat" and earlyfusion.load(model.save(tmp_path / "plain")).template == "qa"
    told = Message("assistant", (Text("three"),), thinking="I count")
    told_ids = chat.encode([{"role": "user", "content": "?"}, told])
    opened = chat.encode([{"role": "user", "content": "?"}], prompt=True)
    written = told_ids.ids[len(opened) :].tolist()
    done = type("Done", (), {"ids": written, "text": ""})
    monkeypatch.setattr(earlyfusion.LoadedModel, "_complete", lambda *_: [done])
    assert chat.reply("?").thinking == "I count" and chat.chat("?") == "three"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda model: model.generate("abc"), r"list of prompts, got a single str; write generate\(\[\["),
        (lambda model: model.batch([]), "list of samples, got none"),
        (lambda model: model.chat([3]), "holds int 3: expected text, a picture"),
        (lambda model: model.chat([Path("lost.png"), "?"]), "lost.png: no such file"),
        (
            lambda model: model.chat([{"role": "user", "text": "?"}]),
            r"keys \['role', 'text'\]: expected role",
        ),
        (
            lambda model: model.chat([{"role": "robot", "content": "?"}]),
            "role 'robot': expected one of system",
        ),
        (lambda model: earlyfusion.load("embedded:skill"), "embedded models are orchestrator, skills"),
    ],
)
def test_a_mistake_is_one_clear_line(model, ask, words):
    with pytest.raises(UserError, match=words) as caught:
        ask(model)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path):
    """Built from a copy, unpacked into a fresh environment that has the dependencies alone, asked from
    elsewhere."""
    source, home = tmp_path / "source", tmp_path / "home"
    skipped = shutil.ignore_patterns(".*", "runs", "build", "tests", "docs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run([*pip, "-w", tmp_path, source], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    shutil.rmtree(source)
    assert (home / "earlyfusion" / "py.typed").is_file() and not (home / "kernels").exists()

    # The folder of a path is not searched for .pth files: an editable installation is not seen.
    packages = Path(torch.__file__).parent.parent
    code = (
        "import sys, earlyfusion; assert 'torch' not in sys.modules; print(earlyfusion.__file__)\n"
        "from earlyfusion.data.examples import write_examples; from pathlib import Path\n"
        "write_examples(Path('photos')); model = earlyfusion.load('embedded:skills')\n"
        "print(model.chat([Path('photos/shape.png'), 'what color is the shape?']))\n"
        "from earlyfusion.pipeline.cli import main; sys.exit(main(['plan', 'nano']))"
    )
    path = os.pathsep.join([str(home), str(packages)])
    bare = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(home / "earlyfusion" / "__init__.py"))


def test_the_embedded_model_travels_with_the_package():
    assert (model_folder("embedded:skills") / "model.safetensors").is_file()
