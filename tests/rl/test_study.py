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

import pytest
from page_cases import checked
from rl_cases import model_directory
from study_world import ARMS, plant, study

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import compose, to_toml, validate
from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.study import runner as running
from earlyfusion.rl.study.analysis import analyse
from earlyfusion.rl.study.measure import measure_seed
from earlyfusion.rl.study.plan import (
    Stage,
    beside,
    measured_file,
    read_study,
    run_folder,
    stages,
    write_recipes,
)
from earlyfusion.rl.study.report import headline, write_report
from earlyfusion.rl.study.runner import Runner
from earlyfusion.rl.study.transfer import run_study

TWIN, PICTURE = "counting/0/twin", "counting/0/picture"
DRAWS = 500


def analysed(out, effects, config=None, **more):
    """What is found where these effects are planted."""
    config = config or study()
    plant(config, out, effects, **more)
    return analyse(config, out, DRAWS)


def pick(results, arm, label, metric):
    """A row of the analysis."""
    wanted = (arm, label, metric)
    return next(row for row in results["rows"] if (row["arm"], row["label"], row["metric"]) == wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_gain_is_a_gain_above_its_controls_and_nulls_are_not(tmp_path, seed):
    found = analysed(
        tmp_path, {("vision", TWIN): 0.2, ("text", TWIN): 0.3, ("vision", PICTURE): 0.3}, seed=seed
    )
    assert found["verdicts"]["vision"] == "gain, above random, sft"
    assert found["verdicts"]["text"] == "gain"
    assert found["verdicts"]["random"] == found["verdicts"]["sft"] == "no difference shown"
    row = pick(found, "vision", TWIN, "accuracy")
    assert row["low"] < 0.2 < row["high"] and row["registered"]
    below = next(d for d in found["differences"] if (d["arm"], d["control"]) == ("vision", "text"))
    assert below["value"] == pytest.approx(-0.1, abs=0.05) and below["word"] == "below"
    assert "A gain in words that its controls do not show: vision." in headline(found)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_effect_anywhere_is_never_called_a_gain(tmp_path, seed):
    found = analysed(tmp_path, {}, seed=seed)
    assert set(found["verdicts"].values()) == {"no difference shown"}
    assert headline(found) == "No difference in words could be shown: vision."


def test_a_gain_that_random_reward_shows_as_well_is_not_the_arms_own(tmp_path):
    found = analysed(tmp_path, {("vision", TWIN): 0.2, ("random", TWIN): 0.2})
    assert found["verdicts"]["vision"] == "gain, not told apart from random"
    assert "its controls may explain: vision" in headline(found)


def test_a_loss_is_called_one(tmp_path):
    """What the scratch run of the reference saw: pictures up, words down."""
    found = analysed(tmp_path, {("vision", TWIN): -0.15, ("vision", PICTURE): 0.4})
    assert found["verdicts"]["vision"] == "loss" and "A loss in words: vision." in headline(found)
    assert pick(found, "vision", PICTURE, "accuracy")["value"] > 0.3


def test_sharpening_gains_p_but_neither_greedy_accuracy_nor_p_at_equal_entropy(tmp_path):
    found = analysed(tmp_path, {}, sharpen="vision")
    assert pick(found, "vision", TWIN, "p_target")["word"] == "gain"
    assert pick(found, "vision", TWIN, "p_matched")["value"] == 0
    assert pick(found, "vision", TWIN, "p_matched")["word"] == "no difference shown"
    assert found["verdicts"]["vision"] == "no difference shown"


def test_holm_covers_every_arm_and_metric_of_the_text_side(tmp_path):
    found = analysed(tmp_path, {("vision", TWIN): 0.1})
    family = [row for row in found["rows"] if row["registered"]]
    assert found["family"] == len(family) == 4 * 4
    assert {row["label"] for row in family} == {TWIN}
    assert {row["metric"] for row in family} == {"accuracy", "p_target", "p_matched", "pass@4"}
    assert all(row["p_holm"] >= row["p"] for row in family)
    first = min(family, key=lambda row: row["p"])
    assert first["p_holm"] == pytest.approx(min(1.0, 16 * first["p"]))


def test_missing_runs_leave_the_rest_to_be_said(tmp_path):
    found = analysed(tmp_path, {("vision", TWIN): 0.25}, missing="vision")
    assert len(pick(found, "vision", TWIN, "accuracy")["per_seed"]) == 4
    assert len(pick(found, "text", TWIN, "accuracy")["per_seed"]) == 5
    assert found["verdicts"]["vision"].startswith("gain")


def test_an_arm_that_thinks_is_judged_after_its_thought(tmp_path):
    arms = [arm.model_dump() for arm in study().arms]
    arms.append({"name": "thought", "about": "t", "tasks": ["{skill}/picture/thought"]})
    config = study(arms=arms)
    after = TWIN + "/thought"
    found = analysed(tmp_path, {("thought", after): 0.25}, config)
    assert found["verdicts"]["thought"].startswith("gain, above")
    assert pick(found, "thought", after, "accuracy")["registered"]
    assert not pick(found, "thought", TWIN, "accuracy")["registered"]
    d = next(d for d in found["differences"] if (d["arm"], d["control"]) == ("thought", "random"))
    assert d["value"] == pytest.approx(d["arm_gain"] - d["control_gain"])


def test_a_start_that_knows_everything_is_pointed_out(tmp_path):
    config = study(seeds=2, rl_seeds=1)
    found = analysed(tmp_path, {}, config)
    assert "no room" not in headline(found)
    found["start"][TWIN]["accuracy"]["mean"] = 0.99
    assert "no room to see a gain" in headline(found)


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    config = study(seeds=2, rl_seeds=2)
    plant(config, tmp_path, {("vision", TWIN): 0.2})
    write_recipes(config, tmp_path)
    lines = [{"event": "train", "step": s, "score": 0.1 * s, "reward": 0.1 * s} for s in (1, 2)]
    folder = tmp_path / "runs" / "p0" / "vision" / "r0"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    note = {"event": "done", "stage": "run/p0/vision/r0", "seconds": 1234.0}
    (tmp_path / "study.jsonl").write_text(json.dumps(note) + "\n{torn")
    file = beside(measured_file(tmp_path, 0), "probe")
    file.write_text(json.dumps({"picture": {"twin": [0.5, 0.5]}}))
    page = checked(write_report(config, tmp_path, analyse(config, tmp_path, DRAWS)))
    for words in ("registered", "fitted on picture, read off twin", "1234", "Score of the task"):
        assert words.lower() in page.lower(), words


# ---- the plan
# -------------------------------------------------------------------------------------------------------


def test_the_shipped_study_names_every_arm_and_its_recipes_are_valid(tmp_path):
    config = read_study("study-transfer", {})
    names = {arm.name for arm in config.arms}
    assert names >= {"replay", "replay_only", "thought", "thought_sft", "joint", *ARMS, "unrelated"}
    assert config.seeds >= 5 and config.rl_seeds >= 3
    write_recipes(config, tmp_path)
    assert len(stages(config, tmp_path)) == 5 * (1 + 3 * len(names) + 1)
    read = {}
    for arm in names:
        file = tmp_path / "runs" / "p0" / arm / "r0" / "arm.toml"
        read[arm] = validate(compose([file]), RLConfig)
    assert len({(c.train.updates, c.rollout.prompts, c.rollout.group_size) for c in read.values()}) == 1
    assert read["random"].reward.name == "random" and read["random"].tasks == read["vision"].tasks
    assert read["sft"].ptx.only and read["replay_only"].ptx.only and read["replay"].ptx.coef > 0
    assert read["text"].tasks[0].form == "twin" and read["thought"].tasks[0].thought
    assert len(read["joint"].tasks) == 2 and read["thought_sft"].ptx.only
    assert read["thought_sft"].data.sources[0].options["thought"] == 1.0
    assert read["unrelated"].tasks[0].name != read["vision"].tasks[0].name
    assert read["unrelated"].tasks[0].power == 8.0 and read["vision"].tasks[0].power == 1.0


def test_runs_of_one_seed_share_it_so_that_arms_see_the_same_prompts(tmp_path):
    made = {stage.name: stage.command for stage in stages(study(), tmp_path)}
    seed = lambda name: next(word for word in made[name] if word.startswith("--run.seed"))
    assert (
        seed("run/p1/vision/r2")
        == seed("run/p1/random/r2")
        != seed("run/p1/vision/r1")
        != seed("run/p0/vision/r1")
    )


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
        (arm(replay=True), "replay"),
        (arm(config={"rollout": {"promts": 1}}), "promts"),
    ],
)
def test_mistakes_in_a_study_are_named(change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        study(**change)


def test_a_folder_of_another_study_is_refused_but_more_seeds_and_arms_are_welcome(tmp_path):
    write_recipes(study(), tmp_path)
    write_recipes(study(seeds=7), tmp_path)
    arms = [arm.model_dump() for arm in study().arms]
    write_recipes(study(arms=[*arms, {"name": "more", "about": "", "tasks": ["{skill}/twin"]}]), tmp_path)
    with pytest.raises(UserError, match="other skill"):
        write_recipes(study(skill="counting/1"), tmp_path)
    arms[0]["tasks"] = ["{skill}/rendered"]
    with pytest.raises(UserError, match=r"other arms\.vision"):
        write_recipes(study(arms=arms), tmp_path)


# ---- the runner
# -----------------------------------------------------------------------------------------------------


def stage(tmp_path, name, script, after=(), **options) -> Stage:
    """A stage that runs Python lines; `done()` writes its result."""
    folder = tmp_path / name
    result = folder / "result"
    head = (
        f"import sys, time; from pathlib import Path; done = lambda: Path({str(result)!r}).write_text('x')\n"
    )
    return Stage(name, (sys.executable, "-c", head + script), (result,), folder, tuple(after), **options)


def events(log) -> list[tuple[str, str]]:
    return [(e["event"], e.get("stage", "")) for e in map(json.loads, log.read_text().splitlines())]


def test_stages_run_in_order_side_by_side_and_once(tmp_path):
    made = [stage(tmp_path, "a", "time.sleep(0.2); done()"), stage(tmp_path, "b", "time.sleep(0.2); done()")]
    made.append(stage(tmp_path, "c", "done()", ["a", "b"]))
    log = tmp_path / "log.jsonl"
    assert Runner(made, log, jobs=2).run() == 0
    told = events(log)
    assert set(told[:2]) == {("start", "a"), ("start", "b")}
    assert told[-2:] == [("start", "c"), ("done", "c")]
    assert Runner(made, log, jobs=2).run() == 0 and events(log) == told
    (tmp_path / "b" / "result").unlink()
    assert Runner(made, log, jobs=2).run() == 0
    assert events(log) == [*told, ("start", "b"), ("done", "b")]


def test_a_failing_stage_stops_only_what_needs_it(tmp_path):
    made = [
        stage(tmp_path, "bad", "print('went wrong'); sys.exit(3)"),
        stage(tmp_path, "good", "done()"),
        stage(tmp_path, "child", "done()", ["bad"]),
        stage(tmp_path, "tables", "done()", ["bad", "good"], partial=True),
    ]
    assert Runner(made, tmp_path / "log.jsonl").run() == 1
    told = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    (failed,) = [event for event in told if event["event"] == "failed"]
    assert (failed["stage"], failed["code"], failed["last"]) == ("bad", 3, "went wrong")
    assert made[1].done and made[3].done and not made[2].done


def test_a_killed_attempt_is_cleared_and_a_saved_one_resumed(tmp_path):
    script = "done() if '--resume' in sys.argv else sys.exit(1)"
    fresh = stage(tmp_path, "fresh", "done()")
    fresh.folder.mkdir()
    (fresh.folder / "half.bin").write_text("x")
    (fresh.folder / "arm.toml").write_text("x")
    saved = stage(tmp_path, "saved", script)
    (saved.folder / "checkpoints" / "step-1").mkdir(parents=True)
    (saved.folder / "checkpoints" / "step-1" / "COMPLETE").write_text("")
    assert Runner([fresh, saved], tmp_path / "log.jsonl").run() == 0
    assert not (fresh.folder / "half.bin").exists() and (fresh.folder / "arm.toml").exists()
    assert not (saved.folder / "checkpoints").exists()  # the model is kept, the checkpoints are not


def test_a_signal_lets_stages_save_and_the_next_start_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "GRACE_S", 5.0)
    polite = (
        f"import signal\ndef leave(*_): Path({str(tmp_path / 'saved')!r}).write_text('x');"
        " sys.exit(75)\nsignal.signal(signal.SIGTERM, leave);"
        f" Path({str(tmp_path / 'up')!r}).write_text('x'); time.sleep(30); done()"
    )
    made = [stage(tmp_path, "long", polite), stage(tmp_path, "next", "done()", ["long"])]

    def interrupt():
        until = time.monotonic() + 20
        while not (tmp_path / "up").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    assert Runner(made, tmp_path / "log.jsonl").run() == EXIT_REQUEUE
    thread.join()
    assert (tmp_path / "saved").exists() and time.monotonic() - begun < 25
    assert ("stopped", "long") in events(tmp_path / "log.jsonl") and not made[1].done
    made[0] = stage(tmp_path, "long", "done()")
    assert Runner(made, tmp_path / "log.jsonl").run() == 0


