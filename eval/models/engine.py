"""Our model directories (or a model in memory) as a Model: the engine (model/engine) writes and judges.

Prompts may hold pictures and videos. What a prompt gets depends on nothing else that is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import ChatStream, encode_chat
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample, Segment, Text
from earlyfusion.data.tokenizer import END_OF_MSG, Tokenizer
from earlyfusion.eval.heldout import Loss, Room, measure
from earlyfusion.eval.models.tokens import (
    Context,
    Opening,
    Piece,
    Scored,
    TokenModel,
    cut_at,
    files_hash,
    tensors_hash,
)
from earlyfusion.eval.protocol import EvalError, Generation, LossRequest, Prompt
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import (
    Completion,
    Request,
    RequestError,
    SamplingParams,
    ScoreRequest,
    TokenPrompt,
)
from earlyfusion.model.engine.requests import Prompt as OpenDocument
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
"""A question as pretraining puts it (data/sources/easy_vqa.py)."""


class EngineModel(TokenModel):
    """A NativeFusion with its tokenizer. Documents begin with [BOS]; there is no longest prompt (no
    positions).

    batch_size: sequences that the engine holds at once; batch_tokens: of a row whose loss is measured, and of
    a window of a rolling text. chat: prompts to continue are put as the user's message, and of the answer
    only what is said counts, not what is thought (data/chat/template.py); what is scored stays as it is.
    """

    capabilities = frozenset({"text", "image", "video", "score", "generate", "loss"})

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Tokenizer,
        *,
        name: str = "model in memory",
        directory: Path | None = None,
        batch_size: int = 16,
        batch_tokens: int = 4096,
        chat: bool = False,
    ) -> None:
        super().__init__(batch_size, batch_tokens)
        self.model, self.tokenizer, self.name, self.directory = model, tokenizer, name, directory
        self.chat = chat
        self._engine: Engine | None = None
        self._pages = 0

    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """See TokenModel."""
        ids = self.tokenizer.encode(text)
        return (self.begin_id, *ids) if begin else ids

    def encode_media(self, segments: Sequence[Segment]) -> Piece:
        """See TokenModel."""
        encoded = encode(Sample(segments, "prompt", "0"), self.tokenizer, self.model.config.vision, eos=False)
        return Piece(tuple(encoded.ids.tolist()), encoded)

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """See TokenModel; with `chat` an open document in which the assistant is to speak."""
        if not self.chat:
            return super().encode_prompt(prompt, shared)
        message = Message("user", as_message(prompt))
        encoded = encode_chat([message], self.tokenizer, self.model.config.vision)
        return Piece(tuple(encoded.ids.tolist()), encoded if encoded.grids else None)

    @property
    def asks_qa(self) -> bool:
        """Whether a question is to stand as in pretraining ("Q: ... A:"), where no chat form says
        otherwise."""
        return not self.chat

    @property
    def begin_id(self) -> int:
        """[BOS]."""
        return self.model.config.text.bos_token_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """[EOS] and <|end_of_msg|>."""
        ids = {self.model.config.text.eos_token_id, self.tokenizer.special_ids.get(END_OF_MSG)}
        return frozenset(token for token in ids if token is not None)

    def identity(self) -> dict[str, Any]:
        """Path, sha256 of the weights (of the files, or of the tensors in memory), tokenizer, dtype, size."""
        weight = self.model.decoder.embed_tokens.weight
        return {
            "kind": "earlyfusion",
            "path": str(self.directory) if self.directory else None,
            "weights_sha256": files_hash(self.directory) if self.directory else tensors_hash(self.model),
            "tokenizer": self.tokenizer.hash,
            **({"chat": True} if self.chat else {}),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    # scoring

    def score(self, contexts: Sequence[Context]) -> list[list[Scored]]:
        """See TokenModel."""
        requests = [
            ScoreRequest(document(context.piece), context.continuations, context.piece.shared)
            for context in contexts
        ]
        longest = max(len(each.piece.ids) + max(map(len, each.continuations)) for each in contexts)
        found = []
        for scores in self._engine_of(longest, len(requests)).score(requests):
            found.append([Scored(score.logprobs, score.greedy) for score in scores])
        return found

    def losses(self, requests: Sequence[LossRequest]) -> list[Loss | BadSample]:
        """The loss of every sample, packed into rows of `batch_tokens`."""
        # A row holds at least one document of the longest length.
        length = max(request.length for request in requests)
        tokens = max(self.batch_tokens, length)
        room = Room(tokens=tokens, max_patches=PATCHES_A_TOKEN * tokens, length=length)
        return measure(
            self.model, self.tokenizer, (partial(_sample_of, request) for request in requests), room
        )

    # writing

    def write(self, openings: Sequence[Opening]) -> list[Generation]:
        """See TokenModel."""
        # The engine's noise depends on the request's seed alone, not on its number or neighbours.
        requests = []
        for number, opening in enumerate(openings):
            asked = opening.request
            try:
                params = SamplingParams(
                    opening.room,
                    asked.temperature,
                    asked.top_p,
                    stop=() if self.chat else asked.stop,  # in a chat only what is said is searched for them
                    seed=asked.seed,
                )
            except RequestError as error:
                raise EvalError(str(error)) from None
            requests.append(Request(str(number), document(opening.piece), params, noise="answer"))

        longest = max(len(opening.piece.ids) + opening.room for opening in openings)
        completions = self._engine_of(longest, len(openings)).generate(requests)
        return [self._answer(opening, done) for opening, done in zip(openings, completions)]

    def _engine_of(self, longest: int, waiting: int) -> Engine:
        """An engine in which batch_size sequences of this length fit."""
        slots = 1 if self.one_by_one else self.batch_size
        # Every sequence and every kept prefix may be of the longest length.
        pages = (slots + KEPT_PREFIXES) * (-(-longest // PAGE) + 1)

        if self._engine is None or pages > self._pages or waiting > self._engine.max_waiting:
            self._engine, self._pages = None, pages  # the old one's memory goes first
            self._engine = Engine(
                self.model,
                self.tokenizer,
                max_slots=slots,
                page_size=PAGE,
                max_pages=pages,
                prefill_chunk=CHUNK,
                max_waiting=max(waiting, 1024),
                prefix_cache=KEPT_PREFIXES,
            )
        return self._engine

    def _answer(self, opening: Opening, done: Completion) -> Generation:
        # The stop token is among the engine's ids and no part of an answer.
        ended = done.finish_reason == "stop"
        ids = done.ids[:-1] if ended and done.ids[-1] in self.stop_ids else done.ids
        text = done.text
        if self.chat:
            text, cut = cut_at(self.decode(ids), opening.request.stop)
            ended |= cut
        return Generation(text, len(ids), "stop" if ended else "length")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids; of a message, what is said."""
        if self.chat:
            return ChatStream(self.tokenizer).content(ids)
        return self.tokenizer.decode(ids, skip_special=True)

    def forget(self) -> None:
        """Drop the engine (call after the weights have changed)."""
        self._engine = None


def document(piece: Piece) -> OpenDocument:
    """A piece as the engine reads it."""
    return piece.media if piece.media is not None else TokenPrompt(torch.tensor(piece.ids))


def _sample_of(request: LossRequest) -> Sample:
    return request.sample


def as_message(prompt: Prompt) -> tuple[Segment, ...]:
    """A prompt as the parts of a message: a question loses the form it has in pretraining ("Q: ... A:")."""
    parts: list[Segment] = [Text(prompt)] if isinstance(prompt, str) else list(prompt)
    if parts and isinstance(parts[-1], Text) and (asked := _QUESTION.fullmatch(parts[-1].text)):
        parts[-1] = Text(asked[1])
    return tuple(parts)


def load_own(
    directory: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    chat: bool | None = None,
    **batch: int,
) -> EngineModel:
    """Read a model directory; chat None: as it was trained. Raises ModelDirectoryError or DataError when it
    is none."""
    folder = Path(directory)
    model = load_model(folder, device=device, dtype=dtype)
    chat = template_of(folder) == "chat" if chat is None else chat
    name = folder.resolve().name
    return EngineModel(model, Tokenizer.load(folder), name=name, directory=folder, chat=chat, **batch)
