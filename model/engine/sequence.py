"""What the engine keeps on the host about a request: the ticket (one per request), its samples, and their
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

from earlyfusion.model.engine.images import picture_digests
from earlyfusion.model.engine.request import Completion, FinishReason, Handle, Request, RequestError, Token
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
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        waiting = len(self._ids) - self._settled
        if not final and now.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return
        self.text += now[len(before) :]
        self._context, self._settled = self._settled, len(self._ids)
        ends = [
            place
            for place in (self.text.find(stop, max(0, self._given - len(stop))) for stop in self.stop)
            if place >= 0
        ]
        if ends and not self.stopped:
            self.text, self.stopped = self.text[: min(ends)], True

    def _give(self, final: bool) -> str:
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((_overlap(self.text, stop) for stop in self.stop), default=0)
        piece = self.text[self._given : max(end, self._given)]
        self._given += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )


@dataclass(eq=False)
class Ticket:
    """A request on its way. key_ids: the prompt with pictures' content in place of their placeholders, for
    the prefix cache. stops, banned: of this request (banned None: the engine's usual set)."""

    request: Request
    handle: Handle
    ids: list[int]
    key_ids: np.ndarray
    media_positions: list[int]
    digests: list[bytes]
    stops: frozenset[int]
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
    """One continuation. length: tokens whose effect is in slot and pages. reserved: pages promised and not
    taken. siblings: samples to be forked from this one when its prompt has been read. saved: state to be put
    back."""

    ticket: Ticket
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
    told: int = 0
    banned_V: Tensor | None = None
    """What its grammar (and its request) forbids as the next token."""

    @property
    def context(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.ticket.ids) + len(self.ids)

    @property
    def target(self) -> int:
        """Where reading stops: the end of the prompt while siblings wait to be forked from there, else all
        that is known."""
        return len(self.ticket.ids) if self.siblings else self.context

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens start .. stop - 1."""
        prompt = len(self.ticket.ids)
        if start >= prompt:
            return self.ids[start - prompt : stop - prompt]
        return self.ticket.ids[start:stop] + self.ids[: max(0, stop - prompt)]

    def prefix_key(self, length: int) -> np.ndarray:
        """Key ids of the first `length` known tokens."""
        made = np.array(self.ids[: max(0, length - len(self.ticket.ids))], dtype=np.int64)
        return np.concatenate([self.ticket.key_ids[:length], made])

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.ticket.request.params.max_new_tokens - len(self.ids)

    def extend(
        self, ids: Sequence[int], logprobs: Sequence[float], logprobs1: Sequence[float], version: int
    ) -> None:
        """New tokens, chosen by the weights of `version`."""
        self.ids += ids
        self.logprobs += logprobs
        self.logprobs1 += logprobs1
        self.versions += [version] * len(ids)

    def untold(self) -> tuple[Token, ...]:
        """The tokens since the last call."""
        start, self.told = self.told, len(self.ids)
        known = (self.ids, self.logprobs, self.logprobs1, self.versions)
        return tuple(map(Token, *(values[start:] for values in known)))

    def completion(self, reason: FinishReason, error: str = "") -> Completion:
        request = self.ticket.request
        return Completion(
            request_id=request.id,
            index=self.index,
            ids=list(self.ids),
            logprobs=list(self.logprobs),
            logprobs1=list(self.logprobs1),
            versions=list(self.versions),
            text=self.stream.text,
            finish_reason=reason,
            prompt_tokens=len(self.ticket.ids),
            cached_tokens=self.ticket.cached_tokens,
            routing=np.concatenate(self.routing) if request.capture_routing and self.routing else None,
            resumes=tuple(self.resumes),
            error=error,
        )


@dataclass(frozen=True)
class House:
    """What the engine knows about every request. ends, silent: its stop and banned ids; media: the
    placeholder."""

    tokenizer: Decodes | None
    vocabulary: int
    ends: frozenset[int]
    silent: frozenset[int]
    media: int
    merge: tuple[int, int]


def house_of(model: NativeFusion, tokenizer: Decodes | None) -> House:
    """What holds for every request to this model.

    Raises ValueError for a tokenizer that knows more ids than the model embeds.
    """
    text, media = model.config.text, model.config.media_token_id
    merge = model.config.vision.merge_kernel_size
    if tokenizer is None:
        return House(None, text.vocab_size, frozenset({text.eos_token_id}), frozenset({media}), media, merge)
    special = tokenizer.special_ids
    largest = max([tokenizer.vocab_size - 1, *special.values()])
    if largest >= text.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, the model embeds vocab_size={text.vocab_size}; "
            "use the tokenizer the model was trained with"
        )
    ends = {text.eos_token_id, *(special[name] for name in (END_OF_MSG,) if name in special)}
    silent = {
        media,
        text.bos_token_id,
        text.pad_token_id,
        *(special[name] for name in MEDIA_TOKENS if name in special),
    }
    silent.update(range(tokenizer.vocab_size, text.vocab_size))  # rows of the embedding beyond the tokenizer
    return House(tokenizer, text.vocab_size, frozenset(ends), frozenset(silent - ends), media, merge)


def make_ticket(request: Request, house: House) -> Ticket:
    """Check a request and lay out its samples.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or pictures that do not fit the text.
    """
    prompt, params = request.prompt, request.params
    ids = [int(i) for i in torch.as_tensor(prompt.ids).tolist()]
    if not ids:
        raise RequestError(f"prompt {request.id} has no tokens; a prompt needs at least [BOS]")
    if min(ids) < 0 or max(ids) >= house.vocabulary:
        got = f"{min(ids)}..{max(ids)}"
        raise RequestError(
            f"request {request.id!r}: token ids must lie in 0..{house.vocabulary - 1}, got {got}"
        )
    positions = [int(i) for i in torch.as_tensor(prompt.media_positions).tolist()]
    digests = picture_digests(prompt.patches, prompt.grids)
    counts = [num_tokens(grid, house.merge) for grid in prompt.grids]
    pads = [i for i, token in enumerate(ids) if token == house.media]
    if pads != sorted(positions) or len(pads) != sum(counts):
        raise RequestError(
            f"request {request.id!r}: the pictures give {sum(counts)} features, the text holds {len(pads)}"
            f" <|media_pad|> and {len(positions)} media positions; encode text and pictures with the model's"
            " vision configuration"
        )
    stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else house.ends)
    banned = ((house.silent | set(params.banned_ids)) - stops) | {house.media}
    banned_V = None
    if banned != house.silent:
        banned_V = torch.zeros(house.vocabulary, dtype=torch.bool)
        banned_V[torch.tensor(sorted(i for i in banned if 0 <= i < house.vocabulary), dtype=torch.long)] = (
            True
        )
        if bool(banned_V.all()):
            raise RequestError(f"request {request.id!r}: every token is banned")
    handle = Handle(request.id, params.n)
    key_ids = _key_ids(ids, positions, digests, counts)
    foreseen = not params.stop and params.grammar is None and banned_V is None and len(stops) <= STOPS
    ticket = Ticket(request, handle, ids, key_ids, positions, digests, stops, banned_V, foreseen=foreseen)
    for index in range(params.n):
        key = sequence_key(params.seed, request.noise or request.id, index)
        ticket.samples.append(Sample(ticket, index, TextStream(house.tokenizer, params.stop), key))
    return ticket


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
