"""The run: learns, repeats bit for bit, resumes bit for bit (also in the middle of answers), shares work over processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_cases import TOKENIZER, model
from rl_cases import config, model_directory, recipe, run, spaces, training
from safetensors.torch import load_file

from earlyfusion.model.hub import save_model
from earlyfusion.pipeline.errors import UserError
from earlyfusion.pipeline.toml_text import to_toml
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl import train
from earlyfusion.rl.collect import LOOK_EVERY
from earlyfusion.rl.experience import experience
from earlyfusion.rl.prompts import PromptBook
from earlyfusion.rl.rewards import Scored

CLOCK = ("time", "_per_", "step_s", "seconds", "engine_idle", "memory")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


pytestmark = pytest.mark.usefixtures("rewards_called_here")


def numbers(out: Path) -> list[dict]:
    """Every number of metrics.jsonl that is no clock."""
    return [
        {key: value for key, value in record.items() if not any(word in key for word in CLOCK)}
        for record in read_metrics(out / "metrics.jsonl", "train")
    ]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(str(out / "model" / "model.safetensors"))


def tensors(state: dict) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def assert_same(left: Path, right: Path) -> None:
    assert numbers(left) == numbers(right) != []
    ours, theirs = weights(left), weights(right)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()


PARTIAL = {
    "rollout": {"fraction": 0.6, "token_cap": 3, "max_new_tokens": 9},
    "stale": {"max_lag": 3},
    "temperature": {"start": 1.2, "end": 0.8, "updates": 4},
    "curriculum": {"prioritised": True},
    "optim": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.0},
}
PTX = {
    "ptx": {"coef": 0.3, "tokens": 192, "length": 96},
    "data": {
        "prefetch": "none",
        "sources": [{"name": "p", "kind": "problems", "options": {"tasks": {"counting": 1}, "forms": {"twin": 1}}}],
    },
    "rollout": {"pool": 6, "resample": 1},
    "train": {"epochs": 2, "minibatches": 2, "old_policy": "trainer"},
    "correction": {"mode": "tis"},
    "objective": {"name": "dapo", "kl_coef": 0.01},
}


@pytest.mark.parametrize("changes", [{}, PARTIAL, PTX], ids=["plain", "partial", "ptx"])
def test_a_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(folder, tmp_path, changes):
    assert run(folder, tmp_path / "whole", **changes) == 0
    assert run(folder, tmp_path / "cut", **{**changes, "run": {"steps": 2}}) == 0
    assert run(folder, tmp_path / "cut", resume=True, **changes) == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
    if changes is PARTIAL:
        assert any(record["carried"] for record in numbers(tmp_path / "cut"))
        assert any(record["staleness"] > 0 for record in numbers(tmp_path / "cut"))


def test_a_partial_rollout_under_a_schedule_knows_the_temperature_of_every_token(folder, tmp_path):
    """Weights that stand still: trainer and sampler are one policy, so every log ratio is rounding."""
    changes = {**PARTIAL, "stale": {}, "temperature": {"start": 1.5, "end": 0.5, "updates": 5}, "train": {"updates": 6}}
    assert run(folder, tmp_path / "run", **{**changes, "optim": {"name": "adamw", "lr": 1e-12}}) == 0
    seen = [record for record in numbers(tmp_path / "run") if record["answers"]]
    assert any(record["staleness"] > 0 for record in seen) and len({record["temperature"] for record in seen}) > 1
    assert max(record["mismatch_kl"] for record in seen) < 1e-9
    assert max(record["mismatch_max"] for record in seen) < 1e-3
    assert all(record["clip_share"] == 0 for record in seen)


@pytest.mark.parametrize("name", ["muonclip", "adamw"])
def test_a_batch_with_nothing_to_learn_makes_no_step_and_is_counted(folder, tmp_path, monkeypatch, name):
    """With momentum from the updates before; by one process, and by one of two, whose sum of no gradients is none."""
    constant = {"now": False}
    judge = lambda problem, response: 1.0 if constant["now"] else spaces(problem, response)
    monkeypatch.setattr("earlyfusion.rl.experience.make_reward", lambda *a: (judge, "inline"))
    made = training(folder, tmp_path / "run", optim={"name": name})
    try:
        assert [made._iterate()["empty"] for _ in range(2)] == [0, 0]
        before = [p.clone() for p in made.model.parameters()]
        held = [value.clone() for state in made.kit.optimizer.state.values() for value in tensors(state)]
        constant["now"] = True
        for world in (1, 2):
            monkeypatch.setattr(made.runtime, "world", world)
            monkeypatch.setattr("torch.distributed.all_reduce", lambda values, op=None: values)
            monkeypatch.setattr(made.kit.collector, "_due", lambda count, rank: count if rank == 0 else 0)
            record = made._iterate()
            assert record["empty"] == 1 and record["grad_norm"] == 0 and record["informative"] == 0
        assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), before))
        now = [value for state in made.kit.optimizer.state.values() for value in tensors(state)]
        assert all(torch.equal(p, q) for p, q in zip(now, held, strict=True))
    finally:
        monkeypatch.setattr(made.runtime, "world", 1)
        made.close()


def test_a_batch_of_which_nothing_is_trained_makes_no_step(folder, tmp_path):
    """Every answer cut at the limit and filtered: its gradients would be zeros."""
    made = training(folder, tmp_path / "run", overlong={"mode": "filter"}, rollout={"max_new_tokens": 2})
    try:
        before = [p.clone() for p in made.model.parameters()]
        assert made._iterate()["empty"] == 1
        assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), before))
    finally:
        made.close()


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(folder, tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert run(folder, tmp_path / name, run={"seed": seed}, train={"updates": 2}) == 0
    assert_same(tmp_path / "a", tmp_path / "b")
    assert numbers(tmp_path / "a") != numbers(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k2.5", "grpo"])
def test_rewards_rise(folder, tmp_path, name):
    """The share of vowels in random text: a policy of the wrong sign would fall."""
    changes = {
        "objective": {"name": name}, "train": {"updates": 40}, "rollout": {"prompts": 4, "group_size": 8},
        "optim": {"lr": 1e-2}, "tasks": [{"name": "colour_shape"}],
    }  # fmt: skip
    assert run(folder, tmp_path / "run", **changes) == 0
    means = [record["score"] for record in numbers(tmp_path / "run")]
    assert sum(means[-8:]) / 8 > sum(means[:8]) / 8 + 0.08, means


def test_pictures_train_the_encoder_and_frozen_parts_stay(folder, tmp_path):
    start = load_file(str(folder / "model.safetensors"))
    for frozen, moved in ((["vision", "projector"], False), ([], True)):
        out = tmp_path / str(moved)
        assert run(folder, out, train={"updates": 2, "frozen": frozen}) == 0
        changed = {name for name, value in weights(out).items() if not torch.equal(value.float(), start[name].float())}
        assert any("vision" in name for name in changed) is moved
        assert any("decoder" in name or "layers" in name for name in changed if "vision" not in name)


def test_a_signal_saves_and_the_run_goes_on(folder, tmp_path):
    made = training(folder, tmp_path / "run", train={"updates": 5})
    real, count = made._iterate, []

    def iterate():
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real()

    made._iterate = iterate
    try:
        assert made.train() == 75
    finally:
        made.close()
    assert run(folder, tmp_path / "run", resume=True, train={"updates": 5}) == 0
    assert run(folder, tmp_path / "whole", train={"updates": 5}) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_ptx_alone_asks_nothing_and_learns_the_documents(folder, tmp_path):
    changes = {**PTX, "ptx": {"only": True, "tokens": 256, "length": 96}, "train": {"updates": 12}, "objective": {}}
    changes["correction"], changes["rollout"] = {}, {}
    assert run(folder, tmp_path / "run", **changes) == 0
    losses = [record["ptx_loss"] for record in numbers(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.3 and all("reward" not in record for record in numbers(tmp_path / "run"))


def test_a_pool_is_asked_again_and_the_hard_ones_more_often(folder, tmp_path):
    made = training(folder, tmp_path / "run", rollout={"pool": 3}, curriculum={"prioritised": True, "floor": 0.01})
    try:
        book = made.kit.book
        solved, tried = torch.zeros(9, dtype=torch.float64), torch.full((9,), 20.0, dtype=torch.float64)
        solved[[0, 3, 6]] = 20.0  # the first problem of every entry is solved
        book.note(solved, tried)
        weights_P = book.weights(0)
        assert weights_P[0] < weights_P[1] / 5 and weights_P.sum() == pytest.approx(1)
        first, again = book.prompt(book.draw(4, 0)[0]), book.prompt(book.draw(9, 0)[0])
        assert first[0].task in {"colour_shape", "counting", "odd_one_out"} and again is not None
    finally:
        made.close()


def test_entries_are_asked_in_proportion_to_their_weights(folder, tmp_path):
    made = training(folder, tmp_path / "run")
    try:
        asks = made.kit.book.draw(100, 0)
        counts = [sum(ask.entry == entry for ask in asks) for entry in range(3)]
        assert counts == [40, 40, 20]
        assert len({(ask.entry, ask.number) for ask in asks}) == 100  # none twice
    finally:
        made.close()


LIMIT = 45
"""Tokens of a prompt: pictures of 40 to 64 pixels make prompts on both sides of it."""


def test_prompts_that_are_too_long_are_left_out_and_counted_never_cut(folder, tmp_path):
    made = training(folder, tmp_path / "run", rollout={"max_prompt_tokens": LIMIT}, tasks=[{"name": "counting"}])
    try:
        asks = made.kit.book.draw(40, 0)
        assert all(len(made.kit.book.prompt(ask)[1].ids) <= LIMIT for ask in asks)
        assert made.kit.book.left_out["too_long"] > 0, [len(made.kit.book.prompt(ask)[1].ids) for ask in asks]
    finally:
        made.close()
    made = training(folder, tmp_path / "none", rollout={"max_prompt_tokens": 5})
    try:
        with pytest.raises(Exception, match=r"raise rollout\.max_prompt_tokens"):
            made.kit.book.draw(4, 0)
    finally:
        made.close()


def test_processes_make_their_own_prompts_only_and_agree_on_all(folder, tmp_path):
    """Oracle: one process. Two draw the same prompts, leave out the same ones, and each makes its share and no more."""
    tasks = [{"name": "counting"}, {"name": "colour_shape"}]
    made = training(folder, tmp_path / "run", rollout={"max_prompt_tokens": LIMIT}, tasks=tasks)
    try:
        kit = made.kit
        books = [PromptBook(made.config, kit.book.tokenizer, kit.book.vision) for _ in range(3)]
        whole = [books[0].draw(30, 0), books[0].draw(31, 1)]
        assert books[0].left_out["too_long"] > 0
        sums, meet = [None, None], threading.Barrier(2)

        def process(rank):
            def agree(found_N):
                sums[rank] = found_N
                meet.wait(60)
                total = sums[0] + sums[1]
                meet.wait(60)
                return total

            shares = slice(0, 13) if rank == 0 else slice(13, None)
            return [books[1 + rank].draw(30, 0, shares, agree), books[1 + rank].draw(31, 1, shares, agree)]

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(process, range(2))
        assert first == second == whole
        assert books[1].left_out == books[2].left_out == books[0].left_out
        assert books[1].made_E == books[2].made_E == books[0].made_E
        made_by = [book.prompt.cache_info().misses for book in books]
        assert made_by[1] + made_by[2] == made_by[0] and min(made_by[1:]) >= 26
    finally:
        made.close()


@pytest.mark.parametrize("rollout", [{}, {"pool": 5}, {"max_prompt_tokens": LIMIT}])
def test_prompts_made_ahead_are_the_same_and_change_nothing(folder, tmp_path, rollout):
    """Oracle: the run without the thread."""
    for name, prefetch in (("ahead", True), ("at once", False)):
        tasks = [{"name": "counting"}, {"name": "colour_shape"}]
        run(folder, tmp_path / name, rollout={**rollout, "prefetch": prefetch}, train={"updates": 3}, tasks=tasks)
    assert_same(tmp_path / "ahead", tmp_path / "at once")


def test_what_is_coming_is_what_is_drawn(folder, tmp_path):
    made = training(folder, tmp_path / "run")
    try:
        book = made.kit.book
        book.draw(3, 0)
        coming = book.coming(8, 1)
        assert coming == book.coming(8, 1) == book.draw(8, 1) != book.draw(8, 1)
    finally:
        made.close()


def raising(problem, response):
    raise RuntimeError("no reward today")


def test_a_reward_that_raises_costs_its_answers_and_a_count_not_the_run(folder, tmp_path):
    assert run(folder, tmp_path / "run", reward={"name": f"{__name__}:raising"}, train={"updates": 1}) == 0
    (record,) = numbers(tmp_path / "run")
    assert record["score"] == 0 and record["rewards/error"] == 16


def test_rewards_of_any_range_teach_what_their_differences_say(folder, tmp_path):
    """-1 to 0, as of a penalty: the advantages and the success rates of the same rewards at 0 to 1, nothing cut off."""
    for name, low in (("zero", 0.0), ("below", -1.0)):
        made = training(folder, tmp_path / name, reward={"low": low, "high": low + 1.0}, length={"weight": 0.5})
        try:
            made.kit.rewards.function = lambda problem, response, low=low: low + spaces(problem, response)
            made.kit.refresh_engine(0)
            _, seen, _ = made._experience(1.0, 0)
            rate = made.kit.book.solved_P / made.kit.book.tried_P.clamp(min=1)
            if name == "zero":
                wanted, rates = seen, rate
            assert made.kit.rewards.counts.keys() == {"ok"} and float(seen.scores_N.std()) > 0.01
        finally:
            made.close()
    assert torch.allclose(seen.advantages_N, wanted.advantages_N, atol=1e-6)
    assert torch.allclose(seen.scores_N + 1, wanted.scores_N, atol=1e-6)
    assert torch.allclose(rate, rates, atol=1e-6) and 0 < float(rate.max()) < 1


def test_powers_of_rewards_keep_their_sign(folder, tmp_path):
    made = training(folder, tmp_path / "run", tasks=[{"name": "counting", "power": 2.5}], reward={"low": -1.0})
    try:
        made.kit.refresh_engine(0)
        groups = made.kit.collector.collect(0, 1.0, 1).groups
        scored = [Scored(value) for value in (-1.0, -0.25, 0.25, 2.0)]
        rewards_N = experience(made.config, groups, scored, 0, {}).rewards_N
        assert rewards_N.tolist() == pytest.approx([-1.0, -0.03125, 0.03125, 2**2.5])
    finally:
        made.close()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reward": {"name": "tusk"}}, "did you mean.*task"),
        ({"reward": {"name": "nowhere:at_all"}}, "cannot be imported"),
        ({"tasks": [{"name": "countin"}]}, "did you mean.*counting"),
        ({"tasks": [{"name": "counting"}, {"name": "counting"}]}, "add up their weights"),
        ({"ptx": {"coef": 0.5}}, "data.sources"),
        ({"rollout": {"group_size": 1}}, "no advantage"),
        ({"train": {"frozen": ["visoin"]}}, "matches no parameter"),
        ({"objective": {"name": "gspo"}, "correction": {"mode": "tis"}}, "correction.level"),
        ({"run": {"init_from": "/nowhere/at/all"}}, "no such directory"),
        ({"run": {"init_from": "embedded:nothing"}}, "embedded"),
    ],
)
def test_mistakes_are_told_in_one_line_before_anything_is_written(folder, tmp_path, changes, message):
    with pytest.raises(Exception, match=message) as caught:
        run(folder, tmp_path / "run", **changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_is_never_written_over(folder, tmp_path):
    assert run(folder, tmp_path / "run", train={"updates": 1}) == 0
    with pytest.raises(UserError, match="already holds checkpoint"):
        run(folder, tmp_path / "run", train={"updates": 1})
    with pytest.raises(UserError, match=r"recipe changed.*group_size"):
        run(folder, tmp_path / "run", resume=True, train={"updates": 1}, rollout={"group_size": 6})


def test_rollouts_are_logged_with_their_pictures(folder, tmp_path):
    assert run(folder, tmp_path / "run", train={"updates": 1}, log={"groups": 4}) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert len(line["answers"]) == 4 and (line["image"] is None) == (line["form"] != "picture")
        if line["image"]:
            assert (tmp_path / "run" / line["image"]).is_file()
        assert sum(a["advantage"] for a in line["answers"]) == pytest.approx(0, abs=1e-5)


VOWELS = """
def share(problem, response):
    return sum(c in "aeiou" for c in response.lower()) / max(1, len(response))
