"""Several processes, signals, and batches with nothing to learn: the same run, whoever computes it and
wherever it stops."""

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forked import finish, ranks
from rl_cases import PTX, model_directory, recipe, run, spaces, training
from safetensors.torch import load_file
from test_rl_train import LIMIT, PARTIAL, assert_same, numbers, weights

from earlyfusion.data.loading.loader import Loader
from earlyfusion.eval.measure import ask
from earlyfusion.eval.measured import load_measured
from earlyfusion.eval.rewards import Weighed
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import to_toml
from earlyfusion.rl.measure import in_order
from earlyfusion.rl.rollouts.prompts import Prompt, PromptPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


pytestmark = pytest.mark.usefixtures("rewards_called_here")


def tensors(state: dict) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", ["muonclip", "adamw"])
def test_a_batch_with_nothing_to_learn_makes_no_step_and_is_counted(folder, tmp_path, monkeypatch, name):
    """With momentum from the updates before; by one process, and by one of two, whose sum of no gradients is
    none."""
    constant = {"now": False}
    judge = lambda problem, response: 1.0 if constant["now"] else spaces(problem, response)
    monkeypatch.setattr(
        "earlyfusion.rl.rollouts.experience.make_reward", lambda *a: ([Weighed(judge)], "inline")
    )
    made = training(folder, tmp_path / "run", optim={"name": name}, rollout={"max_new_tokens": 24})
    try:
        assert [made.iterate()["empty"] for _ in range(2)] == [0, 0]
        before = [p.clone() for p in made.model.parameters()]
        held = [value.clone() for state in made.optimizer.state.values() for value in tensors(state)]
        constant["now"] = True
        for world in (1, 2):
            monkeypatch.setattr(made.runtime, "world", world)
            monkeypatch.setattr("torch.distributed.all_reduce", lambda values, op=None, group=None: values)
            monkeypatch.setattr(made.collector, "due", lambda count, rank: count if rank == 0 else 0)
            record = made.iterate()
            assert record["empty"] == 1 and record["grad_norm"] == 0 and record["informative"] == 0
        assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), before))
        now = [value for state in made.optimizer.state.values() for value in tensors(state)]
        assert all(torch.equal(p, q) for p, q in zip(now, held, strict=True))
    finally:
        monkeypatch.setattr(made.runtime, "world", 1)
        made.close()


def test_a_signal_while_answers_are_collected_stops_at_once_and_loses_no_exactness(folder, tmp_path):
    """The iteration is as if it had not begun: unfinished answers, prompts and tallies are those before
    it."""
    made = training(folder, tmp_path / "run", **PARTIAL)
    step, after = made.engine.step, []

    def stepping():
        if made.update == 2:
            after.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    made.engine.step = stepping
    assert made.train() == 75
    assert made.update == 2 and len(after) == 1 and made.collector.carried
    assert run(folder, tmp_path / "run", resume=True, **PARTIAL) == 0
    assert run(folder, tmp_path / "whole", **PARTIAL) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_signal_before_the_first_iteration_is_resumed_from_the_start(folder, tmp_path):
    """While Toggle looks for its budgets, whose prompts are drawn once."""
    changes = {"toggle": {"every": 2}, "rollout": {"pool": 2}, "train": {"updates": 2}}
    made = training(folder, tmp_path / "run", **changes)
    os.kill(os.getpid(), signal.SIGTERM)
    assert made.train() == 75 and not made.begun
    assert run(folder, tmp_path / "run", resume=True, **changes) == 0
    assert run(folder, tmp_path / "whole", **changes) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_held_out_problems_are_dealt_over_processes_and_give_the_results_of_one(
    folder, tmp_path, monkeypatch
):
    made = training(folder, tmp_path / "run")
    try:
        entries, how = made.config.tasks, {"problems": 5, "seed": 1, "samples": 2}
        whole = ask(made.model, made.tokenizer, entries, **how).measured()
        shares = [ask(made.model, made.tokenizer, entries, **how, share=(r, 4)).measured() for r in range(4)]
        assert [len(share) for share in shares] == [4, 4, 4, 3]
        monkeypatch.setattr(made.runtime, "world", 4)
        monkeypatch.setattr(made.runtime, "gather", lambda own: shares)
        dealt = in_order(shares[0], made.runtime)
    finally:
        monkeypatch.undo()
        made.close()
    said = lambda measured: [(one.label, one.key, one.answer, one.score, one.sampled) for one in measured]
    assert said(dealt) == said(whole)
    assert [one.p_target for one in dealt] == pytest.approx([one.p_target for one in whole], rel=1e-4)


