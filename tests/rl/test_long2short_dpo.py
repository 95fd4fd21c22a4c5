"""DPO for shorter answers as a user runs it: gradients by definition, a toy, exact resume."""

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER
from forked import finish, ranks
from long2short_cases import REWARD, TASKS, call, lines, told, words
from tiny_run import assert_same, numbers, weights

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.scheduler import token_rules
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import to_toml
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.long2short.dpo import DpoOptions, DpoRun
from earlyfusion.rl.long2short.samples import SampleOptions, Sampler, recipe_of
from earlyfusion.rl.rollouts.packing import pack

GRAD_RTOL = 2e-4
"""fp32 sums in another order, as in test_learn.py."""
pytestmark = pytest.mark.usefixtures("here")
DPO = "--batch 8 --epochs 3 --set optim.lr=1e-3 --set eval.problems=0 --set track.log_every=1"


def plain(net, silent, answered, pairs, batch, options, reference) -> float:
    """DPO by definition: every answer by itself, log-softmax of its logits, the formula of the paper."""

    def logp(g, i):
        row, places = pack(net, [answered[g].trajectory(i)])
        logits = net.logits(net.hidden(row).index_select(0, places.positions_M)).float()
        logits[:, silent] = float("-inf")
        return logits.log_softmax(-1).gather(1, places.ids_M[:, None]).sum()

    total = torch.zeros(())
    for p in batch:
        pair = pairs[p]
        chosen, rejected = logp(pair.problem, pair.chosen), logp(pair.problem, pair.rejected)
        margin = options.beta * ((chosen - reference[p][0]) - (rejected - reference[p][1]))
        total = total - torch.log(torch.sigmoid(margin))
    loss = total / len(batch)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("seed, row_tokens", [(0, 60), (1, 60), (0, 4096)])
def test_packed_rows_give_the_gradients_of_the_definition(toy, tmp_path, seed, row_tokens):
    AcceleratorState._reset_state(True)
    fixed = {"samples": 6, "max_new_tokens": 7, "problems": 10, "beta": 0.7, "seed": seed}
    changes = [f"train.row_tokens={row_tokens}", f"reward.name={REWARD}", "train.threads=1"]
    where = {"model": str(toy), "out": str(tmp_path / "out"), "tasks": TASKS.split()}
    run = DpoRun(DpoOptions(**where, **fixed, set_=changes))
    try:
        answered = run.sampler.gather(run.runtime)
        run.take(answered)
        pairs = run.pairs
        run.set_reference()
        batch = list(range(0, len(pairs), 2))[:9]
        with torch.no_grad():  # away from the start, where all margins are 0
            for parameter in run.model.parameters():
                parameter.mul_(1.02)
        sums = run.gradients(batch, len(batch))
        ours = {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}
        run.model.zero_grad(set_to_none=True)
        silent = sorted(token_rules(run.model, TOKENIZER).banned_ids)
        assert TOKENIZER.bos_id in silent
        loss = plain(run.model, silent, answered, pairs, batch, run.options, run.reference_P2)
    finally:
        run.close()
    assert sums["loss"] == pytest.approx(loss, rel=1e-5) and sums["pairs"] == len(batch)
    assert {answered[pairs[p].problem].prompt.encoded.patches is None for p in batch} == {True, False}
    whole = torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).norm()
    for name, parameter in run.model.named_parameters():
        zero = torch.zeros_like(parameter)
        theirs = zero if parameter.grad is None else parameter.grad
        difference = (ours.get(name, zero) - theirs).norm()
        assert difference <= GRAD_RTOL * (theirs.norm() + 0.01 * whole), (name, float(difference))


@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_prefers_the_short_right_answers_and_shortens_held_out_ones(toy, tmp_path, seed, capsys):
    out = tmp_path / "run"
    more = f"{DPO} --set eval.problems=8 --set eval.samples=6 --seed {seed}"
    assert call("dpo", toy, out, more) == 0
    assert "held-out problems" in capsys.readouterr().out
    records = read_metrics(out / "metrics.jsonl", "train")
    assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-3) and abs(records[0]["margin"]) < 1e-3
    assert records[-1]["margin"] > 0.2 and records[-1]["preferred"] > 0.9 and records[-1]["loss"] < 0.65
    assert records[-1]["chosen"] > records[-1]["rejected"]
    rows = json.loads((out / "summary.json").read_text())["heldout"]
    sampled = {row["metric"]: row for row in rows if row["way"] == "sampled" and row["label"] == "all"}
    assert sampled["tokens"]["value"] < -0.5 and sampled["tokens"]["high"] < 0
    assert sampled["accuracy"]["value"] > 0.1
    for pair in lines(out / "pairs.jsonl"):
        assert pair["chosen"]["right"] and len(pair["chosen"]["ids"]) < len(pair["rejected"]["ids"])
    card = (out / "model" / "README.md").read_text()
    assert "DPO for shorter answers" in card and str(toy) in card
    page = (out / "report.html").read_text()
    assert "Margin of chosen over rejected" in page and "Changed answers" in page and 'src="http' not in page


def test_a_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(toy, tmp_path):
    given, whole, cut = f"{DPO} --set optim.name=adamw", tmp_path / "whole", tmp_path / "cut"
    assert call("dpo", toy, whole, given, 7) == 0
    assert call("dpo", toy, cut, f"{given} --set run.steps=2", 7) == 0
    assert len(numbers(cut)) == 2
    assert call("dpo", toy, cut, f"{given} --resume", 7) == 0
    assert len(numbers(whole)) > 4
    assert_same(whole, cut)


