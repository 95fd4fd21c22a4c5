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

from earlyfusion.model.engine.requests import (
    Completion,
    FinishReason,
    Handle,
    PausedSample,
    Request,
    RequestError,
    Token,
)
from earlyfusion.model.engine.sampler import sequence_key
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import num_tokens

REPLACEMENT = "\ufffd"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
STOPS = 8
"""Stop ids of a sample that the device knows."""
LONGEST_CHARACTER = 4
"""Tokens that may be waited for when a character's bytes are not complete (UTF-8 has at most four)."""


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
    merge = model.config.vision.merge_kernel_size
    if tokenizer is None:
        stop = frozenset({text.eos_token_id})
        return TokenRules(None, text.vocab_size, stop, frozenset({media}), media, merge)

    special = tokenizer.special_ids
    largest = max([tokenizer.vocab_size - 1, *special.values()])
    if largest >= text.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, the model embeds vocab_size={text.vocab_size}; "
            "use the tokenizer the model was trained with"
        )

    stop = frozenset({text.eos_token_id, special.get(END_OF_MSG, text.eos_token_id)})
    banned = {media, text.bos_token_id, text.pad_token_id}
    banned.update(special[name] for name in MEDIA_TOKENS if name in special)
    banned.update(range(tokenizer.vocab_size, text.vocab_size))
    return TokenRules(tokenizer, text.vocab_size, stop, frozenset(banned - stop), media, merge)


class TextStream:
    """Text of a growing list of tokens, given out piece by piece.

    A piece is held back while it could still change: bytes of an unfinished character, and an ending that may
    be the beginning of a stop string. `stopped` turns True when a stop string appears; the text ends before
    it.
    """

    def __init__(self, tokenizer: Decodes | None, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.text, self._given = "", 0
        self._ids: list[int] = []
        self._settled = 0  # ids whose text is in `text`
        self._context = 0  # ids decoded together with new ones, so that joining rules of the tokenizer apply

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True) if self.tokenizer is not None else ""

    def keep(self, tokens: Sequence[int]) -> None:
        """Take tokens whose text is asked for later, by `push` or `close`."""
        self._ids += tokens

    def push(self, token: int) -> str:
        """Take one more token; returns the text that became certain."""
        self._ids.append(token)
        if self.tokenizer is None:
            return ""
        self._settle(final=False)
        return self._give(final=False)

    def close(self) -> str:
        """No token will follow; returns the rest."""
        self._settle(final=True)
        return self._give(final=True)

    def _settle(self, final: bool) -> None:
        # Decode the new ids after some old ones, and take what comes beyond the text of the old ones.
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        waiting = len(self._ids) - self._settled
        if not final and now.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return
        self.text += now[len(before) :]
        self._context, self._settled = self._settled, len(self._ids)

        starts = [self.text.find(stop, max(0, self._given - len(stop))) for stop in self.stop]
        found = [start for start in starts if start >= 0]
        if found and not self.stopped:
            self.text, self.stopped = self.text[: min(found)], True

    def _give(self, final: bool) -> str:
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((_overlap(self.text, stop) for stop in self.stop), default=0)
        piece = self.text[self._given : max(end, self._given)]
        self._given += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(eq=False)
class RequestState:
    """A request on its way. key_ids: the prompt with pictures' content in place of their placeholders, for
    the prefix cache. stop_ids, banned_V: of this request (banned_V None: the engine's usual set)."""

    request: Request
    handle: Handle
    ids: list[int]
    key_ids: np.ndarray
    media_positions: list[int]
    digests: list[bytes]
    stop_ids: frozenset[int]
    banned_V: Tensor | None
    samples: list[Sample] = field(default_factory=list)
    features: Tensor | None = None
    cached_tokens: int = 0
    foreseen: bool = False
    """Whether the device can tell by itself where a sample ends: by its length, or at one of up to STOPS ids.
    """
    shared: int | None = None
    """Of a prompt that is only scored: its first tokens that are kept for others (see score.py)."""

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
    saved: state to be put back. reported: tokens that events have told."""

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
    reported: int = 0

    @property
    def context(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.parent.ids) + len(self.ids)

    @property
    def target(self) -> int:
        """Where reading stops: the end of the prompt while siblings wait to be forked from there, else all
        that is known."""
        return len(self.parent.ids) if self.siblings else self.context

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.parent.request.params.max_new_tokens - len(self.ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens start .. stop - 1."""
        prompt = len(self.parent.ids)
        if start >= prompt:
            return self.ids[start - prompt : stop - prompt]
        return self.parent.ids[start:stop] + self.ids[: max(0, stop - prompt)]

    def prefix_key(self, length: int) -> np.ndarray:
        """Key ids of the first `length` known tokens."""
        generated = np.array(self.ids[: max(0, length - len(self.parent.ids))], dtype=np.int64)
        return np.concatenate([self.parent.key_ids[:length], generated])

    def extend(
        self, ids: Sequence[int], logprobs: Sequence[float], logprobs1: Sequence[float], version: int
    ) -> None:
        """New tokens, chosen by the weights of `version`."""
        self.ids += ids
        self.logprobs += logprobs
        self.logprobs1 += logprobs1
        self.versions += [version] * len(ids)

    def new_tokens(self) -> tuple[Token, ...]:
        """The tokens since the last call."""
        start, self.reported = self.reported, len(self.ids)
        known = (self.ids, self.logprobs, self.logprobs1, self.versions)
        return tuple(map(Token, *(values[start:] for values in known)))

    def paused(self, state: dict[str, Tensor]) -> PausedSample:
        """What leaves the engine of it."""
        return PausedSample(
            index=self.index,
            ids=list(self.ids),
            logprobs=list(self.logprobs),
            logprobs1=list(self.logprobs1),
            versions=list(self.versions),
            resumes=list(self.resumes),
            length=self.length if state else 0,
            state=state,
            routing=np.concatenate(self.routing) if self.routing and state else None,
        )

    def completion(self, reason: FinishReason) -> Completion:
        request = self.parent.request
        return Completion(
            request_id=request.id,
            index=self.index,
            ids=list(self.ids),
            logprobs=list(self.logprobs),
            logprobs1=list(self.logprobs1),
            versions=list(self.versions),
            text=self.stream.text,
            finish_reason=reason,
            prompt_tokens=len(self.parent.ids),
            cached_tokens=self.parent.cached_tokens,
            routing=np.concatenate(self.routing) if request.capture_routing and self.routing else None,
            resumes=tuple(self.resumes),
        )