# ---- the verb


def test_the_verb_runs_the_stages_and_leaves_a_page(tmp_path, capsys):
    config = study(seeds=2, rl_seeds=1)
    recipe, out = tmp_path / "mine.toml", tmp_path / "out"
    recipe.write_text(to_toml(config.model_dump(mode="json")))
    plant(config, tmp_path / "planted", {("vision", TWIN): 0.3})

    def fake(made):
        """Training makes empty models; the measuring stages copy the planted answers of all."""
        copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"
        planted = (copy, str(tmp_path / "planted" / "measured"), str(out / "measured"))
        touch = "import sys, pathlib as l; p = l.Path(sys.argv[1]); p.parent.mkdir(parents=True); p.touch()"
        prepared = []
        for s in made:
            words = planted if s.partial else (touch, str(s.results[0]))
            prepared.append(replace(s, command=(sys.executable, "-c", *words)))
        return prepared

    assert run_study(config, out, prepare=fake) == 0
    told = json.loads((out / "study.json").read_text())
    assert told["config"]["skill"] == "counting/0" and set(told["verdicts"]) == set(ARMS)
    assert "greedy accuracy in words" in capsys.readouterr().out
    with pytest.raises(UserError, match="--resume"):
        run_study(config, out, prepare=fake)
    assert run_study(config, out, resume=True, prepare=fake) == 0
    (out / "report.html").unlink()
    words = f"study transfer --recipe {recipe} --out {out} --jobs 2 --report-only"
    assert cli.main(words.split()) == 0 and (out / "report.html").is_file()


