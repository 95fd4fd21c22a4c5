"""Collections made by seed: what is asked can be found and nothing else earns; a reader that quotes; planners
as bounds; PARL's rewards from what the real executor counted; the verbs."""

import asyncio
import json
from dataclasses import replace

import pytest
from rl_cases import flat
from tool_cases import answer, collected, directory, ids_of, tool_training

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tasks.collection import (
    HELDOUT_WORLD,
    KINDS,
    Collection,
    folder_of,
    item_f1,
    parts_of,
    world_of,
)
from earlyfusion.data.tasks.problem import TaskError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.rewards import Rewards, Weighed
from earlyfusion.pipeline import cli
from earlyfusion.rl.environments.swarm import SwarmEnvironment, finish, parallel
from earlyfusion.rl.rollouts.experience import score
from earlyfusion.rl.swarm import plans
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits, cited, conduct
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.reader import Reader, fitting

READER = Reader()


def problems(kind, count=3, level=0):
    return make_task("collection", kinds=[kind], worlds=2).test_problems(count, 0, level)


def play(problem, speaker, **limits):
    """(answer, swarm) of an orchestrator on the real library, with readers."""
    swarm = Swarm(READER, Library(problem.meta["docs"]), SwarmLimits(concurrent=8, turns=64, **limits))
    return asyncio.run(conduct(speaker, problem.question, swarm)), swarm


# ---- what is asked


def test_equal_seeds_write_equal_files_and_the_sides_share_no_name(tmp_path):
    for name in ("one", "two"):
        world_of.cache_clear()
        world_of(3).write(tmp_path / name)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*")]
    assert len(files) == 48 * 2 + 4
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    train, test = ({p for n in range(4) for p in world_of(n + side).people} for side in (0, HELDOUT_WORLD))
    assert not train & test


@pytest.mark.parametrize("kind", KINDS)
def test_the_gold_answer_earns_all_and_naming_every_value_little(kind):
    for problem in problems(kind):
        task = Collection()
        assert task.reward(problem, problem.target) == 1 and task.reward(problem, "") == 0
        subjects, values = {subject for subject, _ in problem.meta["items"]}, problem.meta["values"]
        assert not any(value in problem.question.split() for value in values)
        everything = "\n".join(" ".join([subject, *values]) for subject in subjects)
        assert task.reward(problem, everything) < 0.5
        assert task.reward(problem, problem.target + "\n" + everything) < 0.5


def test_item_f1_by_hand():
    meta = {"items": [("Ann", "3"), ("Bo", "1")], "values": ["1", "2", "3"]}
    assert item_f1("Ann: 3 [pictures/2.png]\nBo has 2 in pictures/1.png", meta) == 2 / 4
    assert item_f1("ann 3\nBo 1", meta) == 1 and item_f1("Ann and Bo\n3, 1", meta) == 0
    assert item_f1("Ann 3", meta) == 2 / 3 and item_f1("{report 1}", meta) == 0


def test_a_log_is_asked_for_by_the_parts_that_the_library_has():
    (problem, *_) = problems("long", 1)
    library = Library(problem.meta["docs"])
    (group,) = problem.meta["plan"]
    place = group[0].split()[3].split("#")[0]
    assert len(group) == sum(one.startswith(f"{place}#") for one in library.places) > 2
    assert parts_of("") == [] and "".join(parts_of("x" * 4000)) == "x" * 4000
    with pytest.raises(TaskError, match="did you mean 'wide'"):
        Collection(["wid"])


# ---- who answers


def test_a_reader_quotes_what_fits_with_its_place_and_sees_pictures():
    (problem,) = problems("pictures", 1)
    asked = problem.meta["plan"][0][0]
    swarm = Swarm(READER, Library(problem.meta["docs"]))
    make, give = ToolCall("create_subagent", {"name": "a", "system_prompt": ""}), "assign_task"
    calls = [make, *(ToolCall(give, {"agent": "a", "prompt": one}) for one in (asked, "Xyzzy plugh?"))]
    _, seen, nothing = asyncio.run(swarm.act(Message("assistant", (), calls=tuple(calls))))
    person = asked.split()[-1].rstrip("?")
    assert seen.text.startswith(f"report 1: The picture of {person} is pictures/") and seen.text.endswith(
        ".png]"
    )
    assert seen.text.split(".png. ")[1][0] in "0123456789" and swarm.reports[1].steps == 4
    assert nothing.text == "report 2: nothing holds any of: Xyzzy plugh"
    assert fitting("Where does Ann live?", "Bo lives in Oslo. Ann lives in Riga.") == ["Ann lives in Riga."]
    wrapped = f"{'Long words before the end of a line that has none, ' * 2}Ann\nlives in Riga.\nNo."
    assert fitting("Where does Ann live?", wrapped) == [wrapped[:-4].replace("\n", " ")]


