"""The transfer study from planted measurements to its claims; its plan, its runner, its page."""

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
from page_cases import checked
from rich.console import Console
from study_world import plant, study

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.study import runner as running
from earlyfusion.rl.study.runner import Runner
from earlyfusion.rl.study.transfer.analysis import analyse
from earlyfusion.rl.study.transfer.cmd import run_study
from earlyfusion.rl.study.transfer.plan import Stage, measured_file, read_study, stages, write_recipes
from earlyfusion.rl.study.transfer.report import headline, pick, write_report

TWIN, PICTURE = "counting/0/twin", "counting/0/picture"
DRAWS = 500


def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_gain_is_a_gain_above_its_controls_and_nulls_are_not(tmp_path, seed):
    config = study()
    plant(config, tmp_path, {("vision", TWIN): 0.2, ("text", TWIN): 0.3, ("vision", PICTURE): 0.3}, seed=seed)
    found = analyse(config, tmp_path, DRAWS)
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
    config = study()
    plant(config, tmp_path, {}, seed=seed)
    found = analyse(config, tmp_path, DRAWS)
    assert set(found["verdicts"].values()) == {"no difference shown"}
    assert headline(found) == "No difference in words could be shown: vision."


def test_a_gain_that_random_reward_shows_as_well_is_not_the_arms_own(tmp_path):
    config = study()
    plant(config, tmp_path, {("vision", TWIN): 0.2, ("random", TWIN): 0.2})
    found = analyse(config, tmp_path, DRAWS)
    assert found["verdicts"]["vision"] == "gain, not told apart from random"
    assert "its controls may explain: vision" in headline(found)


def test_a_loss_is_called_one(tmp_path):
    """What the scratch run of the reference saw: pictures up, words down."""
    config = study()
    plant(config, tmp_path, {("vision", TWIN): -0.15, ("vision", PICTURE): 0.4})
    found = analyse(config, tmp_path, DRAWS)
    assert found["verdicts"]["vision"] == "loss" and "A loss in words: vision." in headline(found)
    assert pick(found, "vision", PICTURE, "accuracy")["value"] > 0.3


def test_sharpening_gains_p_but_neither_greedy_accuracy_nor_p_at_equal_entropy(tmp_path):
    config = study()
    plant(config, tmp_path, {}, sharpen="vision")
    found = analyse(config, tmp_path, DRAWS)
    assert pick(found, "vision", TWIN, "p_target")["word"] == "gain"
    assert pick(found, "vision", TWIN, "p_matched")["value"] == 0
    assert pick(found, "vision", TWIN, "p_matched")["word"] == "no difference shown"
    assert found["verdicts"]["vision"] == "no difference shown"


def test_holm_covers_every_arm_and_metric_of_the_text_side(tmp_path):
    config = study()
    plant(config, tmp_path, {("vision", TWIN): 0.1})
    found = analyse(config, tmp_path, DRAWS)
    family = [row for row in found["rows"] if row["registered"]]
    assert found["family"] == len(family) == 4 * 4
    assert {row["label"] for row in family} == {TWIN}
    assert {row["metric"] for row in family} == {"accuracy", "p_target", "p_matched", "pass@4"}
    assert all(row["p_holm"] >= row["p"] for row in family)
    first = min(family, key=lambda row: row["p"])
    assert first["p_holm"] == pytest.approx(min(1.0, 16 * first["p"]))


def test_missing_runs_leave_the_rest_to_be_said(tmp_path):
    config = study()
    plant(config, tmp_path, {("vision", TWIN): 0.25}, missing="vision")
    found = analyse(config, tmp_path, DRAWS)
    assert len(pick(found, "vision", TWIN, "accuracy")["per_seed"]) == 4
    assert len(pick(found, "text", TWIN, "accuracy")["per_seed"]) == 5
    assert found["verdicts"]["vision"].startswith("gain")


def test_an_arm_that_thinks_is_judged_after_its_thought(tmp_path):
    arms = [arm.model_dump() for arm in study().arms]
    arms.append({"name": "thought", "about": "t", "tasks": ["{skill}/picture/thought"]})
    config = study(arms=arms)
    after = TWIN + "/thought"
    plant(config, tmp_path, {("thought", after): 0.25})
    found = analyse(config, tmp_path, DRAWS)
    assert found["verdicts"]["thought"].startswith("gain, above")
    assert pick(found, "thought", after, "accuracy")["registered"]
    assert not pick(found, "thought", TWIN, "accuracy")["registered"]
    d = next(d for d in found["differences"] if (d["arm"], d["control"]) == ("thought", "random"))
    assert d["value"] == pytest.approx(d["arm_gain"] - d["control_gain"])