@pytest.mark.parametrize(
    "argv,said",
    [
        (["transfr"], "did you mean 'transfer'"),
        (["transfer", "--recipe", "study-transfr"], "did you mean 'study-transfer'"),
        (["transfer", "--recipe", "no/such.toml"], "cannot be read"),
        (["transfer", "--seeds", "0"], "seeds"),
        (["transfer", "--report-only", "--out", "no/such"], "no measurements"),
    ],
)
def test_mistakes_of_the_user_are_one_line(argv, said, capsys):
    assert cli.main(["study", *argv]) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.strip().splitlines()) == 1


def test_dry_run_prints_every_stage(capsys, tmp_path):
    words = f"study transfer --dry-run --seeds 2 --rl-seeds 1 --out {tmp_path / 'x'}"
    assert cli.main(words.split()) == 0
    told = capsys.readouterr().out
    arms = len(read_study("study-transfer", {}).arms)
    assert "earlyfusion.pipeline.pretrain skills" in told and told.count("earlyfusion.rl.train") == 2 * arms
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_seed_is_measured_once_and_a_stopped_stage_goes_on(tmp_path):
    """The stage itself, with a model that stands for the start and for two runs."""
    start = model_directory(tmp_path / "home")
    sizes = {"problems": 3, "samples": 2, "forms": ["twin", "picture"], "unrelated": False, "probe": 24}
    pretrain = {"recipes": ["skills"], "models": [str(start)]}
    arms = arm()["arms"]
    config = study(seeds=1, rl_seeds=2, pretrain=pretrain, arms=arms, measure=sizes, skill="odd_one_out/0")
    write_recipes(config, tmp_path)
    for run in range(2):
        shutil.copytree(start, run_folder(tmp_path, 0, "a", run) / "model")
    (stage,) = [one for one in stages(config, tmp_path) if one.partial]
    measure_seed(tmp_path, 0)
    assert stage.done
    before = {path: path.stat().st_mtime_ns for path in stage.results}
    lost = beside(measured_file(tmp_path, 0, "a", 1), "matched")
    told = lost.read_text()
    lost.unlink()
    measure_seed(tmp_path, 0)
    assert lost.read_text() == told
    first = measured_file(tmp_path, 0, "a", 0)
    assert first.stat().st_mtime_ns == before[first], "what was measured is measured again"
    row = {row["metric"]: row for row in analyse(config, tmp_path, DRAWS)["rows"] if row["registered"]}
    assert row["accuracy"]["value"] == row["p_matched"]["value"] == 0, "the runs are the start"
