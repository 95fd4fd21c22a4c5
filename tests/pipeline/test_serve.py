"""`earlyfusion serve` as its users meet it: a process of its own, the official openai client, and hostile
clients."""

import base64
import io
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image as PILImage
from serve_model import KEY, Server, at_rest, wait_for, write_model

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.generate import generate
from earlyfusion.model.hub.folder import load_model

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from earlyfusion.pipeline.serve.app import serve  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def server(folder):
    made = Server(
        folder, "--max-body-mb", "0.5", "--max-images", "3", "--max-new-tokens", "4000", "--context", "5000"
    )
    yield made
    made.close()


def png(seed: int = 0, size: tuple[int, int] = (60, 40)) -> bytes:
    out = io.BytesIO()
    PILImage.radial_gradient("L").rotate(37 * seed).resize(size).convert("RGB").save(out, "PNG")
    return out.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(text: str, *pictures: bytes) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(picture)}} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def own_answer(folder, text: str, *pictures: bytes, count: int = 8) -> str:
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    content = (*(Image(picture) for picture in pictures), Text(text))
    prompt = encode_chat([Message("user", content)], tokenizer, model.config.vision, template="qa")
    return generate(model, tokenizer, [prompt], max_new_tokens=count)[0]


def test_a_chat_answer_is_what_the_model_generates(server, folder):
    for pictures in ((), (png(1),), (png(1), png(2, (90, 30)))):
        answer = server.client.chat.completions.create(
            model="model", messages=ask("what color?", *pictures), max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content == own_answer(folder, "what color?", *pictures)
        assert answer.usage.completion_tokens <= 8 and answer.usage.prompt_tokens > 0


def test_streamed_pieces_are_the_whole_answer(server):
    options = dict(model="model", messages=ask("why?", png(3)), max_tokens=12, temperature=0.9, seed=11, n=2)
    whole = server.client.chat.completions.create(**options)
    pieces, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in server.client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert set(ends.values()) <= {"stop", "length"} and usage.completion_tokens > 0
    assert len(whole.choices) == 2
    assert all(isinstance(text, str) for text in pieces.values())


def test_a_seed_makes_a_completion_repeat(server):
    def once(seed: int) -> list[str]:
        answer = server.client.completions.create(
            model="model", prompt=["a", "the"], max_tokens=12, seed=seed, n=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    assert once(5) == once(5) != once(6)


def test_log_probabilities_are_given_when_asked_for(server):
    answer = server.client.chat.completions.create(
        model="model", messages=ask("x"), max_tokens=5, temperature=0, logprobs=True
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(entry.logprob <= 0 for entry in content)
    plain = server.client.completions.create(model="model", prompt="x", max_tokens=5, logprobs=1)
    assert all(value <= 0 for value in plain.choices[0].logprobs.token_logprobs)


def test_stop_strings_end_the_answer_and_are_cut_off(server):
    text = (
        server.client.completions.create(model="model", prompt="the", max_tokens=24, temperature=0)
        .choices[0]
        .text
    )
    stop = text[len(text) // 2 :][:2]
    cut = server.client.completions.create(
        model="model", prompt="the", max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].text == text[: text.index(stop)]


def test_video_frames_and_video_files_are_taken(server):
    frames = [
        {"type": "video", "video": [url_of(png(i)) for i in range(3)], "fps": 2},
        {"type": "text", "text": "what?"},
    ]
    answer = server.client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": frames}], max_tokens=3, temperature=0
    )
    assert answer.usage.prompt_tokens > 3
    clip = io.BytesIO()
    first, *rest = [PILImage.radial_gradient("L").rotate(20 * i).resize((56, 56)) for i in range(6)]
    first.save(clip, "GIF", save_all=True, append_images=rest, duration=250)
    part = {"type": "video_url", "video_url": {"url": url_of(clip.getvalue(), "image/gif")}}
    answer = server.client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}],
        max_tokens=3,
    )
    assert answer.usage.prompt_tokens > 3