"""


def launched(world: int, file: Path, folder: Path, out: Path, *extra: str) -> subprocess.CompletedProcess:
    """A run of the recipe by `world` processes."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "-m", "earlyfusion.rl.train", str(file), "--init-from", str(folder), "--out", str(out), *extra,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(file.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


LINEAR = {"name": "adamw", "lr": 0.05, "eps": 1.0, "weight_decay": 0.0}
"""With an epsilon of 1 AdamW answers gradients in proportion; Muon blows up rounding where there is hardly a gradient (1 to
5 % after one update), and the next samples would differ."""
IN_PIECES = {
    "rollout": {"prompts": 5, "token_cap": 3, "max_new_tokens": 6},
    "temperature": {"start": 1.3, "end": 0.9, "updates": 5},
    "train": {"updates": 6},
}
"""Nothing is finished in every second iteration: batches without a gradient, before and after there is momentum."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"rollout": {"prompts": 5}, "train": {"updates": 3}}, IN_PIECES], ids=["whole", "in pieces"]
)
def test_two_processes_take_the_steps_of_one(folder, tmp_path, changes):
    """Same prompts, same samples, gradients summed over gloo: weights equal up to the order of sums."""
    file = tmp_path / "recipe.toml"
    (tmp_path / "vowels.py").write_text(VOWELS)  # a reward that random weights earn, so that gradients are no rounding
    file.write_text(to_toml(recipe(reward={"name": "vowels:share"}, optim=LINEAR, **changes)))
    for world, name in ((1, "one"), (2, "two")):
        launched(world, file, folder, tmp_path / name)
    ours, theirs = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("score", "length", "entropy", "grad_norm", "answers", "informative", "empty", "carried"):
            assert mine[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6), (mine["step"], key)
    if changes is IN_PIECES:
        assert [mine["empty"] for mine in ours] == [1, 0, 1, 0, 1, 0]
    left, right = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in left:
        difference = (left[name] - right[name]).float().norm() / right[name].float().norm().clamp(min=1e-6)
        assert difference < 1e-3, (name, float(difference))


def test_dry_run_prints_the_plan(folder, tmp_path, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe()))
    assert train.main([str(file), "--dry-run"]) == 0
    assert "an iteration: 4 prompts x 4 answers" in capsys.readouterr().out
    assert config(folder, tmp_path).total_updates == 4


def test_answers_that_run_in_circles_are_ended_early_and_the_others_go_on(tmp_path, monkeypatch):
    """What counts as a circle is decided elsewhere (test_length.py): here, an odd first token. The model hardly ends."""
    folder = save_model(model(0), TOKENIZER, tmp_path / "model")
    monkeypatch.setattr("earlyfusion.rl.collect.repeat_period", lambda config, ids: ids[0] % 2 or None)
    changes = {"repeat": {}, "rollout": {"max_new_tokens": 40, "prompts": 3, "group_size": 6}}
    made = training(folder, tmp_path / "run", **changes)
    try:
        made.kit.refresh_engine(0)
        answers = [t for g in made.kit.collector.collect(0, 1.0, 3).groups for t in g.trajectories]
        ended = [t for t in answers if t.completion.finish_reason == "cancelled"]
        assert ended and len(ended) == made.kit.collector.counts["ended_in_circles"] < len(answers)
        assert all(t.ids[0] % 2 and len(t.ids) == LOOK_EVERY for t in ended)
        others = [t for t in answers if t.completion.finish_reason != "cancelled"]
        assert all(len(t.ids) <= LOOK_EVERY for t in others if t.ids[0] % 2)
        assert any(len(t.ids) == 40 for t in answers)
        assert made.kit.engine.stats()["free_slots"] == made.kit.engine.stats()["slots"]
    finally:
        made.close()
