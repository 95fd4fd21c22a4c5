"""DPO for shorter answers as a user runs it: pairs by hand, gradients by definition, a toy, exact resume."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER, model
from long2short_cases import LONG, REWARD, SHORT, answer, call, lines, told, toy_directory, weights, words
from rl_cases import problem_of

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.state import token_rules
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl import rewards
from earlyfusion.rl.long2short import cmd
from earlyfusion.rl.long2short.dpo import (
    DpoOptions,
    Pair,
    PreferenceLearner,
    batches,
    make_pairs,
    pairs_digest,
)
from earlyfusion.rl.long2short.heldout import Held, compared, fallen
from earlyfusion.rl.long2short.run import DpoRun
from earlyfusion.rl.long2short.samples import Answer, Answered, Sampler
from earlyfusion.rl.long2short.shortest import lengths, shortest
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.rollouts.prompts import Prompt, encode_prompt

GRAD_RTOL = 2e-4
"""fp32 sums in another order, as in test_learn.py."""
CLOCK = ("time", "tokens_per_s", "step_s", "memory_gib")
DPO = ("--lr", "1e-3", "--batch", "8", "--epochs", "3", "--eval-problems", "0", "--set", "track.log_every=1")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_directory(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Rewards of the tests are called in this process."""
    made = rewards.make_reward
    monkeypatch.setattr("earlyfusion.rl.rollouts.experience.make_reward", lambda *a: (made(*a)[0], "inline"))


def made_up(number: int, *answers: tuple[int, bool]) -> Answered:
    """A problem with answers of these (tokens, right)."""
    entry = TaskEntry(name="counting", form="twin")
    problem = problem_of(f"counting/train/0/{number}")
    prompt = encode_prompt(problem, entry, TOKENIZER, model(0).config.vision)
    made = [Answer(tuple(range(20, 20 + n)), f"{n}", "stop", float(right), right) for n, right in answers]
    return Answered(Prompt(0, 0, number, None), entry.label, problem, prompt, made)


def test_pairs_by_hand():
    """Chosen: 4 tokens. 6 is right and 1.5 times as long, 5 is right and is not, 5 and 9 are wrong, 3 is
    wrong but shorter; the second problem was never solved, in the third everything is equal."""
    answered = [
        made_up(0, (6, True), (4, True), (5, True), (5, False), (9, False), (3, False)),
        made_up(1, (2, False), (7, False)),
        made_up(2, (3, True), (3, True), (3, False)),
        made_up(3, (8, False), (2, True)),
    ]
    assert make_pairs(answered, DpoOptions()) == [Pair(0, 1, 0), Pair(0, 1, 3), Pair(0, 1, 4), Pair(3, 1, 0)]
    assert make_pairs(answered, DpoOptions(longer=1.2))[:2] == [Pair(0, 1, 0), Pair(0, 1, 2)]
    assert make_pairs(answered, DpoOptions(per_problem=1)) == [Pair(0, 1, 4), Pair(3, 1, 0)]
    with pytest.raises(UserError, match="no pairs: 1 of 2 problems got a right answer"):
        make_pairs(answered[1:3], DpoOptions())
    assert shortest(answered) == {0: 1, 2: 0, 3: 1}
    pairs = make_pairs(answered, DpoOptions())
    assert pairs_digest(answered, pairs) != pairs_digest(answered, pairs[:-1])


def test_lengths_before_and_after_by_hand():
    answered = [made_up(0, (6, True), (4, True), (8, False)), made_up(1, (2, False), (7, False), (3, False))]
    row = lengths(answered, shortest(answered))["counting/0/twin"]
    assert row == {
        "problems": 2,
        "solved": 1,
        "accuracy": 2 / 6,
        "tokens_all": 5.0,
        "tokens_right": 5.0,
        "tokens_shortest": 4.0,
    }


def test_every_epoch_takes_every_pair_once_in_an_order_of_the_seed():
    steps = batches(11, 4, 2, 7)
    assert [len(step) for step in steps] == [4, 4, 3, 4, 4, 3]
    assert sorted(chain(*steps[:3])) == sorted(chain(*steps[3:])) == list(range(11))
    assert steps[:3] != steps[3:] and steps == batches(11, 4, 2, 7) != batches(11, 4, 2, 8)


def config_of(*given: str):
    """The recipe that `long2short dpo` would run."""
    configs = []

    def taken(config, *_):
        configs.append(config)
        return SimpleNamespace(train=lambda: 0, close=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cmd, "DpoRun", taken)
        cli.invoke(cli.command_of(cmd.dpo, "dpo"), given[1:], "dpo")
    return configs[0]