@pytest.mark.parametrize(
    "path, body, status, said",
    [
        ("/chat/completions", {"messages": []}, 400, "messages"),
        ("/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
        ("/chat/completions", {"messages": ask("x"), "temperature": -1}, 400, "temperature"),
        ("/chat/completions", {"messages": ask("x"), "tools": [{}]}, 400, "tools"),
        ("/chat/completions", {"messages": ask("x"), "max_tokens": 10**6}, 400, "max_tokens"),
        ("/chat/completions", {"messages": ask("x"), "n": 1000}, 400, "n: "),
        ("/chat/completions", {"messages": ask("x"), "unknown": 1}, 400, "unknown"),
        ("/chat/completions", {"messages": ask("x", b"no picture")}, 400, "image"),
        ("/chat/completions", {"messages": ask("x", *[png()] * 4)}, 400, "at most 3"),
        ("/chat/completions", {"messages": ask("x"), "model": "gpt-9"}, 404, "gpt-9"),
        ("/chat/completions", {"messages": ask("x" * 100_000), "max_tokens": 4}, 400, ""),
        ("/completions", {"prompt": [10**9]}, 400, "token ids"),
        ("/completions", {"prompt": []}, 400, "prompt"),
        ("/completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("/completions", {"prompt": [[1], "x", [[2]]]}, 400, "prompt.2.0: "),
    ],
)
def test_what_cannot_be_served_is_refused_in_openais_form(server, path, body, status, said):
    answer = server.post(path, json={"model": "model", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"


def test_nothing_is_fetched_from_urls(server):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        port = trap.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/a.png", "file:///etc/passwd", "data:image/png,abc"):
            part = {"type": "image_url", "image_url": {"url": url}}
            answer = server.post(
                "/chat/completions", json={"messages": [{"role": "user", "content": [part]}]}
            )
            assert answer.status_code == 400 and "nothing is fetched" in answer.json()["error"]["message"]
        with pytest.raises(TimeoutError):
            trap.accept()


def test_large_bodies_are_refused_while_they_arrive(server):
    assert server.post("/completions", json={"prompt": "x" * 600_000}).status_code == 413

    def endless():
        for _ in range(40):
            yield b" " * 50_000

    kind = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    try:
        status = httpx.post(server.url + "/completions", content=endless(), headers=kind).status_code
    except httpx.WriteError:  # the server hung up before all was sent
        status = 413
    assert status == 413
    assert server.post("/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_wrong_key_is_refused(server):
    stranger = openai.OpenAI(base_url=server.url, api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in server.client.models.list()] == ["model"]
    assert httpx.get(server.url.removesuffix("/v1") + "/health").json() == {"status": "ok"}


def test_a_client_that_goes_away_frees_its_memory(server):
    body = {
        "prompt": "the",
        "max_tokens": 4000,
        "stream": True,
        "temperature": 1.0,
        "n": 4,
        "ignore_eos": True,
    }
    with httpx.stream(
        "POST", server.url + "/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
    ) as answer:
        lines = answer.iter_lines()  # held: a collected iterator closes the connection
        next(lines)
        assert server.stats()["open_requests"] == 1
    at_rest(server)
    assert server.stats()["finished_cancelled"] + server.stats()["finished_stop"] >= 4


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_a_caller_of_a_whole_answer_who_goes_away_is_noticed(server, path):
    before = server.stats()["finished_cancelled"]
    body = {"max_tokens": 3900, "ignore_eos": True, "n": 2}
    body |= {"prompt": "the"} if path == "/completions" else {"messages": ask("x")}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + path,
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=httpx.Timeout(60, read=0.3),
        )
    assert at_rest(server)["finished_cancelled"] == before + 2


def test_only_loopback_names_are_served_on_a_loopback_address(server):
    address = server.url.removesuffix("/v1")
    for host, status in (
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:1", 200),
        ("[::1]:80", 200),
    ):
        answer = httpx.get(address + "/health", headers={"Host": host})
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers


def test_what_a_client_is_told_of_a_bad_picture_speaks_to_a_client(server):
    for data in (b"no picture", png()[:60], b""):
        said = server.post("/chat/completions", json={"messages": ask("x", data)}).json()["error"]["message"]
        assert "image of" in said and not any(
            word in said for word in ("on_bad_sample", "data.decode", "chat chat")
        )


def test_a_stream_that_outlives_the_grace_ends_with_an_error_and_done(folder):
    server = Server(folder, "--grace", "0", "--max-new-tokens", "100000", "--context", "101000", key=None)
    body = {"prompt": "the", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, error, end = [line for line in lines if line]
    assert (
        json.loads(error.removeprefix("data: "))["error"]["message"]
        == "the server stopped before this answer was complete"
    )
    assert end == "data: [DONE]"
    assert server.process.wait(60) == 0


def test_a_full_line_answers_429_and_a_stop_lets_requests_finish(folder):
    """On an address that others reach, which without a key is warned about."""
    options = (
        "--host",
        "0.0.0.0",
        "--queue",
        "2",
        "--slots",
        "1",
        "--grace",
        "60",
        "--max-new-tokens",
        "1200",
    )
    server = Server(folder, *options, key=None)
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    body = {"prompt": "the", "max_tokens": 1200, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    with ThreadPoolExecutor(2) as pool:
        # Two that take their time fill the line; only then comes another.
        first = [pool.submit(server.post, "/completions", json=body) for _ in range(2)]
        wait_for(lambda: server.stats()["open_requests"] == 2 or any(one.done() for one in first))
        assert server.post("/completions", json=body).status_code == 429
        server.process.send_signal(signal.SIGTERM)
        assert [one.result().status_code for one in first] == [200, 200]
    assert server.process.wait(60) == 0
    assert "no API key" in server.process.stderr.read()


def test_a_port_in_use_is_told(folder):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match=r"is the port in use\?"),
    ):
        serve(model=str(folder), port=taken.getsockname()[1])


def test_error_bodies_are_json_for_every_route(server):
    for content, said in (
        (b"{not json", "not JSON"),
        (b"[" * 100_000, "recursion limit"),
        (b"[]", "a valid dictionary"),
    ):
        kind = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        answer = httpx.post(server.url + "/chat/completions", content=content, headers=kind)
        assert answer.status_code == 400 and said in json.loads(answer.text)["error"]["message"]
    for method, path, status in (("GET", "/nothing", 404), ("PUT", "/completions", 405)):
        answer = httpx.request(method, server.url + path, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == status and set(answer.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
