"""Evaluation of a chat stage, during and after training.

    answer_loss   mean negative log-likelihood of the learned tokens of held-out conversations, by source
    tool_talks    held-out conversations of the kinds zero_vision and chat_scenes played greedily with the Python tool in
                  the sandbox: how many calls are valid, run, and end in the right answer (eval/tool_talks.py)

A source of weight 0 is measured and never trained on. Every task of pretraining's evaluation can be named as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from earlyfusion.data.encode import Encoded, encode
from earlyfusion.data.errors import BadSample
from earlyfusion.data.pack import pack_all
from earlyfusion.data.zero_vision import ZeroVision
from earlyfusion.eval.results import save_result
from earlyfusion.eval.samples import thumbnail
from earlyfusion.eval.sandbox import Sandbox
from earlyfusion.eval.tool_talks import MEASURES, Played, play_talks, summary, transcript
from earlyfusion.eval.tool_turns import picture_files
from earlyfusion.model.generate import evaluating
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
            found = self.answer_loss(source.name, limit or self.config.eval.limits.get("answer_loss", HELDOUT))
            if found is not None:
                results[source.name] = found
        save_result(self.out, "answer_loss", step, {"sources": results})
        return {f"answer_loss/{name}": result["loss"] for name, result in results.items()}

    def answer_loss(self, name: str, limit: int) -> dict[str, float] | None:
        """Loss (nats a token), share of tokens that are the likeliest, and numbers of tokens and conversations.

        None for a source that holds nothing out.
        """
        stage = max(self.config.stages, key=lambda stage: stage.length)
        batches = pack_all(
            self._heldout(name, limit, stage.length, stage.max_patches), tokens=stage.tokens,
            max_patches=stage.max_patches, pad_id=self.tokens.pad_id, sources=[name],
            patch_size=self.config.vision.patch_size, length=stage.length,
        )  # fmt: skip
        loss = weight = 0.0
        documents = 0
        with evaluating(self.fusion):
            for batch in batches:
                out = self.fusion(batch.to(self.runtime.device))
                learned = (batch.labels >= 0) & (batch.loss_weights > 0)
                loss += float(out.nll_T.double().cpu()[learned].sum())
                weight += float(learned.sum())
                documents += len(batch.keys)
        return {"loss": loss / weight, "tokens": weight, "conversations": documents} if weight else None

    def _heldout(self, name: str, limit: int, length: int, max_patches: int) -> Iterator[Encoded]:
        source = self._source(name)
        for index in range(min(limit, source.heldout_len())):
            try:
                document = encode(source.heldout(index), self.tokens, self.config.vision)
            except BadSample:
                continue
            if len(document) <= length and document.num_patches <= max_patches:
                yield document

    def _tool_talks(self, step: int, limit: int | None) -> dict[str, float]:
        headline: dict[str, float] = {}
        limit = limit or self.config.eval.limits.get("tool_talks", PLAYED)
        for config in self.config.data.sources:
            source = self._source(config.name)
            if not isinstance(source, ZeroVision):
                continue
            talks = [source.talk(index, heldout=True) for index in range(min(limit, source.heldout_len()))]
            with Sandbox() as sandbox:
                played = play_talks(self.fusion, self.tokens, talks, sandbox)
            found = summary(played)
            shown = [
                transcript(game) | {"picture": self._picture(config.name, number, game)}
                for number, game in enumerate(played[:SHOWN])
            ]
            save_result(self.out, f"tool_talks_{config.name}", step, found | {"source": config.name, "shown": shown})
            headline |= {f"{measure}/{config.name}": found[measure] for measure in MEASURES}
        return headline

    def _picture(self, source: str, number: int, game: Played) -> str | None:
        """Path of the conversation's picture in the run folder, written once; None where the model sees none."""
        picture = next(iter(picture_files(game.prompt).values()), None)
        if picture is None:
            return None
        name = f"samples/{source}_{number:03d}.png"
        path = self.out / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            thumbnail(picture).save(path)
        return name
