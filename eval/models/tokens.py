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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from earlyfusion.data.sample import Segment, Text
from earlyfusion.eval.protocol import (
    GenerateRequest,
    Generation,
    LogProb,
    Prompt,
    RollingRequest,
    ScoreRequest,
    prompt_text,
)

Ids = tuple[int, ...]
Encode = Callable[[str, bool], Sequence[int]]
"""(text, with the model's beginning and end tokens as it adds them by default) -> ids"""

FIRST_CHECKS, THEN_EVERY = 16, 512
REMEMBERED = 64


@dataclass(frozen=True)
class Piece:
    """Tokens to read; `media` is what the backend needs to fill image placeholders among them (None for plain
    text). shared: how many of the first ids begin other prompts as well (a hint)."""

    ids: Ids
    media: Any = None
    shared: int = 0


@dataclass
class Context:
    """A piece with the continuations asked of it, none of them empty. owners: of every continuation the place
    of its answer."""

    piece: Piece
    continuations: list[Ids] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


class Scored(NamedTuple):
    """ln p of every token of a continuation, and whether each of them was the likeliest."""

    values: Sequence[float]
    greedy: bool


class Opening(NamedTuple):
    """A prompt to continue by at most `room` tokens."""

    piece: Piece
    request: GenerateRequest
    room: int


