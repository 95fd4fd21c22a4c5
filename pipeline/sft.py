"""Supervised fine-tuning on conversations: from a model directory to one that speaks the chat form.

    accelerate launch -m earlyfusion.pipeline.sft sft-zero-vision --init-from runs/nano/model
    earlyfusion sft sft-vision --init-from runs/nano/model --out runs/sft-vision

The loop is that of pretraining (pipeline/pretrain.py), with its packing, optimizers, guard, checkpoints and
exact resume. What differs: the model, its shape and its tokenizer come from `run.init_from`
(pipeline/sft_start.py); the sources are conversations, in which only the assistant's messages carry loss
(data/chat/template.py); evaluation measures the loss on held-out answers and whether tool calls work
(pipeline/sft_eval.py); and the model directory gets `chat_template.jinja`, by which generate, chat, serve and
eval know that the model speaks the chat form. Sources of plain documents alone (chat_files with another
template, problems) leave a model in the form it had.

Zero-vision SFT (Kimi K2.5, section 2.2) is the recipe sft-zero-vision: text only, image operations as Python
programs, vision tower and projector left alone. sft-vision is the arm with pictures, at the same number of
tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.chat.template import ChatTokenizer, template_of
from earlyfusion.data.sources.base import kind_of
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline import build, cli, evaluate
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.pretrain import Pretraining
from earlyfusion.pipeline.sft_eval import ChatEvaluator
from earlyfusion.pipeline.sft_start import start_model, with_start


class FineTuning(Pretraining):
    """The run of pretraining, from a model directory and to one that speaks chat."""

    def fit_vocabulary(self, config: RunConfig) -> RunConfig:
        return config  # with_start has set the vocabulary

    def _start(self) -> Path:
        return model_folder(str(self.config.run.init_from))

    def build_model(self) -> NativeFusion:
        wanted = build.fusion_config(self.config, self.tokenizer.media_pad_id)
        model, self.growth = start_model(self._start(), wanted, self.tokenizer)
        return model

    def build_evaluator(self) -> evaluate.Evaluator:
        evaluator = ChatEvaluator(self.config, self.fusion, self.tokenizer, self.runtime, self.out)
        evaluator.chat = self._speaks_chat()
        return evaluator

    def _speaks_chat(self) -> bool:
        """Whether the model that is written speaks the chat form: a source teaches it, or the start spoke
        it."""
        taught = (
            kind_of(source.kind).chat and getattr(source.typed, "template", "chat") == "chat"
            for source in self.config.data.sources
        )
        return any(taught) or template_of(self._start()) == "chat"

    def train(self) -> int:
        """The steps, with an evaluation before the first one: what the stage started from."""
        if self.step == 0 and self.config.eval.every:
            with self.meter.paused():
                self.evaluator.run(0, self.tracker, final=False)
        return super().train()

    def write_outputs(self, facts: dict[str, Any]) -> Sequence[str]:
        chat = self._speaks_chat()
        frozen = sorted({entry for stage in self.config.stages for entry in stage.frozen})
        notes = [
            (
                f"Supervised fine-tuning on conversations, from `{self.config.run.init_from}`; only answers"
                " were learned."
            ),
            "It speaks the chat form of `chat_template.jinja`, with thinking and tool calls." if chat else "",
            f"Not trained in this stage: {', '.join(frozen)}." if frozen else "",
            self.growth.note,
        ]
        facts = facts | {"base": self.config.run.init_from, "notes": [note for note in notes if note]}
        tokenizer = ChatTokenizer(self.tokenizer) if chat else self.tokenizer
        return evaluate.write_outputs(self.out, self.fusion, tokenizer, facts)


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config = validate(with_start(compose(parsed.recipes, parsed.overrides)))
    return launch(FineTuning, config, parsed, check=ChatEvaluator.check)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion sft`."""
    return cli.main(["sft", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
