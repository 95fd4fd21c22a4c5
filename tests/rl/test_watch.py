"""`earlyfusion watch`: every line once, whatever happens to the file; nothing outside the run; and the page
in a browser."""

import json
import os

import pytest
from browser_cases import browser, check_looks, open_page, served  # noqa: F401
from synthetic_run import ENTRIES, synthetic_run

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl import watch
from earlyfusion.rl.rollouts.log import read_rollouts

httpx = pytest.importorskip("httpx")
expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    made = [synthetic_run(folder / name, updates) for name, updates in (("a", 200), ("b", 100))]
    # A file that only says that it is a picture, a way out, and what is no picture.
    (made[0] / "secret.png").write_text("seen")
    (folder / "outside.png").write_text("seen")
    os.symlink(folder / "outside.png", made[0] / "link.png")
    (made[0] / "samples").mkdir()
    sample = {
        "image": read_rollouts(made[0])[0]["image"],
        "prompt": "what <b>?",
        "answer": "<i>red</i>",
        "reference": "red",
    }
    for step in (100, 200):
        (made[0] / "samples" / f"{step}.json").write_text(json.dumps({"step": step, "samples": [sample]}))
    return made


@pytest.fixture(scope="module")
def url(runs):
    with served(watch.create_app(runs)) as address:
        yield address


def follow(path, after=""):
    """(all records until there are no more, what to give next, whether it began anew)."""
    found, fresh, more = [], False, True
    while more:
        lines, about = watch.news(path, after)
        found += [record for _, record in lines]
        after, more, fresh = about["after"], about["more"], fresh or about["fresh"]
    return found, after, fresh