def plain(net, silent, answered, pairs, batch, options, reference):
    """DPO by definition: every answer by itself, log-softmax of its logits, the formula of the paper."""
    from earlyfusion.rl.rollouts.packing import pack

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
        smooth = options.label_smoothing
        total = (
            total
            - (1 - smooth) * torch.log(torch.sigmoid(margin))
            - smooth * torch.log(torch.sigmoid(-margin))
        )
        total = total - options.nll * chosen / answered[pair.problem].answers[pair.chosen].tokens
    loss = total / len(batch)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("row_tokens", [60, 4096])
def test_packed_rows_give_the_gradients_of_the_definition(toy, tmp_path, seed, row_tokens):
    out = str(tmp_path / "out")
    config = config_of(
        *words("dpo", toy, out, "--seed", str(seed), "--set", f"train.row_tokens={row_tokens}")
    )
    options = DpoOptions(beta=0.7, label_smoothing=0.1, nll=0.2)
    AcceleratorState._reset_state(True)
    run = DpoRun(config, options, 10, resume=False)
    try:
        from rich.console import Console

        answered = run.sampler.gather(Console(quiet=True))
        pairs = make_pairs(answered, options)
        learner = PreferenceLearner(run.learner, answered, pairs, options, row_tokens)
        learner.set_reference(run.model)
        batch = list(range(0, len(pairs), 2))[:9]
        with torch.no_grad():  # away from the start, where all margins are 0
            for parameter in run.model.parameters():
                parameter.mul_(1.02)
        sums = learner.gradients(batch, len(batch))
        ours = {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}
        run.model.zero_grad(set_to_none=True)
        silent = sorted(token_rules(run.model, TOKENIZER).banned_ids)
        assert TOKENIZER.bos_id in silent
        loss = plain(run.model, silent, answered, pairs, batch, options, learner.reference_P2)
    finally:
        run.close()
    assert float(sums[0]) == pytest.approx(loss, rel=1e-5) and float(sums[6]) == len(batch)
    assert {answered[pairs[p].problem].prompt.patches is None for p in batch} == {True, False}
    whole = torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).norm()
    for name, parameter in run.model.named_parameters():
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = (ours.get(name, torch.zeros_like(parameter)) - theirs).norm()
        assert difference <= GRAD_RTOL * (theirs.norm() + 0.01 * whole), (name, float(difference))


@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_prefers_the_short_right_answers_and_shortens_held_out_ones(toy, tmp_path, seed, capsys):
    out = tmp_path / "run"
    more = ("--eval-problems", "8", "--eval-samples", "6", "--seed", str(seed))
    assert call(*words("dpo", toy, out, *DPO, *more, problems=16)) == 0
    shown = capsys.readouterr().out
    assert "held-out problems" in shown and "tokens" in shown
    records = read_metrics(out / "metrics.jsonl", "train")
    assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-3) and abs(records[0]["margin"]) < 1e-3
    assert records[-1]["margin"] > 0.2 and records[-1]["preferred"] > 0.9 and records[-1]["loss"] < 0.65
    assert records[-1]["chosen"] > records[-1]["rejected"]
    rows = json.loads((out / "summary.json").read_text())["heldout"]
    sampled = next(row for row in rows if row["way"] == "sampled" and row["label"] == "all")
    assert sampled["tokens"]["after"] < sampled["tokens"]["before"] - 0.5 and sampled["tokens"]["high"] < 0
    assert sampled["accuracy"]["after"] > sampled["accuracy"]["before"] + 0.1
    for pair in lines(out / "pairs.jsonl"):
        assert pair["chosen"]["right"] and pair["chosen"]["tokens"] < pair["rejected"]["tokens"]
    card = (out / "model" / "README.md").read_text()
    assert "DPO for shorter answers" in card and str(toy) in card
    page = (out / "report.html").read_text()
    assert "Margin of chosen over rejected" in page and "Changed answers" in page and 'src="http' not in page


def numbers(out: Path) -> list[dict]:
    found = read_metrics(out / "metrics.jsonl", "train")
    return [{key: value for key, value in record.items() if key not in CLOCK} for record in found]