def test_a_start_that_knows_everything_is_pointed_out(tmp_path):
    config = study(seeds=2, rl_seeds=1)
    plant(config, tmp_path, {})
    found = analyse(config, tmp_path, DRAWS)
    assert "no room" not in headline(found)
    found["start"][TWIN]["accuracy"]["mean"] = 0.99
    assert "no room to see a gain" in headline(found)


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    config = study(seeds=2, rl_seeds=2)
    plant(config, tmp_path, {("vision", TWIN): 0.2})
    write_recipes(config, tmp_path)
    folder = tmp_path / "runs" / "p0" / "vision" / "r0"
    (folder / "rollouts").mkdir(parents=True)
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save(folder / "rollouts" / "a.png")
    answers = [{"text": "<b>9</b>", "score": 1.0}, {"text": "2", "score": 0.0}]
    group = {"update": 1, "prompt": "how many?", "target": "3", "image": "rollouts/a.png", "answers": answers}
    (folder / "rollouts.jsonl").write_text(
        json.dumps(group) + "\n" + json.dumps({**group, "image": "../../x.png"}) + "\n{torn"
    )
    lines = [
        {"event": "train", "step": s, "score": 0.1 * s, "reward": 0.1 * s, "answers": 64, "step_s": 0.5}
        for s in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    probed = {"start": {"picture>twin": [0.5, 0.5]}, "arms": {}}
    page = checked(write_report(config, tmp_path, analyse(config, tmp_path, DRAWS) | {"probe": probed}))
    assert page.count("data:image/png;base64,") == 1 and "&lt;b&gt;9" in page and "<b>9</b>" not in page
    assert "could not be drawn" not in page and "fitted on picture, read off twin" in page
    for said in (
        "Registered before the runs",
        "84.7",
        "+1.7",
        "+2.1",
        "+2.2",
        "Rollouts",
        "Curves",
        "Against the controls",
    ):
        assert said in page, said


# ---- the plan
# -------------------------------------------------------------------------------------------------------


def test_the_shipped_study_names_every_arm_and_its_recipes_are_valid(tmp_path):
    config = read_study("study-transfer")
    names = {arm.name for arm in config.arms}
    assert names >= {
        "vision",
        "unrelated",
        "random",
        "text",
        "sft",
        "replay",
        "replay_only",
        "thought",
        "joint",
    }
    assert config.seeds >= 5 and config.rl_seeds >= 3
    write_recipes(config, tmp_path)
    made = stages(config, tmp_path)
    assert len(made) == 5 * (1 + 3 * len(names) + 1)
    read = {
        arm.name: validate(compose([tmp_path / "runs" / "p0" / arm.name / "r0" / "arm.toml"]), RLConfig)
        for arm in config.arms
    }
    assert len({(c.train.updates, c.rollout.prompts, c.rollout.group_size) for c in read.values()}) == 1
    assert read["random"].reward.name == "random" and read["random"].tasks == read["vision"].tasks
    assert read["sft"].ptx.only and read["replay_only"].ptx.only and read["replay"].ptx.coef > 0
    assert (
        read["text"].tasks[0].form == "twin"
        and read["thought"].tasks[0].thought
        and len(read["joint"].tasks) == 2
    )
    assert read["thought_sft"].ptx.only and read["thought_sft"].data.sources[0].options["thought"] == 1.0
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


@pytest.mark.parametrize(
    "change,said",
    [
        ({"skill": "countin/0"}, "did you mean 'counting'"),
        ({"unrelated": "counting/0"}, "two different skills"),
        ({"primary": "rendered", "measure": {"forms": ["twin"]}}, "primary"),
        ({"arms": [{"name": "none", "about": "", "tasks": ["{skill}/twin"]}]}, "name of its own"),
        ({"arms": [{"name": "a", "about": "", "tasks": ["{skill}/twin"], "against": ["b"]}]}, "against 'b'"),
        ({"arms": [{"name": "a", "about": "", "tasks": ["{skill}/twin"], "replay": True}]}, "replay"),
        (
            {
                "arms": [
                    {
                        "name": "a",
                        "about": "",
                        "tasks": ["{skill}/twin"],
                        "config": {"rollout": {"promts": 1}},
                    }
                ]
            },
            "promts",
        ),
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
    head = (
        "import sys, time; from pathlib import Path; done = lambda:"
        f" Path({str(folder / 'result')!r}).write_text('x')\n"
    )
    return Stage(
        name, (sys.executable, "-c", head + script), (folder / "result",), folder, tuple(after), **options
    )


def events(log) -> list[tuple[str, str]]:
    return [(e["event"], e.get("stage", "")) for e in map(json.loads, log.read_text().splitlines())]


def test_stages_run_in_order_side_by_side_and_once(tmp_path):
    made = [stage(tmp_path, "a", "time.sleep(0.2); done()"), stage(tmp_path, "b", "time.sleep(0.2); done()")]
    made.append(stage(tmp_path, "c", "done()", ["a", "b"]))
    log = tmp_path / "log.jsonl"
    assert Runner(made, log, jobs=2, console=quiet()).run() == 0
    told = [e for e in events(log) if e[0] in ("start", "done")]
    assert {told[0], told[1]} == {("start", "a"), ("start", "b")} and told[-2:] == [
        ("start", "c"),
        ("done", "c"),
    ]
    before = log.read_text()
    assert Runner(made, log, jobs=2, console=quiet()).run() == 0
    assert "start" not in {e for e, _ in events(log)[len(before.splitlines()) :]}
    (tmp_path / "b" / "result").unlink()
    assert Runner(made, log, jobs=2, console=quiet()).run() == 0
    assert events(log)[-3:-1] == [("start", "b"), ("done", "b")]


def test_a_failing_stage_stops_only_what_needs_it(tmp_path):
    made = [
        stage(tmp_path, "bad", "print('went wrong'); sys.exit(3)"),
        stage(tmp_path, "good", "done()"),
        stage(tmp_path, "child", "done()", ["bad"]),
        stage(tmp_path, "tables", "done()", ["bad", "good"], partial=True),
    ]
    assert Runner(made, tmp_path / "log.jsonl", console=quiet()).run() == 1
    failed = next(
        e
        for e in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        if e["event"] == "failed"
    )
    assert (failed["stage"], failed["code"], failed["last"]) == ("bad", 3, "went wrong")
    assert made[1].done and made[3].done and not made[2].done


def test_a_killed_attempt_is_cleared_and_a_saved_one_resumed(tmp_path):
    script = "done() if '--resume' in sys.argv else sys.exit(1)"
    fresh = stage(tmp_path, "fresh", "done()", resumable=True)
    fresh.folder.mkdir()
    (fresh.folder / "half.bin").write_text("x")
    (fresh.folder / "arm.toml").write_text("x")
    saved = stage(tmp_path, "saved", script, resumable=True)
    (saved.folder / "checkpoints" / "step-1").mkdir(parents=True)
    (saved.folder / "checkpoints" / "step-1" / "COMPLETE").write_text("")
    assert Runner([fresh, saved], tmp_path / "log.jsonl", console=quiet()).run() == 0
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
    assert Runner(made, tmp_path / "log.jsonl", console=quiet()).run() == EXIT_REQUEUE
    thread.join()
    assert (tmp_path / "saved").exists() and time.monotonic() - begun < 25
    assert ("stopped", "long") in events(tmp_path / "log.jsonl") and not made[1].done
    made[0] = stage(tmp_path, "long", "done()")
    assert Runner(made, tmp_path / "log.jsonl", console=quiet()).run() == 0


# ---- the verb
# -------------------------------------------------------------------------------------------------------

FAKE = """
import sys
from pathlib import Path
for path in sys.argv[1:]:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
"""


def test_the_verb_runs_the_stages_and_leaves_a_page(tmp_path, capsys):
    from earlyfusion.pipeline.config.compose import to_toml

    config = study(seeds=2, rl_seeds=1)
    recipe, out = tmp_path / "mine.toml", tmp_path / "out"
    recipe.write_text(to_toml(config.model_dump(mode="json")))

    def fake(made):
        """Training makes empty models; the first measuring stage plants the answers of all."""
        plant(config, tmp_path / "planted", {("vision", TWIN): 0.3})
        script = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"
        copy = (sys.executable, "-c", script, str(tmp_path / "planted" / "measured"), str(out / "measured"))
        touch = (sys.executable, "-c", FAKE)
        return [replace(s, command=copy if s.partial else (*touch, *map(str, s.results))) for s in made]

    assert run_study(config, out, prepare=fake) == 0
    told = json.loads((out / "study.json").read_text())
    assert told["config"]["skill"] == "counting/0" and set(told["verdicts"]) == {
        "vision",
        "random",
        "text",
        "sft",
    }
    assert (out / "report.html").read_text().startswith("<!doctype html>")
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
        (["transfer", "--arms", "visio"], "did you mean 'vision'"),
        (["transfer", "--seeds", "0"], "seeds"),
        (["transfer", "--report-only", "--out", "no/such"], "no measurements"),
    ],
)
def test_mistakes_of_the_user_are_one_line(argv, said, capsys):
    assert cli.main(["study", *argv]) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.strip().splitlines()) == 1


def test_dry_run_prints_every_stage(capsys, tmp_path):
    assert (
        cli.main(
            [
                "study",
                "transfer",
                "--dry-run",
                "--seeds",
                "2",
                "--rl-seeds",
                "1",
                "--out",
                str(tmp_path / "x"),
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "earlyfusion.pipeline.pretrain skills" in told and told.count("earlyfusion.rl.train") == 2 * len(
        read_study("study-transfer").arms
    )
    assert not (tmp_path / "x").exists()


def test_measured_files_lie_where_the_plan_says(tmp_path):
    plant(study(seeds=1, rl_seeds=1), tmp_path, {})
    assert measured_file(tmp_path, 0).is_file() and measured_file(tmp_path, 0, "vision", 0).is_file()