@pytest.mark.parametrize("kind", ["wide", "long", "report", "deep"])
def test_both_bounds_find_everything_and_only_what_can_be_side_by_side_is_sooner(kind):
    for problem in problems(kind):
        answer_, oracle = play(problem, plans.Planner(problem))
        assert Collection().reward(problem, answer_) == 1 and cited(answer_, Library(problem.meta["docs"]))
        text, alone = play(problem, plans.Alone(problem, READER))
        assert Collection().reward(problem, text) == 1 and not alone.assigned
        apart = play(problem, plans.Planner(problem, together=False))[1]
        assert oracle.critical_steps <= apart.critical_steps and oracle.total_steps <= apart.total_steps
        # A chain has nothing to do side by side, and pays for its sub-agents.
        assert (oracle.critical_steps < apart.critical_steps) == (kind != "deep")
        assert (parallel(problem, oracle.counts) > 0) == (kind != "deep")
        assert parallel(problem, alone.counts) == 0 and finish(problem, [], alone.counts) == 0


def test_a_wide_question_of_eight_takes_a_third_of_the_serial_steps():
    problem = next(one for one in problems("wide", 12, 1) if len(one.answer) == 8)
    assert play(problem, plans.Alone(problem, READER))[1].critical_steps == 16
    assert play(problem, plans.Planner(problem))[1].critical_steps == 4


def test_documents_of_fine_tuning_are_conversations_that_went_so():
    source = build_source(SourceConfig(name="plans", kind="earlyfusion.rl.swarm.plans:Plans"))
    for number in range(4):
        segments = source.made(number, "x", heldout=True).segments
        learned = "".join(one.text for one in segments if isinstance(one, Text) and one.loss)
        read = "".join(one.text for one in segments if isinstance(one, Text) and not one.loss)
        assert "report 1:" in read and "report 1:" not in learned and "{report" in learned
        assert not any(isinstance(one, Image) for one in segments)
    words = build_source(
        SourceConfig(name="p", kind="earlyfusion.rl.swarm.plans:Plans", options={"in_words": True})
    )
    segments = words.made(0, "x", False).segments
    learned = "".join(one.text for one in segments if isinstance(one, Text) and one.loss)
    assert learned.count("?") > 1 and "assign_task" not in learned


# ---- rewards


def test_finish_pays_for_what_is_new_and_asked_for_alone():
    (problem,) = problems("wide", 1)
    (subject, value), *_ = problem.meta["items"]
    told = [
        f"report 1: {subject}: {value}.",
        f"report 2: {subject}, {value}",
        "report 3: Bo",
        "not finished: x",
    ]
    messages = [Message("tool", (Text(text),), tool="assign_task") for text in told]
    assert finish(problem, messages, {"assigned": 4, "finished": 3}) == 1 / 4
    assert finish(replace(problem, meta={}), messages, {"assigned": 4, "finished": 3}) == 3 / 4


