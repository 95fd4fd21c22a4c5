"""One run of the loop: what it computes, what it leaves alone, what it leaves behind, and what it refuses."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from PIL import Image
from tiny_run import finish, forget_processes, losses, numbers, run_here, same, start, weights

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub import load_model
from earlyfusion.pipeline import cli, pretrain
from earlyfusion.pipeline.checkpoint import completed, latest, step_of
from earlyfusion.pipeline.compose import dump, load_config
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER
from earlyfusion.pipeline.statefile import load_tree
from earlyfusion.pipeline.track import read_metrics

# fp32 sums over some hundred tokens in another order
GRADIENT_RTOL = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pretrain")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Path:
    return tiny_run.make_tokenizer(folder, 320)


@pytest.fixture(scope="module")
def recipe(folder, tokenizer) -> Path:
    return tiny_run.write_recipe(folder / "tiny.toml", tiny_run.tiny_recipe(tokenizer))


@pytest.fixture
def run(monkeypatch):
    return lambda recipe, out, *words, **options: run_here(recipe, out, *words, monkeypatch=monkeypatch, **options)


@pytest.fixture
def training(recipe, tmp_path):
    """Makes a Pretraining to look into; closed at the end."""
    made = []

    def make(*words: tuple[str, object], resume: bool = False, out: Path | None = None) -> pretrain.Pretraining:
        forget_processes()
        config = load_config([str(recipe)], [("run.out", str(out or tmp_path / "run")), *words])
        made.append(pretrain.Pretraining(config, resume))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ------------------------------------------------------------------------------------------------ what is computed


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_four_lanes_give_the_gradient_of_one_weighted_mean(training, monkeypatch):
    """Micro-batches are accumulated; by hand: all logits, cross entropy, weights by source and for text, one mean."""
    words = (("stages.short.lanes", 4), ("stages.short.tokens", 128), ("optim.clip_grad_norm", "null"))
    run = training(*words)
    seen: dict[str, torch.Tensor] = {}

    def capture() -> None:
        seen.update({name: parameter.grad.clone() for name, parameter in run.fusion.named_parameters()})

    monkeypatch.setattr(run.optimizer, "step", capture)
    batches = run.loaders.at(0).next_step()
    raw = [batch.loss_weights.clone() for batch in batches]
    assert len(batches) == 4 and len({batch.num_loss_weight for batch in batches}) > 1

    total, weight = 0.0, 0.0
    for batch, loss_weights in zip(batches, raw, strict=True):
        factor = torch.tensor([{"manual": 0.5}.get(batch.sources[i], 1.0) for i in batch.source_ids])
        factor = factor * torch.where(batch.has_image, 1.0, 0.7)
        logits = run.fusion.logits(run.fusion.hidden(batch)).double()
        nll = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="none")
        loss_weights = (loss_weights * factor * (batch.labels >= 0)).double()
        total = total + (nll * loss_weights).sum()
        weight += float(loss_weights.sum())
    expected = torch.autograd.grad(total / weight, list(run.fusion.parameters()), allow_unused=True)

    with monkeypatch.context() as patch:
        patch.setattr(run.loaders.at(0), "next_step", lambda: batches)
        run.total = 1
        patch.setattr(run, "_finish", lambda: EXIT_OK)
        assert run.train() == EXIT_OK
    for (name, _), gradient in zip(run.fusion.named_parameters(), expected, strict=True):
        gradient = torch.zeros_like(seen[name]) if gradient is None else gradient
        scale = float(gradient.abs().max()) + 1e-9
        assert float((seen[name] - gradient).abs().max()) <= GRADIENT_RTOL * scale + 1e-9, name
    assert losses(run.out)[0] == pytest.approx(float(total.detach()) / weight, rel=1e-6)


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
    biases = {name: value.clone() for name, value in run.fusion.named_buffers() if name.endswith("correction_bias")}
    run._finish = lambda: EXIT_OK
    assert run.train() == EXIT_OK
    if entry not in ("vision", "projector"):
        logits = [max(record["max_logit"]["2"]) for record in numbers(run.out) if "max_logit" in record]
        assert optimizer == "adamw" or max(logits) > 0.03, "the clip had a reason to touch the frozen layer"
    moved = {name for name, value in run.fusion.named_parameters() if not torch.equal(value, before[name])}
    frozen = {name for name in before if name.startswith(FROZEN[entry])}
    assert frozen and not moved & frozen
    assert len(moved) > 0.9 * (len(before) - len(frozen)) and all(p.requires_grad for p in run.fusion.parameters())
    for name, value in run.fusion.named_buffers():
        if name in biases:
            assert torch.equal(value, biases[name]) == name.startswith(FROZEN[entry]), name


def test_a_stage_thaws_what_the_stage_before_froze(run, recipe, tmp_path):
    words = (
        "--stages.short.frozen",
        '["vision"]',
        "--steps",
        "10",
        "--checkpoint.every",
        "1",
        "--checkpoint.keep",
        "20",
    )
    assert run(recipe, tmp_path, *words) == EXIT_OK
    states = {step_of(path): load_tree(path / "model") for path in completed(tmp_path / "checkpoints")}
    tower = [name for name in states[1] if name.startswith("vision_tower.")]
    assert all(torch.equal(states[1][name], states[8][name]) for name in tower)
    assert not any(torch.equal(states[8][name], states[9][name]) for name in tower)


@pytest.mark.parametrize(
    ("weights_of", "absent"),
    [({"manual": 1.0}, "loss/image"), ({"vqa": 1.0}, "loss/text")],
    ids=["text only", "images only"],
)
def test_a_run_on_one_modality_trains(run, recipe, tmp_path, weights_of, absent):
    table = "{" + ", ".join(f"{key} = {value}" for key, value in weights_of.items()) + "}"
    assert (
        run(recipe, tmp_path, "--stages.short.weights", table, "--stages.short.length", "256", "--steps", "8")
        == EXIT_OK
    )
    records = numbers(tmp_path)
    assert not any(absent in record for record in records)
    assert records[-1]["loss"] < records[0]["loss"] - 0.2
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path).values())
    if absent == "loss/image":
        assert records[-1]["patches"] == 0


@pytest.mark.parametrize(
    "words", [("--optim.name", "adamw"), ("--model.attn_res", "none"), ("--optim.qk_clip", "null")]
)
def test_what_is_optional_can_be_left_out(run, recipe, tmp_path, words):
    assert run(recipe, tmp_path, *words, "--steps", "8") == EXIT_OK
    record = losses(tmp_path)
    assert record[-1] < record[0] - 0.2


def test_bf16_autocast_follows_the_fp32_run(run, recipe, tmp_path):
    """Eight bits of mantissa: close losses, not equal ones; master weights stay fp32."""
    assert run(recipe, tmp_path / "fp32", "--steps", "6") == EXIT_OK
    assert run(recipe, tmp_path / "bf16", "--steps", "6", "--train.mixed_precision", "bf16") == EXIT_OK
    ours, theirs = losses(tmp_path / "bf16"), losses(tmp_path / "fp32")
    assert ours != theirs and ours == pytest.approx(theirs, rel=0.02)
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32}


# ----------------------------------------------------------------------------------------------------- the guard


def poison(run: pretrain.Pretraining, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Make the loss of these steps (counted as they are taken) not a number; returns the states before each step."""
    real, before, calls = run.fusion.forward, {}, [0]

    def forward(batch):
        calls[0] += 1
        before[calls[0]] = {name: value.clone() for name, value in run.fusion.state_dict().items()}
        out = real(batch)
        return type(out)(out.loss_sum * math.nan, out.weight_sum, out.nll_T * math.nan) if calls[0] in steps else out

    run.fusion.forward = forward
    return before


