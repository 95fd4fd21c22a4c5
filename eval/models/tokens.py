"""What every model with token-level access shares: texts become ids, requests become rows for a backend.

    ScoreRequest     context and continuation split as lm-evaluation-harness splits them; continuations of one
                     context stand together, so that a backend reads it once
    RollingRequest   windows of the model's length, each the continuation of the beginning token
    GenerateRequest  a prompt with its room

A backend (engine.py, hf.py) brings its tokenizer, `score` and `write`.

Prompts of a benchmark share a long beginning and often all but a last word; encoding each of them whole costs
more than a small model's forward pass. `QuickEncoder` encodes the parts by themselves, and checks itself
against whole encodings.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.sample import Segment, Text
from earlyfusion.eval.protocol import (
    GenerateRequest,
    Generation,
    LogProb,
    Prompt,
    RollingRequest,
    ScoreRequest,
)

Encode = Callable[[str, bool], Sequence[int]]
"""(text, with the model's beginning and end tokens as it adds them by default) -> ids"""

FIRST_CHECKS, THEN_EVERY = 16, 512
REMEMBERED = 64
PREFIX_STEP = 64
"""Shared beginnings end where chunks of recurrent kernels do, so that results differ least from unshared
reading; shorter ones are not worth keeping."""


@dataclass(frozen=True)
class Piece:
    """Tokens to read; `media` is what the backend needs to fill image placeholders among them (None for plain
    text). shared: how many of the first ids begin other prompts as well (a hint)."""

    ids: tuple[int, ...]
    media: Any = None
    shared: int = 0


@dataclass
class Context:
    """A piece with the continuations asked of it, none of them empty."""

    piece: Piece
    continuations: list[tuple[int, ...]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """Of every continuation the place of its answer."""


@dataclass(frozen=True)
class Scored:
    """ln p of every token of a continuation, and whether each of them was the likeliest."""

    values: Sequence[float]
    greedy: bool


@dataclass(frozen=True)
class Opening:
    """A prompt to continue by at most `room` tokens."""

    piece: Piece
    request: GenerateRequest
    room: int


class TokenModel(ABC):
    """A Model (eval/protocol.py) on top of a backend's `score` and `write`.

    batch_size: most sequences at once; batch_tokens: most new tokens read at once (a single longer sequence
    still goes through). one_by_one: never more than one sequence in a call. Raises ValueError for sizes below
    1.
    """

    name = ""
    max_length: int | None = None
    capabilities = frozenset({"text", "score", "generate"})
    one_by_one = False

    def __init__(self, batch_size: int = 16, batch_tokens: int = 4096) -> None:
        if batch_size < 1 or batch_tokens < 1:
            raise ValueError(f"batch_size={batch_size}, batch_tokens={batch_tokens}: give at least 1")
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.quick = QuickEncoder(self.encode)

    # what a backend brings

    @abstractmethod
    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """Ids of a text; begin: with the tokens the model wants at the beginning of a document."""

    @property
    @abstractmethod
    def begin_id(self) -> int:
        """The token an empty context stands for."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @abstractmethod
    def score(self, contexts: Sequence[Context]) -> list[list[Scored]]:
        """Of every context one Scored a continuation. Order and company change no result."""

    @abstractmethod
    def write(self, openings: Sequence[Opening]) -> list[Generation]:
        """An answer to every opening, in order."""

    def encode_media(self, segments: Sequence[Segment]) -> Piece:
        """Ids and pictures of a prompt with media. Raises ValueError where the model reads text alone."""
        raise ValueError(f"{self.name} reads text alone; this prompt holds pictures or videos")

    def identity(self) -> dict[str, Any]:
        """See Model."""
        return {"name": self.name}

    @abstractmethod
    def forget(self) -> None:
        """Drop what is kept between calls (call after the weights have changed)."""

    # what it gets

    def count_tokens(self, text: str) -> int:
        """See Model."""
        return len(self.quick(text))

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """Ids of a prompt (never none: an empty prompt is the beginning token)."""
        text = plain_text(prompt)
        if text is None:
            return self.encode_media(prompt)  # type: ignore[arg-type]
        ids = self.quick(text, shared) or (self.begin_id,)
        return Piece(ids, shared=self._shared_ids(text, shared, ids))

    def loglikelihood(self, requests: Sequence[ScoreRequest]) -> list[LogProb]:
        """See Model."""
        pairs = [self.encode_pair(request) for request in requests]
        # Pictures are compared by identity: the continuations of one question share the object.
        keys = [
            piece.ids if piece.media is None else id(request.context)
            for request, (piece, _) in zip(requests, pairs)
        ]
        sizes = [len(request.continuation.encode("utf-8")) for request in requests]
        return self._score_pairs(pairs, keys, sizes)

    def rolling(self, requests: Sequence[RollingRequest]) -> list[LogProb]:
        """See Model."""
        # As many tokens as the model may see, each window after a beginning of its own.
        window = min(self.max_length or self.batch_tokens, self.batch_tokens)
        begin = Piece((self.begin_id,))
        windows: list[tuple[Piece, tuple[int, ...]]] = []
        ends = [0]
        for request in requests:
            ids = tuple(self.encode(request.text, False))
            windows += [(begin, ids[start : start + window]) for start in range(0, len(ids), window)]
            ends.append(len(windows))

        scored = self._score_pairs(windows, [begin.ids] * len(windows), [0] * len(windows))
        found = []
        for request, (start, stop) in zip(requests, pairwise(ends)):
            parts = scored[start:stop]
            total, tokens = sum(part.sum for part in parts), sum(part.tokens for part in parts)
            size = len(request.text.encode("utf-8"))
            found.append(LogProb(float(total), tokens, size, all(part.greedy for part in parts)))
        return found

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See Model."""
        results: list[Generation | None] = []
        openings = []
        for request in requests:
            piece = self.encode_prompt(request.prompt, request.shared)
            room = request.max_new_tokens
            if self.max_length is not None:
                room = min(room, self.max_length - len(piece.ids))
            if room > 0:
                openings.append(Opening(piece, request, room))
                results.append(None)
            else:
                results.append(Generation("", 0, "refused" if request.max_new_tokens > 0 else "length"))

        written = iter(self.write(openings) if openings else [])
        return [next(written) if result is None else result for result in results]

    # contexts

    def encode_pair(self, request: ScoreRequest) -> tuple[Piece, tuple[int, ...]]:
        """(context, ids of the continuation)."""
        text = plain_text(request.context)
        # An empty context stands for the beginning of a document.
        if text == "":
            ids = tuple(self.encode(request.continuation, False))
            if ids[:1] == (self.begin_id,):
                return Piece(ids[:1]), ids[1:]
            return Piece((self.begin_id,)), ids
        if text is not None:
            context, continuation = split_pair(self.quick, text, request.continuation, request.shared)
            shared = self._shared_ids(text, request.shared, tuple(context))
            return Piece(tuple(context), shared=shared), tuple(continuation)
        piece = self.encode_media(request.context)  # type: ignore[arg-type]
        return piece, tuple(self.encode(request.continuation, False))

    def _shared_ids(self, text: str, shared: int, ids: tuple[int, ...]) -> int:
        """How many of the ids stand for the first `shared` characters, whatever follows them.

        The last two ids of the shared text may join with what follows; a context keeps one token to read.
        """
        if shared <= 0:
            return 0
        # The shared text is encoded once for all requests that begin with it.
        head = self.quick.remembered(text[:shared])
        count = max(0, min(len(head) - 2, len(ids) - 1)) // PREFIX_STEP * PREFIX_STEP
        return count if ids[:count] == head[:count] else 0

    def _score_pairs(
        self, pairs: Sequence[tuple[Piece, tuple[int, ...]]], keys: Sequence[Hashable], sizes: Sequence[int]
    ) -> list[LogProb]:
        """One LogProb a pair; continuations of contexts with one key (and length) are asked together."""
        results = [LogProb(0.0, 0, size, True) for size in sizes]
        contexts: dict[Any, Context] = {}
        for owner, ((piece, continuation), key) in enumerate(zip(pairs, keys)):
            if not continuation:
                continue
            excess = 0
            if self.max_length is not None:  # a context that is too long loses its beginning
                excess = max(0, len(piece.ids) + len(continuation) - (self.max_length + 1))
                if excess:
                    piece = Piece(piece.ids[excess:], piece.media)
            context = contexts.setdefault((key, excess), Context(piece))
            context.continuations.append(continuation)
            context.owners.append(owner)

        rows = list(contexts.values())
        for context, scored in zip(rows, self.score(rows) if rows else []):
            for owner, one in zip(context.owners, scored):
                total = float(sum(one.values))
                results[owner] = LogProb(total, len(one.values), sizes[owner], one.greedy)
        return results


def plain_text(prompt: Prompt) -> str | None:
    """The text of a prompt without media, else None."""
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(segment, Text) for segment in prompt):
        return "".join(segment.text for segment in prompt if isinstance(segment, Text))
    return None


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(the text before the first of the stop strings, whether there was one)."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class QuickEncoder:
    """encode(text, True), from parts that are cut after `shared` characters and after the last line end.

    Parts are cut only where a line feed stands before a character that is no blank: there pre-tokenizers
    split anyway. Every cut is compared with the whole encoding for the first texts and now and then
    afterwards; after one difference (a tokenizer that marks word starts, or joins over line ends) texts are
    encoded whole for ever.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._calls = 0
        self._parts: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self.splits = True

    def __call__(self, text: str, shared: int = 0) -> tuple[int, ...]:
        """Ids of the whole text, with the beginning token the tokenizer adds by default."""
        # One part is the whole text: nothing to join, nothing to check.
        parts = self._cut(text, shared) if self.splits else [text]
        if len(parts) == 1:
            return tuple(self._encode(text, True))

        ids = self._part(parts[0], True) + sum((self._part(part, False) for part in parts[1:-1]), ())
        ids += tuple(self._encode(parts[-1], False))
        # Trust, but look now and then.
        self._calls += 1
        if self._calls <= FIRST_CHECKS or self._calls % THEN_EVERY == 0:
            whole = tuple(self._encode(text, True))
            self.splits = whole == ids
            return whole
        return ids

    def remembered(self, text: str) -> tuple[int, ...]:
        """Ids of a text that will be asked for again (a shared beginning)."""
        return self._part(text, True)

    def _cut(self, text: str, shared: int) -> list[str]:
        places = [place for place in (shared, text.rfind("\n") + 1) if _splittable(text, place)]
        edges = [0, *sorted(set(places)), len(text)]
        return [text[a:b] for a, b in pairwise(edges)]

    def _part(self, text: str, begin: bool) -> tuple[int, ...]:
        key = (text, begin)
        ids = self._parts.get(key)
        if ids is None:
            ids = self._parts[key] = tuple(self._encode(text, begin))
            if len(self._parts) > REMEMBERED:
                self._parts.popitem(last=False)
        else:
            self._parts.move_to_end(key)
        return ids


def _splittable(text: str, place: int) -> bool:
    return 0 < place < len(text) and text[place - 1] == "\n" and not text[place].isspace()


def split_pair(
    encode: QuickEncoder, context: str, continuation: str, shared: int
) -> tuple[list[int], list[int]]:
    """(context ids, continuation ids) for a context that is not empty.

    Blanks at the end of the context are moved to the continuation; the continuation is what the whole has
    beyond as many ids as the context alone has (lm-evaluation-harness, TemplateLM._encode_pair).
    """
    # Most tokenizers put a blank before the word that follows it.
    bare = context.rstrip()
    if len(bare) < len(context):
        context, continuation = bare, context[len(bare) :] + continuation
    whole, alone = encode(context + continuation, shared), encode(context, shared)
    return list(alone), list(whole[len(alone) :])


# what was evaluated


def files_hash(directory: Path) -> str:
    """sha256 over the weight files of a directory, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(f for f in directory.iterdir() if f.suffix in (".safetensors", ".bin", ".gguf")):
        with file.open("rb") as handle:
            for block in iter(lambda: handle.read(1 << 22), b""):
                digest.update(block)
    return digest.hexdigest()


def tensors_hash(model: torch.nn.Module) -> str:
    """sha256 over names and values of a model's parameters and persistent buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