def test_processes_make_their_own_prompts_only_and_agree_on_all(folder, tmp_path, monkeypatch):
    """Oracle: one process. Two draw the same prompts, leave out the same ones, and each makes its share and
    no more."""
    tasks = [{"name": "counting"}, {"name": "colour_shape"}]
    made = training(folder, tmp_path / "run", rollout={"max_prompt_tokens": LIMIT}, tasks=tasks)
    encoded: Counter[PromptPool] = Counter()
    real = Prompt.encoded.func
    counted = lambda prompt: encoded.update([prompt.pool]) or real(prompt)
    monkeypatch.setattr(Prompt.encoded, "func", counted)
    pools = [PromptPool(made.config, made.tokenizer, made.model.config.vision) for _ in range(3)]
    whole = [pools[0].draw(30, 0), pools[0].draw(31, 1)]
    assert pools[0].left_out["too_long"] > 0
    sums, meet = [None, None], threading.Barrier(2)

    def process(rank):
        def agree(found_N):
            sums[rank] = found_N
            meet.wait(60)
            total = sums[0] + sums[1]
            meet.wait(60)
            return total

        shares = slice(0, 13) if rank == 0 else slice(13, None)
        return [pools[1 + rank].draw(30, 0, shares, agree), pools[1 + rank].draw(31, 1, shares, agree)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(process, range(2))
    assert first == second == whole
    assert pools[1].left_out == pools[2].left_out == pools[0].left_out
    assert pools[1].drawn_E == pools[2].drawn_E == pools[0].drawn_E
    assert encoded[pools[1]] + encoded[pools[2]] == encoded[pools[0]] and min(encoded.values()) >= 26


def test_curated_rows_stay_those_the_run_began_with(folder, tmp_path, monkeypatch):
    """As many for an update as there were processes, here two: one process that goes on takes both."""
    changes = {
        "ptx": {"only": True, "tokens": 192, "length": 96},
        "data": PTX["data"],
        "train": {"updates": 2},
    }
    with monkeypatch.context() as patch:
        patch.setattr("earlyfusion.rl.train.Loader", lambda *a, **k: Loader(*a, **{**k, "lanes": 2}))
        assert run(folder, tmp_path / "whole", **changes) == 0
        assert run(folder, tmp_path / "cut", **{**changes, "run": {"steps": 1}}) == 0
    assert run(folder, tmp_path / "cut", resume=True, **changes) == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")


VOWELS = """
def share(problem, response):
    if len(response) % 7 == 6:
        raise ValueError("counted, on whatever process")
    return sum(c in "aeiou" for c in response.lower()) / max(1, len(response))
"""


def launched(world: int, file: Path, folder: Path, out: Path, *extra: str) -> None:
    """A run of the recipe by `world` processes."""
    words = ["rl", str(file), "--init-from", str(folder), "--out", str(out), *extra]
    environment = {**os.environ, "PYTHONPATH": str(file.parent)}
    for code, errors in map(finish, ranks(cli.main, (words,), environment, world)):
        assert code == 0, errors[-3000:]


LINEAR = {"name": "adamw", "lr": 0.05, "eps": 1.0, "weight_decay": 0.0}
"""With an epsilon of 1 AdamW answers gradients in proportion; Muon blows up rounding where there is hardly a
gradient (1 to 5 % after one update), and the next samples would differ."""


WHOLE = {
    "rollout": {"prompts": 5, "max_new_tokens": 24},
    "temperature": {"start": 1.3, "end": 1e-4, "updates": 2},
    "train": {"updates": 4},
    "eval": {"problems": 3},
    "log": {"groups": 4},
}
"""From the third update on all answers to a prompt are alike: nothing to learn, while the optimizer has its
momentum."""


IN_PIECES = {
    "rollout": {"prompts": 5, "token_cap": 3, "max_new_tokens": 24},
    "temperature": {"start": 1.3, "end": 0.9, "updates": 5},
    "train": {"updates": 6},
}
"""Answers over several updates, each with its temperature."""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [WHOLE, IN_PIECES], ids=["whole", "in pieces"])
def test_two_processes_take_the_steps_of_one(folder, tmp_path, changes):
    """Same prompts, same samples, gradients summed over gloo: the same way, up to the order of sums; each
    with the whole policy, or with shards and half of the experts."""
    file = tmp_path / "recipe.toml"
    (tmp_path / "vowels.py").write_text(
        VOWELS
    )  # a reward that random weights earn, so that gradients are no rounding
    file.write_text(to_toml(recipe(reward={"name": "vowels:share"}, optim=LINEAR, **changes)))
    shards = ["--parallel.dp_shard=2", "--parallel.ep=2"]
    for world, name, extra in ((1, "one", []), (2, "two", []), (2, "shards", shards)):
        launched(world, file, folder, tmp_path / name, *extra)
    ours = numbers(tmp_path / "one")
    for name in ("two", "shards"):
        for mine, other in zip(ours, numbers(tmp_path / name), strict=True):
            for key in (
                "score",
                "length",
                "entropy",
                "grad_norm",
                "answers",
                "informative",
                "empty",
                "carried",
            ):
                assert mine[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6), (name, mine["step"], key)
            assert mine.get("rewards/error") == other.get("rewards/error")
        assert_about_the_same_way(folder, tmp_path / "one", tmp_path / name)
    assert ours[-1]["rewards/error"] > 0
    if changes is IN_PIECES:
        assert all(mine["carried"] for mine in ours[:-1]) and any(mine["staleness"] for mine in ours)
        # In the middle of answers: begun by one process, carried on by two with shards, finished by one.
        whole = ["--parallel.dp_shard=1", "--parallel.ep=1"]
        legs = ((1, 3, []), (2, 5, ["--resume", *shards]), (1, 6, ["--resume", *whole]))
        for world, steps, extra in legs:
            launched(world, file, folder, tmp_path / "moved", f"--run.steps={steps}", *extra)
        assert numbers(tmp_path / "moved")[-1]["answers"] == ours[-1]["answers"] > 0
        assert_about_the_same_way(folder, tmp_path / "one", tmp_path / "moved")
    else:
        assert [mine["empty"] for mine in ours] == [0, 0, 1, 1]
        asked = [[json.loads(line)["key"] for line in lines_of(tmp_path / name)] for name in ("one", "two")]
        assert (
            asked[0] == asked[1] and len(asked[0]) == 8
        )  # groups of all processes, at the first update and the last
        answers = [
            [(one.label, one.key, one.answer) for one in eval_of(tmp_path / name)] for name in ("one", "two")
        ]
        assert answers[0] == answers[1] and len(answers[0]) == 9


def lines_of(out: Path) -> list[str]:
    return (out / "rollouts.jsonl").read_text().splitlines()


def eval_of(out: Path) -> list:
    return load_measured(out / "eval" / "update-000000.jsonl")


def assert_about_the_same_way(folder: Path, one: Path, other: Path) -> None:
    """From the start to the trained weights, all parameters as one vector; a step too many would be a tenth
    of it and more."""
    start, left, right = load_file(str(folder / "model.safetensors")), weights(one), weights(other)
    length = lambda a, b: sum(float((a[name] - b[name]).double().square().sum()) for name in a) ** 0.5
    assert length(left, right) < 0.01 * length(left, start), (length(left, right), length(left, start))