def new_state(request: Request, rules: TokenRules) -> RequestState:
    """Check a request and lay out its samples.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or pictures that do not fit the text.
    """
    prompt, params = request.prompt, request.params
    ids = [int(i) for i in torch.as_tensor(prompt.ids).tolist()]
    if not ids:
        raise RequestError(f"prompt {request.id} has no tokens; a prompt needs at least [BOS]")
    if min(ids) < 0 or max(ids) >= rules.vocab_size:
        raise RequestError(
            f"request {request.id!r}: token ids must lie in 0..{rules.vocab_size - 1}, got"
            f" {min(ids)}..{max(ids)}"
        )

    positions = [int(i) for i in torch.as_tensor(prompt.media_positions).tolist()]
    digests = picture_digests(prompt.patches, prompt.grids)
    counts = [num_tokens(grid, rules.merge) for grid in prompt.grids]
    pads = [i for i, token in enumerate(ids) if token == rules.media_id]
    if pads != sorted(positions) or len(pads) != sum(counts):
        raise RequestError(
            f"request {request.id!r}: the pictures give {sum(counts)} features, the text holds {len(pads)}"
            f" <|media_pad|> and {len(positions)} media positions; encode text and pictures with the model's"
            " vision configuration"
        )

    stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else rules.stop_ids)
    state = RequestState(
        request,
        Handle(request.id, params.n),
        ids,
        _key_ids(ids, positions, digests, counts),
        positions,
        digests,
        stop_ids,
        _banned(request, rules, stop_ids),
    )
    state.foreseen = not params.stop and state.banned_V is None and len(stop_ids) <= STOPS
    for index in range(params.n):
        key = sequence_key(params.seed, request.noise or request.id, index)
        state.samples.append(Sample(state, index, TextStream(rules.tokenizer, params.stop), key))
    return state


def _banned(request: Request, rules: TokenRules, stop_ids: frozenset[int]) -> Tensor | None:
    """bool [V] of a request that bans other tokens than all do; the image placeholder always is."""
    banned = ((rules.banned_ids | set(request.params.banned_ids)) - stop_ids) | {rules.media_id}
    if banned == rules.banned_ids:
        return None
    known = sorted(i for i in banned if 0 <= i < rules.vocab_size)
    if len(known) == rules.vocab_size:
        raise RequestError(f"request {request.id!r}: every token is banned")
    banned_V = torch.zeros(rules.vocab_size, dtype=torch.bool)
    banned_V[torch.tensor(known, dtype=torch.long)] = True
    return banned_V


def picture_digests(patches: Tensor | None, grids: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """16 bytes per picture over its size and patches. Raises RequestError when patches and grids disagree."""
    counts = [t * h * w for t, h, w in grids]
    given = 0 if patches is None else int(patches.shape[0])
    if sum(counts) != given:
        raise RequestError(
            f"the prompt's grids {list(grids)[:4]} need {sum(counts)} patches, {given} were given"
        )
    if patches is None:
        return []
    digests = []
    for grid, part in zip(grids, patches.split(counts)):
        digest = hashlib.blake2b(repr(tuple(grid)).encode(), digest_size=16)
        digest.update(part.contiguous().cpu().numpy().tobytes())
        digests.append(digest.digest())
    return digests


def _key_ids(ids: list[int], positions: list[int], digests: list[bytes], counts: list[int]) -> np.ndarray:
    """int64 ids with a number for (picture, place in it) at every placeholder: other pictures make another
    key."""
    key = np.array(ids, dtype=np.int64)
    start = 0
    for digest, count in zip(digests, counts):
        salt = int.from_bytes(hashlib.blake2b(digest, digest_size=7).digest(), "little")
        key[np.array(positions[start : start + count])] = -1 - (salt + np.arange(count))
        start += count
    return key
