"""The transfer study from planted measurements to its claims; its plan, its runner, its page."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from page_cases import checked
from rl_cases import model_directory
from study_world import ARMS, PICTURE, TWIN, plant, study

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import compose, to_toml, validate
from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.pipeline.study import runner as running
from earlyfusion.pipeline.study.runner import Runner, Stage
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.study.analysis import analyse
from earlyfusion.rl.study.measure import measure_seed
from earlyfusion.rl.study.plan import (
    beside,
    measured_file,
    read_study,
    run_folder,
    stages,
    start_of,
    write_recipes,
)
from earlyfusion.rl.study.transfer import headline, write_report

NULL = "no difference shown"


def analysed(out, effects, config=None, **more):
    """What is found where these effects are planted."""
    config = config or study()
    plant(config, out, effects, **more)
    return analyse(config, out)


def pick(results, arm, label, metric):
    """A row of the analysis."""
    wanted = (arm, label, metric)
    return next(row for row in results["rows"] if (row["arm"], row["label"], row["metric"]) == wanted)


GAIN = {("vision", TWIN): 0.2, ("text", TWIN): 0.3, ("vision", PICTURE): 0.3}
CASES = [
    (0, GAIN, "gain, above random, sft", "A gain in words that its controls do not show: vision."),
    (1, GAIN, "gain, above random, sft", "A gain in words that its controls do not show: vision."),
    (0, {}, NULL, "No difference in words could be shown: vision."),
    (1, {}, NULL, "No difference in words could be shown: vision."),
    (2, {}, NULL, "No difference in words could be shown: vision."),
    (0, {("vision", TWIN): 0.2, ("random", TWIN): 0.2}, "gain, not told apart from random", "may explain"),
    (0, {("vision", TWIN): -0.15, ("vision", PICTURE): 0.4}, "loss", "A loss in words: vision."),
]


@pytest.mark.parametrize("seed, effects, verdict, said", CASES)
def test_what_is_planted_is_found_and_nothing_else(tmp_path, seed, effects, verdict, said):
    found = analysed(tmp_path, effects, seed=seed)
    assert found["verdicts"]["vision"] == verdict and said in headline(found)
    assert found["verdicts"]["sft"] == NULL
    row = pick(found, "vision", TWIN, "accuracy")
    assert row["low"] < effects.get(("vision", TWIN), 0) < row["high"] and row["registered"]
    if effects is GAIN:
        below = next(d for d in found["differences"] if (d["arm"], d["control"]) == ("vision", "text"))
        assert below["value"] == pytest.approx(-0.1, abs=0.05) and below["word"] == "below"


def test_sharpening_gains_p_but_neither_greedy_accuracy_nor_p_at_equal_entropy(tmp_path):
    found = analysed(tmp_path, {}, sharpen="vision")
    assert pick(found, "vision", TWIN, "p_target")["word"] == "gain"
    matched = pick(found, "vision", TWIN, "p_matched")
    assert (matched["value"], matched["word"], found["verdicts"]["vision"]) == (0, NULL, NULL)


def test_holm_covers_every_arm_and_metric_of_the_text_side_and_runs_may_be_missing(tmp_path):
    found = analysed(tmp_path, {("vision", TWIN): 0.25}, missing="vision")
    family = [row for row in found["rows"] if row["registered"]]
    assert found["family"] == len(family) == 4 * 4
    assert {row["label"] for row in family} == {TWIN}
    assert {row["metric"] for row in family} == {"accuracy", "p_target", "p_matched", "pass@4"}
    assert all(row["p_holm"] >= row["p"] for row in family)
    first = min(family, key=lambda row: row["p"])
    assert first["p_holm"] == pytest.approx(min(1.0, 16 * first["p"]))
    assert len(pick(found, "vision", TWIN, "accuracy")["per_seed"]) == 4
    assert len(pick(found, "text", TWIN, "accuracy")["per_seed"]) == 5
    assert found["verdicts"]["vision"].startswith("gain")


def test_an_arm_that_thinks_is_judged_after_its_thought(tmp_path):
    arms = [one.model_dump() for one in study().arms] + arm("thought", tasks=["{skill}/picture/thought"])[
        "arms"
    ]
    after = TWIN + "/thought"
    found = analysed(tmp_path, {("thought", after): 0.25}, study(arms=arms))
    assert found["verdicts"]["thought"].startswith("gain, above")
    assert pick(found, "thought", after, "accuracy")["registered"]
    assert not pick(found, "thought", TWIN, "accuracy")["registered"]
    d = next(d for d in found["differences"] if (d["arm"], d["control"]) == ("thought", "random"))
    assert d["value"] == pytest.approx(d["arm_gain"] - d["control_gain"])


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    config = study(seeds=2, rl_seeds=2)
    plant(config, tmp_path, {("vision", TWIN): 0.2})
    write_recipes(config, tmp_path)
    file = beside(measured_file(tmp_path, 0), "probe")
    file.write_text(json.dumps({"picture>twin": [0.5, 0.5]}))
    found = analyse(config, tmp_path)
    page = checked(write_report(config, tmp_path, found))
    for words in (
        "registered",
        "fitted on picture, read off twin",
        "run by run",
    ):
        assert words.lower() in page.lower(), words
    assert "could not be drawn" not in page
    assert "no room" not in headline(found) and "that rule" not in headline(found)
    found["start"][TWIN] = [{"accuracy": 0.99}]
    found["shortcuts"][TWIN] = {"rule": "answer word 2", "solves": 0.95}
    assert "no room to see a gain" in headline(found) and "a gain can be that rule" in headline(found)


# ---- the plan


def test_the_shipped_study_names_every_arm_and_its_recipes_are_valid(tmp_path):
    config = read_study("study-transfer", {})
    names = {arm.name for arm in config.arms}
    assert names >= {"replay", "replay_only", "thought", "thought_sft", "joint", *ARMS, "unrelated"}
    assert config.seeds >= 5 and config.rl_seeds >= 3
    write_recipes(config, tmp_path)
    assert len(stages(config, tmp_path)) == 5 * (1 + 3 * len(names) + 1)
    read = {}
    for name in names:
        read[name] = validate(compose([run_folder(tmp_path, 0, name, 0) / "arm.toml"]), RLConfig)
    assert len({(c.train.updates, c.rollout.prompts, c.rollout.group_size) for c in read.values()}) == 1
    assert read["random"].reward.name == "random" and read["random"].tasks == read["vision"].tasks
    assert {name for name, recipe in read.items() if recipe.ptx.only} == {"sft", "replay_only", "thought_sft"}
    assert read["replay"].ptx.coef > 0 and read["thought_sft"].data.sources[0].options["thought"] == 1.0
    assert read["text"].tasks[0].form == "twin" and read["thought"].tasks[0].thought
    assert len(read["joint"].tasks) == 2 and read["unrelated"].tasks[0].power == 8.0


def test_runs_of_one_seed_share_it_so_that_arms_see_the_same_prompts(tmp_path):
    made = {stage.name: stage.command() for stage in stages(study(), tmp_path)}
    names = ("run/p1/vision/r2", "run/p1/random/r2", "run/p1/vision/r1", "run/p0/vision/r1")
    seeds = [next(word for word in made[name] if word.startswith("--run.seed")) for name in names]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


def arm(name="a", **more) -> dict:
    return {"arms": [{"name": name, "about": "", "tasks": ["{skill}/twin"], **more}]}


@pytest.mark.parametrize(
    "change,said",
    [
        ({"skill": "countin/0"}, "did you mean 'counting'"),
        ({"unrelated": "counting/0"}, "two different skills"),
        ({"primary": "rendered", "measure": {"forms": ["twin"]}}, "primary"),
        (arm("none"), "name of its own"),
        (arm(against=["b"]), "against 'b'"),
        (arm(config={"rollout": {"promts": 1}}), "promts"),
    ],
)
def test_mistakes_in_a_study_are_named(change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        study(**change)


def test_a_folder_of_another_study_is_refused_but_more_seeds_and_arms_are_welcome(tmp_path):
    write_recipes(study(), tmp_path)
    arms = [one.model_dump() for one in study().arms]
    write_recipes(study(seeds=7, arms=[*arms, *arm("more")["arms"]]), tmp_path)
    with pytest.raises(UserError, match="other skill"):
        write_recipes(study(skill="counting/1"), tmp_path)
    arms[0]["tasks"] = ["{skill}/rendered"]
    with pytest.raises(UserError, match=r"other arms\.vision"):
        write_recipes(study(arms=arms), tmp_path)


# ---- the runner


@pytest.fixture
def stage(tmp_path):
    def made(name, script, *after, **options) -> Stage:
        """A stage that runs Python lines; `done()` writes its result."""
        result = tmp_path / name / "result"
        head = "import sys, time, signal; from pathlib import Path\n"
        head += f"done = lambda: Path({str(result)!r}).write_text('x')\n"
        command = (sys.executable, "-c", head + script)
        return Stage(name, lambda: command, (result,), result.parent, after, **options)

    return made


@pytest.fixture
def events(tmp_path):
    def read():
        lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        return [(e["event"], e["stage"], e.get("code"), e.get("last")) for e in lines]

    return read


def test_stages_run_in_order_side_by_side_and_once(tmp_path, stage, events):
    made = [stage(name, "time.sleep(0.2); done()") for name in "ab"] + [stage("c", "done()", "a", "b")]
    runner = Runner(made, tmp_path / "log.jsonl", jobs=2)
    assert runner.run() == 0
    told = [event[:2] for event in events()]
    assert set(told[:2]) == {("start", "a"), ("start", "b")}
    assert told[-2:] == [("start", "c"), ("done", "c")]
    assert runner.run() == 0 and len(events()) == 6
    (tmp_path / "b" / "result").unlink()
    assert runner.run() == 0
    assert [event[:2] for event in events()] == [*told, ("start", "b"), ("done", "b")]


def test_a_failing_stage_stops_only_what_needs_it(tmp_path, stage, events):
    made = [
        stage("bad", "print('went wrong'); sys.exit(3)"),
        stage("good", "done()"),
        stage("child", "done()", "bad"),
        stage("tables", "done()", "bad", "good", partial=True),
    ]
    assert Runner(made, tmp_path / "log.jsonl").run() == 1
    assert [event for event in events() if event[0] == "failed"] == [("failed", "bad", 3, "went wrong")]
    assert made[1].done and made[3].done and not made[2].done


def test_a_killed_attempt_is_cleared_and_a_saved_one_resumed(tmp_path, stage):
    fresh, saved = (
        stage("fresh", "done()"),
        stage("saved", "done() if '--resume' in sys.argv else sys.exit(1)"),
    )
    (saved.folder / "checkpoints" / "step-1").mkdir(parents=True)
    fresh.folder.mkdir()
    for file in (
        fresh.folder / "half",
        fresh.folder / "arm.toml",
        saved.folder / "checkpoints/step-1/COMPLETE",
    ):
        file.touch()
    assert Runner([fresh, saved], tmp_path / "log.jsonl").run() == 0
    assert not (fresh.folder / "half").exists() and (fresh.folder / "arm.toml").exists()
    assert not (saved.folder / "checkpoints").exists()  # the model is kept, the checkpoints are not


@pytest.mark.parametrize("polite", [True, False])
def test_a_signal_lets_stages_save_and_the_next_start_goes_on(tmp_path, stage, events, monkeypatch, polite):
    monkeypatch.setattr(running, "GRACE_S", 5.0 if polite else 0.5)
    saved, up = tmp_path / "saved", tmp_path / "up"
    leave = f"Path({str(saved)!r}).touch(); {'sys.exit(75)' if polite else ''}"
    script = f"def leave(*_): {leave}\nsignal.signal(signal.SIGTERM, leave); Path({str(up)!r}).touch()\n"
    made = [
        stage("long", script + "for _ in range(300): time.sleep(0.1)\ndone()"),
        stage("next", "done()", "long"),
    ]

    def interrupt():
        until = time.monotonic() + 20
        while not up.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    assert Runner(made, tmp_path / "log.jsonl").run() == EXIT_REQUEUE
    thread.join()
    assert saved.exists() and time.monotonic() - begun < 25
    assert events()[-1][:3] == ("stopped", "long", 75 if polite else -9) and not made[1].done
    made[0] = stage("long", "done()")
    assert Runner(made, tmp_path / "log.jsonl").run() == 0


# ---- the verb


def test_the_verb_runs_the_stages_and_leaves_a_page(tmp_path, capsys, monkeypatch):
    sizes = {"problems": 30, "samples": 4, "forms": ["twin", "picture"]}
    config = study(seeds=2, rl_seeds=1, measure=sizes)
    recipe, out = tmp_path / "mine.toml", tmp_path / "out"
    recipe.write_text(to_toml(config.model_dump(mode="json")))
    plant(config, tmp_path / "planted", {("vision", TWIN): 0.3})

    def fake(config, out):
        """Training makes empty models; the measuring stages copy the planted answers of all."""
        copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"
        planted = (copy, str(tmp_path / "planted" / "measured"), str(out / "measured"))
        touch = "import sys, pathlib as l; p = l.Path(sys.argv[1]); p.parent.mkdir(parents=True); p.touch()"
        prepared = []
        for s in stages(config, out):
            words = planted if s.partial else (touch, str(s.results[0]))
            prepared.append(replace(s, command=partial(tuple, (sys.executable, "-c", *words))))
        return prepared

    monkeypatch.setattr("earlyfusion.rl.study.transfer.stages", fake)
    main = lambda more="": cli.main(f"study transfer --recipe {recipe} --out {out} --jobs 2 {more}".split())
    assert main() == 0
    told = json.loads((out / "study.json").read_text())
    assert told["config"]["skill"] == "counting/0" and set(told["verdicts"]) == set(ARMS)
    assert headline(told) in capsys.readouterr().out
    assert main() == 2 and "--resume" in capsys.readouterr().err
    assert main("--resume") == 0
    (out / "report.html").unlink()
    assert main("--report-only") == 0 and (out / "report.html").is_file()


def test_dry_run_prints_every_stage(capsys, tmp_path):
    words = f"study transfer --dry-run --seeds 2 --rl-seeds 1 --out {tmp_path / 'x'}"
    assert cli.main(words.split()) == 0
    told = capsys.readouterr().out
    arms = len(read_study("study-transfer", {}).arms)
    assert "earlyfusion.pipeline.pretrain skills" in told and told.count("earlyfusion.rl.train") == 2 * arms
    assert not (tmp_path / "x").exists()
    for mistake, said in (
        ("--recipe transfr", "not shipped"),
        ("--report-only --out no/such", "no measurements"),
    ):
        assert cli.main(f"study transfer {mistake}".split()) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_seed_is_measured_once_and_a_stopped_stage_goes_on(tmp_path):
    """The stage itself, with a model that stands for the start and for two runs."""
    sizes = {"problems": 3, "samples": 2, "forms": ["twin", "picture"], "probe": 24}
    config = study(seeds=1, rl_seeds=2, **arm(), measure=sizes, skill="odd_one_out/0")
    write_recipes(config, tmp_path)
    start = model_directory(tmp_path / "home")
    for folder in (start_of(tmp_path, 0), *(run_folder(tmp_path, 0, "a", run) / "model" for run in range(2))):
        shutil.copytree(start, folder)
    (last,) = [one for one in stages(config, tmp_path) if one.partial]
    measure_seed(tmp_path, 0)
    assert last.done
    before = {path: path.stat().st_mtime_ns for path in last.results}
    lost = beside(measured_file(tmp_path, 0, "a", 1), "matched")
    told = lost.read_text()
    lost.unlink()
    measure_seed(tmp_path, 0)
    assert lost.read_text() == told
    first = measured_file(tmp_path, 0, "a", 0)
    assert first.stat().st_mtime_ns == before[first], "what was measured is measured again"
    row = {row["metric"]: row for row in analyse(config, tmp_path)["rows"] if row["registered"]}
    assert row["accuracy"]["value"] == row["p_matched"]["value"] == 0, "the runs are the start"