def test_the_executors_counts_reach_the_rewards_and_fade_with_them(tmp_path, monkeypatch):
    """A run whose model assigns one task or none: parts of the reward by hand, reports in what is judged."""
    task = make_task("collection", kinds=["wide"], worlds=1)
    asked = {one.question: one for one in (task.numbered(n, 3) for n in range(400))}

    def say(name, prompt):
        begun = "report 1:" in prompt
        if begun:
            return [answer("{report 1}")]
        (problem,) = [one for question, one in asked.items() if f"{question}<|close|>" in prompt]
        calls = asyncio.run(plans.Planner(problem).say([], (), 0)).message.calls[:2]
        return [answer("no"), ids_of(Message("assistant", (), calls=calls))]

    monkeypatch.setattr(
        "earlyfusion.data.tasks.problem.Task.numbered",
        lambda self, number, seed, level=0: next(iter(asked.values())) if level == 0 else None,
    )
    entry = {
        "name": "collection",
        "options": {"kinds": ["wide"], "worlds": 1},
        "environment": "swarm",
        "environment_options": {"agents": "reader"},
        "turns": 3,
        "reply_tokens": 900,
    }
    made = tool_training(
        directory(tmp_path),
        tmp_path / "run",
        say,
        tasks=[entry],
        rollout={"max_new_tokens": 700, "prompts": 2, "group_size": 6},
    )
    groups, metrics = collected(made)
    answers = flat([group.trajectories for group in groups])
    spawned = [one for one in answers if one.counts.get("assigned")]
    assert 0 < len(spawned) < len(answers) == metrics["tools/answers"]
    assert metrics["tools/assigned"] == metrics["tools/finished"] == len(spawned)
    assert all("[people/" in one.answer for one in spawned), "a report stands in what is judged"
    functions = [
        Weighed(Collection().reward, "task"),
        Weighed(parallel, "parallel"),
        Weighed(finish, "finish"),
    ]
    rewards = Rewards(functions)
    for one, scored in zip(answers, score(rewards, groups)):
        if one in spawned:
            assert scored.parts["finish"] == 1 and scored.parts["parallel"] == 0 and scored.parts["task"] > 0
        else:
            assert scored.value == 0
    rewards.share = 0.0
    assert [one.value for one in score(rewards, groups)] == [
        pytest.approx(one.parts["task"]) for one in score(rewards, groups)
    ]


# ---- bad input


def test_ten_thousand_look_ups_and_reports_taken_in_for_ever_are_bounded():
    (problem,) = problems("wide", 1)
    swarm = Swarm(READER, Library(problem.meta["docs"]), SwarmLimits())
    many = Message("assistant", (), calls=(ToolCall("search", {"query": "x"}),) * 10_000)
    told = asyncio.run(swarm.act(many))
    assert (
        len(told) == 10_000 and told[-1].text.startswith("not run: at most 64") and swarm.critical_steps == 64
    )
    swarm = play(problem, plans.Planner(problem))[1]
    assert len(swarm.whole("{report 1}" * 5000)) < 5000 * len("{report 1}") + 200
    assert swarm.whole("{report 99999999} {report 0}") == "{report 99999999} {report 0}"
    budget = SwarmEnvironment("reader", steps=3)
    budget.reset(problem)
    found = asyncio.run(budget.step(Message("assistant", (), calls=many.calls[:5]))).messages
    assert [one.text.startswith("the budget of 3") for one in found] == [False, False, False, True, True]


# ---- the verbs


def listing(messages):
    """An orchestrator that asks for everybody whom its question names."""
    told = [one for one in messages if one.tool == "assign_task"]
    if told:
        return "\n".join(f"{{report {number}}}" for number in range(1, len(told) + 1))
    names = [word.strip(",?") for word in messages[-1].text.split()[2:] if word[0].isupper()]
    give = [("assign_task", {"agent": "a", "prompt": f"Where does {name} live?"}) for name in names]
    return [("create_subagent", {"name": "a", "system_prompt": ""}), *give]


def test_a_collection_is_written_asked_and_measured(tmp_path, capsys):
    out = tmp_path / "made"
    assert cli.main(["swarm", "collection", str(out), "--questions", "10"]) == 0
    rows = [json.loads(line) for line in (out / "questions.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == set(KINDS)
    assert len(Library(out / "docs").places) == len(Library(folder_of(HELDOUT_WORLD)).places)
    assert cli.main(["swarm", "collection", str(out)]) == 2
    people = world_of(HELDOUT_WORLD).people[:3]
    words = ["--docs", str(out / "docs"), "--model", f"{__name__}:listing", "--agents", "reader"]
    asked = f"Where do {', '.join(people)} live?"
    assert cli.main(["swarm", "run", asked, *words, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    home = world_of(HELDOUT_WORLD).facts["home"]
    assert all(f"{one} lives in {home[one]}." in shown for one in people) and "sources: people/" in shown
    figures = tmp_path / "figures.json"
    words = ["swarm", "measure", f"{__name__}:listing", "--kinds", "wide", "deep", "--problems", "6"]
    assert cli.main([*words, "--out", str(figures)]) == 0
    measured = json.loads(figures.read_text())
    assert measured["oracle"]["all"]["items"] == measured["alone"]["all"]["items"] == 1
    assert measured["alone"]["all"]["alone"] == 1 and measured[f"{__name__}:listing"]["deep"]["items"] < 1
