"""Our model directories (or a model in memory) as a Model: packed rows, no padding, images and videos in
prompts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import ChatStream, encode_chat
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample, Segment, Text
from earlyfusion.data.tokenizer import (
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    Tokenizer,
)
from earlyfusion.eval.heldout import Loss, Room, measure
from earlyfusion.eval.models.batch import Piece, TokenModel
from earlyfusion.eval.protocol import LossRequest, Prompt
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import DecoderCache
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import Row, evaluating
from earlyfusion.model.hub.folder import load_model

MEDIA_TOKENS = (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)
POSITIONS = 1024
"""Positions whose logits over the vocabulary are held at once."""
ROWS = 16
"""On a CPU every row of tokens is filled up to a multiple of this. Matrix products of one to three rows, and
exponentials in the tail of a vector, round differently: without it an answer's last bits would depend on what
it is batched with."""

_QUESTION = re.compile(r"\nQ: (.*)\nA:", re.DOTALL)
"""A question as pretraining puts it (data/sources/easy_vqa.py)."""


PATCHES_A_TOKEN = 16
"""Most patches that one token of a picture or video stands for: 2 x 2, over up to four frames."""


class OwnSession:
    """Sequences in a DecoderCache: KDA states, convolution taps, MLA latents. On a CPU the cache's last
    sequence is a filler (see ROWS) that begins anew in every call."""

    def __init__(self, model: NativeFusion, cache: DecoderCache) -> None:
        self.model, self.cache = model, cache
        self.filled = model.decoder.embed_tokens.weight.device.type == "cpu"

    @classmethod
    def fresh(cls, model: NativeFusion, sequences: int) -> OwnSession:
        """A session of `sequences` empty sequences."""
        filler = int(model.decoder.embed_tokens.weight.device.type == "cpu")
        return cls(model, model.decoder.new_cache(sequences + filler))

    def fork(self, index: Sequence[int]) -> OwnSession:
        """See Session."""
        layers = [replace(memory) for memory in self.cache.layers]
        copied = DecoderCache(layers, self.cache.lengths, self.cache.capacity)
        copied.reorder([*index, copied.num_sequences - 1] if self.filled else list(index))
        return OwnSession(self.model, copied)

    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Segments]:
        """Hidden states [T, D] of all new tokens."""
        config = self.model.config
        device = self.model.decoder.embed_tokens.weight.device
        lengths = [len(piece.ids) for piece in pieces]
        if self.filled:
            pad = config.text.pad_token_id
            pieces = [*pieces, Piece((pad,) * (ROWS - sum(lengths) % ROWS), None)]
            lengths.append(len(pieces[-1].ids))
        segments = Segments.from_lengths(lengths)
        vision = config.vision
        media = [
            (piece.media, start) for piece, start in zip(pieces, segments.offsets) if piece.media is not None
        ]
        places = [encoded.media_positions + start for encoded, start in media]
        none = torch.empty(0, vision.in_channels, vision.patch_size, vision.patch_size, dtype=torch.uint8)
        row = Row(
            ids=torch.tensor([token for piece in pieces for token in piece.ids], device=device),
            segments=segments,
            patches=torch.cat([none, *(encoded.patches for encoded, _ in media)]).to(device),
            grids=[grid for encoded, _ in media for grid in encoded.grids],
            media_positions=torch.cat([torch.empty(0, dtype=torch.long), *places]).to(device),
        )
        if any(
            self.cache.lengths
        ):  # room for exactly these tokens: latents are attended over the whole capacity
            needed = max(past + new for past, new in zip(self.cache.lengths, segments.lengths))
            if segments.max_length > 1:
                self.cache.capacity = max(self.cache.capacity, needed)
        with evaluating(self.model):
            h_TD = self.model.hidden(row, self.cache)
        if self.filled:
            self.cache.lengths = (*self.cache.lengths[:-1], 0)
        return h_TD, segments

    def _logits(self, h_ND: Tensor) -> Tensor:
        """[N, V] fp32; on a CPU from a multiple of ROWS rows."""
        rows = h_ND.shape[0]
        if self.filled:
            h_ND = torch.nn.functional.pad(h_ND, (0, 0, 0, -rows % ROWS))
        return self.model.logits(h_ND)[:rows].float()

    def extend(self, pieces: Sequence[Piece], step: bool = False) -> Tensor:
        """See Session."""
        h_TD, segments = self._read(pieces)
        last = torch.tensor(segments.offsets[1 : len(pieces) + 1], device=h_TD.device) - 1
        return self._logits(h_TD.index_select(0, last))

    def extend_scored(
        self, pieces: Sequence[Piece], targets: Sequence[Sequence[int]]
    ) -> list[tuple[list[float], bool]]:
        """See Session."""
        h_TD, segments = self._read(pieces)
        wanted_T = torch.tensor([token for row in targets for token in row], device=h_TD.device)
        values, right = [], []
        h_TD = h_TD[: wanted_T.shape[0]]
        for h, wanted in zip(h_TD.split(POSITIONS), wanted_T.split(POSITIONS)):
            logits = self._logits(h)
            values += logits.log_softmax(-1).gather(1, wanted[:, None]).squeeze(1).tolist()
            right += (logits.argmax(-1) == wanted).tolist()
        edges = list(zip(segments.offsets, segments.offsets[1:]))[: len(pieces)]
        return [(values[a:b], all(right[a:b])) for a, b in edges]


class OwnModel(TokenModel):
    """A NativeFusion with its tokenizer. Documents begin with [BOS]; there is no longest prompt (no
    positions).

    chat: prompts to continue are put as the user's message, and of the answer only what is said counts, not
    what is thought (data/chat/template.py); what is scored stays as it is.
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
        self.chat = chat
        self.model, self.tokenizer, self.name, self.directory = model, tokenizer, name, directory
        special = tokenizer.special_ids
        text = model.config.text
        self._stops = frozenset({text.eos_token_id, *(special[t] for t in (END_OF_MSG,) if t in special)})
        beyond = range(tokenizer.vocab_size, text.vocab_size)  # rows of the embedding without a token
        media = [special[token] for token in MEDIA_TOKENS if token in special]
        self._silent = sorted({text.bos_token_id, text.pad_token_id, *media, *beyond} - self._stops)

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
        encoded = encode_chat([Message("user", said(prompt))], self.tokenizer, self.model.config.vision)
        return Piece(tuple(encoded.ids.tolist()), encoded if encoded.grids else None)

    def _prefix(self, prompt: Prompt, shared: int, context: Piece) -> tuple[int, ...]:
        return () if self.chat else super()._prefix(prompt, shared, context)

    @property
    def asks_qa(self) -> bool:
        """Whether a question is to stand as in pretraining ("Q: ... A:"), where no chat form says
        otherwise."""
        return not self.chat

    def losses(self, requests: Sequence[LossRequest]) -> list[Loss | BadSample]:
        """The loss of every sample, packed into rows of `batch_tokens`."""
        length = max(request.length for request in requests)
        tokens = max(self.batch_tokens, length)
        room = Room(tokens=tokens, max_patches=PATCHES_A_TOKEN * tokens, length=length)
        return measure(
            self.model, self.tokenizer, (partial(_sample_of, request) for request in requests), room
        )

    def decode(self, ids: Sequence[int]) -> str:
        """See TokenModel."""
        if self.chat:
            return ChatStream(self.tokenizer).content(ids)
        return self.tokenizer.decode(ids, skip_special=True)

    def fresh(self, sequences: int) -> OwnSession:
        """See TokenModel."""
        return OwnSession.fresh(self.model, sequences)

    @property
    def begin_id(self) -> int:
        """[BOS]."""
        return self.model.config.text.bos_token_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """[EOS] and <|end_of_msg|>."""
        return self._stops

    @property
    def silent_ids(self) -> Sequence[int]:
        """Tokens that only stand in inputs."""
        return self._silent

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


def _sample_of(request: LossRequest) -> Sample:
    return request.sample


def said(prompt: Prompt) -> tuple[Segment, ...]:
    """A prompt as the parts of a message: a question loses the form it has in pretraining ("Q: ... A:")."""
    parts: list[Segment] = [Text(prompt)] if isinstance(prompt, str) else list(prompt)
    if parts and isinstance(parts[-1], Text) and (asked := _QUESTION.fullmatch(parts[-1].text)):
        parts[-1] = Text(asked[1])
    return tuple(parts)


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


def load_own(
    directory: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    chat: bool | None = None,
    **batch: int,
) -> OwnModel:
    """Read a model directory; chat None: as it was trained. Raises ModelDirectoryError or DataError when it
    is none."""
    folder = Path(directory)
    model = load_model(folder, device=device, dtype=dtype)
    chat = template_of(folder) == "chat" if chat is None else chat
    return OwnModel(
        model, Tokenizer.load(folder), name=folder.resolve().name, directory=folder, chat=chat, **batch
    )
