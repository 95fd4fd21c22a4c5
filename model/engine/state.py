"""What the engine keeps on the host about a request: its state, its samples, their text, and the features of
its pictures.

Shapes: n tokens of a prompt, V vocabulary, L sparse layers, J chosen experts, M image features.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from earlyfusion.model.config import FusionConfig
from earlyfusion.model.engine.requests import Handle, PausedSample, Prompt, Request, RequestError
from earlyfusion.model.engine.sampler import sequence_key
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

REPLACEMENT = "\ufffd"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
STOPS = 8
"""Stop ids of a sample that the device knows."""
LONGEST_CHARACTER = 4
"""Tokens that may be waited for when a character's bytes are not complete (UTF-8 has at most four)."""
WRITTEN = ("ids", "logprobs", "logprobs1", "versions")
"""What a sample, a paused sample and a completion all know of the generated tokens."""
TOGETHER = 65_536
"""Patches in one pass of the tower on a GPU, but for a picture that has more."""


@dataclass(frozen=True)
class TokenRules:
    """Which tokens end a text and which are never drawn, for every request to a model.

    stop_ids: end of text and of a message. banned_ids: tokens that only stand in inputs, and rows of the
    embedding that the tokenizer does not know.
    """

    config: FusionConfig
    tokenizer: Any
    stop_ids: frozenset[int]
    banned_ids: frozenset[int]


def token_rules(model: NativeFusion, tokenizer: Any) -> TokenRules:
    """Raises ValueError for a tokenizer that knows more ids than the model embeds."""
    text = model.config.text
    # Without a tokenizer only what the configuration names is known.
    stop, banned = {text.eos_token_id}, {model.config.media_token_id}
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
    return TokenRules(model.config, tokenizer, frozenset(stop), frozenset(banned - stop))


