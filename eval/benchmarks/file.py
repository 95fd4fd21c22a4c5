"""Questions of your own as a benchmark: rows in the form of the task "file" (data/tasks/file.py), asked with
their pictures, with grey ones and with those of the next question.

    earlyfusion eval --model runs/nano --tasks file --data questions.jsonl

score      with its pictures and clips
blind      grey ones of the same sizes: what can be guessed from the words
swapped    those of the next question that has any: what a picture adds that is not this one

Every row is asked, held out or not; the option heldout does not exist here. A model without a chat form is
asked as in pretraining ("Q: ... A:"). Rows whose checks may hang (math, json_schema, your own function) are
scored in a process of their own, with a deadline.
"""

from collections.abc import Iterable

from earlyfusion.data.sample import Segment, Text
from earlyfusion.data.tasks.file import FileTask
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.eval.benchmarks.base import benchmark, evenly
from earlyfusion.eval.benchmarks.visual import PictureTask, whole
from earlyfusion.eval.blind import grey, is_media, replaced
from earlyfusion.eval.protocol import Generation, Model, Prompt, Question
from earlyfusion.eval.rewards import Rewards, TaskReward
from earlyfusion.kernels.files import Record

OPTIONS = ("split", "check", "urls", "skip_bad_rows")
"""Of the task "file", as --set NAME=VALUE."""
DEADLINE_S = 10.0
"""Of scoring one answer by a check that may hang."""


@benchmark("file", "your own questions with or without pictures (jsonl, parquet, dataset on disk)")
class FileQuestions(PictureTask):
    """See the module. --data names the file; max_new_tokens 64 if not given, by row where a row says less."""

    name = "file"
    stop: tuple[str, ...] = ()

    def setup(self) -> None:
        # --set gives texts; what other tasks of the call take is not for this one.
        given = {name: value for name, value in self.options.extra.items() if name in OPTIONS}
        for name in ("urls", "skip_bad_rows"):
            if name in given:
                given[name] = given[name] == "true"
        self.task = FileTask(str(self.data_path()), heldout=0.0, **given)
        # Questions in words alone have nothing to be shown otherwise.
        self.views = ("blind", "swapped") if self.task.media else ()
        self.needs = frozenset(self.task.media)
        self.qa = False
        self.rewards = Rewards(
            TaskReward([self.task]),
            isolation="inline" if self.task.quick else "process",
            timeout_s=DEADLINE_S,
            workers=1,
        )

    def prepare(self, model: Model) -> None:
        """Whether the model is asked in the form of pretraining."""
        self.qa = bool(getattr(model, "asks_qa", False))
        self.stop = ("\n",) if self.qa else ()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """Rows in file order, or `limit` of them at even distances."""
        rows = evenly(range(len(self.task.sides["train"].numbers)), limit)
        for place, row in enumerate(rows):
            problem = self.task.sample(row)
            # The next one that shows anything; the last ones see what the first ones show.
            others = (*rows[place + 1 :], *rows[:place]) if self.views else ()
            other = next((one for one in others if self.media_of(one)), row)
            # Numbers and not problems: the pictures of all questions would not fit into memory.
            meta = {"row": row, "other": other}
            yield Question(problem.combination, "", problem.target, problem.category, meta=meta)

    def media_of(self, row: int) -> list[Segment]:
        """The pictures and clips of a row."""
        return [part for part in self.segments(self.task.sample(row)) if is_media(part)]

    def segments(self, problem: Problem) -> list[Segment]:
        """What is asked: in the form of pretraining, or the contents of the messages."""
        if self.qa:
            return list(problem.prompt())
        parts: list[Segment] = []
        for message in problem.chat():
            parts += [Text("\n\n"), *message.content] if parts else message.content
        return parts

    def prompts(self, question: Question) -> list[Prompt]:
        """With its own pictures, then one for each view."""
        asked = self.segments(self.task.sample(question.meta["row"]))
        if not self.views:
            return [asked]
        return [asked, [grey(part) for part in asked], replaced(asked, self.media_of(question.meta["other"]))]

    def judged(self, question: Question, output: Generation) -> Record:
        """What the row's own check gives."""
        text = whole(output)
        (found,) = self.rewards([(self.task.sample(question.meta["row"]), text)])
        record: Record = {"target": question.target, "extracted": text.strip() or None, "score": found.value}
        # A check that failed says nothing about the model: it is told beside the answer.
        return record | ({"error": f"{found.status}: {found.detail}"} if found.status != "ok" else {})