class TokenModel(ABC):
    """A Model (eval/protocol.py) on top of a backend's `score` and `write`.

    batch_size: most sequences at once; batch_tokens: most new tokens read at once (a single longer sequence
    still goes through). one_by_one: never more than one sequence in a call.
    """

    name = ""
    begin_id: int
    """The token an empty context stands for."""
    max_length: int | None = None
    capabilities = frozenset({"text", "score", "generate"})
    one_by_one = False
    prefix_step = 1
    """Shared beginnings end at whole multiples of this."""

    def __init__(self, batch_size: int = 16, batch_tokens: int = 4096) -> None:
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.quick = QuickEncoder(self.encode)

    # what a backend brings

    @abstractmethod
    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """Ids of a text; begin: with the tokens the model wants at the beginning of a document."""

    @abstractmethod
    def score(self, contexts: Sequence[Context]) -> list[list[Scored]]:
        """Of every context one Scored a continuation. Order and company change no result."""

    @abstractmethod
    def write(self, openings: Sequence[Opening]) -> list[Generation]:
        """An answer to every opening, in order."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is kept between calls (call after the weights have changed)."""

    def encode_media(self, segments: Sequence[Segment]) -> Piece:
        """Ids and pictures of a prompt with media. Raises ValueError where the model reads text alone."""
        raise ValueError(f"{self.name} reads text alone; this prompt holds pictures or videos")

    # what it gets

    def count_tokens(self, text: str) -> int:
        """See Model."""
        return len(self.quick(text))

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """Ids of a prompt (never none: an empty prompt is the beginning token)."""
        if has_media(prompt):
            return self.encode_media(prompt)  # type: ignore[arg-type]
        text = prompt_text(prompt)
        ids = self.quick(text, shared) or (self.begin_id,)
        return Piece(ids, shared=self._shared_ids(text, shared, ids))

    def loglikelihood(self, requests: Sequence[ScoreRequest]) -> list[LogProb]:
        """See Model."""
        pairs, keys, sizes = [], [], []
        for request in requests:
            piece, continuation = self.encode_pair(request)
            pairs.append((piece, continuation))
            # Pictures are compared by identity: the continuations of one question share the object.
            keys.append(piece.ids if piece.media is None else id(request.context))
            sizes.append(len(request.continuation.encode()))
        return self._score_pairs(pairs, keys, sizes)

    def rolling(self, requests: Sequence[RollingRequest]) -> list[LogProb]:
        """See Model."""
        # As many tokens as the model may see, each window after a beginning of its own.
        window = min(self.max_length or self.batch_tokens, self.batch_tokens)
        begin = Piece((self.begin_id,))
        pairs, ends = [], [0]
        for request in requests:
            ids = tuple(self.encode(request.text, False))
            pairs += [(begin, ids[start : start + window]) for start in range(0, len(ids), window)]
            ends.append(len(pairs))

        scored = self._score_pairs(pairs, [begin.ids] * len(pairs), [0] * len(pairs))
        found = []
        for request, (start, stop) in zip(requests, pairwise(ends)):
            parts = scored[start:stop]
            total, tokens = sum((part.sum for part in parts), 0.0), sum(part.tokens for part in parts)
            greedy = all(part.greedy for part in parts)
            found.append(LogProb(total, tokens, len(request.text.encode()), greedy))
        return found

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See Model."""
        results: dict[int, Generation] = {}
        openings: dict[int, Opening] = {}
        for place, request in enumerate(requests):
            piece = self.encode_prompt(request.prompt, request.shared)
            # What the model's window leaves, if it has one.
            room = request.max_new_tokens
            if self.max_length is not None:
                room = min(room, self.max_length - len(piece.ids))
            if room > 0:
                openings[place] = Opening(piece, request, room)
            else:
                # A prompt that leaves no room is told, never cut: it would be another question.
                results[place] = Generation("", 0, "refused")
        if openings:
            results |= zip(openings, self.write(list(openings.values())))
        return [results[place] for place in range(len(requests))]

    # contexts

    def encode_pair(self, request: ScoreRequest) -> tuple[Piece, Ids]:
        """(context, ids of the continuation)."""
        if has_media(request.context):
            # Behind a picture nothing can join, so the parts are encoded by themselves.
            piece = self.encode_media(request.context)  # type: ignore[arg-type]
            return piece, tuple(self.encode(request.continuation, False))
        text = prompt_text(request.context)
        if text:
            context, continuation = split_pair(self.quick, text, request.continuation, request.shared)
            return Piece(context, shared=self._shared_ids(text, request.shared, context)), continuation

        # An empty context stands for the beginning of a document.
        ids = tuple(self.encode(request.continuation, False))
        return Piece((self.begin_id,)), ids[ids[:1] == (self.begin_id,) :]

    def _shared_ids(self, text: str, shared: int, ids: Ids) -> int:
        """How many of the ids stand for the first `shared` characters, whatever follows them.

        The last two ids of the shared text may join with what follows; a context keeps one token to read.
        """
        if shared <= 0:
            return 0
        # The shared text is encoded once for all requests that begin with it.
        head = self.quick.part(text[:shared], True)
        count = max(0, min(len(head) - 2, len(ids) - 1)) // self.prefix_step * self.prefix_step
        return count if ids[:count] == head[:count] else 0

    def _score_pairs(
        self, pairs: Sequence[tuple[Piece, Ids]], keys: Sequence[Hashable], sizes: Sequence[int]
    ) -> list[LogProb]:
        """One LogProb a pair; continuations of contexts with one key (and length) are asked together."""
        results = [LogProb(0.0, 0, size, True) for size in sizes]
        contexts: dict[Any, Context] = {}
        for owner, ((piece, continuation), key) in enumerate(zip(pairs, keys)):
            if not continuation:
                continue
            excess = 0
            if self.max_length is not None:
                excess = max(0, len(piece.ids) + len(continuation) - (self.max_length + 1))
            if excess:  # a context that is too long loses its beginning
                piece = Piece(piece.ids[excess:], piece.media)
            context = contexts.setdefault((key, excess), Context(piece))
            context.continuations.append(continuation)
            context.owners.append(owner)

        rows = list(contexts.values())
        for context, scored in zip(rows, self.score(rows) if rows else []):
            for owner, (values, greedy) in zip(context.owners, scored):
                results[owner] = LogProb(float(sum(values)), len(values), sizes[owner], greedy)
        return results


def has_media(prompt: Prompt) -> bool:
    """Whether a prompt shows anything but text."""
    return not isinstance(prompt, str) and not all(isinstance(segment, Text) for segment in prompt)


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
        self.encode = encode
        self.part = lru_cache(REMEMBERED)(lambda text, begin: tuple(encode(text, begin)))
        self.calls = 0
        self.splits = True

    def __call__(self, text: str, shared: int = 0) -> Ids:
        """Ids of the whole text, with the beginning token the tokenizer adds by default."""
        cuts = set()
        for place in (shared, text.rfind("\n") + 1) if self.splits else ():
            if 0 < place < len(text) and text[place - 1] == "\n" and not text[place].isspace():
                cuts.add(place)
        if not cuts:
            return tuple(self.encode(text, True))

        # What stands before the last part will come again; the last part is this text's own.
        ids: Ids = ()
        for start, stop in pairwise([0, *sorted(cuts)]):
            ids += self.part(text[start:stop], start == 0)
        ids += tuple(self.encode(text[max(cuts) :], False))

        # Trust, but look now and then.
        self.calls += 1
        if self.calls <= FIRST_CHECKS or self.calls % THEN_EVERY == 0:
            whole = tuple(self.encode(text, True))
            self.splits = whole == ids
            return whole
        return ids


def split_pair(encode: QuickEncoder, context: str, continuation: str, shared: int) -> tuple[Ids, Ids]:
    """(context ids, continuation ids) for a context that is not empty.

    Blanks at the end of the context are moved to the continuation; the continuation is what the whole has
    beyond as many ids as the context alone has (lm-evaluation-harness, TemplateLM._encode_pair).
    """
    # Most tokenizers put a blank before the word that follows it.
    bare = context.rstrip()
    whole, alone = encode(context + continuation, shared), encode(bare, shared)
    return alone, whole[len(alone) :]


def weights_of(model: torch.nn.Module, folder: Path | None) -> dict[str, Any]:
    """What was evaluated: sha256 over the weight files of a folder in the order of their names, or over names
    and values of the tensors in memory; dtype and number of parameters."""
    digest = hashlib.sha256()
    files = sorted(folder.iterdir()) if folder else []
    for file in files:
        if file.suffix in (".safetensors", ".bin", ".gguf"):
            with file.open("rb") as handle:
                hashlib.file_digest(handle, lambda: digest)
    for name, tensor in sorted(model.state_dict().items()) if folder is None else ():
        # Names as well: swapped layers are another model.
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    parameters = list(model.parameters())
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    count = sum(parameter.numel() for parameter in parameters)
    return {"weights_sha256": digest.hexdigest(), "dtype": dtype, "parameters": count}
