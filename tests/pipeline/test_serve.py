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
from serve_model import Server, at_rest, wait_for, write_model

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import generate
from earlyfusion.model.hub.folder import load_model

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from earlyfusion.pipeline.serve.app import serve  # noqa: E402

CHAT, COMPLETIONS = "/chat/completions", "/completions"
LONG = {"prompt": "the", "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def server(folder):
    made = Server(folder, "--max-body-mb 0.5 --max-images 3 --max-new-tokens 4000 --context 5000")
    yield made
    made.close()


def png(seed: int = 0, size: tuple[int, int] = (60, 40)) -> bytes:
    out = io.BytesIO()
    PILImage.radial_gradient("L").rotate(37 * seed).resize(size).convert("RGB").save(out, "PNG")
    return out.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def media(kind: str, url: str) -> dict:
    return {"type": kind, kind: {"url": url}}


def ask(text: str, *parts: dict) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def pictures(*made: bytes) -> list[dict]:
    return [media("image_url", url_of(picture)) for picture in made]


def test_a_chat_answer_is_what_the_model_generates(server, folder):
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    for shown in ((), (png(1),), (png(1), png(2, (90, 30)))):
        answer = server.client.chat.completions.create(
            model="model", messages=ask("what color?", *pictures(*shown)), max_tokens=8, temperature=0
        )
        content = (*(Image(picture) for picture in shown), Text("what color?"))
        prompt = encode_chat([Message("user", content)], tokenizer, model.config.vision, template="qa")
        expected = generate(model, tokenizer, [prompt], max_new_tokens=8)[0]
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens <= 8 and answer.usage.prompt_tokens == len(prompt.ids)


def test_streamed_pieces_are_the_whole_answer(server):
    messages = ask("why?", *pictures(png(3)))
    options = dict(model="model", messages=messages, max_tokens=12, temperature=0.9, seed=11, n=2)
    whole = server.client.chat.completions.create(**options)
    pieces, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in server.client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert pieces == {choice.index: choice.message.content for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens > 0


def complete(server, prompt="the", **options):
    return server.client.completions.create(model="model", prompt=prompt, **{"max_tokens": 12, **options})


def test_a_seed_makes_a_completion_repeat(server):
    def once(seed: int) -> list[str]:
        answer = complete(server, ["a", "the"], seed=seed, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    assert once(5) == once(5) != once(6)


def test_log_probabilities_are_given_when_asked_for(server):
    answer = server.client.chat.completions.create(
        model="model", messages=ask("x"), max_tokens=5, temperature=0, logprobs=True
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(entry.logprob <= 0 for entry in content)
    options = dict(
        model="model", messages=ask("x"), max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    whole = server.client.chat.completions.create(**options).choices[0].logprobs.content
    pieces = []
    for chunk in server.client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            pieces += choice.logprobs.content if choice.logprobs else []
    assert pieces == whole and [entry.logprob for entry in whole] == [entry.logprob for entry in content]
    for entry in whole:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert (
            values[0] == pytest.approx(entry.logprob, abs=1e-5) and entry.top_logprobs[0].token == entry.token
        )
    assert all(value <= 0 for value in complete(server, logprobs=1).choices[0].logprobs.token_logprobs)


def test_stop_strings_end_the_answer_and_are_cut_off(server):
    text = complete(server, max_tokens=24, temperature=0).choices[0].text
    stop = text[len(text) // 2 :][:2]
    cut = complete(server, max_tokens=24, temperature=0, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and cut.text == text[: text.index(stop)]


def test_video_frames_and_video_files_are_taken(server):
    clip = io.BytesIO()
    first, *rest = [PILImage.radial_gradient("L").rotate(20 * i).resize((56, 56)) for i in range(6)]
    first.save(clip, "GIF", save_all=True, append_images=rest, duration=250)
    for part in (
        {"type": "video", "video": [url_of(png(i)) for i in range(3)], "fps": 2},
        media("video_url", url_of(clip.getvalue(), "image/gif")),
    ):
        body = {"messages": ask("what?", part), "max_tokens": 3}
        assert server.post(CHAT, json=body).json()["usage"]["prompt_tokens"] > 9


# What is sent (PNG, TEXT: a picture that is none, 100,000 letters), the status, what the message holds.
REFUSED = """
{"messages": []} | 400 | messages
{"messages": [{"role": "robot", "content": "x"}]} | 400 | role
{"messages": [{"role": "user", "content": "x"}], "temperature": -1} | 400 | temperature
{"messages": [{"role": "user", "content": "x"}], "tools": [{}]} | 400 | tools
{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000000} | 400 | max_tokens
{"messages": [{"role": "user", "content": "x"}], "n": 1000} | 400 | n:
{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2} | 400 | with logprobs
{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 21} | 400 | top_logprobs
{"messages": [{"role": "user", "content": "x"}], "unknown": 1} | 400 | unknown
{"messages": [{"role": "user", "content": "x"}], "model": "gpt-9"} | 404 | gpt-9
{"messages": [{"role": "user", "content": [PNG]}]} | 400 | image of
{"messages": [{"role": "user", "content": [PNG, PNG, PNG, PNG]}]} | 400 | at most 3
{"messages": [{"role": "user", "content": "TEXT"}]} | 400 | e
{"messages": [{"role": "user", "content": [FILE]}]} | 400 | nothing is fetched
{"prompt": [1000000000]} | 400 | token ids
{"prompt": []} | 400 | prompt
{"prompt": "x", "echo": true} | 400 | echo
{"prompt": [[1], "x", [[2]]]} | 400 | prompt.2.0:
{not json, "messages" | 400 | not JSON
["messages"] | 400 | a valid dictionary
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_cannot_be_served_is_refused_in_openais_form(server, line):
    body, status, said = line.split(" | ")
    body = body.replace("PNG", json.dumps(pictures(b"no picture")[0])).replace("TEXT", "x" * 100_000)
    body = body.replace("FILE", json.dumps(media("image_url", "file:///etc/passwd")))
    path = CHAT if "messages" in body else COMPLETIONS
    answer = server.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == int(status), answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
    # What speaks to somebody who prepares data is not for a client.
    assert not any(word in error["message"] for word in ("on_bad_sample", "data.decode", "chat chat"))


def test_other_routes_and_methods_have_errors_in_openais_form(server):
    for method, path, status in (("GET", "/nothing", 404), ("PUT", COMPLETIONS, 405)):
        answer = server.ask(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_nothing_is_fetched_from_urls(server):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        part = media("image_url", f"http://127.0.0.1:{trap.getsockname()[1]}/a.png")
        assert server.post(CHAT, json={"messages": ask("x", part)}).status_code == 400
        with pytest.raises(TimeoutError):
            trap.accept()


def test_large_bodies_are_refused_while_they_arrive(server):
    assert server.post(COMPLETIONS, json={"prompt": "x" * 600_000}).status_code == 413

    def endless():
        for _ in range(40):
            yield b" " * 50_000

    try:
        kind = {"Content-Type": "application/json"}
        assert server.post(COMPLETIONS, content=endless(), headers=kind).status_code == 413
    except httpx.WriteError:
        pass  # the server hung up before all was sent
    assert server.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_wrong_key_is_refused(server):
    stranger = openai.OpenAI(base_url=server.url, api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in server.client.models.list()] == ["model"]
    health = server.ask("GET", "./health", headers={"Authorization": ""})
    assert health.json() == {"status": "ok"}


def test_a_client_that_goes_away_frees_its_memory(server):
    body = {**LONG, "max_tokens": 4000, "stream": True, "n": 4}
    with server.post(COMPLETIONS, way="stream", json=body) as answer:
        lines = answer.iter_lines()  # held: a collected iterator closes the connection
        next(lines)
        assert server.stats()["open_requests"] == 1
    at_rest(server)
    assert server.stats()["finished_cancelled"] + server.stats()["finished_stop"] >= 4


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_caller_of_a_whole_answer_who_goes_away_is_noticed(server, path):
    before = server.stats()["finished_cancelled"]
    body = {"max_tokens": 3900, "ignore_eos": True, "n": 2}
    body |= {"prompt": "the"} if path == COMPLETIONS else {"messages": ask("x")}
    with pytest.raises(httpx.ReadTimeout):
        server.post(path, json=body, timeout=httpx.Timeout(60, read=0.3))
    assert at_rest(server)["finished_cancelled"] == before + 2


def test_only_loopback_names_are_served_on_a_loopback_address(server):
    hosts = {"evil.example": 403, "127.0.0.1.evil.example": 403, "localhost:1": 200, "[::1]:80": 200}
    for host, status in hosts.items():
        answer = server.ask("GET", "./health", headers={"Host": host})
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers


def test_a_stream_that_outlives_the_grace_ends_with_an_error_and_done(folder):
    server = Server(folder, "--grace 0 --max-new-tokens 100000 --context 101000", key=None)
    with server.post(
        COMPLETIONS, way="stream", json={**LONG, "max_tokens": 100_000, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, error, end = [line for line in lines if line]
    assert "the server stopped before this answer was complete" in error and '"error"' in error
    assert end == "data: [DONE]"
    assert server.process.wait(60) == 0


def test_a_full_line_answers_429_and_a_stop_lets_requests_finish(folder):
    """On an address that others reach, which without a key is warned about."""
    options = "--host 0.0.0.0 --queue 2 --slots 1 --grace 60 --max-new-tokens 4000 --context 5000"
    server = Server(folder, options, key=None)
    body = {**LONG, "max_tokens": 4000, "seed": 1}
    with ThreadPoolExecutor(2) as pool:
        # Two that take their time, also on a busy machine, fill the line; only then comes another.
        first = [pool.submit(server.post, COMPLETIONS, json=body) for _ in range(2)]
        wait_for(lambda: server.stats()["open_requests"] == 2 or any(one.done() for one in first))
        assert server.post(COMPLETIONS, json=body).status_code == 429
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