def guard_events(out: Path) -> list[dict]:
    return read_metrics(out / "metrics.jsonl", "guard")


def test_the_guard_skips_a_bad_step_without_a_trace_in_the_weights(training, monkeypatch):
    """Weights, router biases and clip statistics as before it; the next batch goes on."""
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 7), ("guard.policy", "skip"), ("checkpoint.every", 0))
    before = poison(run, 4)
    assert run.train() == EXIT_OK
    assert same(before[4], before[5]) and not same(before[3], before[4]) and not same(before[5], before[6])
    assert len(before) == 7 and len(losses(run.out)) == 7 and losses(run.out)[3] is None
    (event,) = guard_events(run.out)
    assert event["step"] == 4 and event["action"] == "skip" and "nan" in event["message"]
    assert all(math.isfinite(loss) for loss in losses(run.out)[4:])


def test_a_skipped_step_does_not_poison_the_means_of_its_window(training, monkeypatch):
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 6), ("track.log_every", 3))
    poison(run, 5)
    assert run.train() == EXIT_OK
    record = numbers(run.out)[1]
    means = {key: value for key, value in record.items() if key.startswith("loss")}
    assert record["step"] == 6 and len(means) >= 4 and None not in means.values(), means


def test_the_guard_stops_with_one_line_and_exit_code_1(training, capsys):
    run = training(("run.steps", 7), ("guard.policy", "stop"))
    before = poison(run, 5)
    assert cli.guarded(run.train) == EXIT_FAILURE
    assert same(before[5], run.fusion.state_dict()), "the update of the bad step was not made"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "step 5" in lines[0] and "loss is nan" in lines[0]
    assert step_of(latest(run.out / "checkpoints")) == 3 and not (run.out / "model").exists()
    assert guard_events(run.out)[0]["action"] == "stop"