def assert_same(left: Path, right: Path) -> None:
    assert numbers(left) == numbers(right) != []
    ours, theirs = weights(left / "model"), weights(right / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()


@pytest.mark.parametrize("optimizer", ["muonclip", "adamw"])
def test_a_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(toy, tmp_path, optimizer):
    given = (*DPO, "--optimizer", optimizer)
    assert call(*words("dpo", toy, tmp_path / "whole", *given, problems=7)) == 0
    assert call(*words("dpo", toy, tmp_path / "cut", *given, "--steps", "2", problems=7)) == 0
    assert len(numbers(tmp_path / "cut")) == 2
    assert call(*words("dpo", toy, tmp_path / "cut", *given, "--resume", problems=7)) == 0
    assert len(numbers(tmp_path / "whole")) > 4
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_signal_saves_and_a_kill_loses_only_what_came_after(toy, tmp_path, monkeypatch):
    real, count = DpoRun._update, []

    def update(self, *given):
        count.append(1)
        if len(count) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(count) == 6:
            raise InterruptedError
        return real(self, *given)

    out = tmp_path / "run"
    given = (*DPO, "--checkpoint-every", "2")
    with monkeypatch.context() as patch:
        patch.setattr(DpoRun, "_update", update)
        assert call(*words("dpo", toy, out, *given, problems=7)) == 75
        with pytest.raises(InterruptedError):  # update 6; the checkpoint of update 4 is there
            call(*words("dpo", toy, out, *given, "--resume", problems=7))
    assert call(*words("dpo", toy, out, *given, "--resume", problems=7)) == 0
    assert call(*words("dpo", toy, tmp_path / "whole", *given, problems=7)) == 0
    assert_same(tmp_path / "whole", out)


def test_a_signal_while_it_samples_keeps_the_samples(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("earlyfusion.rl.long2short.samples.PART", 3)
    real, count, given = Sampler._part, [], (*DPO, "--steps", "2")

    def part(self, *where):
        count.append(1)
        if len(count) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *where)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_part", part)
        assert call(*words("dpo", toy, tmp_path / "cut", *given, problems=7)) == 75
    assert len(lines(tmp_path / "cut" / "samples.jsonl")) == 1 + 3
    assert call(*words("dpo", toy, tmp_path / "cut", *given, "--resume", problems=7)) == 0
    assert call(*words("dpo", toy, tmp_path / "whole", *given, problems=7)) == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_resume_with_other_settings_or_other_samples_is_refused(toy, tmp_path, capsys):
    out = tmp_path / "run"
    assert call(*words("dpo", toy, out, *DPO, "--steps", "1")) == 0
    capsys.readouterr()
    for given, message in (
        (DPO, "already holds a run"),
        ((*DPO, "--resume", "--beta", "0.3"), "recipe changed.*beta: 0.1 -> 0.3"),
        ((*DPO, "--resume", "--seed", "4"), "recipe changed.*seed"),
    ):
        assert call(*words("dpo", toy, out, *given)) == 2
        assert re.search(message, told(capsys))
    file = out / "samples.jsonl"
    kept = file.read_text()
    head, first, *rest = kept.splitlines(keepends=True)
    file.write_text("".join([head, first.replace('"score": 1.0', '"score": 0.0'), *rest]))
    assert call(*words("dpo", toy, out, *DPO, "--resume")) == 2
    assert "no longer gives the pairs" in capsys.readouterr().err.splitlines()[-1]
    file.write_text("{}\n" + kept)
    assert call(*words("dpo", toy, out, *DPO, "--resume")) == 2
    assert "not a file of samples" in capsys.readouterr().err.splitlines()[-1]
    file.write_text(kept.replace('"problems": 16', '"problems": 17', 1))
    assert call(*words("dpo", toy, out, *DPO, "--resume")) == 2
    assert "problems differ" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("way", ["shortest", "dpo"])
def test_bad_input_is_told_in_one_line(toy, tmp_path, capsys, way):
    out = tmp_path / "out"
    cases = [
        (("--samples", "1"), "equal to 2"),
        (("--problems", "0"), "equal to 1"),
        (("--temperature", "0"), "above 0"),
        (("--max-new-tokens", "0"), "equal to 1"),
        (("--set", "optim.lr"), "section.key=VALUE"),
        (("--set", "optim.rate=1"), "unknown key 'rate'"),
        (("--set", "reward.name=tusk"), "did you mean"),
        (("--tasks", "countin"), "did you mean 'counting'"),
        (("--tasks", "counting", "counting"), "two entries are the same"),
        (("--model", str(tmp_path / "nowhere")), "nowhere"),
        (("--model", "embedded:nothing"), "embedded"),
        (("--resume",), "nothing to resume"),
        (("--frobnicate",), "no option --frobnicate"),
        (("--recipe", "vision-rl"), "one of them"),
    ]
    if way == "dpo":
        cases += [
            (("--beta", "0"), "--beta 0.0: expected above 0"),
            (("--longer", "1"), "above 1"),
            (("--label-smoothing", "0.5"), "in"),
            (("--batch", "0"), "at least 1"),
            (("--pairs-per-problem", "-1"), "at least 0"),
            (("--lr", "-1"), "optim.lr"),
            (("--optimizer", "adam"), "'muonclip', 'adamw'"),
        ]
    for given, message in cases:
        assert call(*words(way, toy, out, *given)) == 2, given
        assert message in told(capsys), given
        assert not out.exists()


def test_answers_that_are_never_right_teach_nothing(toy, tmp_path, capsys):
    """The task's own reward: the toy says yes and no to questions of colour."""
    given, small = ("--set", "reward.name=task"), {"problems": 4, "tasks": ["colour_shape/0/twin"]}
    assert call(*words("shortest", toy, tmp_path / "a", *given, **small)) == 2
    assert "none of 4 problems got a right answer" in capsys.readouterr().err
    assert call(*words("dpo", toy, tmp_path / "b", *given, "--eval-problems", "0", **small)) == 2
    assert "no pairs: 0 of 4" in capsys.readouterr().err


def test_a_recipe_gives_its_tasks_and_tools_are_refused(toy, tmp_path):
    from earlyfusion.pipeline.config.compose import to_toml

    file = tmp_path / "recipe.toml"
    tree = {
        "tasks": [{"name": "maze"}, {"name": "counting", "form": "twin"}],
        "rollout": {"max_new_tokens": 33},
    }
    file.write_text(to_toml(tree))
    given = ["dpo", "--model", str(toy), "--recipe", str(file), "--out", "x"]
    config = config_of(*given)
    assert [entry.label for entry in config.tasks] == ["maze/0/picture", "counting/0/twin"]
    assert config.rollout.max_new_tokens == 33 and config.rollout.group_size == 8 and config.optim.lr == 2e-4
    assert config_of(*given, "--set", "optim.lr=0.5").optim.lr == 0.5
    tree["tasks"][1]["tools"] = True
    file.write_text(to_toml(tree))
    with pytest.raises(UserError, match="without tools"):
        config_of(*given)


def test_before_and_after_are_paired_by_problem():
    before = [Held("t", f"k{i}", "greedy", 10.0 + i, float(i % 2), "a") for i in range(4)]
    after = [Held("t", f"k{i}", "greedy", 8.0 + i, 1.0, "b") for i in reversed(range(4))]
    (row,) = compared(before, after)
    assert (
        row["n"] == 4
        and row["tokens"]["delta"] == -2.0
        and row["tokens"]["low"] == row["tokens"]["high"] == -2.0
    )
    assert row["accuracy"]["before"] == 0.5 and row["accuracy"]["after"] == 1.0
    # d = 0, 1, 0, 1: mean 0.5, sd 0.577, SE 0.289, t(3) = 3.182
    assert row["accuracy"]["low"] == pytest.approx(0.5 - 3.182 * 0.2887, abs=1e-3)
    assert fallen([row]) == []
    worse = [replace(one, right=0.1 * i) for i, one in enumerate(after)]
    assert fallen(compared(after, worse)) == ["t (greedy)"]
    (alone,) = compared(before[:1], after)
    assert alone["n"] == 1 and alone["tokens"]["low"] is None


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(toy, tmp_path):
    """The same samples and batches, gradients summed over gloo: equal up to the order of sums."""
    home = Path(__file__).parent
    path = os.pathsep.join([str(home), str(home.parent / "model")])
    for world in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(world),
            "--master-port",
            str(29681 + world),
            "-m",
            "earlyfusion.rl.long2short.cmd",
            *words("dpo", toy, tmp_path / str(world), *DPO, "--steps", "3", "--optimizer", "adamw"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = numbers(tmp_path / "1"), numbers(tmp_path / "2")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs):
        for key in ("loss", "margin", "grad_norm", "pairs"):
            assert mine[key] == pytest.approx(other[key], rel=2e-3, abs=1e-5), (mine["step"], key)
    left, right = weights(tmp_path / "1" / "model"), weights(tmp_path / "2" / "model")
    for name in left:
        difference = (left[name] - right[name]).float().norm() / right[name].float().norm().clamp(min=1e-6)
        assert difference < 1e-3, (name, float(difference))


def test_the_toy_is_a_toy(toy):
    """Both answers are likely at the start, or the tests above would show nothing."""
    assert SHORT.strip() == "yes" and len(TOKENIZER.encode(LONG)) >= 2 * len(TOKENIZER.encode(SHORT))
    entry = TaskEntry(name="colour_shape", form="twin")
    prompt = encode_prompt(problem_of("colour_shape/test/0/5"), entry, TOKENIZER, model(0).config.vision)
    from rl_cases import trained_logprobs

    from earlyfusion.rl.rollouts.packing import pack

    net = load_model(toy)
    with torch.no_grad():
        for text in (SHORT, LONG):
            row, places = pack(net, [answer(prompt, text)])
            assert float(trained_logprobs(net, row, places).sum()) > -4, text
    assert REWARD.endswith("yes_is_right")