@pytest.mark.parametrize("slice_bytes", [1, 1000, 1 << 20])
def test_a_growing_file_is_read_once_and_a_torn_line_when_it_is_whole(
    runs, tmp_path, monkeypatch, slice_bytes
):
    monkeypatch.setattr(watch, "SLICE", slice_bytes)
    whole = (runs[0] / "metrics.jsonl").read_bytes()
    path, found, after = tmp_path / "metrics.jsonl", [], ""
    assert follow(path) == ([], "", True)
    path.write_bytes(b"")
    for end in (0, 700, 701, 5000, len(whole) // 2, len(whole)):
        with path.open("ab") as file:
            file.write(whole[path.stat().st_size : end])
        new, after, _ = follow(path, after)
        found += new
    assert found == read_metrics(path) and len(found) > 200
    assert follow(path, after) == ([], after, False)


def test_a_run_that_is_begun_anew_or_goes_back_is_read_from_its_start(runs, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    _, after, _ = follow(path)

    # A resume: a new file with the same beginning, which soon is as long again.
    (tmp_path / "new").write_text("".join(lines[:50] + lines[:150]))
    os.replace(tmp_path / "new", path)
    found, again, fresh = follow(path, after)
    assert fresh and len(found) == 200
    # The same file from another first line on; and one that was cut.
    for text in ("".join(lines[1:]), "".join(lines[1:9])):
        path.write_text(text)
        found, again, fresh = follow(path, again)
        assert fresh and found == read_metrics(path)
    for odd in ("x", "-", "--7", "1-2-99999999999", "٣"):
        assert follow(path, odd)[0] == read_metrics(path)


def test_the_endpoints_say_what_the_files_hold(runs, url):
    told = httpx.get(url + "/runs").json()
    assert [run["name"] for run in told] == [f"skills <1> ({run})" for run in runs]
    metrics = httpx.get(url + "/runs/0/metrics").json()["records"]
    train = [record["numbers"] for record in metrics if record["event"] == "train"]
    assert [one["reward"] for one in train] == [
        one["reward"] for one in read_metrics(runs[0] / "metrics.jsonl", "train")
    ]
    (first, *_), expected = (
        [one for one in metrics if one["event"] == "eval"],
        read_metrics(runs[0] / "metrics.jsonl", "eval"),
    )
    assert first["numbers"]["heldout/score/counting/0/picture"] == expected[0]["counting/0/picture"]["score"]

    logged = read_rollouts(runs[0])
    places = httpx.get(url + "/runs/0/rollouts").json()["groups"]
    for record, place in zip(logged, places, strict=True):
        group = httpx.get(f"{url}/runs/0/rollouts/{place['at']}").json()
        assert (group["key"], group["image"]) == (record["key"], record["image"])
        assert [one["text"] for one in group["answers"]] == [one["text"] for one in record["answers"]]
        if record["image"]:
            assert (
                httpx.get(f"{url}/runs/0/files/{record['image']}").content
                == (runs[0] / record["image"]).read_bytes()
            )
    latest, earlier = (httpx.get(url + "/runs/0/samples" + asked).json() for asked in ("", "?step=100"))
    assert (latest["step"], earlier["step"], latest["steps"]) == (200, 100, [100, 200])


def test_nothing_outside_of_a_run_and_nothing_but_pictures_is_given(url):
    assert httpx.get(url + "/runs/0/files/secret.png").status_code == 200
    out = "/runs/0/files/"
    wrong = [
        "../b/secret.png",
        "%2e%2e/outside.png",
        "..%2foutside.png",
        "%2e%2e%2foutside.png",
        "/etc/passwd",
        "link.png",
    ]
    wrong += [
        "metrics.jsonl",
        "recipe.toml",
        "",
        ".",
        "%00.png",
        "%ff.png",
        "x" * 5000 + ".png",
    ]
    for path in [out + one for one in wrong] + [
        "/runs/2/metrics",
        "/runs/-1/metrics",
        "/runs/0/rollouts/1",
        "/x",
    ]:
        # As it stands: a client would put the dots away.
        answer = httpx.get(httpx.URL(url).copy_with(raw_path=path.encode()))
        assert answer.status_code == 404 and "seen" not in answer.text, path
    assert httpx.get(url + "/runs", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.post(url + "/runs", json={}).status_code in (405, 413)


def test_files_of_another_hand_are_strict_json(tmp_path):
    run = synthetic_run(tmp_path / "run", 20, ENTRIES[:1])
    odd = [
        '{"step": 1, "event": "train", "loss": NaN, "lr": 1e999, "a": 1}',
        '{"step": 2, "message": "half \\ud83d"}',
    ]
    odd += ['{"step": "x"}', "[" * 100_000, '{"update": 3, "answers": 5}', "\udcff"]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (run / name).write_bytes("\n".join([*odd, ""]).encode("utf-8", "surrogateescape"))
    with served(watch.create_app([run])) as url:
        first, second = httpx.get(url + "/runs/0/metrics").json()["records"]
        assert first["numbers"] == {"step": 1, "a": 1} and second["message"].startswith("half")
        (group,) = httpx.get(url + "/runs/0/rollouts").json()["groups"]
        assert httpx.get(f"{url}/runs/0/rollouts/{group['at']}").status_code == 404


def test_a_folder_that_is_no_run_names_those_that_are(runs, tmp_path, capsys):
    with pytest.raises(UserError, match=r"did you mean .*/a .*/b\?"):
        watch.create_app([runs[0].parent])
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "give the --out folder of a run" in capsys.readouterr().err


def test_the_page_follows_and_compares_runs(tmp_path, open_page):  # noqa: F811
    made = [synthetic_run(tmp_path / name, updates) for name, updates in (("a", 40), ("b", 20))]
    with served(watch.create_app(made)) as url:
        page = open_page(url)
        chart = page.locator("figure", has=page.get_by_text("reward", exact=True))
        chart.locator("polyline").nth(1).wait_for(state="attached")
        assert chart.locator("polyline").count() == 2
        last = [read_metrics(run / "metrics.jsonl", "train")[-1]["reward"] for run in made]
        label = chart.locator("svg").get_attribute("aria-label")
        assert [float(part.split()[-3]) for part in label.split("; ")] == pytest.approx(last, rel=1e-3)

        # Pictures of rollouts are there, and what a model said is text.
        page.get_by_text("Rollouts of skills").first.wait_for()
        picture = page.locator("#rollouts img").first
        picture.scroll_into_view_if_needed()
        # (The page forbids what `wait_for_function` does: a text that becomes a program.)
        expect(picture).to_have_js_property("complete", True)
        assert picture.evaluate("one => one.naturalWidth") > 0
        assert (
            page.locator("#rollouts .said", has_text="<b>").count() > 0
            and page.locator("#rollouts b").count() == 0
        )

        # Another update, one kind of prompt; both stay as they were put.
        page.get_by_label("Update").first.select_option("1")
        page.get_by_label("Kind").first.select_option("ocr/0/rendered")
        page.get_by_text("at update 1").wait_for()
        shown = page.locator("#rollouts > div").first.locator(".card")
        expect(shown).to_have_count(3)
        assert all("ocr/0/rendered" in text for text in shown.all_text_contents())

        # What is written now is seen without being asked for.
        with (made[0] / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41, "event": "train", "reward": 7.25}\n')
        chart.get_by_text("7.25 at 41").wait_for()
        page.get_by_label("Find").fill("score/")
        page.get_by_text("reward", exact=True).wait_for(state="detached")
        page.get_by_role("checkbox").first.uncheck()
        page.locator("summary", has_text="heldout").click()
        page.locator("#curves details[open] polyline").first.wait_for(state="attached")
        boxes = page.locator("#curves details[open] figure")
        assert all(boxes.nth(i).locator("polyline").count() <= 1 for i in range(boxes.count()))


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone(url, open_page, dark):  # noqa: F811
    page = open_page(url, width=360, dark=dark)
    page.get_by_text("Rollouts of skills").first.wait_for()
    page.get_by_text("Samples of skills").first.wait_for()
    check_looks(page, dark)
