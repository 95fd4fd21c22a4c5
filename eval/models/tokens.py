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

import base64
import hashlib
import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Text
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    LogProb,
    Prompt,
    RollingRequest,
    ScoreRequest,
    prompt_text,
)
from earlyfusion.kernels.files import Record

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
    """A piece with the continuations asked of it, none of them empty."""

    piece: Piece
    continuations: list[Ids] = field(default_factory=list)


class TokenModel(ABC):
    """A Model (eval/protocol.py) on top of a backend's `score` and `write`.

    name, directory: of the checkpoint. chat: prompts to continue are put as the user's message. batch_size:
    most sequences at once, so that with 1 an answer does not depend on what else is asked, bit
    for bit; batch_tokens: most new tokens read at once (a single longer sequence still goes through).
    """

    begin_id: int
    """The token an empty context stands for."""
    max_length: int | None = None
    capabilities = frozenset({"text", "score", "generate"})
    prefix_step = 1
    """Shared beginnings end at whole multiples of this."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "model in memory",
        directory: Path | None = None,
        chat: bool = False,
        batch_size: int = 16,
        batch_tokens: int = 4096,
    ) -> None:
        self.model, self.tokenizer, self.name, self.directory = model, tokenizer, name, directory
        self.chat, self.batch_size, self.batch_tokens = chat, batch_size, batch_tokens
        self.quick = QuickEncoder(self.encode)
        self._known: tuple[Prompt | None, Piece] = (None, Piece(()))

    # what a backend brings

    @abstractmethod
    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """Ids of a text; begin: with the tokens the model wants at the beginning of a document."""

    @abstractmethod
    def score(self, contexts: Sequence[Context]) -> list[list[LogProb]]:
        """Of every context one LogProb a continuation. Order and company change no result."""

    @abstractmethod
    def write(self, pieces: Sequence[Piece], requests: Sequence[GenerateRequest]) -> list[Generation]:
        """An answer to every piece, in order; the requests say how it is continued."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is kept between calls (call after the weights have changed)."""

    def encode_media(self, segments: Prompt) -> Piece:
        """Ids and pictures of a prompt with media. Raises ValueError where the model reads text alone."""
        raise ValueError(f"{self.name} reads text alone; this prompt holds pictures or videos")

    # what it gets

    def count_tokens(self, text: str) -> int:
        """See Model."""
        return len(self.quick(text))

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """Ids of a prompt to continue (never none: an empty prompt is the beginning token)."""
        return self.encode_context(prompt, shared)

    def encode_context(self, prompt: Prompt, shared: int) -> Piece:
        """The same of what is scored, which no chat form changes."""
        if has_media(prompt):
            return self.encode_media(prompt)
        text = prompt_text(prompt)
        ids = self.quick(text, shared) or (self.begin_id,)

        # The shared text is encoded once for all requests that begin with it. Its last two ids may join with
        # what follows, and a context keeps one token to read.
        head = self.quick.part(text[:shared], True) if shared else ()
        count = max(0, min(len(head) - 2, len(ids) - 1)) // self.prefix_step * self.prefix_step
        return Piece(ids, shared=count if ids[:count] == head[:count] else 0)

    def encode_pair(self, request: ScoreRequest) -> tuple[Piece, Ids]:
        """(context, ids of the continuation).

        Blanks at the end of the context are moved to the continuation; the continuation is what the whole has
        beyond as many ids as the context alone has (lm-evaluation-harness, TemplateLM._encode_pair).
        """
        context, shared = request.context, request.shared
        text = "" if has_media(context) else prompt_text(context)
        # The options of a question share the very object: one encoding, one cutting of pictures for all.
        if self._known[0] is not context:
            # Most tokenizers put a blank before the word that follows it.
            self._known = context, self.encode_context(text.rstrip() if text else context, shared)
        piece = self._known[1]
        if text:
            return piece, self.quick(text + request.continuation, shared)[len(piece.ids) :]

        # Behind a picture, and at the beginning of a document, nothing can join.
        ids = tuple(self.encode(request.continuation, False))
        return piece, ids[ids[:1] == (self.begin_id,) :]

    def loglikelihood(self, requests: Sequence[ScoreRequest]) -> list[LogProb]:
        """See Model."""
        return self._score_pairs([self.encode_pair(request) for request in requests])

    def rolling(self, requests: Sequence[RollingRequest]) -> list[LogProb]:
        """See Model."""
        # As many tokens as the model may see, each window after a beginning of its own.
        window = min(self.max_length or self.batch_tokens, self.batch_tokens)
        pairs, owners = [], []
        for owner, request in enumerate(requests):
            ids = tuple(self.encode(request.text, False))
            for start in range(0, len(ids), window):
                pairs.append((Piece((self.begin_id,)), ids[start : start + window]))
                owners.append(owner)

        found = [LogProb() for _ in requests]
        for owner, part in zip(owners, self._score_pairs(pairs)):
            found[owner] += part
        return found

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See Model."""
        places, pieces, fitting = [], [], []
        for place, request in enumerate(requests):
            piece = self.encode_prompt(request.prompt, request.shared)
            # What the model's window leaves, if it has one.
            room = min(request.max_new_tokens, (self.max_length or sys.maxsize) - len(piece.ids))
            if room > 0:
                places.append(place)
                pieces.append(piece)
                fitting.append(replace(request, max_new_tokens=room))

        # A prompt that leaves no room is told, never cut: it would be another question.
        results = [Generation("", 0, "refused")] * len(requests)
        for place, answer in zip(places, self.write(pieces, fitting) if places else ()):
            results[place] = answer
        return results

    def _score_pairs(self, pairs: Sequence[tuple[Piece, Ids]]) -> list[LogProb]:
        """One LogProb a pair; continuations of one context are asked together."""
        results = [LogProb() for _ in pairs]
        contexts: dict[Any, tuple[Context, list[int]]] = {}
        for owner, (piece, continuation) in enumerate(pairs):
            if not continuation:
                continue
            # A context that is too long loses its beginning.
            excess = len(piece.ids) + len(continuation) - 1 - (self.max_length or sys.maxsize)
            if excess > 0:
                piece = Piece(piece.ids[excess:], piece.media)
            context, owners = contexts.setdefault((piece.ids, id(piece.media)), (Context(piece), []))
            context.continuations.append(continuation)
            owners.append(owner)

        scored = self.score([context for context, _ in contexts.values()]) if contexts else []
        for (_, owners), own in zip(contexts.values(), scored):
            for owner, value in zip(owners, own):
                results[owner] = value
        return results


def has_media(prompt: Prompt) -> bool:
    """Whether a prompt shows anything but text."""
    return not isinstance(prompt, str) and not all(isinstance(segment, Text) for segment in prompt)


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(the text before the first of the stop strings, whether there was one)."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def content_parts(prompt: Prompt) -> list[Record]:
    """Message content for text and pictures (as data URLs). Raises EvalError for video: give its frames as
    pictures."""
    parts: list[Record] = []
    for segment in [Text(prompt)] if isinstance(prompt, str) else prompt:
        if isinstance(segment, Text):
            parts.append({"type": "text", "text": segment.text})
        elif isinstance(segment, Image):
            buffer = io.BytesIO()
            open_picture(segment.image).convert("RGB").save(buffer, "PNG")
            encoded = base64.b64encode(buffer.getvalue()).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}})
        else:
            raise EvalError("an endpoint takes no video here; evaluate video tasks on a model directory")
    return parts


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


def weights_of(model: torch.nn.Module) -> Record:
    """What was evaluated: sha256 over names and values of the tensors, dtype and number of parameters."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        # Names as well: swapped layers are another model.
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + flat.numpy().tobytes())

    parameters = list(model.parameters())
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    count = sum(parameter.numel() for parameter in parameters)
    return {"weights_sha256": digest.hexdigest(), "dtype": dtype, "parameters": count}
