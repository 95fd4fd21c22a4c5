"""The needle benchmark: its controls hold no needle, its rows are lengths and depths, and long prompts go
through or are told."""

import pytest
from eval_cases import Scripted, ask_all, hf_folder, hf_model, own_model

from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions


def needle(form="", lengths="128,1024", **options):
    return build_task(
        f"needle:{form}" if form else "needle", TaskOptions(extra={"lengths": lengths}, **options)
    )


def seen(question, request):
    """The answer where the picture of the needle stands in the prompt."""
    problem = question.meta["problem"]
    shown = [part.image.tobytes() for part in request.prompt if hasattr(part, "image")]
    return problem.answer if problem.picture.tobytes() in shown else "none"


def said(question, request):
    problem = question.meta["problem"]
    asked = problem.question.removeprefix("what color is the ").rstrip("?")
    return problem.answer if f"the {asked} is {problem.answer}." in request.prompt[0].text else "none"


@pytest.mark.parametrize(
    ("form", "model", "views"), [("", seen, ("without", "blind")), ("words", said, ("without",))]
)
def test_only_the_needle_answers(form, model, views):
    _, sums = ask_all(needle(form), model, 31)
    assert sums["score"] == 1.0 and sums["n"] == 31
    assert [sums[f"{view}_score"] for view in views] == [0.0] * len(views)
    rows = sums["by_category"]
    assert (rows["000128 tokens"]["n"], rows["001024 tokens"]["n"]) == (16, 15)
    depths = [found["n"] for name, found in rows.items() if name.startswith("001024 tokens, depth")]
    assert len(depths) > 2 and sum(depths) == 15


def test_an_unknown_length_is_told():
    with pytest.raises(EvalError, match="needle: --set lengths=1000; did you mean '"):
        needle(lengths="128,1000")


@pytest.mark.parametrize("form", ["", "words"])
def test_our_models_read_prompts_of_any_length(form):
    """Longer than the engine's chunk (2,048 tokens): 63 pictures, one sequence at a time and four."""
    found = [run_task(own_model(batch_size=size), needle(form, "4096"), limit=2) for size in (1, 4)]
    assert all(one["refused"] == 0 and one["metrics"]["n"] == 2 for one in found)


def test_prompts_that_memory_does_not_hold_are_told(monkeypatch):
    """torch's own error, of an allocation that no machine can make."""
    model = own_model(batch_size=2)
    monkeypatch.setattr("earlyfusion.eval.models.engine.KEPT_PREFIXES", 1 << 28)
    with pytest.raises(EvalError, match=r"no memory for 2 sequences of .* tokens; ask for fewer"):
        run_task(model, needle("words", "128"), limit=1)


def test_a_prompt_over_a_models_window_is_counted_and_not_cut(tmp_path):
    model = hf_model(hf_folder(tmp_path, "gpt2"))
    found = run_task(model, needle("words", "128,4096"), limit=4)
    assert found["refused"] == 2


def test_pictures_need_eyes():
    blind = Scripted()
    blind.capabilities = frozenset({"text", "generate"})
    with pytest.raises(EvalError, match="needs a model with image"):
        run_task(blind, needle(), limit=2)
