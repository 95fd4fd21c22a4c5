"""The page of `earlyfusion serve` in a browser: what it shows is what the endpoint says."""

import asyncio
import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from browser_cases import browser, check_looks, open_page, served  # noqa: F401
from hostile_requests import png
from serve_model import KEY, write_model

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Text
from earlyfusion.model.engine.requests import Completion, Event, Token

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from earlyfusion.pipeline.serve.app import ServeOptions, Service, create_app  # noqa: E402

PICTURE = {"name": "a.png", "mimeType": "image/png", "buffer": png(40, 30)}
NASTY = '<img src=x onerror="document.title=1"> ✓ 🙂'
CHAT = "/v1/chat/completions"
SAMPLE = b"\0\0\0\x18ftypmp42, a clip that nobody reads"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("playground") / "model")
    (folder / "a sample.mp4").write_bytes(SAMPLE)
    options = ServeOptions(model=str(folder), name="model", template="chat", api_key=KEY, context=8192)
    made = Service(options)
    with served(create_app(made, options)) as url:
        yield SimpleNamespace(service=made, url=url, headers={"Authorization": f"Bearer {KEY}"})
    made.preparer.close()
    made.worker.stop()


@pytest.fixture
def page(service, open_page):  # noqa: F811
    made = open_page(service.url)
    unlock(made)
    return made


@pytest.fixture
def says(service, monkeypatch):
    """says(message) lets the model's next answer be this; says(None): a word after the other, without end."""
    words = service.service.tokenizer

    def script(message):
        asked = [Message("user", (Text("x"),))]
        vision = service.service.preparer.setup.vision
        ids = encode_chat([*asked, message or asked[0]], words, vision, add_generation_prompt=False).ids
        ids = ids[len(encode_chat(asked, words, vision).ids) : -1].tolist()

        async def stream(requests):
            name = requests[0].id
            while message is None:
                yield Event(name, 0, tuple(Token(i, -0.5, -0.5, 0) for i in words.encode(" on")), " on")
                await asyncio.sleep(0.02)
            for id in ids:
                yield Event(name, 0, (Token(id, -0.1, -0.1, 0),), words.decode([id]))
            told = [-0.1] * len(ids)
            yield Event(
                name, 0, (), "", Completion(name, 0, ids, told, told, [0] * len(ids), "", "stop", 5, 0)
            )

        monkeypatch.setattr(service.service.worker, "stream", stream)

    return script


def unlock(page):
    page.get_by_label("This server wants its API key").fill(KEY)
    page.get_by_text("Use it").click()
    page.get_by_role("heading", name="model").wait_for()


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def sent(page):
    """The body of the next request, as it is sent."""
    return page.expect_request(lambda request: request.url.endswith(CHAT))


def rest(page):
    page.get_by_role("button", name="Send").wait_for()


