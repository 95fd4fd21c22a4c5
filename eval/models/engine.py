"""Our model directories (or a model in memory) as a Model: the engine (model/engine) writes and judges.

Prompts may hold pictures and videos. What a prompt gets depends on nothing else that is asked.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import ChatStream, encode_chat
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Sample, Segment, Text
from earlyfusion.data.tokenizer import END_OF_MSG, Tokenizer
from earlyfusion.eval.heldout import Loss, Room, measure
from earlyfusion.eval.models.tokens import Context, Piece, TokenModel, cut_at, weights_of
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Generation, LogProb, LossRequest, Prompt
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Prompt as OpenDocument
from earlyfusion.model.engine.requests import Request, SamplingParams, ScoreRequest, TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model

PAGE = 16
"""Tokens of a page of the engine's memory."""
CHUNK = 2048
"""Tokens of prompts that the engine reads in a step; the same always, for a prompt's last bits depend on
where it is cut."""
KEPT_PREFIXES = 4
PATCHES_A_TOKEN = 16
"""Most patches that one token of a picture or video stands for: 2 x 2, over up to four frames."""

_QUESTION = re.compile(r"\nQ: (.*)\nA:", re.DOTALL)
"""A question as pretraining puts it (data/sources/embedded.py)."""


class EngineModel(TokenModel):
    """A NativeFusion with its tokenizer. Documents begin with [BOS]; there is no longest prompt (no
    positions).

    batch_size: sequences that the engine holds at once; batch_tokens: of a row whose loss is measured, and of
    a window of a rolling text. chat: prompts to continue are put as the user's message, and of the answer
    only what is said counts, not what is thought (data/chat/template.py); what is scored stays as it is.
    """

    capabilities = frozenset({"text", "image", "video", "score", "generate", "loss"})
    # Where chunks of the recurrent kernels end, so that results differ least from unshared reading.
    prefix_step = 64

    def __init__(self, model: NativeFusion, tokenizer: Tokenizer, **about: Any) -> None:
        super().__init__(model, tokenizer, **about)
        # A question stands as in pretraining ("Q: ... A:"), where no chat form says otherwise.
        self.asks_qa = not self.chat
        text = model.config.text
        self.begin_id = text.bos_token_id
        self.stop_ids = {text.eos_token_id, tokenizer.special_ids.get(END_OF_MSG)}
        self._engine: Engine | None = None
        self._pages = 0

    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """See TokenModel."""
        ids = self.tokenizer.encode(text)
        return (self.begin_id, *ids) if begin else ids

    def encode_media(self, segments: Prompt) -> Piece:
        """See TokenModel."""
        # An open document: what follows is the model's.
        sample = Sample(segments, "prompt", "0")  # type: ignore[arg-type]
        return _piece(encode(sample, self.tokenizer, self.model.config.vision, eos=False))

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """See TokenModel; with `chat` an open document in which the assistant is to speak."""
        if not self.chat:
            return super().encode_prompt(prompt, shared)
        message = Message("user", as_message(prompt))
        return _piece(encode_chat([message], self.tokenizer, self.model.config.vision))

    def identity(self) -> dict[str, Any]:
        """Path, sha256 of the weights, tokenizer, dtype, size."""
        # The hash and not the path tells models apart: folders are renamed and retrained.
        return {
            "kind": "earlyfusion",
            "path": str(self.directory) if self.directory else None,
            "tokenizer": self.tokenizer.hash,
            **weights_of(self.model),
            **({"chat": True} if self.chat else {}),
        }

    def score(self, contexts: Sequence[Context]) -> list[list[LogProb]]:
        """See TokenModel."""
        # The memory is made for the longest request, so that none is turned away.
        requests, longest = [], 0
        for context in contexts:
            piece, continuations = context.piece, context.continuations
            requests.append(ScoreRequest(document(piece), continuations, piece.shared))
            longest = max(longest, len(piece.ids) + max(map(len, continuations)))
        found = []
        for scores in self._engine_of(longest, len(requests)).score(requests):
            found.append([LogProb(sum(one.logprobs), len(one.logprobs), one.greedy) for one in scores])
        return found

    def losses(self, requests: Sequence[LossRequest]) -> list[Loss | BadSample]:
        """The loss of every sample, packed into rows of `batch_tokens`."""
        # A row holds at least one document of the longest length.
        length = max(request.length for request in requests)
        tokens = max(self.batch_tokens, length)
        room = Room(tokens, PATCHES_A_TOKEN * tokens, length)
        samples = (partial(getattr, request, "sample") for request in requests)
        return measure(self.model, self.tokenizer, samples, room)

    def write(self, pieces: Sequence[Piece], requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See TokenModel."""
        opened, longest = [], 0
        for number, (piece, asked) in enumerate(zip(pieces, requests)):
            room = asked.max_new_tokens
            # In a chat only what is said is searched for stop strings, and the engine sees the thoughts too.
            stop = () if self.chat else asked.stop
            params = SamplingParams(room, asked.temperature, asked.top_p, stop=stop, seed=asked.seed)
            # The engine's noise depends on the request's seed alone, not on its number or neighbours.
            opened.append(Request(str(number), document(piece), params, noise="answer"))
            longest = max(longest, len(piece.ids) + room)

        answers = []
        for asked, done in zip(requests, self._engine_of(longest, len(opened)).generate(opened)):
            # The stop token is among the engine's ids and no part of an answer.
            ended, ids, text = done.finish_reason == "stop", done.ids, done.text
            if ended and ids[-1] in self.stop_ids:
                ids = ids[:-1]
            if self.chat:
                text, cut = cut_at(ChatStream(self.tokenizer).content(ids), asked.stop)
                ended |= cut
            answers.append(Generation(text, len(ids), "stop" if ended else "length"))
        return answers

    def _engine_of(self, longest: int, waiting: int) -> Engine:
        """An engine in which batch_size sequences of this length fit."""
        # Every sequence and every kept prefix may be of the longest length.
        pages = (self.batch_size + KEPT_PREFIXES) * (-(-longest // PAGE) + 1)

        if self._engine is None or pages > self._pages or waiting > self._engine.max_waiting:
            self._engine, self._pages = None, pages  # the old one's memory goes first
            try:
                self._engine = Engine(
                    self.model,
                    self.tokenizer,
                    max_slots=self.batch_size,
                    page_size=PAGE,
                    max_pages=pages,
                    prefill_chunk=CHUNK,
                    max_waiting=max(waiting, 1024),
                    prefix_cache=KEPT_PREFIXES,
                )
            except RuntimeError as error:  # torch's own is one, on a CPU and on a GPU
                if "memory" not in str(error):
                    raise
                raise EvalError(
                    f"{self.name}: no memory for {self.batch_size} sequences of {longest:,} tokens; ask for"
                    " fewer at once (--batch 1) or for shorter prompts"
                ) from None
        return self._engine

    def forget(self) -> None:
        """Drop the engine (call after the weights have changed)."""
        self._engine = None


def _piece(encoded: Encoded) -> Piece:
    return Piece(tuple(encoded.ids.tolist()), encoded)


def document(piece: Piece) -> OpenDocument:
    """A piece as the engine reads it."""
    return piece.media if piece.media is not None else TokenPrompt(torch.tensor(piece.ids))


def as_message(prompt: Prompt) -> tuple[Segment, ...]:
    """A prompt as the parts of a message: a question loses the form it has in pretraining ("Q: ... A:")."""
    *before, last = [Text(prompt)] if isinstance(prompt, str) else prompt
    # The chat form has a place for the question; the one of pretraining would stand twice.
    asked = _QUESTION.fullmatch(last.text) if isinstance(last, Text) else None
    return (*before, Text(asked[1]) if asked else last)


def load_own(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    chat: bool | None = None,
    **batch: int,
) -> EngineModel:
    """Read a model directory; chat None: as it was trained. Raises ModelDirectoryError or DataError when it
    is none."""
    model = load_model(folder, device=device, dtype=dtype)
    if chat is None:
        chat = template_of(folder) == "chat"
    name = folder.resolve().name
    return EngineModel(model, Tokenizer.load(folder), name=name, directory=folder, chat=chat, **batch)
