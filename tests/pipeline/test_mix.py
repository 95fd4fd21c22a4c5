"""The mixture of a recipe: the arms of Kimi K2.5 Table 1, schedules inside a stage, what a run reports of its
data."""

import pytest
from tiny_run import numbers, tiny_recipe, write_recipe

from earlyfusion.data.loading.loader import Loader, read_skipped
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.report.page import write_report
from earlyfusion.pipeline.stage_data import mix_schedule
from earlyfusion.pipeline.track import read_metrics

ARMS = {"early": (0.0, 0.10), "mid": (0.5, 0.20), "late": (0.8, 0.50)}  # injected at, share from there on
STEPS, BUDGET = 640, 0.10  # the steps of nano
POOL = 4  # micro-batches that wait in the packer: data.lookahead
VISION_RTOL = POOL * 0.50 / (STEPS * BUDGET)  # 3.1 %
"""Of the vision total. The packer's pool at the end may hold any mix: at most all its vision in the arm that
ends at 50 %."""


def arm_loader(arm, tokenizer, seed):
    """The real loader of a shipped arm, with rows of a quarter of the length."""
    words = [("stages.joint.steps", STEPS), ("stages.joint.length", 256), ("stages.joint.tokens", 1024)]
    config = load_config([arm], [*words, ("data.seed", seed), ("data.prefetch", "none")])
    stage = config.stages[0]
    schedule = mix_schedule(stage, {source.name: source.weight for source in config.data.sources})
    return Loader(
        config.data,
        tokenizer,
        config.vision,
        length=stage.length,
        tokens=stage.tokens,
        max_patches=stage.max_patches,
        lanes=stage.lanes,
        schedule=schedule,
    )


@pytest.fixture(scope="module")
def bpe():
    return embedded_tokenizer(2048)


@pytest.mark.slow
def test_early_mid_and_late_spend_the_same_vision_total(bpe, capsys):
    """A whole short run of each arm, counted in the batches themselves."""
    vision, text, media = {}, {}, {}
    for arm, (start, share) in ARMS.items():
        loader, rows = arm_loader(arm, bpe, 0), []
        for _ in range(STEPS):
            (batch,) = loader.next_step()
            rows.append((int(batch.has_image.sum()), batch.num_tokens, batch.media_positions.shape[0]))
        vision[arm], media[arm] = (sum(row[i] for row in rows) for i in (0, 2))
        text[arm] = sum(row[1] for row in rows) - vision[arm]
        first = round(start * STEPS)
        assert sum(row[0] for row in rows[: max(0, first - POOL)]) == 0, "text only before the injection"
        after = rows[first + POOL * bool(first) :]
        assert sum(r[0] for r in after) / sum(r[1] for r in after) == pytest.approx(share, rel=0.05)
        assert vision[arm] / (vision[arm] + text[arm]) == pytest.approx(BUDGET, rel=VISION_RTOL)
    with capsys.disabled():
        print(
            "\n"
            + ", ".join(f"{arm}: {vision[arm]} vision of {vision[arm] + text[arm]} tokens" for arm in ARMS)
        )
    assert max(vision.values()) - min(vision.values()) <= VISION_RTOL * min(vision.values())
    assert max(text.values()) - min(text.values()) <= VISION_RTOL * min(text.values())
    assert max(media.values()) - min(media.values()) <= 2 * VISION_RTOL * min(media.values())


@pytest.fixture(scope="module")
def mixed(tokenizer, tmp_path_factory):
    """The tiny recipe with a bad picture in a folder of its own, a ramp of the vision share, and a skip."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for i in range(30):
        Image.new("RGB", (32, 32), (8 * i, 0, 0)).save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.txt").write_text(f"shade {i}")
    (folder / "07.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    recipe = tiny_recipe(tokenizer)
    recipe["data"]["sources"][0] = {"name": "vqa", "kind": "folder", "path": str(folder), "weight": 0.4}
    recipe["data"]["on_bad_sample"] = "skip"
    recipe["stages"][0] |= {"vision_share": 0.2, "mix": [{"at": 1.0, "vision_share": 0.8, "ramp": "linear"}]}
    recipe["stages"][1] |= {"skip": [[2, 5]]}
    return write_recipe(tmp_path_factory.mktemp("mixed") / "mixed.toml", recipe)


def test_a_run_reports_its_data_as_it_came_and_resumes_with_the_same_numbers(mixed, run, tmp_path):
    assert run(mixed, tmp_path / "whole") == 0
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl", "train")
    short = [r for r in records if r["stage"] == "short"]
    assert short[-1]["data/vision_share"] == pytest.approx(0.5, abs=0.15), "mean of the ramp"
    last = records[-1]
    assert sum(last[f"data/share/{name}"] for name in ("vqa", "manual", "scenes")) == pytest.approx(1)
    assert last["data/fill"] > 0.8 and 0 < last["data/media_share"] < last["data/vision_share"] < 1
    skipped = read_skipped(tmp_path / "whole")
    assert {e["key"].partition(".")[0] for e in skipped} <= {"7", "07"} and {
        e["source"] for e in skipped
    } == {"vqa"}
    assert (
        last["data/skipped"]
        == sum(e["stage"] == 1 for e in skipped)
        == last["data/skipped/corrupt_image"]
        > 0
    )

    assert (last["stage"], last["data/step"]) == ("long", 12 + 3), "twelve steps taken, three left out"
    page = write_report(tmp_path / "whole").read_text()
    share = 100 * last["data/share/scenes"]
    assert (
        "What it read" in page
        and f"<td>scenes</td><td>{share:.1f} %</td>" in page
        and "corrupt_image" in page
    )

    assert run(mixed, tmp_path / "cut", "--steps 13") == 0
    assert run(mixed, tmp_path / "cut", "--resume") == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert read_skipped(tmp_path / "cut") == skipped


def test_a_resume_may_leave_out_a_bad_stretch_and_change_who_prefetches(recipe, run, tmp_path):
    """As after a loss spike: go back to a checkpoint, name the steps of the data to skip."""
    assert run(recipe, tmp_path, "--steps 10") == 0
    words = ("--stages.long.skip", "[[3, 6]]", "--data.prefetch", "thread", "--data.prefetch_steps", "3")
    assert run(recipe, tmp_path, "--resume --steps 13", *words) == 0
    steps = [(r["step"], r["data/step"]) for r in read_metrics(tmp_path / "metrics.jsonl", "train")]
    assert steps[7:] == [(8, 8), (9, 1), (10, 2), (11, 3), (12, 7), (13, 8)]
