"""What goes into the engine and what comes out: the public types of `earlyfusion.model.engine`.

    engine = Engine(model, tokenizer, max_slots=64)
    handle = engine.submit(Request("r1", prompt, SamplingParams(max_new_tokens=32, temperature=0.7)))
    while engine.has_work:
        for event in engine.step():              # new tokens and text of every request that advanced
            ...                                  # event.completion is set with the last event of a sample
    completions = engine.generate(requests)      # the same, for those who only want the ends

One thread drives an engine: `submit`, `cancel`, `step` and the rest are not to be called from two threads at
once.

Shapes: n tokens of a prompt, P patches, V vocabulary, L sparse layers, J chosen experts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from earlyfusion.kernels.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: a stop id or stop string; length: max_new_tokens; cancelled: `Engine.cancel`. An admitted request
never runs out of memory: its pages are promised when it is admitted."""


class RequestError(UserError, ValueError):
    """A request that can never be served: an option out of range, a prompt longer than the memory, an id in
    use."""


class EngineFull(RuntimeError):
    """The waiting line is full; try again later. waiting: its bound."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"the engine already has {waiting} requests waiting (max_waiting); try again later")


class Prompt(Protocol):
    """An open document, as `data.encode.encode(..., eos=False)` makes it: ids [n] int64, patches uint8 [P, 3,
    p, p] or None, grids [(t, h, w)], media_positions (places of the image placeholders in ids, in feature
    order)."""

    ids: Tensor
    patches: Tensor | None
    grids: Any
    media_positions: Any


@dataclass
class TokenPrompt:
    """A prompt of token ids alone."""

    # Text alone by default; pictures come with their grids and the places of their placeholders.
    ids: Tensor
    patches: Tensor | None = None
    grids: Any = ()
    media_positions: Any = ()


@dataclass(frozen=True)
class SamplingParams:
    """How a request is continued.

    max_new_tokens: upper bound, the stop token included. temperature 0 takes the likeliest token. top_p: the
    smallest set of likeliest tokens with this mass; min_p: tokens at least this share of the likeliest one's
    probability; both act on the distribution at `temperature`. stop: strings that end the text (and are cut
    off). stop_ids: tokens that end it (kept in `ids`, left out of `text`), besides the engine's own ([EOS],
    <|end_of_msg|>) unless ignore_eos. banned_ids: never chosen, besides the engine's own (image placeholders,
    tokens that only stand in inputs, rows the tokenizer does not know; a stop id is allowed unless it is the
    image placeholder). logprobs: fill the log-probabilities. n: samples of the one prompt, which is read
    once.

    Raises RequestError for a value out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: bool = False
    n: int = 1
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Lists come from JSON; tuples make the options hashable and safe to share.
        for name in ("stop", "stop_ids", "banned_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise RequestError(f"{name}={value!r}: give a sequence of strings, such as ({value!r},)")
            object.__setattr__(self, name, tuple(value))
        # Refused here, where the caller stands, and not steps later in the engine.
        for name, right, expected in (
            ("max_new_tokens", self.max_new_tokens >= 0, "must be at least 0"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "must be finite and at least 0 (greedy)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must lie in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must lie in [0, 1]"),
            ("n", self.n >= 1, "must be at least 1"),
            ("stop", all(self.stop), "a stop string must not be empty"),
        ):
            if not right:
                raise RequestError(f"{name}={getattr(self, name)!r}: {expected}")


@dataclass(frozen=True)
class Request:
    """One prompt to be continued `params.n` times. The id must be new among unfinished requests; it also keys
    the random numbers, so equal (id, seed, sample index) give equal samples. `noise` takes the id's place as
    that key where ids are made up, as on a server.

    capture_routing: record which experts every token chose (see `Completion.routing`). pieces: events tell
    tokens and text as they come; without, a sample has one event, its end with the completion, and less is
    done for every token. keep_state: a sample that stops by itself leaves its state behind (`Event.left`),
    for a request that goes on from it.
    """

    # The id is what a caller knows a request by, and (without `noise`) what its samples are drawn with.
    id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    capture_routing: bool = False
    noise: str = ""
    pieces: bool = True
    keep_state: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt (at least one token) and continuations of it, each judged by itself; an empty one is certain.

    shared: leading prompt tokens that other requests of the same call begin with, too. They are read once for
    all of them, in whole pages, where the engine has a prefix cache with room for them.
    """

    prompt: Prompt
    continuations: Sequence[Sequence[int]]
    shared: int = 0


@dataclass(eq=False)
class Score:
    """What the model makes of one continuation, one entry for each of its tokens.

    logprobs: ln p over the whole vocabulary at temperature 1. likeliest: whether the token is the argmax.
    states: hidden states [tokens, D] that choose the tokens (`model.logits` turns them into logits), only
    where they were asked for.
    """

    # Filled token by token, as the parts of a continuation are read.
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[bool] = field(default_factory=list)
    states: Tensor | None = None

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would write this continuation."""
        return all(self.likeliest)


class Token(NamedTuple):
    """One generated token. logprob: under the distribution it was drawn from (temperature, top-p, min-p,
    bans; 0 when greedy). logprob1: at temperature 1 over the whole vocabulary, what a trainer computes. Both
    NaN unless the request asked for them. version: of the weights that computed its logits."""

    # Two log-probabilities: what it was drawn with, and what a trainer computes of it.
    id: int
    logprob: float
    logprob1: float
    version: int


@dataclass(frozen=True)
class Completion:
    """One finished sample (`index` of `params.n`). All per-token lists have one entry per generated token,
    the stop token included; `text` leaves out special tokens, the stop string and what follows it.

    routing: uint8 or uint16 [tokens, L, J], experts of every token that went through the layers (prompt, then
    generated without the last one, which was never fed back), or None unless asked for.
    """

    # Everything a trainer needs of a sample, without asking the engine again.
    request_id: str
    index: int
    ids: list[int]
    logprobs: list[float]
    logprobs1: list[float]
    versions: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    routing: np.ndarray | None = None


@dataclass
class PausedSample:
    """One unfinished sample outside an engine. length: tokens that the state covers (0 without state: nothing
    was read yet)."""

    index: int
    ids: list[int]
    logprobs: list[float]
    logprobs1: list[float]
    versions: list[int]
    length: int
    state: dict[str, Tensor] = field(default_factory=dict)
    routing: np.ndarray | None = None


FORMAT = "earlyfusion-paused-3"
TENSOR = "tensor"
"""The only field of an object that stands in the JSON for the tensor of that name."""


@dataclass
class PausedRequest:
    """A request outside an engine, with its unfinished samples and the completions of the finished ones.
    version: of the engine's weights when it was paused.

    It carries everything a continuation depends on: the prompt with its pictures, the sampling options, what
    was generated with log-probabilities and the weight version of every token, the KDA state and the MLA
    latents. Nothing is pickled.
    """

    # Plain data: any process with the same model can go on with it.
    request: Request
    samples: list[PausedSample]
    finished: list[Completion]
    version: int
    cached_tokens: int = 0

    def to_bytes(self) -> tuple[bytes, bytes]:
        """(JSON in UTF-8, safetensors)."""
        # Tensors are numbered as they are met; the JSON says where each belongs.
        tensors: dict[str, Tensor] = {}

        def plain(value: Any) -> Any:
            """What JSON cannot hold: tensors go beside it, objects become their fields."""
            if isinstance(value, Tensor | np.ndarray):
                name = str(len(tensors))
                tensors[name] = torch.as_tensor(value).cpu().contiguous()
                return {TENSOR: name}
            return vars(value)

        # Any document will do as a prompt; what comes back is a TokenPrompt.
        prompt = self.request.prompt
        document = {
            "ids": torch.as_tensor(prompt.ids).long(),
            "patches": prompt.patches,
            "grids": prompt.grids,
            "media_positions": torch.as_tensor(prompt.media_positions).tolist(),
        }
        facts = {**vars(self), "format": FORMAT, "request": {**vars(self.request), "prompt": document}}
        return json.dumps(facts, default=plain).encode(), save(tensors)

    @classmethod
    def from_bytes(cls, facts: bytes, tensors: bytes) -> PausedRequest:
        """The reverse of `to_bytes`. Raises RequestError for anything else."""
        try:
            # Nothing here runs what it reads: JSON, safetensors, and constructors that check.
            found = load(tensors)

            def whole(fields: dict[str, Any]) -> Any:
                return found[fields[TENSOR]] if TENSOR in fields else fields

            known = json.loads(facts, object_hook=whole)
            if known.pop("format", None) != FORMAT:
                raise ValueError(f"expected the format {FORMAT!r}")
            request = known["request"]
            prompt = TokenPrompt(**request["prompt"])
            prompt.grids = tuple(map(tuple, prompt.grids))
            request |= {"prompt": prompt, "params": SamplingParams(**request["params"])}
            for entry in [*known["samples"], *known["finished"]]:
                if entry["routing"] is not None:
                    entry["routing"] = entry["routing"].numpy()
            known["samples"] = [PausedSample(**sample) for sample in known["samples"]]
            known["finished"] = [Completion(**completion) for completion in known["finished"]]
            return cls(**{**known, "request": Request(**request)})
        except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise RequestError(f"not a paused request: {type(error).__name__}: {error}") from None


@dataclass(slots=True)
class Event:
    """What a step did for one sample: its tokens since the last event, the text that became certain (bytes of
    an unfinished character and possible beginnings of a stop string are held back), and its completion when
    this was the end."""

    # Small and slotted: a step makes one for every sample that streams.
    request_id: str
    index: int
    tokens: tuple[Token, ...]
    text: str
    completion: Completion | None = None
    left: PausedSample | None = None
    """With the completion, where the request keeps states: what `Engine.submit` goes on from."""


@dataclass
class Handle:
    """What `submit` returns; filled as the request advances. `completions` is in sample order once `done`."""

    # A handle is filled by the engine; who submitted keeps it and looks when it likes.
    id: str
    samples: int
    completions: list[Completion] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.completions) == self.samples
