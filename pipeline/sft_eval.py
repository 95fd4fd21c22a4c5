"""Evaluation of a chat stage, during and after training.

    answer_loss   mean negative log-likelihood of the learned tokens of held-out conversations, by source
    tool_talks    held-out conversations of the kinds zero_vision and chat_scenes played greedily with the
                  Python tool in the sandbox: how many calls are valid, run, and end in the right answer
                  (eval/tool_talks.py)

A source of weight 0 is measured and never trained on. Every task of pretraining's evaluation can be named as
well.
"""

from __future__ import annotations

from functools import partial

from earlyfusion.data.sources.zero_vision import ZeroVision
from earlyfusion.eval import heldout
from earlyfusion.eval.results import save_result
from earlyfusion.eval.samples import thumbnail
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.eval.tool_talks import MEASURES, Played, play_talks, summary, transcript
from earlyfusion.eval.tool_turns import picture_files
from earlyfusion.pipeline.evaluate import Evaluator

HELDOUT = 64
"""Held-out conversations of a source when eval.limits names no number."""
PLAYED = 16
"""Conversations played when eval.limits names no number."""
SHOWN = 4
"""Played conversations of a source that the report shows."""


class ChatEvaluator(Evaluator):
    """Adds the tasks of this file to those of pretraining."""

    own_tasks = (*Evaluator.own_tasks, "answer_loss", "tool_talks")
    chat = True

    def _answer_loss(self, step: int, limit: int | None) -> dict[str, float]:
        results = {}
        for source in self.config.data.sources:
            found = self.answer_loss(
                source.name, limit or self.config.eval.limits.get("answer_loss", HELDOUT)
            )
            if found is not None:
                results[source.name] = found
        save_result(self.out, "answer_loss", step, {"sources": results})
        return {f"answer_loss/{name}": result["loss"] for name, result in results.items()}

    def answer_loss(self, name: str, limit: int) -> dict[str, float] | None:
        """Loss (nats a token), share of tokens that are the likeliest, and numbers of tokens and
        conversations.

        None for a source that holds nothing out.
        """
        source = self._source(name)
        chosen = (partial(source.heldout, index) for index in range(min(limit, source.heldout_len())))
        found = heldout.summary(self.measure(chosen, blind=False))
        return found and {"loss": found["loss"], "tokens": found["tokens"], "conversations": found["samples"]}

    def _heldout(self, step: int, final: bool) -> dict[str, float]:
        """Nothing: the task answer_loss is that of this stage, on as many conversations as its recipe
        says."""
        return {}

    def _tool_talks(self, step: int, limit: int | None) -> dict[str, float]:
        headline: dict[str, float] = {}
        limit = limit or self.config.eval.limits.get("tool_talks", PLAYED)
        for config in self.config.data.sources:
            source = self._source(config.name)
            if not isinstance(source, ZeroVision):
                continue
            talks = [source.talk(index, heldout=True) for index in range(min(limit, source.heldout_len()))]
            with Sandbox(allow_weaker=self.config.sandbox.allow_weaker) as sandbox:
                weaker = sandbox.check().weaker
                played = play_talks(self.fusion, self.tokens, talks, sandbox)
            found = summary(played) | ({"sandbox": weaker} if weaker else {})
            shown = [
                transcript(game) | {"picture": self._picture(config.name, number, game)}
                for number, game in enumerate(played[:SHOWN])
            ]
            save_result(
                self.out, f"tool_talks_{config.name}", step, found | {"source": config.name, "shown": shown}
            )
            headline |= {f"{measure}/{config.name}": found[measure] for measure in MEASURES}
        return headline

    def _picture(self, source: str, number: int, game: Played) -> str | None:
        """Path of the conversation's picture in the run folder, written once; None where the model sees
        none."""
        picture = next(iter(picture_files(game.prompt).values()), None)
        if picture is None:
            return None
        name = f"samples/{source}_{number:03d}.png"
        path = self.out / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            thumbnail(picture).save(path)
        return name