def test_the_page_comes_without_a_key_and_runs_its_own_script_alone(service):
    answer = httpx.get(service.url + "/")
    policy = answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    # Nothing is loaded, and nothing can become markup.
    assert re.findall(r'(?:src|href)="([^"]*)"', answer.text) == ["data:,"]
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "http://", "https://"):
        assert way not in answer.text
    assert httpx.post(service.url + "/", json={}).status_code == 405
    assert httpx.get(service.url + "/", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(service.url + "/v1/models").status_code == 401


def test_an_answer_about_a_picture_is_the_endpoints_own(service, page):
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("12")
    page.locator("#files").set_input_files(PICTURE)
    page.get_by_alt_text("attached picture").wait_for()
    with sent(page) as asked:
        ask(page, "what color?")
    page.get_by_text("+ 12 tokens").or_(page.get_by_text("tokens/s")).wait_for()
    body = asked.value.post_data_json
    assert body["messages"][0]["content"][0]["image_url"]["url"].endswith(
        base64.b64encode(png(40, 30)).decode()
    )

    # The same asked by itself: text, and the probability that the pointer shows.
    body = {**body, "stream": False, "stream_options": None}
    whole = httpx.post(service.url + CHAT, json=body, headers=service.headers, timeout=60).json()["choices"][
        0
    ]
    shown = page.locator(".assistant .text").text_content()
    assert shown == whole["message"]["content"] != ""
    page.locator(".assistant .token").first.hover()
    # A letter may be cut between several tokens, which are told together.
    told = [float(line.split(" %")[0]) for line in page.get_by_role("tooltip").text_content().split("\n")]
    entry = whole["logprobs"]["content"][0]
    assert told[0] == pytest.approx(100 * math.exp(entry["logprob"]), abs=0.051)
    assert len(told) >= 5 and max(told) == told[0]  # at temperature 0 nothing is likelier
    page.locator(".assistant .text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.at").count() == 1

    # As a program of its own it gives the same answer again.
    programs = [("Copy as Python", [sys.executable, "-"]), ("Copy as curl", ["bash", "-s"])]
    programs = [one for one in programs if shutil.which("curl") or "curl" not in one[0]]
    for label, command in programs:
        page.get_by_role("button", name=label).click()
        page.get_by_role("button", name="Copied").wait_for()
        program = page.evaluate("navigator.clipboard.readText()")
        assert KEY not in program
        rest(page)
        page.get_by_role("button", name=label).wait_for()
        environment = {**os.environ, "EARLYFUSION_API_KEY": KEY}
        run = subprocess.run(command, input=program, env=environment, capture_output=True, text=True)
        text = (
            json.loads(run.stdout)["choices"][0]["message"]["content"]
            if label.endswith("curl")
            else run.stdout
        )
        assert text.removesuffix("\n") == shown.removesuffix("\n"), run.stderr


def test_thinking_is_folded_calls_are_shown_and_words_stay_words(says, page):
    call = ToolCall("python", {"code": NASTY, "n": 2})
    says(Message("assistant", (Text(NASTY),), thinking=f"I think {NASTY}", calls=(call,)))
    ask(page, NASTY)
    rest(page)
    thought = page.locator(".assistant details").first
    assert thought.get_attribute("open") is None and not page.locator(".thought").is_visible()
    assert page.locator(".thought").text_content() == f"I think {NASTY}"
    thought.locator("summary").click()
    assert page.locator(".thought").is_visible()
    assert page.locator(".assistant .text:not(.thought)").text_content() == NASTY
    assert json.loads(page.locator(".call pre").text_content()) == {"code": NASTY, "n": 2}
    assert page.locator("#log img").count() == 0 and page.title() == "model"

    # Every letter that was said belongs to a token; markup to none.
    tokens = page.locator(".assistant .token").all_text_contents()
    assert "".join(tokens) == f"I think {NASTY}{NASTY}"

    # The result goes back as the tool's message, behind the call.
    says(Message("assistant", (Text("four"),)))
    page.get_by_label("Result of python").fill("4")
    with sent(page) as asked:
        page.get_by_role("button", name="Answer the call").click()
    *_, said, result = asked.value.post_data_json["messages"]
    assert said["content"] == NASTY and said["reasoning_content"] == f"I think {NASTY}"
    assert result == {
        "role": "tool",
        "tool_call_id": said["tool_calls"][0]["id"],
        "name": "python",
        "content": "4",
    }
    page.get_by_text("four").wait_for()


@pytest.mark.parametrize("way", ["Escape", "Stop"])
def test_an_answer_without_end_can_be_stopped_and_is_remembered(says, page, way):
    says(None)
    ask(page, "go on")
    page.get_by_text("on on on").wait_for()
    assert not page.get_by_role("button", name="Send").is_visible()
    if way == "Stop":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.get_by_text("stopped").wait_for()
    said = page.locator(".assistant .text").text_content()
    says(Message("assistant", (Text("fine"),)))
    with sent(page) as asked:
        ask(page, "and?")
    assert asked.value.post_data_json["messages"][1] == {"role": "assistant", "content": said}
    rest(page)
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#log article").count() == 0


def test_keys_paste_and_drop(says, page):
    says(Message("assistant", (Text("fine"),)))
    page.get_by_label("Message", exact=True).fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    # What a paste and a drop bring, as the browser tells of them.
    page.evaluate(
        """async data => {
            const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
            const drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="7"/>';
            const given = new DataTransfer();
            given.items.add(new File([bytes], "a.png", {type: "image/png"}));
            given.items.add(new File(["x"], "a<b>.txt", {type: "text/plain"}));
            given.items.add(new File([drawing], "a.svg", {type: "image/svg+xml"}));
            document.dispatchEvent(new ClipboardEvent("paste", {clipboardData: given}));
            const clip = new DataTransfer();
            clip.items.add(new File([bytes], "a.gif", {type: "image/gif"}));
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: clip}));
        }""",
        base64.b64encode(png(40, 30)).decode(),
    )
    page.get_by_text("a<b>.txt: neither a picture nor a clip").wait_for()
    page.locator("#chips > div").nth(2).wait_for()
    with sent(page) as asked:
        page.keyboard.press("Enter")
    *media, text = asked.value.post_data_json["messages"][0]["content"]
    assert text == {"type": "text", "text": "a\nb"}
    assert sorted(part[part["type"]]["url"][:15] for part in media) == [
        "data:image/gif;",
        "data:image/png;",
        "data:image/png;",
    ]
    assert sorted(part["type"] for part in media) == ["image_url", "image_url", "video_url"]


def test_what_is_refused_goes_back_to_where_it_can_be_changed(page):
    page.locator("#files").set_input_files({**PICTURE, "buffer": b"no picture"})
    page.get_by_alt_text("attached picture").wait_for()
    ask(page, "what?")
    page.get_by_role("alert").get_by_text("image").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "what?"
    assert page.locator("#log article").count() == 0
    page.get_by_label("Remove attachment 1").click()
    ask(page, "what?")
    page.get_by_text("tokens/s").wait_for()
    assert page.locator("#status").text_content() == ""


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone(service, says, open_page, dark):  # noqa: F811
    page = open_page(service.url, width=360, dark=dark)
    unlock(page)
    says(
        Message(
            "assistant", (Text("x" * 300),), thinking="y" * 300, calls=(ToolCall("python", {"a": "z" * 300}),)
        )
    )
    page.get_by_text("Settings").click()
    page.locator("#files").set_input_files([PICTURE] * 8)
    ask(page, "w" * 300)
    rest(page)
    page.locator(".thought").locator("..").locator("summary").click()
    check_looks(page, dark)


WRITTEN = "page ocean sans snug\nnav end dark| Harbor| Home\nhero left soft| Bright garden| Open.| Join now"


@pytest.mark.parametrize("width, dark", [(1000, False), (360, True)])
def test_a_page_that_is_written_is_seen_compared_revised_and_downloaded(
    service,
    says,
    open_page,  # noqa: F811
    tmp_path,
    width,
    dark,
):
    page = open_page(service.url, width=width, dark=dark)
    unlock(page)
    says(Message("assistant", (Text(WRITTEN),)))
    page.locator("#files").set_input_files(PICTURE)
    page.get_by_alt_text("attached picture").wait_for()
    # By the keyboard alone.
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("write it")
    page.keyboard.press("Enter")
    frame = page.frame_locator("iframe")
    frame.get_by_text("Bright garden").wait_for()
    assert page.locator("iframe").get_attribute("sandbox") == ""
    check_looks(page, dark)

    with page.expect_download() as kept:
        page.get_by_text("Download HTML").click()
    kept.value.save_as(tmp_path / "page.html")
    assert "Bright garden" in (tmp_path / "page.html").read_text()

    # Where the server has a browser: how it looks, what differs, and another try with it.
    if page.get_by_role("button", name="Revise").count():
        page.get_by_text("equal pixels").first.wait_for()
        with sent(page) as asked:
            page.get_by_role("button", name="Revise").press("Enter")
        *_, picture, text = asked.value.post_data_json["messages"][-1]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")
        assert "looks" in text["text"]


def test_words_that_are_no_page_are_words_and_a_page_can_do_nothing(service, says, page):
    says(Message("assistant", (Text("page one of two:\nno page"),)))
    ask(page, "x")
    rest(page)
    assert page.locator("iframe").count() == 0
    # Hostile HTML: shown in a frame without rights.
    hostile = "<!doctype html><p>hello</p><script>top.document.title='x'</script><img src=//127.0.0.1:1/a>"
    answer = httpx.post(f"{service.url}/page", json={"text": hostile}, headers=service.headers)
    shown = httpx.get(service.url + answer.json()["address"])
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'") and "script-src" not in policy
    assert httpx.post(f"{service.url}/page", json={"text": hostile}).status_code == 401
    assert httpx.get(f"{service.url}/page/0").status_code == 404
    refused = httpx.post(f"{service.url}/page", json={"text": "hello"}, headers=service.headers)
    assert refused.status_code == 400 and "expected lines like" in refused.json()["error"]["message"]


def test_a_sample_beside_the_model_is_attached_as_a_clip(service, says, page):
    says(Message("assistant", (Text("ok"),)))
    page.get_by_role("button", name="Sample: a sample").press("Enter")
    page.get_by_label("attached clip").wait_for()
    with sent(page) as asked:
        ask(page, "x")
    part, _ = asked.value.post_data_json["messages"][-1]["content"]
    assert part["video_url"]["url"] == "data:video/mp4;base64," + base64.b64encode(SAMPLE).decode()
    assert httpx.get(f"{service.url}/sample/other", headers=service.headers).status_code == 404


def test_frames_of_a_clip_are_shown_as_they_are_read(service, says, page, tmp_path):
    pytest.importorskip("av")
    from PIL import Image

    from earlyfusion.eval.website.record import write_mp4

    clip = write_mp4([Image.new("RGB", (240, 180), (9 * i, 0, 0)) for i in range(16)], tmp_path / "a.mp4")
    says(Message("assistant", (Text("ok"),)))
    page.locator("#files").set_input_files(str(clip))
    page.get_by_label("attached clip").wait_for()
    page.get_by_label("Message", exact=True).press("Enter")
    # Two seconds, two frames each.
    page.get_by_label("4 of 4 frames").wait_for()
    reds = page.evaluate(
        "[...document.querySelectorAll('.strip canvas')]"
        ".map(one => one.getContext('2d').getImageData(5, 5, 1, 1).data[0])"
    )
    assert len(reds) == 4 and reds == sorted(set(reds)), "every frame is another one"