def test_the_guard_rolls_back_to_the_checkpoint_and_passes_the_bad_batch_over(training, monkeypatch):
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 7), ("guard.policy", "rollback"))
    saved = {}
    real = run.checkpoints.save

    def save(step, **state):
        saved.setdefault(step, {name: value.clone() for name, value in state["model"].items()})
        return real(step, **state)

    monkeypatch.setattr(run.checkpoints, "save", save)
    before = poison(run, 5)  # checkpoint at 3: back to it, then steps 4..7 on batches that follow the bad one
    assert run.train() == EXIT_OK
    assert same(before[6], saved[3]) and not same(before[6], before[5])
    assert len(before) == 5 + 4, "five steps, then the four after step 3 again"
    records = numbers(run.out)
    assert [record["step"] for record in records] == list(range(1, 8)), "each step is told once"
    assert all(math.isfinite(record["loss"]) for record in records)
    (event,) = guard_events(run.out)
    assert event["action"] == "rollback" and "nan" in event["message"]


def test_a_rollback_across_a_stage_boundary_does_not_read_old_data_again(training, monkeypatch):
    """Back into the first stage: its cursor stands where it was left, so no batch comes twice; the bad one neither."""
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    words = [("stages.short.steps", 4), ("stages.short.warmup_steps", 1), ("checkpoint.every", 3), ("run.steps", 7)]
    run = training(*words, ("guard.policy", "rollback"), ("guard.max_rollbacks", 2))
    seen, real = [], run.loaders.at

    def at(index):
        loader = real(index)
        if not hasattr(loader, "_watched"):
            original = loader.next_step

            def next_step():
                batches = original()
                seen.append((index, tuple(batches[0].ids.tolist())))
                return batches

            loader.next_step, loader._watched = next_step, True
        return loader

    monkeypatch.setattr(run.loaders, "at", at)
    poison(run, 5)  # the first step of the second stage; the checkpoint is of step 3
    assert run.train() == EXIT_OK
    assert [index for index, _ in seen] == [0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert len(set(seen)) == len(seen), "a batch was trained on twice"
    assert run.step == 7 and run.guard.rollbacks == 1


def test_too_many_bad_steps_stop_whatever_the_policy(training, capsys):
    run = training(("guard.max_skips", 2), ("guard.policy", "skip"))
    poison(run, *range(2, 20))
    assert cli.guarded(run.train) == EXIT_FAILURE
    assert run.step == 4 and "bad steps lately: 3" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- plan, and what is left


def test_dry_run_prints_the_plan_and_writes_nothing(run, recipe, tmp_path, capsys):
    assert run(recipe, tmp_path / "out", "--dry-run") == EXIT_OK
    shown = capsys.readouterr().out
    parts = ("[optim]", "[[stages]]", "parameters", "FLOPs", "who trains what", "muon", "adamw", "stages: 20 steps")
    assert all(part in shown for part in parts), [part for part in parts if part not in shown]
    assert "self_attn.q_proj.weight" in shown and "embed_tokens.weight" in shown
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def finished(folder, recipe) -> Path:
    """A whole run, with report, two evaluations with pictures and a model directory."""
    with pytest.MonkeyPatch.context() as patch:
        words = ("--eval.every", "5", "--eval.samples", "2", "--steps", "9")
        assert run_here(recipe, folder / "finished", *words, report=True, monkeypatch=patch) == EXIT_OK
    return folder / "finished"


def test_a_finished_run_leaves_what_the_first_lines_promise(finished):
    for name in ("metrics.jsonl", "recipe.toml", "versions.json", "report.html", "facts.json", "model/config.json"):
        assert (finished / name).stat().st_size > 0, name
    assert {path.name for path in (finished / "eval").iterdir()} == {"attnres_0000009.json"}
    assert len(list((finished / "samples").glob("step_*.json"))) == 2
    report = (finished / "report.html").read_text()
    assert "loss" in report and "data:image" in report, "curves and pictures stand in the file itself"


def test_recipe_toml_reproduces_the_run(run, finished, tmp_path):
    again = load_config([str(finished / "recipe.toml")])
    assert dump(again) == dump(load_config([str(finished / "recipe.toml")], [("run.seed", 3)]))
    assert run(finished / "recipe.toml", tmp_path) == EXIT_OK
    assert numbers(tmp_path) == numbers(finished)
    assert same(weights(tmp_path), weights(finished))
    ours, theirs = (dump(load_config([str(out / "recipe.toml")])) for out in (tmp_path, finished))
    assert ours | {"run": None} == theirs | {"run": None}


@pytest.fixture(scope="module")
def picture(folder) -> Path:
    Image.new("RGB", (64, 48), (200, 30, 30)).save(folder / "red.png")
    return folder / "red.png"


def test_generate_answers_from_the_model_directory(finished, picture, capsys):
    words = ["generate", "--model", str(finished / "model"), "--image", str(picture), "--prompt", "what color is"]
    assert cli.main([*words, "--max-new-tokens", "5"]) == EXIT_OK
    first = capsys.readouterr().out
    assert cli.main([*words, "--max-new-tokens", "5"]) == EXIT_OK
    assert capsys.readouterr().out == first and first.endswith("\n")


def test_the_model_directory_holds_the_weights_of_the_last_checkpoint(finished):
    loaded = load_model(finished / "model").state_dict()
    state = load_tree(latest(finished / "checkpoints") / "model")
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_warm_start_begins_with_the_weights_and_with_nothing_else(training, finished, tmp_path):
    run = training(("run.init_from", str(finished / "model")), out=tmp_path / "warm")
    assert same(dict(run.fusion.state_dict()), dict(load_model(finished / "model").state_dict()))
    assert run.step == 0 and run.meter.totals["tokens"] == 0 and not run.optimizer.state_dict()["state"]
    run.total, run._finish = 1, lambda: EXIT_OK
    assert run.train() == EXIT_OK
    assert losses(tmp_path / "warm")[0] < losses(finished)[0] - 0.5, "it knows already what the first run learned"


# ------------------------------------------------------------------------------------------------------- bad input


def refused(capsys, code: int) -> str:
    """The one line on stderr of a refused run."""
    assert code == EXIT_USER
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


BAD = {
    "unknown key": (("--optim.learning_rat", "1"), ["learning_rat", "unknown key", "optim"]),
    "nearest key": (("--optim.weight_decai", "1"), ["did you mean 'weight_decay'?"]),
    "wrong value": (("--stages.short.steps", "many"), ["stages.0.steps", "many"]),
    "unknown recipe option": (("--reusme",), ["--reusme", "resume"]),
    "unknown frozen name": (("--stages.short.frozen", '["visoin"]'), ["visoin", "matches no parameter", "vision"]),
    "unknown eval task": (("--eval.tasks", '["easy_vqs"]'), ["easy_vqs", "did you mean 'easy_vqa'?"]),
    "unknown source in a mixture": (("--stages.long.weights", "{vqs = 1.0}"), ["vqs", "did you mean 'vqa'?"]),
    "missing tokenizer": (("--tokenizer.path", "/nowhere/at/all"), ["/nowhere/at/all"]),
    "missing model": (("--init-from", "/nowhere/at/all"), ["/nowhere/at/all"]),
    "nothing to resume": (("--resume",), ["nothing to resume", "without --resume"]),
    "heads that do not divide": (("--optim.head_group_size", "3"), ["3"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(run, recipe, tmp_path, capsys, case):
    words, parts = BAD[case]
    line = refused(capsys, run(recipe, tmp_path / "out", *words))
    assert all(part in line for part in parts), line
    assert not (tmp_path / "out").exists()


def test_missing_data_is_told_before_anything_is_written(run, tokenizer, tmp_path, capsys):
    sources = [{"name": "mine", "kind": "folder", "path": str(tmp_path / "pictures")}]
    stages = [{"name": "only", "steps": 2, "length": 96, "tokens": 256}]
    changes = {"data__sources": sources, "stages": stages, "train__loss_weights": {}}
    recipe = tiny_run.write_recipe(tmp_path / "r.toml", tiny_run.tiny_recipe(tokenizer, **changes))
    line = refused(capsys, run(recipe, tmp_path / "out"))
    assert "mine" in line and str(tmp_path / "pictures") in line and "does not exist" in line
    assert not (tmp_path / "out").exists()


def test_an_unreadable_picture_is_named_and_leaves_no_model(run, tokenizer, tmp_path, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for index in range(4):
        (pictures / f"{index}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot a picture at all")
        (pictures / f"{index}.txt").write_text("a caption")
    sources = [{"name": "mine", "kind": "folder", "path": str(pictures)}]
    stages = [{"name": "only", "steps": 2, "length": 96, "tokens": 256}]
    changes = {"data__sources": sources, "stages": stages, "train__loss_weights": {}, "data__val_fraction": 0.0}
    recipe = tiny_run.write_recipe(tmp_path / "r.toml", tiny_run.tiny_recipe(tokenizer, **changes))
    line = refused(capsys, run(recipe, tmp_path / "out"))
    assert ".png" in line and str(pictures) in line
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "checkpoints").exists()


@pytest.fixture(scope="module")
def stopped(folder, recipe) -> Path:
    """A run of two steps, to resume wrongly."""
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(recipe, folder / "stopped", "--steps", "2", monkeypatch=patch) == EXIT_OK
    return folder / "stopped"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fresh_run_never_writes_over_checkpoints(run, recipe, stopped, capsys):
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped))
    assert "step-000002" in line and "--resume" in line and "--out" in line
    assert files(stopped) == before


def test_a_recipe_changed_under_a_resume_is_refused_by_key(run, recipe, stopped, capsys):
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped, "--resume", "--optim.lr", "0.5", "--stages.short.length", "64"))
    assert "optim.lr: 0.01 -> 0.5" in line and "stages.0.length: 96 -> 64" in line
    assert files(stopped) == before


