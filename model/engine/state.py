"""What the engine keeps on the host about a request: its state (one per request), its samples, and their
text.

Shapes: n tokens of a prompt, V vocabulary, L sparse layers, J chosen experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from earlyfusion.model.engine.requests import Handle, PausedSample, Prompt, Request, RequestError
from earlyfusion.model.engine.sampler import sequence_key
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import num_patches, num_tokens

REPLACEMENT = "\ufffd"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
STOPS = 8
"""Stop ids of a sample that the device knows."""
LONGEST_CHARACTER = 4
"""Tokens that may be waited for when a character's bytes are not complete (UTF-8 has at most four)."""
WRITTEN = ("ids", "logprobs", "logprobs1", "versions", "resumes")
"""What a sample, a paused sample and a completion all know of the generated tokens."""


class Decodes(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def special_ids(self) -> Any: ...
    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


@dataclass(frozen=True)
class TokenRules:
    """Which tokens end a text and which are never drawn, for every request to a model.

    stop_ids: end of text and of a message. banned_ids: tokens that only stand in inputs, and rows of the
    embedding that the tokenizer does not know. media_id: the image placeholder.
    """

    tokenizer: Decodes | None
    vocab_size: int
    stop_ids: frozenset[int]
    banned_ids: frozenset[int]
    media_id: int
    merge: tuple[int, int]


def token_rules(model: NativeFusion, tokenizer: Decodes | None) -> TokenRules:
    """Raises ValueError for a tokenizer that knows more ids than the model embeds."""
    text, media = model.config.text, model.config.media_token_id
    # Without a tokenizer only what the configuration names is known.
    stop, banned = {text.eos_token_id}, {media}
    if tokenizer is not None:
        # Ids beyond the embedding would be looked up outside its rows.
        special = tokenizer.special_ids
        largest = max([tokenizer.vocab_size - 1, *special.values()])
        if largest >= text.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {largest}, the model embeds vocab_size={text.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        stop.add(special.get(END_OF_MSG, text.eos_token_id))
        banned |= {text.bos_token_id, text.pad_token_id, *range(tokenizer.vocab_size, text.vocab_size)}
        banned |= {special[name] for name in MEDIA_TOKENS if name in special}
    merge = model.config.vision.merge_kernel_size
    return TokenRules(tokenizer, text.vocab_size, frozenset(stop), frozenset(banned - stop), media, merge)


class TextStream:
    """Text of a growing list of tokens, given out piece by piece.

    A piece is held back while it could still change: bytes of an unfinished character, and an ending that may
    be the beginning of a stop string. `stopped` turns True when a stop string appears; the text ends before
    it.
    """

    def __init__(self, tokenizer: Decodes | None, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.text, self.ids = "", list[int]()
        self._shown = 0  # characters of `text` that were given out
        self._settled = 0  # ids whose text is in `text`
        self._context = 0  # ids decoded together with new ones, so that joining rules of the tokenizer apply

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Take more tokens; returns the text that became certain, all of it when no token will follow."""
        self.ids += tokens
        if self.tokenizer is None:
            return ""

        # Decode the new ids after some old ones, and take what comes beyond the text of the old ones.
        before = self.tokenizer.decode(self.ids[self._context : self._settled], skip_special=True)
        now = self.tokenizer.decode(self.ids[self._context :], skip_special=True)
        unfinished = now.endswith(REPLACEMENT) and len(self.ids) - self._settled < LONGEST_CHARACTER
        if final or not unfinished:
            self.text += now[len(before) :]
            self._context, self._settled = self._settled, len(self.ids)
            starts = [self.text.find(stop, max(0, self._shown - len(stop))) for stop in self.stop]
            matches = [start for start in starts if start >= 0]
            if matches and not self.stopped:
                self.text, self.stopped = self.text[: min(matches)], True

        # Show what no later token can take back.
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((_overlap(self.text, stop) for stop in self.stop), default=0)
        piece = self.text[self._shown : end]
        self._shown += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return max(size for size in range(len(stop)) if text.endswith(stop[:size]))


@dataclass(eq=False)
class RequestState:
    """A request on its way.

    key_ids: the prompt with pictures' content in place of their placeholders, for the prefix cache. stop_ids,
    banned_V: of this request (banned_V None: the engine's usual set). borders: positions of the prompt where
    reading stops to leave a checkpoint. hits: lengths that a known beginning may have. foreseen: whether the
    device can tell by itself where a sample ends, by its length or at one of up to STOPS ids.
    """

    # Facts of the prompt, checked once; samples add what they write.
    request: Request
    handle: Handle
    ids: list[int]
    key_ids: np.ndarray
    media_positions: list[int]
    digests: list[bytes]
    stop_ids: frozenset[int]
    banned_V: Tensor | None
    foreseen: bool
    hits: range
    borders: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    features: Tensor | None = None
    cached_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens a sample can reach."""
        return len(self.ids) + self.request.params.max_new_tokens

    @property
    def alive(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.finished]


@dataclass(eq=False)
class Sample:
    """One continuation of `parent`. length: tokens whose effect is in slot and pages. reserved: pages
    promised and not taken. siblings: samples to be forked from this one when its prompt has been read.
    saved: state to be put back."""

    # Host side only: tensors of a sample lie in the slot and the pages named here.
    parent: RequestState
    index: int
    stream: TextStream
    key: int
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reserved: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs1: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    resumes: list[str] = field(default_factory=list)
    siblings: list[Sample] = field(default_factory=list)
    saved: dict[str, Tensor] | None = None
    routing: list[np.ndarray] = field(default_factory=list)
    finished: bool = False

    @property
    def context(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.parent.ids) + len(self.ids)

    @property
    def target(self) -> int:
        """Where reading stops: the end of the prompt while siblings wait to be forked from there, else all
        that is known."""
        # A fork copies the state at the prompt's end, so the lead must not read past it.
        return len(self.parent.ids) if self.siblings else self.context

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.parent.request.params.max_new_tokens - len(self.ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens start .. stop - 1."""
        prompt = len(self.parent.ids)
        if start >= prompt:  # a decode step asks this of every sample, and prompts are long
            return self.ids[start - prompt : stop - prompt]
        return self.parent.ids[start:stop] + self.ids[: max(0, stop - prompt)]

    def written(self) -> dict[str, Any]:
        """Copies of what WRITTEN names."""
        return {name: list(getattr(self, name)) for name in WRITTEN}

    def keep_state(self, paused: PausedSample) -> None:
        """Go on from this state, which is put back when the sample is admitted."""
        self.saved, self.length = paused.state, paused.length
        self.routing = [] if paused.routing is None else [paused.routing]

    def paused(self, state: dict[str, Tensor]) -> PausedSample:
        """What leaves the engine of it."""
        if not state:
            return PausedSample(index=self.index, **self.written(), length=0)
        # Only with a state: what is read again is recorded again.
        routing = np.concatenate(self.routing) if self.routing else None
        return PausedSample(
            index=self.index, **self.written(), length=self.length, state=state, routing=routing
        )


def new_state(request: Request, rules: TokenRules) -> RequestState:
    """Check a request and lay out its samples.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or pictures that do not fit the text.
    """
    prompt, params, name = request.prompt, request.params, f"request {request.id!r}"
    ids = torch.as_tensor(prompt.ids).tolist()
    if not ids:
        raise RequestError(f"prompt {request.id} has no tokens; a prompt needs at least [BOS]")
    if min(ids) < 0 or max(ids) >= rules.vocab_size:
        raise RequestError(
            f"{name}: token ids must lie in 0..{rules.vocab_size - 1}, got {min(ids)}..{max(ids)}"
        )

    positions = torch.as_tensor(prompt.media_positions).tolist()
    # Text and pictures encoded with different merge sizes would shift every later feature.
    counts = [num_tokens(grid, rules.merge) for grid in prompt.grids]
    pads = [i for i, token in enumerate(ids) if token == rules.media_id]
    if pads != sorted(positions) or len(pads) != sum(counts):
        raise RequestError(
            f"{name}: the pictures give {sum(counts)} features, the text holds {len(pads)}"
            f" <|media_pad|> and {len(positions)} media positions; encode text and pictures with the model's"
            " vision configuration"
        )

    # Another picture behind the same placeholders makes another key.
    key_ids, digests, start = np.array(ids, dtype=np.int64), picture_digests(prompt), 0
    for digest, count in zip(digests, counts):
        salt = int.from_bytes(digest[:7], "little")
        key_ids[positions[start : start + count]] = -1 - (salt + np.arange(count))
        start += count

    # A stop id is always allowed: a text must be able to end.
    stop_ids = frozenset(params.stop_ids)
    if not params.ignore_eos:
        stop_ids |= rules.stop_ids
    banned_V = _banned(request, rules, stop_ids)
    state = RequestState(
        request,
        Handle(request.id, params.n),
        ids,
        key_ids,
        positions,
        digests,
        stop_ids,
        banned_V,
        foreseen=not params.stop and banned_V is None and len(stop_ids) <= STOPS,
        hits=range(1, len(ids)),
    )
    for index in range(params.n):
        # Keyed by the request and not by a stream: neighbours and order change no draw.
        key = sequence_key(params.seed, request.noise or request.id, index)
        state.samples.append(Sample(state, index, TextStream(rules.tokenizer, params.stop), key))
    return state


def _banned(request: Request, rules: TokenRules, stop_ids: frozenset[int]) -> Tensor | None:
    """bool [V] of a request that bans other tokens than all do; the image placeholder always is."""
    # The placeholder stays banned even as a stop id: it stands for a picture that is not there.
    banned = ((rules.banned_ids | set(request.params.banned_ids)) - stop_ids) | {rules.media_id}
    if banned == rules.banned_ids:
        return None
    banned_V = torch.zeros(rules.vocab_size, dtype=torch.bool)
    banned_V[[i for i in banned if 0 <= i < rules.vocab_size]] = True
    if banned_V.all():
        raise RequestError(f"request {request.id!r}: every token is banned")
    return banned_V


def picture_digests(prompt: Prompt) -> list[bytes]:
    """16 bytes per picture over its size and patches. Raises RequestError when patches and grids disagree."""
    counts = [num_patches(grid) for grid in prompt.grids]
    patches = torch.empty(0) if prompt.patches is None else prompt.patches
    if sum(counts) != len(patches):
        raise RequestError(
            f"the prompt's grids {list(prompt.grids)[:4]} need {sum(counts)} patches, {len(patches)} were"
            " given"
        )
    digests = []
    for grid, part in zip(prompt.grids, patches.split(counts)):
        digest = hashlib.blake2b(repr(tuple(grid)).encode(), digest_size=16)
        # Content and not identity: the same picture in two requests is encoded once.
        digest.update(part.contiguous().cpu().numpy().tobytes())
        digests.append(digest.digest())
    return digests
