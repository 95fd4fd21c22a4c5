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

Choosing tokens so that the choice does not depend on anything but the request.

A token is drawn as argmax_v (logit_v / temperature + g_v) with Gumbel noise g (equal to sampling from the
softmax). The noise is not a stream but a function of (seed, request, sample, position, v): whatever the
batch, the chunking of the prompt, a pause or a move to another engine, the same token meets the same noise.
So "lossless" can be tested as equality of tokens, up to rounding of the logits.

The function is an integer hash: splitmix64 of the host key and the position makes two 32-bit words, and two
rounds of a 32-bit finaliser (xor-shift and multiply) mix the token id into them. Everything runs on the
device of the logits.

Shapes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from earlyfusion.kernels.cpu.program import sample, takes
from earlyfusion.kernels.errors import UserError

TOP = 20
"""Most of the likeliest tokens that are told with a token."""
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
    grids: Any
    media_positions: Any

    # Read-only, for prompts that decode their pictures when they are asked for them.
    @property
    def patches(self) -> Tensor | None: ...


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
    image placeholder). logprobs: fill the log-probabilities. top_logprobs: so many of the likeliest tokens in
    every token of an event, with logprobs. n: samples of the one prompt, which is read once.

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
    top_logprobs: int = 0

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
            ("top_logprobs", 0 <= self.top_logprobs <= self.logprobs * TOP, f"0 to {TOP}, with logprobs"),
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
    done for every token. keep_state: a sample that is not cancelled leaves its state behind (`Event.left`),
    for a request that goes on from it; "cut": only one that its token limit ended. numbers: of the samples,
    for their noise, where not 0 to n - 1.

    Raises RequestError for numbers that are not n.
    """

    # The id is what a caller knows a request by, and (without `noise`) what its samples are drawn with.
    id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    capture_routing: bool = False
    noise: str = ""
    pieces: bool = True
    keep_state: bool | Literal["cut"] = False
    numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.numbers and len(self.numbers) != self.params.n:
            raise RequestError(
                f"request {self.id!r}: {len(self.numbers)} numbers for {self.params.n} samples"
            )


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
    NaN unless the request asked for them. version: of the weights that computed its logits. top: the
    likeliest tokens in its place as (id, log-probability at temperature 1), as many as were asked for."""

    # Two log-probabilities: what it was drawn with, and what a trainer computes of it.
    id: int
    logprob: float
    logprob1: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


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


# ---- the choice of a token

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int, bits: int = 64) -> int:
    """The two's complement number with the same bits, as torch integers want it."""
    # torch has no unsigned 64-bit arithmetic; two's complement multiplies to the same bits.
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def sequence_key(seed: int, request_id: str, sample: int) -> int:
    """A signed 64-bit key of one sample of one request; equal on every machine."""
    text = f"{seed & _MASK64}|{sample}|{request_id}".encode()
    return _signed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift of signed integers."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    """The output function of splitmix64 on int64."""
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31, 64)


def _mix32_(x: Tensor) -> Tensor:
    """A 32-bit finaliser in place on int32: every input bit moves every output bit with probability near
    1/2."""
    x ^= _shift_right(x, 16, 32)
    x *= _signed(0x7FEB352D, 32)
    x ^= _shift_right(x, 15, 32)
    x *= _signed(0x846CA68B, 32)
    x ^= _shift_right(x, 16, 32)
    return x


def gumbel(keys_B: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [B, V] fp32 of the generated token at each position (0 is the first) of each
    sequence."""
    # One word per sequence and position; the token id is mixed in afterwards, in 32 bits.
    word_B = _splitmix(keys_B + positions_B * _signed(_GOLDEN))
    low_B1 = word_B.to(torch.int32).unsqueeze(1)
    high_B1 = (word_B >> 32).to(torch.int32).unsqueeze(1)
    token_V = torch.arange(vocabulary, dtype=torch.int32, device=keys_B.device) * _signed(0x9E3779B9, 32)
    x_BV = _mix32_(token_V + low_B1)
    x_BV ^= high_B1
    # 31 bits, small numbers exactly: u near 0 becomes the large
    # noise that decides, so it needs the fine steps there
    u_BV = (
        _mix32_(x_BV)
        .bitwise_and_(0x7FFFFFFF)
        .to(torch.float32)
        .add_(0.5)
        .mul_(2.0**-31)
        .clamp_(max=1 - 2.0**-24)
    )
    return u_BV.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Needs:
    """What a batch needs at all, known on the host, so that nothing else is computed."""

    drawn: bool
    top_p: bool
    min_p: bool
    logprobs: bool
    top: bool = False


