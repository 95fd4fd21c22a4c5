"""Reinforcement learning on questions of one's own: both forms, a prompt cache of any size, a file that
changes, and what of a chat answer is judged."""

import json

import pytest
from PIL import Image
from rl_cases import training
from tiny_run import assert_same
from tool_cases import TOKENIZER, answer, directory

from earlyfusion.data.errors import DataError
from earlyfusion.eval.measure import answer_text_of, ask, target_ids
from earlyfusion.rl import train
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.rollouts import prompts

pytestmark = pytest.mark.usefixtures("rewards_called_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("start"))


@pytest.fixture
def file(tmp_path):
    rows = []
    for i in range(40):
        Image.new("RGB", (16 + i, 24), (6 * i, 255 - 6 * i, 90)).save(tmp_path / f"{i}.png")
        row = {"question": f"how many in {i}?", "image": f"{i}.png", "answer": i % 3, "check": "number"}
        rows.append(row | ({"max_new_tokens": 2} if i % 2 else {}))
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def entries(file):
    options = {"path": str(file), "heldout": 0.2}
    ways = ({}, {"chat": True}, {"chat": True, "thought": True})
    return [{"name": "file", "options": options, **way} for way in ways]


def made(folder, file, out, **changes):
    changes = {"rollout": {"prompts": 6, "max_new_tokens": 6}, "train": {"updates": 3}, **changes}
    return training(folder, out, tasks=entries(file), **changes)


def finish(run):
    try:
        assert run.train() == 0
    finally:
        run.close()
    return run.out


def test_a_cache_of_one_prompt_learns_what_a_large_one_does_bit_for_bit(folder, file, tmp_path, monkeypatch):
    whole = finish(made(folder, file, tmp_path / "whole"))
    read = prompts.encode_prompt
    calls = []
    monkeypatch.setattr(prompts, "encode_prompt", lambda *a: (calls.append(1), read(*a))[1])
    monkeypatch.setattr(prompts, "size_of", lambda document: 1 << 40)
    small = made(folder, file, tmp_path / "small")
    assert len(small.prompts.held) == 0
    finish(small)
    assert len(small.prompts.held) == 1 and len(calls) > 18, "documents are read again when they are needed"
    assert_same(tmp_path / "whole", tmp_path / "small")
    assert whole != small.out


def test_a_row_may_end_its_answers_sooner_and_a_stopped_run_goes_on(folder, file, tmp_path):
    run = made(folder, file, tmp_path / "run")
    try:
        groups = run.collector.collect(0, 1.0, 6)
        for group in groups:
            most = group.problem.max_new_tokens or 6
            assert max(len(one.ids) for one in group.trajectories) <= most
        assert {group.problem.max_new_tokens for group in groups} == {None, 2}
    finally:
        run.close()
    finish(made(folder, file, tmp_path / "whole"))
    finish(made(folder, file, tmp_path / "cut", run={"steps": 1}))
    finish(
        training(
            folder,
            tmp_path / "cut",
            True,
            tasks=entries(file),
            rollout={"prompts": 6, "max_new_tokens": 6},
            train={"updates": 3},
        )
    )
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_file_that_has_changed_is_not_gone_on_with(folder, file, tmp_path):
    finish(made(folder, file, tmp_path / "run", run={"steps": 1}))
    file.write_text(file.read_text().replace('"answer": 0', '"answer": 1'))
    with pytest.raises(DataError, match="the file has changed since the run began"):
        training(
            folder,
            tmp_path / "run",
            True,
            tasks=entries(file),
            rollout={"prompts": 6, "max_new_tokens": 6},
            train={"updates": 3},
        )


def test_of_a_chat_answer_the_response_is_judged_and_broken_markup_is_none():
    plain, thinking = (
        TaskEntry(name="counting", chat=True),
        TaskEntry(name="counting", chat=True, thought=True),
    )
    said = answer("two", thinking="I count")
    opened = said.index(TOKENIZER.sep_id) + 1  # the prompt ends behind "<|open|>think<|sep|>"
    assert answer_text_of(said[opened:], "", thinking, TOKENIZER) == "two"
    assert answer_text_of(answer("two"), "", plain, TOKENIZER) == "two"
    assert answer_text_of(said[opened:-3], "two", thinking, TOKENIZER) == ""
    # What counts as the target is what the model would have to say, to the last token.
    problem = train.make_task("counting").sample(0)
    whole = answer(problem.target, thinking="I count")
    target = target_ids(problem, thinking, TOKENIZER)
    assert tuple(whole[-len(target) :]) == target
    assert tuple(answer(problem.target)) == target_ids(problem, plain, TOKENIZER)


def test_chat_prompts_open_the_assistants_turn_and_the_thinking_channel(folder, file, tmp_path):
    run = made(folder, file, tmp_path / "run")
    try:
        texts = [run.tokenizer.decode(run.prompts.prompt(e, e, 0).encoded.ids.tolist()) for e in range(3)]
        problem = run.prompts.prompt(0, 0, 0).problem
        assert texts[0].endswith(f"\nQ: {problem.question}\nA:")
        assert texts[1].endswith('message role="assistant"<|sep|>')
        assert texts[2] == texts[1] + "<|open|>think<|sep|>"
        labels = [entry.label for entry in run.config.tasks]
        assert labels == [
            "file:mine/0/picture",
            "file:mine/0/picture/chat",
            "file:mine/0/picture/chat/thought",
        ]
        asked = ask(
            run.model, run.tokenizer, run.config.tasks, problems=4, seed=0, pictures=("true", "swapped")
        )
        records = asked.measured()
        assert len(records) == 24 and {one.target for one in records} <= {"0", "1", "2"}
    finally:
        run.close()