def test_another_vocabulary_under_a_resume_is_refused_with_both_sizes(run, recipe, stopped, folder, capsys):
    other = tiny_run.make_tokenizer(folder, 300)
    assert Tokenizer.load(other).vocab_size == 300
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped, "--resume", "--tokenizer.path", str(other)))
    assert "vocabulary of 320" in line and "300" in line
    assert files(stopped) == before


def test_a_warm_start_from_another_shape_is_refused(run, recipe, stopped, tmp_path, capsys):
    words = ("--init-from", str(stopped / "model"), "--model.hidden_size", "40")
    line = refused(capsys, run(recipe, tmp_path / "out", *words))
    assert str(stopped / "model") in line and not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays(run, recipe, tmp_path, monkeypatch, capsys):
    """The disk fills up between the first checkpoint (step 3) and the second."""
    calls, real = [0], shutil.disk_usage

    def usage(path):
        calls[0] += 1
        return real(path) if calls[0] == 1 else SimpleNamespace(total=1, used=1, free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert run(recipe, tmp_path) == EXIT_USER
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "no disk space" in lines[0] and "MiB" in lines[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert run(recipe, tmp_path, "--resume", "--steps", "4") == EXIT_OK


@pytest.mark.slow
def test_the_shell_sees_exit_code_2_and_one_line(recipe, tmp_path):
    code, errors = finish(start(recipe, tmp_path / "out", "--optim.weight_decai", "1"))
    assert code == EXIT_USER
    assert errors.strip().splitlines()[-1].startswith("error:") and "Traceback" not in errors
    assert not (tmp_path / "out").exists()
