"""Text twins: a picture's graph told in words, with everything in it that a question may ask for.

The same question has the same answer with the picture and with its twin; the difference of the two scores is
what reading the picture costs, and a model trained on pictures that gets better on twins has carried
something over. The task `twins` asks the questions of all visual tasks in words alone, so that a model
without eyes can take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from earlyfusion.data.sample import question_text
from earlyfusion.data.synth.graphs import Graph, twin
from earlyfusion.eval.protocol import GenerateRequest, Question, Record, TaskOptions
from earlyfusion.eval.registry import benchmark


def twin_prompt(graph: Graph, question: str) -> str:
    """The twin in the picture's place, then the question as in training."""
    return twin(graph) + question_text(question)


class TwinsTask:
    """The questions of the visual tasks, told in words alone. Categories: "counting/objects", "chart/value",
    ..."""

    kind = "generate"
    version = "1"
    needs: frozenset[str] = frozenset()
    private = False

    def __init__(self, options: TaskOptions) -> None:
        from earlyfusion.eval.benchmarks.video_qa import video_qa
        from earlyfusion.eval.benchmarks.visual import PICTURE_TASKS

        self.name = "twins"
        self.options = options
        self.parts = {
            name: factory(options) for name, factory in {**PICTURE_TASKS, "video_qa": video_qa}.items()
        }

    def data_hash(self) -> str:
        """Over the data of all parts."""
        from hashlib import sha256

        return sha256("\n".join(part.data_hash() for part in self.parts.values()).encode()).hexdigest()

    def prepare(self, model: Any) -> None:
        """Nothing to prepare."""

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Questions of the parts in turn, so that every limit holds all kinds."""
        share = None if limit is None else -(-limit // len(self.parts))
        streams = [(name, list(part.questions(share, shots, seed))) for name, part in self.parts.items()]
        longest = max(len(questions) for _, questions in streams)
        merged = [
            Question(
                id=f"twins/{questions[i].id}",
                prompt=twin_prompt(questions[i].meta["item"].graph, questions[i].meta["item"].question),
                target=questions[i].target,
                category=f"{name}/{questions[i].category}",
                meta={**questions[i].meta, "part": name},
            )
            for i in range(longest)
            for name, questions in streams
            if i < len(questions)
        ]
        return merged if limit is None else merged[:limit]

    def requests(self, question: Question, repeat: int) -> Sequence[GenerateRequest]:
        """One request: the twin and the question."""
        return [self.parts[question.meta["part"]].generate_request(question.prompt, question.id, repeat)]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """As the visual task scores it."""
        return self.parts[question.meta["part"]].judged(question, outputs[0])

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Score in all and by category, beside the constant answer; the kinds' own metrics by category
        only."""
        from earlyfusion.eval.benchmarks.visual_base import aggregate

        own = {name for record in records for name in record["metrics"]}
        return {name: value for name, value in aggregate(records, views=()).items() if name not in own}


@benchmark("twins", "the visual tasks told in words alone")
def twins(options: TaskOptions) -> TwinsTask:
    """Factory of the task `twins`."""
    return TwinsTask(options)
