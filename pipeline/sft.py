"""Supervised fine-tuning on conversations: from a model directory to one that speaks the chat form.

    accelerate launch -m earlyfusion.pipeline.sft sft-zero-vision --init-from runs/nano/model
    earlyfusion sft sft-vision --init-from runs/nano/model --out runs/sft-vision

The loop is that of pretraining (pipeline/pretrain.py), with its packing, optimizers, guard, checkpoints and
exact resume. What differs: the model, its shape and its tokenizer come from `run.init_from`
(pipeline/sft_start.py); the sources are conversations, in which only the assistant's messages carry loss
(data/chat/template.py); evaluation measures the loss on held-out answers and whether tool calls work; and the
model directory gets `chat_template.jinja`, by which generate, chat, serve and eval know that the model speaks
the chat form. Sources of plain documents alone (chat_files with another template, problems) leave a model in
the form it had.

Zero-vision SFT (Kimi K2.5, section 2.2) is the recipe sft-zero-vision: text only, image operations as Python
programs, vision tower and projector left alone. sft-vision is the arm with pictures, at the same number of
tokens.

Tasks of `eval.tasks` beside those of pretraining:

    answer_loss   mean negative log-likelihood of the learned tokens of held-out conversations, by source
    tool_talks    held-out conversations of the kinds zero_vision and chat_scenes played greedily with the
                  Python tool in the sandbox: how many calls are valid, run, and end in the right answer
                  (eval/tool_talks.py)

A source of weight 0 is measured and never trained on.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from earlyfusion.data.chat.template import ChatTokenizer, template_of
from earlyfusion.data.sources.base import kind_of
from earlyfusion.data.sources.zero_vision import ZeroVision
from earlyfusion.eval.heldout import summary as summarise
from earlyfusion.eval.samples import thumbnail
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.eval.tool_talks import MEASURES, Played, picture_files, play_talks, summary, transcript
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline import build, cli, evaluate
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.pretrain import Pretraining
from earlyfusion.pipeline.sft_start import start_model, with_start

HELDOUT = 64
"""Held-out conversations of a source when eval.limits names no number."""
PLAYED = 16
"""Conversations played when eval.limits names no number."""
SHOWN = 4
"""Played conversations of a source that the report shows."""


class ChatEvaluator(evaluate.Evaluator):
    """Adds the tasks of this file to those of pretraining."""

    # The tasks of pretraining stay: they show what fine-tuning forgets.
    own_tasks = (*evaluate.TASKS, "answer_loss", "tool_talks")
    chat = True

    def answer_loss(self, step: int, limit: int | None) -> dict[str, float]:
        """Loss (nats a token) and numbers of tokens and conversations, by source; one that holds nothing out
        is left out."""

        def loss_of(name: str) -> Any:
            source = self.source(name)
            count = min(limit or HELDOUT, source.heldout_len())
            # Read when it is measured: a source of a million rows is not opened for sixteen.
            chosen = (partial(source.heldout, index) for index in range(count))
            return summarise(self.measure(chosen, blind=False))

        results = {}
        for name, found in self.shared([source.name for source in self.config.data.sources], loss_of).items():
            if found is not None:
                results[name] = {"loss": found["loss"], "tokens": found["tokens"]}
                results[name]["conversations"] = found["samples"]
        self.save("answer_loss", step, {"sources": results})
        return {f"answer_loss/{name}": result["loss"] for name, result in results.items()}

    def heldout(self, step: int, final: bool) -> dict[str, float]:
        """Nothing: the task answer_loss is that of this stage, on as many conversations as its recipe
        says."""
        return {}

    def tool_talks(self, step: int, limit: int | None) -> dict[str, float]:
        """The task tool_talks, by source."""
        headline: dict[str, float] = {}
        for config in self.config.data.sources:
            source = self.source(config.name)
            # Only conversations of these kinds know the right answer of their program.
            if not isinstance(source, ZeroVision):
                continue
            count = min(limit or PLAYED, source.heldout_len())
            rank, world = self.runtime.rank, self.runtime.world
            talks = [source.talk(index, heldout=True) for index in range(count)[rank::world]]
            # A sandbox for each source: what one program leaves behind is gone for the next.
            with Sandbox(allow_weaker=self.config.sandbox.allow_weaker) as sandbox:
                weaker = sandbox.check().weaker
                own = play_talks(self.fusion, self.tokens, talks, sandbox)
            # Dealt out in turn, so they are taken back in turn.
            shares = self.runtime.gather(own)
            played = [shares[i % world][i // world] for i in range(count)]

            found = summary(played)
            headline |= {f"{measure}/{config.name}": found[measure] for measure in MEASURES}
            shown = []
            for number, game in enumerate(played[:SHOWN]):
                shown.append(transcript(game) | {"picture": self._picture(config.name, number, game)})
            result = found | {"source": config.name, "shown": shown}
            if weaker:
                result["sandbox"] = weaker
            self.save(f"tool_talks_{config.name}", step, result)
        return headline

    def _picture(self, source: str, number: int, game: Played) -> str | None:
        """Path of the conversation's picture in the run folder, written once; None where the model sees
        none."""
        picture = next(iter(picture_files(game.messages).values()), None)
        if picture is None:
            return None
        name = f"samples/{source}_{number:03d}.png"
        path = self.out / name
        if self.runtime.is_main and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            thumbnail(picture).save(path)
        return name


class FineTuning(Pretraining):
    """The run of pretraining, from a model directory and to one that speaks chat."""

    def fit_vocabulary(self, config: RunConfig) -> RunConfig:
        # Here and not later: the first thing that is built asks for it.
        self.start = model_folder(str(config.run.init_from))
        return config  # with_start has set the vocabulary

    def build_model(self) -> NativeFusion:
        wanted = build.fusion_config(self.config, self.tokenizer.media_pad_id)
        model, self.added = start_model(self.start, wanted, self.tokenizer)
        return model

    def build_evaluator(self) -> evaluate.Evaluator:
        evaluator = ChatEvaluator(self.config, self.plain, self.tokenizer, self.runtime, self.out)
        # A model that was taught documents alone is asked as pretraining asks.
        self.checkpoints.chat = evaluator.chat = self._speaks_chat()
        return evaluator

    def _speaks_chat(self) -> bool:
        """Whether the model that is written speaks the chat form: a source teaches it, or the start spoke
        it."""
        taught = (
            kind_of(source.kind).chat and getattr(source.typed, "template", "chat") == "chat"
            for source in self.config.data.sources
        )
        return any(taught) or template_of(self.start) == "chat"

    def train(self) -> int:
        """The steps, with an evaluation before the first one: what the stage started from."""
        # A resumed run has this evaluation behind it.
        self.owed = self.owed or (self.step == 0 and self.config.eval.every > 0)
        return super().train()

    def write_outputs(self, facts: dict[str, Any]) -> Sequence[str]:
        chat = self._speaks_chat()
        frozen = sorted({entry for stage in self.config.stages for entry in stage.frozen})
        start = self.config.run.init_from
        notes = [f"Supervised fine-tuning on conversations, from `{start}`; only answers were learned."]
        if chat:
            notes.append("It speaks the chat form of `chat_template.jinja`, with thinking and tool calls.")
        if frozen:
            notes.append(f"Not trained in this stage: {', '.join(frozen)}.")
        if self.added:
            notes.append(self.added)
        # The template is how generate, chat, serve and eval know the form.
        tokenizer = ChatTokenizer(self.tokenizer) if chat else self.tokenizer
        return evaluate.write_outputs(
            self.out, self.plain, tokenizer, facts | {"base": start, "notes": notes}, self.read
        )


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config = validate(with_start(compose(parsed.recipes, parsed.overrides)))
    return launch(FineTuning, config, parsed, check=ChatEvaluator.check)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion sft`."""
    return cli.main(["sft", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
