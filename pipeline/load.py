"""`earlyfusion.load`: a model with its tokenizer and chat form, for one's own Python.

    >>> import earlyfusion
    >>> model = earlyfusion.load("embedded:skills")
    >>> model.chat([picture, "how many objects are there?"])
    '2'
    >>> model.loss([[picture, "There are two objects."]]).shape
    torch.Size([])

A sample is what the model reads as one document: a string, a picture, or a list of them in order. A picture
is a PIL image, a uint8 array [H, W, 3], encoded bytes, or a pathlib.Path (a string is always text); Text,
Image, Video and VideoFile of data/sample.py may stand in the list as well. A conversation is a list of
messages, {"role": ..., "content": a sample} or Message of data/chat/template.py, and is written in the form
the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from earlyfusion.data.chat.template import ChatTokenizer, Message, Template, template_of
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded, PackedBatch, assemble, encode
from earlyfusion.data.sample import Image, Sample, Segment, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import Completion, Request, SamplingParams
from earlyfusion.model.fusion import FusionOutput, NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model, save_model

Part = str | PILImage.Image | np.ndarray | bytes | Path | Segment
"""One piece of a sample; a string is text, never a path."""
Content = Part | Sequence[Part]
Conversation = Sequence[Message | Mapping[str, Any]]
"""{"role": "user" | "assistant" | "system" | "tool", "content": Content}."""
PICTURES = (PILImage.Image, np.ndarray, bytes, Path)
SOURCE = "python"
"""What samples that come from no data source are called in messages and batches."""


def load(directory: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """The model of a model directory, a run's folder, or "embedded:NAME", in eval mode.

    dtype: of the weights; None keeps what is stored. Raises ModelDirectoryError or DataError.

    >>> model = load("embedded:skills")
    >>> sum(parameter.numel() for parameter in model.model.parameters())
    832729
    """
    # "embedded:NAME" and a run's folder both become a directory here.
    folder = model_folder(directory)
    return LoadedModel(load_model(folder, device, dtype), Tokenizer.load(folder), template_of(folder))


@dataclass
class LoadedModel:
    """A model, its tokenizer, and the form it speaks (data/chat/template.py): "chat" after a chat stage, else
    "qa".

    `model` is the torch module itself (model/fusion.py): train it, move it, wrap it. What is wrong with a
    sample raises DataError, for a picture BadSample, in one line.
    """

    model: NativeFusion
    tokenizer: Tokenizer
    template: Template = "qa"

    def chat(self, content: Content | Conversation, **sampling: Any) -> str:
        """What the model answers to a message (text and pictures in order), or to a conversation so far.

        sampling: fields of SamplingParams: max_new_tokens (256 here), temperature (0 here, greedy), top_p,
        stop, seed, ... Thinking and tool calls are left out; `reply` has them.

        >>> model.chat([picture, "how many objects are there?"])
        '2'
        >>> model.chat([{"role": "user", "content": [picture, "how many objects are there?"]}])
        '2'
        """
        return self.reply(content, **sampling).text.strip()

    def reply(self, content: Content | Conversation, **sampling: Any) -> Message:
        """The model's message as a whole: `text`, `thinking` (None: no such channel), `calls` of tools.

        >>> model.reply([picture, "how many objects are there?"]).thinking is None
        True
        """
        talk = _conversation(content) or [Message("user", _segments(content))]
        (done,) = self._complete([talk], {"max_new_tokens": 256} | sampling)
        if self.template == "chat":
            return parse_assistant(done.ids, self.tokenizer).message
        return Message("assistant", (Text(done.text),))

    def generate(self, prompts: Sequence[Content | Conversation], **sampling: Any) -> list[str]:
        """Continue every prompt as it stands, all of them together; a conversation is answered.

        sampling: as in `chat`, with SamplingParams' 64 new tokens; with n > 1 the samples of a prompt stand
        together.

        >>> model.generate([[picture, "\\nQ: how many objects are there?\\nA:"], "The import"])[0]
        ' 2'
        """
        _refuse_single(prompts, "generate", "prompts")
        return [done.text for done in self._complete(prompts, sampling)]

    def encode(self, sample: Content | Conversation, *, prompt: bool = False) -> Encoded:
        """One document: ids int64 [n] from [BOS] on, weights of predicting each, uint8 patches.

        prompt: leave it open, for generation; otherwise it ends in [EOS]. Of a conversation only the
        assistant's messages are learned, of a sample every text (Text(words, loss=0.0) is context only).

        >>> document = model.encode([picture, "Two."])
        >>> document.grids, document.media_positions.shape
        ([(1, 6, 6)], torch.Size([9]))
        """
        vision = self.model.config.vision
        talk = _conversation(sample)
        if talk:
            return encode_chat(
                talk, self.tokenizer, vision, template=self.template, add_generation_prompt=prompt, key=SOURCE
            )
        return encode(Sample(_segments(sample), SOURCE, SOURCE), self.tokenizer, vision, eos=not prompt)

    def batch(self, samples: Sequence[Content | Conversation], tokens: int | None = None) -> PackedBatch:
        """The samples side by side as one packed row on the model's device, each a document of its own.

        tokens: positions of the row, the rest filled with [PAD]; None: as many as the samples have. Raises
        ValueError when they do not fit.

        >>> batch = model.batch([[picture, "Two."], "No picture here."], tokens=64)
        >>> batch.ids.shape, batch.segments.num, batch.num_patches
        (torch.Size([64]), 3, 36)
        """
        _refuse_single(samples, "batch", "samples")
        documents = [self.encode(sample) for sample in samples]
        packed = assemble(
            documents,
            tokens=sum(map(len, documents)) if tokens is None else tokens,
            pad_id=self.tokenizer.pad_id,
            sources=sorted({document.source for document in documents}),
            patch_size=self.model.config.vision.patch_size,
        )
        return packed.to(self.model.device)

    def forward(self, samples: Sequence[Content | Conversation]) -> FusionOutput:
        """Loss sum, weight sum and the loss of every token (fp32 [T], nats, detached) of a batch of samples.

        >>> model.forward([[picture, "Two."]]).nll_T.shape
        torch.Size([19])
        """
        output: FusionOutput = self.model(self.batch(samples))
        return output

    def loss(self, samples: Sequence[Content | Conversation]) -> Tensor:
        """Mean loss in nats per learned token, a differentiable scalar.

        >>> seen = model.loss([[picture, "\\nQ: how many objects are there?\\nA:", " 2"]])
        >>> bool(seen.requires_grad)
        True
        """
        output = self.forward(samples)
        return output.loss_sum / output.weight_sum

    def save(self, directory: str | Path) -> Path:
        """Write a model directory that `load`, every verb and transformers' tokenizer read; see
        `save_model`."""
        form = ChatTokenizer(self.tokenizer) if self.template == "chat" else self.tokenizer
        return save_model(self.model, form, directory)

    def _complete(
        self, prompts: Sequence[Content | Conversation], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        """Greedy unless `sampling` says otherwise."""
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        documents = [self.encode(prompt, prompt=True) for prompt in prompts]
        engine = engine_for(self.model, self.tokenizer, documents, params.max_new_tokens)
        return engine.generate(Request(str(i), document, params) for i, document in enumerate(documents))


def _refuse_single(samples: Any, method: str, what: str) -> None:
    """DataError for no sample, and for one where a list of them is expected."""
    # A string is a sequence as well, of its letters.
    if isinstance(samples, Part) or not samples:
        given = "none" if not isinstance(samples, Part) else f"a single {type(samples).__name__}"
        raise DataError(
            f"{method}: expected a list of {what}, got {given}; write {method}([[picture, 'text']])"
        )


def _conversation(content: Any) -> list[Message]:
    """The messages of a conversation; [] for anything else."""
    if isinstance(content, Part) or not all(isinstance(turn, Message | Mapping) for turn in content):
        return []
    messages = []
    for turn in content:
        if not isinstance(turn, Message):
            if set(turn) != {"role", "content"}:
                raise DataError(
                    f"a message with the keys {sorted(turn)}: expected role and content (a Message has more)"
                )
            turn = Message(turn["role"], _segments(turn["content"]))
        messages.append(turn)
    return messages


def _segments(content: Any) -> tuple[Segment, ...]:
    """The parts of a sample as the encoder reads them. Raises DataError for anything that is none."""
    segments: list[Segment] = []
    for part in [content] if isinstance(content, Part) else content:
        if isinstance(part, str):
            part = Text(part)
        elif isinstance(part, PICTURES):
            part = Image(part)
        elif not isinstance(part, Segment):
            raise DataError(
                f"a sample holds {type(part).__name__} {part!r:.60}: expected text, a picture (PIL image,"
                " uint8 array, bytes, pathlib.Path), Text, Image, Video or VideoFile"
            )
        segments.append(part)
    return tuple(segments)