@dataclass(frozen=True)
class Controls:
    """Sampling of every row. keys_B int64, positions_B int64 (generated tokens so far), the rest fp32 [B]."""

    keys_B: Tensor
    positions_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    needs: Needs


def restrict(scaled_BV: Tensor, controls: Controls) -> Tensor:
    """-inf outside the top-p and min-p sets of softmax(scaled); in place where that is possible.

    top-p: the smallest set of likeliest tokens whose mass reaches p (ties: smaller ids first). min-p:
    probability at least p times the largest. The likeliest token always stays.
    """
    if controls.needs.min_p:
        floor_B1 = scaled_BV.amax(-1, keepdim=True) + controls.min_p_B.log().unsqueeze(1)
        limited_BV = scaled_BV.masked_fill(scaled_BV < floor_B1, float("-inf"))
    else:
        limited_BV = scaled_BV
    if not controls.needs.top_p:
        return limited_BV
    # Stable: ties fall to smaller ids, on every device alike.
    ordered_BV, ids_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = ordered_BV.double().softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV  # mass of the likelier tokens; 0 for the first
    # a row with p = 1 keeps everything: its cumulated mass may round to 1 early
    p_B1 = controls.top_p_B.double().unsqueeze(1)
    outside_BV = (before_BV >= p_B1) & (p_B1 < 1.0)
    return limited_BV.masked_fill(torch.zeros_like(outside_BV).scatter_(1, ids_BV, outside_BV), float("-inf"))


def choose(logits_BV: Tensor, controls: Controls, banned: Tensor) -> Tensor:
    """Chosen ids and their log-probabilities as one float64 tensor [3, B] (ids are exact in it; one copy to
    the host).

    banned: int64 ids for all rows, or bool [B, V]. fp32 logits are overwritten unless needs.logprobs. Row 1:
    log-probability under the distribution drawn from (0 for greedy rows). Row 2: log softmax of the untouched
    logits. Rows 1 and 2 are NaN unless needs.logprobs. On a CPU with a C++ compiler kernels/cpu/sample.cpp
    does this for fp32 logits; its noise differs from `gumbel` by rounding.
    """
    needs = controls.needs
    if takes(logits_BV):
        each = (controls.keys_B, controls.positions_B, controls.temperature_B, controls.top_p_B)
        return sample(logits_BV, *each, controls.min_p_B, banned, drawn=needs.drawn, logprobs=needs.logprobs)

    # Without log-probabilities nobody looks at the logits again, and they may be overwritten.
    raw_BV, known = logits_BV.float(), needs.logprobs
    allowed_BV = raw_BV.clone() if known else raw_BV
    if banned.dtype == torch.bool:
        allowed_BV.masked_fill_(banned, float("-inf"))
    else:
        allowed_BV.index_fill_(1, banned, float("-inf"))

    if not needs.drawn:
        ids_B = allowed_BV.argmax(-1)
        scaled_BV = None
    else:
        greedy_B1 = (controls.temperature_B == 0).unsqueeze(1)
        scaled_BV = allowed_BV / controls.temperature_B.unsqueeze(1).masked_fill(greedy_B1, 1.0)
        scaled_BV = restrict(scaled_BV, controls)
        noise_BV = gumbel(controls.keys_B, controls.positions_B, raw_BV.shape[1]).masked_fill_(greedy_B1, 0.0)
        ids_B = noise_BV.add_(scaled_BV).argmax(-1)

    out_3B = torch.full((3, ids_B.shape[0]), float("nan"), dtype=torch.float64, device=ids_B.device)
    out_3B[0] = ids_B
    if known:
        at_B1 = ids_B.unsqueeze(1)
        out_3B[2] = (raw_BV.gather(1, at_B1) - raw_BV.logsumexp(-1, keepdim=True)).squeeze(1)
        if scaled_BV is None:
            out_3B[1] = 0.0
        else:
            drawn_B1 = scaled_BV.gather(1, at_B1) - scaled_BV.logsumexp(-1, keepdim=True)
            out_3B[1] = drawn_B1.masked_fill(controls.temperature_B.unsqueeze(1) == 0, 0.0).squeeze(1)
    return out_3B


def likeliest(logits_BV: Tensor) -> Tensor:
    """The TOP likeliest tokens of every row (all of a smaller vocabulary): float64 [2 TOP, B], ids above
    their log-probabilities at temperature 1, to stand below what `choose` returns."""
    top = logits_BV.float().log_softmax(-1).topk(min(TOP, logits_BV.shape[1]))
    return torch.cat([top.indices.T.double(), top.values.T.double()])