def test_signals_save_and_a_kill_loses_only_what_came_after(toy, tmp_path, monkeypatch):
    """A signal while it samples and one while it trains, then a kill behind the checkpoint of update 4."""
    monkeypatch.setattr("earlyfusion.rl.long2short.samples.PART", 3)
    parts, updates = [], []

    def counted(real, count, at):
        def wrapped(self, *given):
            count.append(1)
            if len(count) == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if len(count) == 6:
                raise InterruptedError
            return real(self, *given)

        return wrapped

    out, given = tmp_path / "run", f"{DPO} --set checkpoint.every=2"
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_part", counted(Sampler._part, parts, 1))
        patch.setattr(DpoRun, "update", counted(DpoRun.update, updates, 3))
        assert call("dpo", toy, out, given, 7) == 75
        assert len(lines(out / "samples.jsonl")) == 1 + 3 and not updates
        assert call("dpo", toy, out, f"{given} --resume", 7) == 75
        with pytest.raises(InterruptedError):
            call("dpo", toy, out, f"{given} --resume", 7)
    assert call("dpo", toy, out, f"{given} --resume", 7) == 0
    assert call("dpo", toy, tmp_path / "whole", given, 7) == 0
    assert_same(tmp_path / "whole", out)


def test_a_resume_with_other_settings_or_other_samples_is_refused(toy, tmp_path, capsys):
    out = tmp_path / "run"
    assert call("dpo", toy, out, f"{DPO} --set run.steps=1") == 0
    file = out / "samples.jsonl"
    kept = file.read_text()
    for given, content, message in (
        ("", kept, "already holds a run"),
        ("--resume --beta 0.3", kept, "recipe changed.*beta: 0.1 -> 0.3"),
        ("--resume --seed 4", kept, "recipe changed.*seed"),
        ("--resume", kept.replace('"score": 1.0', '"score": 0.0', 6), "no longer gives the pairs"),
        ("--resume", "{}\n" + kept, "sampled with other settings"),
        ("--resume", kept.replace('"problems": 16', '"problems": 17', 1), "problems differ"),
    ):
        file.write_text(content)
        capsys.readouterr()
        assert call("dpo", toy, out, f"{DPO} {given}") == 2
        assert re.search(message, capsys.readouterr().err.splitlines()[-1])


BAD = {
    "--samples 1": "equal to 2",
    "--temperature 0": "greater than 0",
    "--set optim.lr": "section.key=VALUE",
    "--set optim.rate=1": "unknown key 'rate'",
    "--set reward.name=tusk": "did you mean",
    "--tasks countin": "did you mean 'counting'",
    "--tasks counting counting": "two entries are the same",
    "--model nowhere/at/all": "nowhere",
    "--resume": "nothing to resume",
    "--frobnicate": "no option --frobnicate",
    "--recipe vision-rl": "one of them",
    "--beta 0": "--beta 0.0: ",
    "--set optim.lr=-1": "optim.lr",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_told_in_one_line(toy, tmp_path, capsys, given):
    assert call("dpo", toy, tmp_path / "out", given) == 2
    assert BAD[given] in told(capsys)
    assert not (tmp_path / "out").exists()


def test_answers_that_are_never_right_teach_nothing(toy, tmp_path, capsys):
    """The task's own reward: the toy says yes and no to questions of colour."""
    given = "--set reward.name=task --set eval.problems=0"
    assert call("shortest", toy, tmp_path / "a", given, 4) == 2
    assert "none of 4 problems got a right answer" in capsys.readouterr().err
    assert call("dpo", toy, tmp_path / "b", given, 4) == 2
    assert "no pairs: 0 of 4" in capsys.readouterr().err


def test_a_recipe_gives_its_tasks_and_tools_are_refused(toy, tmp_path):
    file = tmp_path / "recipe.toml"
    tasks = [{"name": "maze"}, {"name": "counting", "form": "twin"}]
    tree = {"tasks": tasks, "rollout": {"max_new_tokens": 33}}
    file.write_text(to_toml(tree))
    options = SampleOptions(model=str(toy), out="x", recipe=str(file), set_=["optim.lr=0.5"])
    config = recipe_of(options, {})
    assert [entry.label for entry in config.tasks] == ["maze/0/picture", "counting/0/twin"]
    assert (config.rollout.max_new_tokens, config.rollout.group_size, config.optim.lr) == (33, 8, 0.5)
    tree["tasks"][1]["tools"] = True
    file.write_text(to_toml(tree))
    with pytest.raises(UserError, match="without tools"):
        recipe_of(options, {})


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(toy, tmp_path):
    """The same samples and batches, gradients summed over gloo: equal up to the order of sums."""
    more = f"{DPO} --set run.steps=3 --set optim.name=adamw"
    assert call("dpo", toy, tmp_path / "1", more) == 0
    for code, errors in map(
        finish, ranks(cli.main, (["long2short", *words("dpo", toy, tmp_path / "2", more)],), {**os.environ})
    ):
        assert code == 0, errors[-3000:]
    ours, theirs = numbers(tmp_path / "1"), numbers(tmp_path / "2")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs):
        for key in ("loss", "margin", "grad_norm", "pairs"):
            assert mine[key] == pytest.approx(other[key], rel=2e-3, abs=1e-5), (mine["step"], key)
    left, right = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name in left:
        difference = (left[name] - right[name]).float().norm() / right[name].float().norm().clamp(min=1e-6)
        assert difference < 1e-3, (name, float(difference))
