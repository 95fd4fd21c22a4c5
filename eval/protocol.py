"""What a model and a task are to the evaluator: two small protocols, and the requests between them.

    Task.questions -> Question -> Task.requests -> [GenerateRequest | ScoreRequest | RollingRequest]
        -> Model.generate | loglikelihood | rolling -> outputs -> Task.score -> one record -> Task.aggregate
        -> numbers

Model adapters: eval/models/base.py. Shared behaviour of tasks: eval/benchmarks/base.py. Their names:
eval/registry.py. Who runs them: eval/harness.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Sample, Segment, Text, Video, VideoFile

Prompt: TypeAlias = str | Sequence[Segment]
"""A plain text, or text, pictures and videos in order (data/sample.py)."""


class EvalError(DataError):
    """An evaluation cannot be run as asked; the message is one line. The command line ends with exit code
    2."""


@dataclass(frozen=True)
class GenerateRequest:
    """Continue `prompt`; the text ends before the first of the `stop` strings, or at the model's own end
    token.

    temperature 0 is greedy. seed: of this request alone, so that an answer does not depend on its neighbours.
    shared: the number of characters at the start of a text prompt that many requests have in common (a hint:
    adapters may keep the model's state after them; the result does not depend on it).
    """

    prompt: Prompt
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    shared: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """ln p(continuation | context). shared: as in GenerateRequest, of the context.

    Tokens are split between the two as in lm-evaluation-harness: blanks at the end of the context go to the
    continuation, and the continuation's tokens are those that encode(context + continuation) has beyond
    encode(context). An empty context is the model's beginning token.
    """

    context: Prompt
    continuation: str
    shared: int = 0


@dataclass(frozen=True)
class RollingRequest:
    """ln p of a whole text, cut into windows of the model's length; every token is paid for once."""

    text: str


@dataclass(frozen=True)
class LossRequest:
    """The loss of a whole sample as training counts it, documents cut at `length` tokens, with its blind twin
    (eval/heldout.py). The output is a heldout.Loss, or the BadSample that says why there is none."""

    sample: Sample
    length: int


Request: TypeAlias = GenerateRequest | ScoreRequest | RollingRequest | LossRequest


@dataclass(frozen=True)
class Generation:
    """text without the stop string. tokens: produced by the model. finish: "stop" (a stop string or the end
    token), "length", or "refused" (the prompt does not fit; text is empty)."""

    text: str
    tokens: int
    finish: str


@dataclass(frozen=True)
class LogProb:
    """sum: nats over the continuation. tokens and bytes (UTF-8) of it. greedy: every token was the argmax."""

    sum: float
    tokens: int
    bytes: int
    greedy: bool


class Model(Protocol):
    """Anything that can be evaluated. A list of outputs stands in the order of its requests, and an output is
    the same whatever else is in the list."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]:
        """Of "text", "image", "video" (what a prompt may hold), "score" and "generate" (what may be
        asked)."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest prompt plus answer in tokens; None when the model has no such limit."""
        ...

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text, the model's beginning token (if it uses one) included."""
        ...

    def loglikelihood(self, requests: Sequence[ScoreRequest]) -> list[LogProb]: ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...

    def rolling(self, requests: Sequence[RollingRequest]) -> list[LogProb]: ...

    # with the capability "loss" also: losses(requests:
    # Sequence[LossRequest]) -> list[heldout.Loss | BadSample]

    def identity(self) -> dict[str, Any]:
        """What was evaluated: path or address, sha256 of the weights, dtype, parameters. JSON values only."""
        ...


@dataclass(frozen=True)
class Question:
    """One item of a task.

    id: unique inside the task, stable between versions of the file. target: what the scorer compares with
    (JSON value). meta: what the task needs again in `requests` and `score`; it is never written anywhere.
    """

    id: str
    prompt: Prompt
    target: Any
    category: str = ""
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


Record: TypeAlias = dict[str, Any]
"""A line of a task's JSONL: id, repeat, category, seed, prompt_hash, output, extracted, score, tokens, and
what else the task's `score` returned. One record per question and repeat."""


class Task(Protocol):
    """One benchmark in one form. Inherit from eval.benchmarks.base.BaseTask for the shared parts.

    kind: "generate", "score" or "rolling": which of the model's methods answers. needs: capabilities beside
    the kind, such as frozenset({"image"}). private: question text, options and outputs must leave no trace;
    the harness then writes ids, hashes, extracted letters and scores alone.
    """

    name: str
    kind: str
    version: str
    needs: frozenset[str]
    private: bool

    def data_hash(self) -> str:
        """sha256 of the questions' data (file content, or a generator's name, version and seed)."""
        ...

    def prepare(self, model: Model) -> None:
        """Called once before `questions`: a place to count tokens with the model. May do nothing."""
        ...

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """At most `limit` questions (spread over the categories), in a fixed order. shots None: the task's
        own number."""
        ...

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """What to ask for the `repeat`-th sample; several where a score needs several (options, a blind
        control)."""
        ...

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """At least {extracted, score}: extracted is a JSON value or None (nothing usable in the output),
        score a number, higher is better. Further JSON values are kept in the record (for example
        "blind_score", "target")."""
        ...

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Named numbers: at least n, score, unextracted (share), chance and majority (baselines, None when
        undefined), and by_category: name -> {n, score}."""
        ...


@dataclass(frozen=True)
class TaskOptions:
    """What a factory is given. data: path of the task's data (file or folder) or None. form: see the task,
    None for its default. samples: repeats per question. seed: of sampling, guesses and generated data.
    temperature, top_p and max_new_tokens: None for the task's protocol. extra: further settings by name."""

    data: Path | None = None
    form: str | None = None
    samples: int = 1
    seed: int = 0
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def prompt_text(prompt: Prompt) -> str:
    """The text of a prompt, media left out."""
    if isinstance(prompt, str):
        return prompt
    return "".join(segment.text for segment in prompt if isinstance(segment, Text))


def prompt_hash(requests: Sequence[Request]) -> str:
    """sha256 (16 hexadecimal digits) over everything a model is shown and asked: texts, pictures, limits,
    sampling."""
    digest = hashlib.sha256()
    for request in requests:
        if isinstance(request, RollingRequest):
            digest.update(f"rolling\0{request.text}\0".encode())
            continue
        if isinstance(request, LossRequest):
            weights = [getattr(part, "loss", None) for part in request.sample.segments]
            digest.update(f"loss\0{request.length}\0{weights}\0".encode())
            prompt: Prompt = request.sample.segments
        else:
            prompt = request.prompt if isinstance(request, GenerateRequest) else request.context

        for part in [prompt] if isinstance(prompt, str) else prompt:
            _feed(digest, part)
        if isinstance(request, GenerateRequest):
            asked = (request.max_new_tokens, request.stop, float(request.temperature), float(request.top_p))
            digest.update(f"\0generate\0{asked}\0".encode())
        elif isinstance(request, ScoreRequest):
            digest.update(f"\0score\0{request.continuation}\0".encode())
    return digest.hexdigest()[:16]


def _feed(digest: Any, part: str | Segment) -> None:
    """A text is hashed alike whether it stands alone or as a Text segment."""
    if isinstance(part, str | Text):
        digest.update((part if isinstance(part, str) else part.text).encode("utf-8"))
        return
    if not isinstance(part, Image | Video):
        # Another kind of segment: its settings, and the bytes of its file.
        held = {name: getattr(part, name) for name in part.__slots__}
        file = held.pop("video") if isinstance(part, VideoFile) else b""
        data = file if isinstance(file, bytes) else Path(file).read_bytes()
        digest.update(f"\0{type(part).__name__}{held}\0".encode() + data)
        return

    pictures = [part.image] if isinstance(part, Image) else part.frames
    digest.update(f"\0{type(part).__name__}{len(pictures)}\0".encode())
    if isinstance(part, Video):
        digest.update(np.asarray(part.timestamps, dtype=np.float64).tobytes())

    for picture in pictures:
        if isinstance(picture, PILImage.Image):
            digest.update(f"{picture.mode}{picture.size}".encode() + picture.tobytes())
        elif isinstance(picture, np.ndarray):
            digest.update(f"{picture.dtype}{picture.shape}".encode() + picture.tobytes())
        else:
            digest.update(picture if isinstance(picture, bytes) else Path(picture).read_bytes())