class TextStream:
    """Text of a growing list of tokens, given out piece by piece.

    A piece is held back while it could still change: bytes of an unfinished character, and an ending that may
    be the beginning of a stop string. `stopped` turns True when a stop string appears; the text ends before
    it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
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
    pictures: list[Picture]
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

    def paused(self, state: dict[str, Tensor]) -> PausedSample:
        """What leaves the engine of it."""
        paused = PausedSample(self.index, **self.written(), length=0)
        # Only with a state: what is read again is recorded again.
        if state:
            paused.state, paused.length = state, self.length
            paused.routing = np.concatenate(self.routing) if self.routing else None
        return paused


def new_state(request: Request, rules: TokenRules) -> RequestState:
    """Check a request and lay out its samples.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or pictures that do not fit the text.
    """
    prompt, params, name = request.prompt, request.params, f"request {request.id!r}"
    vocabulary, media = rules.config.text.vocab_size, rules.config.media_token_id
    ids = torch.as_tensor(prompt.ids).tolist()
    if not ids:
        raise RequestError(f"prompt {request.id} has no tokens; a prompt needs at least [BOS]")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise RequestError(f"{name}: token ids must lie in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")

    # Text and pictures encoded with different merge sizes would shift every later feature.
    positions, pictures = torch.as_tensor(prompt.media_positions).tolist(), pictures_of(prompt)
    counts = [num_tokens(each.grid, rules.config.vision.merge_kernel_size) for each in pictures]
    pads = [i for i, token in enumerate(ids) if token == media]
    if pads != sorted(positions) or len(pads) != sum(counts):
        raise RequestError(
            f"{name}: the pictures give {sum(counts)} features, the text holds {len(pads)}"
            f" <|media_pad|> and {len(positions)} media positions; encode text and pictures with the model's"
            " vision configuration"
        )

    # Another picture behind the same placeholders makes another key.
    key_ids, start = np.array(ids, dtype=np.int64), 0
    for picture, count in zip(pictures, counts):
        salt = int.from_bytes(picture.digest[:7], "little")
        key_ids[positions[start : start + count]] = -1 - (salt + np.arange(count))
        start += count

    # A stop id is always allowed: a text must be able to end. But the placeholder stays banned even so: it
    # stands for a picture that is not there.
    stop_ids = frozenset(params.stop_ids)
    if not params.ignore_eos:
        stop_ids |= rules.stop_ids
    banned, banned_V = ((rules.banned_ids | set(params.banned_ids)) - stop_ids) | {media}, None
    if banned != rules.banned_ids:
        banned_V = torch.zeros(vocabulary, dtype=torch.bool)
        banned_V[[i for i in banned if 0 <= i < vocabulary]] = True
        if banned_V.all():
            raise RequestError(f"{name}: every token is banned")

    state = RequestState(
        request,
        Handle(request.id, params.n),
        ids,
        key_ids,
        positions,
        pictures,
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


# ---- pictures


class Picture(NamedTuple):
    """A picture of a prompt, with 16 bytes that tell its content."""

    digest: bytes
    grid: Grid
    patches: Tensor


def pictures_of(prompt: Prompt) -> list[Picture]:
    """Raises RequestError when patches and grids disagree."""
    counts = [num_patches(grid) for grid in prompt.grids]
    patches = torch.empty(0) if prompt.patches is None else prompt.patches
    if sum(counts) != len(patches):
        raise RequestError(
            f"the prompt's grids {list(prompt.grids)[:4]} need {sum(counts)} patches, {len(patches)} were"
            " given"
        )
    pictures = []
    for grid, part in zip(prompt.grids, patches.split(counts)):
        digest = hashlib.blake2b(repr(tuple(grid)).encode(), digest_size=16)
        # Content and not identity: the same picture in two requests is encoded once.
        digest.update(part.contiguous().cpu().numpy().tobytes())
        pictures.append(Picture(digest.digest(), grid, part))
    return pictures


class ImageMemory:
    """Features [M, D] of at most `limit` pictures by their digest. `encoded` and `hits` count its work.

    together: patches in one pass of the tower. 0: every picture by itself, so that its features do not depend
    on what else is asked at the time; on a GPU, where a tower over small pictures is all launches, those of
    all new requests go together.
    """

    def __init__(self, model: NativeFusion, limit: int, together: int) -> None:
        self.model, self.limit, self.together = model, limit, together
        self.encoded = self.hits = 0
        self.features: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.no_grad()
    def attach(self, states: Sequence[RequestState]) -> None:
        """Give features to requests that have pictures still to be read."""
        # A resumed answer has read its pictures; encoding them again would be work for nobody.
        wanted, waiting = [], []
        for state in states:
            last = max(state.media_positions, default=-1)
            if any(sample.slot and sample.length <= last for sample in state.alive):
                waiting.append(state)
                wanted += state.pictures
        missing = {each.digest: each for each in wanted if each.digest not in self.features}
        self.encoded += len(missing)
        self.hits += len(wanted) - len(missing)

        # A pass that is full goes first; a picture that is larger goes alone.
        passes: list[list[Picture]] = []
        room = 0
        for each in missing.values():
            if not passes or len(each.patches) > room:
                passes.append([])
                room = self.together
            passes[-1].append(each)
            room -= len(each.patches)
        merge = self.model.config.vision.merge_kernel_size
        for pictures in passes:
            patches = torch.cat([each.patches for each in pictures])
            grids = [each.grid for each in pictures]
            found = self.model.encode_images(patches.to(self.model.device), grids)
            parts = found.split([num_tokens(grid, merge) for grid in grids])
            self.features |= {each.digest: part for each, part in zip(pictures, parts)}

        # What was just used is kept longest.
        for each in wanted:
            self.features.move_to_end(each.digest)
        for state in waiting:
            state.features = torch.cat([self.features[each.digest] for each in state.pictures])
        while len(self.features) > self.limit:
            self.features.popitem(last=False)
