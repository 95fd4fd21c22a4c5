"""What a model is to the evaluator: a small protocol, and the requests between it and the tasks.

    BaseTask.questions -> Question -> requests -> [GenerateRequest | ScoreRequest | RollingRequest]
        -> Model.generate | loglikelihood | rolling -> outputs -> score -> one record -> aggregate -> numbers

Model adapters: eval/models/base.py. What a task is: eval/benchmarks/base.py. Who runs them: eval/harness.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Sample, Segment, Text
from earlyfusion.kernels.files import Record

Prompt = str | Sequence[Segment]
"""A plain text, or text, pictures and videos in order (data/sample.py)."""
UNHASHED = ("shared", "seed", "source", "key")
"""What a request holds beside the question: a hint, the noise, and the names of a sample."""


class EvalError(DataError):
    """An evaluation cannot be run as asked; the message is one line. The command line ends with exit code
    2."""


class Interrupted(Exception):
    """A signal asked some process to stop while the model was asked; raised on every process."""


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


Request = GenerateRequest | ScoreRequest | RollingRequest | LossRequest


@dataclass(frozen=True)
class Generation:
    """text without the stop string. tokens: produced by the model. finish: "stop" (a stop string or the end
    token), "length", or "refused" (the prompt does not fit; text is empty)."""

    text: str
    tokens: int
    finish: str


@dataclass(frozen=True)
class LogProb:
    """sum: nats over the continuation. tokens of it. greedy: every token was the argmax."""

    sum: float = 0.0
    tokens: int = 0
    greedy: bool = True

    def __add__(self, more: LogProb) -> LogProb:
        """Of a continuation and what follows it."""
        return LogProb(self.sum + more.sum, self.tokens + more.tokens, self.greedy and more.greedy)


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

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...

    # With the capability "score" also loglikelihood(Sequence[ScoreRequest]) and
    # rolling(Sequence[RollingRequest]) -> list[LogProb]; with "loss" losses(Sequence[LossRequest]) ->
    # list[heldout.Loss | BadSample].

    def identity(self) -> Record:
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
    meta: Record = field(default_factory=dict)


@dataclass(frozen=True)
class TaskOptions:
    """What a factory is given. data: path of the task's data (file or folder) or None. form: see the task,
    None for its default. shots: worked examples, None for the task's own number.
    samples: repeats per question. seed: of sampling, guesses and generated data.
    temperature, top_p and max_new_tokens: None for the task's protocol. extra: further settings by name."""

    data: Path | None = None
    form: str | None = None
    shots: int | None = None
    samples: int = 1
    seed: int = 0
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    extra: Record = field(default_factory=dict)


def prompt_text(prompt: Prompt) -> str:
    """The text of a prompt, media left out."""
    if isinstance(prompt, str):
        return prompt
    return "".join(segment.text for segment in prompt if isinstance(segment, Text))


def prompt_hash(requests: Sequence[Request]) -> str:
    """sha256 (16 hexadecimal digits) over everything a model is shown and asked: texts, pictures, limits,
    sampling. Not over hints and seeds: those change no question."""
    digest = hashlib.sha256()
    _feed(digest, requests)
    return digest.hexdigest()[:16]


def _feed(digest: Any, value: Any) -> None:
    """Enter a request, a segment, or anything that they hold."""
    if is_dataclass(value):
        parts: list[Any] = [type(value).__name__]
        for item in fields(value):
            part = getattr(value, item.name)
            if item.name == "frames":
                part = [Image(frame) for frame in part]
            # The bytes and not the path: a moved file asks the same question.
            if item.name in ("image", "video") and isinstance(part, str | Path):
                part = Path(part).read_bytes()
            if item.name not in UNHASHED:
                parts.append(part)
        value = parts
    if isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for part in value:
            _feed(digest, part)
        return

    # Pixels with their size and kind: the same bytes may be another picture.
    if isinstance(value, PILImage.Image):
        value = f"{value.mode}{value.size}".encode() + value.tobytes()
    elif isinstance(value, np.ndarray):
        value = f"{value.dtype}{value.shape}".encode() + value.tobytes()
    # With its length, so that what ends one value never begins the next.
    raw = value if isinstance(value, bytes) else repr(value).encode()
    digest.update(f"{len(raw)}:".encode() + raw)
