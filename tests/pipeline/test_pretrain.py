"""One run of the loop: what a step computes, what a frozen stage leaves alone, what a run leaves behind."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tiny_run import assert_same, losses, numbers, run_here, same, weights
from torch import Tensor

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.kernels import products
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import pretrain
from earlyfusion.pipeline.checkpoint import completed, step_of
from earlyfusion.pipeline.config.compose import dump, load_config
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.plan import banner
from earlyfusion.pipeline.state import weights as stored

# fp32 sums over some hundred tokens in another order
GRADIENT_RTOL = 2e-5


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_four_lanes_give_the_gradient_of_one_weighted_mean(training, monkeypatch):
    """Micro-batches are accumulated; by hand: all logits, cross entropy, weights by source, one mean."""
    words = (("stages.short.lanes", 4), ("stages.short.tokens", 512), ("optim.clip_grad_norm", "null"))
    run = training(*words)
    seen: dict[str, Tensor] = {}

    def capture() -> None:
        seen.update({name: parameter.grad.clone() for name, parameter in run.fusion.named_parameters()})

    monkeypatch.setattr(run.optimizer, "step", capture)
    batches = run.loaders.at(0).next_step()
    assert len(batches) == 4 and len({batch.num_loss_weight for batch in batches}) > 1

    total, weight, told = 0.0, 0.0, defaultdict(list)
    for batch in batches:
        factor = torch.tensor([{"manual": 0.5}.get(batch.sources[i], 1.0) for i in batch.source_ids])
        learned = batch.loss_weights > 0
        assert torch.equal(batch.loss_weights[learned], factor[learned])  # texts and answers weigh 1
        logits = run.fusion.logits(run.fusion.hidden(batch)).double()
        nll = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="none")
        loss_weights = (batch.loss_weights * (batch.labels >= 0)).double()
        for t in loss_weights.nonzero().flatten().tolist():
            told[f"loss/source/{batch.sources[batch.source_ids[t]]}"].append(nll[t].item())
            told["loss/image" if batch.has_image[t] else "loss/text"].append(nll[t].item())
        total = total + (nll * loss_weights).sum()
        weight += float(loss_weights.sum())
    expected = torch.autograd.grad(total / weight, list(run.fusion.parameters()), allow_unused=True)

    with monkeypatch.context() as patch:
        patch.setattr(run.loaders.at(0), "next_step", lambda: batches)
        run.total = 1
        patch.setattr(run, "finish", lambda: EXIT_OK)
        assert run.train() == EXIT_OK
    for (name, _), gradient in zip(run.fusion.named_parameters(), expected, strict=True):
        gradient = torch.zeros_like(seen[name]) if gradient is None else gradient
        scale = float(gradient.abs().max()) + 1e-9
        assert float((seen[name] - gradient).abs().max()) <= GRADIENT_RTOL * scale + 1e-9, name
    assert losses(run.out)[0] == pytest.approx(float(total.detach()) / weight, rel=1e-6)
    record = numbers(run.out)[0]
    assert {key for key in record if key.startswith("loss/")} == set(told) and len(told) == 5
    for key, values in told.items():  # told without weights: plain nats per token
        assert record[key] == pytest.approx(sum(values) / len(values), rel=1e-6), key


FROZEN = {
    "vision": ("vision_tower.",),
    "projector": ("mm_projector.",),
    "text": ("decoder.",),
    "decoder.layers.2.*": ("decoder.layers.2.",),
}


@pytest.mark.parametrize("optimizer", ["muonclip", "adamw"])
@pytest.mark.parametrize("entry", list(FROZEN))
def test_a_frozen_stage_leaves_the_named_parameters_bit_identical(training, entry, optimizer):
    """No update, no weight decay, no QK-Clip; the rest moves."""
    run = training(("stages.short.frozen", [entry]), ("run.steps", 3), ("optim.name", optimizer))
    before = parameters(run.fusion)
    biases = {
        name: value.clone() for name, value in run.fusion.named_buffers() if name.endswith("correction_bias")
    }
    run._finish = lambda: EXIT_OK
    assert run.train() == EXIT_OK
    if entry not in ("vision", "projector"):
        logits = [max(record["max_logit"]["2"]) for record in numbers(run.out) if "max_logit" in record]
        assert optimizer == "adamw" or max(logits) > 0.03, "the clip had a reason to touch the frozen layer"
    moved = {name for name, value in run.fusion.named_parameters() if not torch.equal(value, before[name])}
    frozen = {name for name in before if name.startswith(FROZEN[entry])}
    assert frozen and not moved & frozen
    assert len(moved) > 0.9 * (len(before) - len(frozen)) and all(
        p.requires_grad for p in run.fusion.parameters()
    )
    for name, value in run.fusion.named_buffers():
        if name in biases:
            assert torch.equal(value, biases[name]) == name.startswith(FROZEN[entry]), name


def test_a_stage_thaws_what_the_stage_before_froze(run, recipe, tmp_path):
    words = ('--stages.short.frozen ["vision"] --steps 10 --checkpoint.every 1 --checkpoint.keep 20',)
    assert run(recipe, tmp_path, *words) == EXIT_OK
    states = {step_of(path): stored(path) for path in completed(tmp_path / "checkpoints")}
    tower = [name for name in states[1] if name.startswith("vision_tower.")]
    assert all(torch.equal(states[1][name], states[8][name]) for name in tower)
    assert not any(torch.equal(states[8][name], states[9][name]) for name in tower)


@pytest.mark.parametrize(
    ("weights_of", "absent"),
    [({"manual": 1.0}, "loss/image"), ({"vqa": 1.0}, "loss/text")],
    ids=["text only", "images only"],
)
def test_a_run_on_one_modality_trains(run, recipe, tmp_path, weights_of, absent):
    table = "{" + ",".join(f"{key}={value}" for key, value in weights_of.items()) + "}"
    assert (
        run(recipe, tmp_path, "--stages.short.weights", table, "--stages.short.length 256 --steps 8")
        == EXIT_OK
    )
    records = numbers(tmp_path)
    assert not any(absent in record for record in records)
    assert records[-1]["loss"] < records[0]["loss"] - 0.2
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path).values())
    if absent == "loss/image":
        assert records[-1]["patches"] == 0


def test_bf16_autocast_follows_the_fp32_run(run, recipe, tmp_path):
    """Eight bits of mantissa: close losses, not equal ones; master weights stay fp32."""
    assert run(recipe, tmp_path / "fp32", "--steps 6") == EXIT_OK
    assert run(recipe, tmp_path / "bf16", "--steps 6 --train.mixed_precision bf16") == EXIT_OK
    ours, theirs = losses(tmp_path / "bf16"), losses(tmp_path / "fp32")
    assert ours != theirs and ours == pytest.approx(theirs, rel=0.02)
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32}


@pytest.mark.parametrize("pays", [True, False])
def test_products_are_halved_where_that_pays(run, training, recipe, tmp_path, monkeypatch, pays):
    """The head of the run and its report say so."""
    monkeypatch.setattr(pretrain, "halves_pay", lambda: pays)
    monkeypatch.setattr(products, "LEAST", 1)
    assert run(recipe, tmp_path / "fp32", "--steps 6") == EXIT_OK
    assert run(recipe, tmp_path / "auto", "--steps 6 --train.cpu_products auto") == EXIT_OK
    head = banner(training(("train.cpu_products", "auto")))
    assert products.HALVED not in banner(training(out=tmp_path / "other"))
    facts = json.loads((tmp_path / "auto/facts.json").read_text())  # what the report's head shows
    assert (products.HALVED in head) == (facts["precision"] == products.HALVED) == pays
    ours, theirs = losses(tmp_path / "auto"), losses(tmp_path / "fp32")
    assert (ours != theirs) == pays and ours == pytest.approx(theirs, rel=0.02)
    assert {tensor.dtype for tensor in weights(tmp_path / "auto").values()} == {torch.float32}


def test_recomputation_is_reached_from_a_recipe_and_keeps_fewer_activations(training):
    """The same loss and gradients in float64, from less than half of the bytes that the backward pass kept
    before."""
    kept: dict[str, int] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for recompute in ("no", "block", "layer"):
        made = training(("train.recompute", recompute))
        batch, model = made.loaders.at(0).next_step()[0], made.fusion.double()
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(batch).loss_sum
        kept[recompute] = sum(sizes)
        loss.backward()
        gradients[recompute] = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
    for way in ("block", "layer"):
        assert kept[way] < kept["no"] / 2
        assert gradients[way].keys() == gradients["no"].keys()
        for name, gradient in gradients[way].items():
            torch.testing.assert_close(gradient, gradients["no"][name], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def finished(folder, recipe) -> Path:
    """A whole run, with report, two evaluations with pictures and a model directory."""
    with pytest.MonkeyPatch.context() as patch:
        words = ("--eval.every 5 --eval.samples 2 --steps 9",)
        assert run_here(recipe, folder / "finished", *words, report=True, monkeypatch=patch) == EXIT_OK
    return folder / "finished"


def test_a_finished_run_leaves_what_the_first_lines_promise(finished):
    for name in (
        "metrics.jsonl",
        "recipe.toml",
        "versions.json",
        "report.html",
        "facts.json",
        "model/config.json",
    ):
        assert (finished / name).stat().st_size > 0, name
    assert {path.name for path in (finished / "eval").iterdir()} == {"attnres_0000009.json"}
    assert len(list((finished / "samples").glob("step_*.json"))) == 2
    report = (finished / "report.html").read_text()
    assert "loss" in report and "data:image" in report, "curves and pictures stand in the file itself"


def test_recipe_toml_reproduces_the_run(run, finished, tmp_path):
    assert run(finished / "recipe.toml", tmp_path) == EXIT_OK
    assert_same(tmp_path, finished)
    ours, theirs = (dump(load_config([str(out / "recipe.toml")])) for out in (tmp_path, finished))
    assert ours | {"run": None} == theirs | {"run": None}


def test_a_warm_start_begins_with_the_weights_and_with_nothing_else(training, finished, tmp_path):
    run = training(("run.init_from", str(finished / "model")), out=tmp_path / "warm")
    assert same(dict(run.fusion.state_dict()), dict(load_model(finished / "model").state_dict()))
    assert run.step == 0 and run.meter.totals["tokens"] == 0 and not run.optimizer.state_dict()["state"]
    run.total, run._finish = 1, lambda: EXIT_OK
    assert run.train() == EXIT_OK
    assert losses(tmp_path / "warm")[0] < losses(finished)[0] - 0.5, (
        "it knows already what the first run learned"
    )


def test_a_start_that_is_stored_in_bfloat16_is_trained_in_float32(training, finished, tmp_path):
    """A step of 1e-3 of a weight is less than half of what bfloat16 tells apart: it would be lost."""
    model = load_model(finished / "model", dtype=torch.bfloat16)
    folder = save_model(model, Tokenizer.load(finished / "model"), tmp_path / "stored")
    run = training(("run.init_from", str(folder)), out=tmp_path / "warm")
    assert {parameter.dtype for parameter in run.fusion.parameters()} == {torch.float32}
    assert same(dict(run.fusion.state_dict()), {k: v.float() for k, v in model.state_dict().items()})


def test_benchmarks_run_in_the_loop_on_the_weights_in_memory(training, tmp_path):
    """Any task of `earlyfusion eval` by name: its numbers are those of the same weights evaluated from a
    directory."""

    made = training(
        ("eval.tasks", ["counting", "bits_per_byte"]),
        ("eval.limits", {"counting": 6}),
        ("eval.every", 4),
        ("run.steps", 4),
        ("eval.data", {"bits_per_byte": str(Path(__file__))}),
    )
    told = []

    class Tracker:
        def event(self, step, kind, **facts):
            told.append((step, kind, facts))

        def busy(self, text, done=0, total=0):
            pass

    headline = made.evaluator.run(4, Tracker(), final=False)
    assert made.fusion.training
    model = EngineModel(made.fusion, made.tokenizer)
    again = run_task(model, build_task("counting"), limit=6)["metrics"]
    assert headline["counting"] == again["score"] and headline["counting_blind"] == again["blind_score"]
    saved = json.loads((tmp_path / "run" / "eval" / "counting_0000004.json").read_text())
    assert saved["score"] == again["score"] and saved["n"] == 6
    assert told[0][:2] == (4, "eval") and headline["bits_per_byte"] < 0
