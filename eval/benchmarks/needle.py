"""The needle task by length and depth: one shape among many in a long document (data/tasks/needle.py).

    earlyfusion eval --model runs/nano-context/model --tasks needle,needle:words --set lengths=1024,8192

score           with the needle
without_score   the same document without it: what can be guessed
blind_score     all pictures grey (form picture)

Rows of the table: each length, and each length by depth. A length is the most tokens that a document of it
takes; a prompt that does not fit a model is counted as "refused (too long)".
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

from earlyfusion.data.sample import Segment
from earlyfusion.data.tasks.needle import Haystack, Needle
from earlyfusion.eval.benchmarks.base import benchmark
from earlyfusion.eval.benchmarks.visual import PictureTask, whole
from earlyfusion.eval.blind import grey
from earlyfusion.eval.protocol import EvalError, Generation, Prompt, Question
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record

LENGTHS = "128,512,1024,2048"
"""Asked if --set lengths=... names no others."""
EACH = 100
"""Questions of one length if --limit says nothing."""


@benchmark("needle", "one shape among many in a long document, by length and depth")
class NeedleTask(PictureTask):
    """See the module."""

    name = "needle"
    forms = ("picture", "words")
    new_tokens = 8

    def setup(self) -> None:
        """Which lengths are asked. Raises EvalError for one that the task has not."""
        self.task = Needle()
        known = [str(knobs["length"]) for knobs in self.task.levels]
        self.asked = [one.strip() for one in self.options.extra.get("lengths", LENGTHS).split(",")]
        for one in self.asked:
            if one not in known:
                raise EvalError(f"needle: --set lengths={one}; {did_you_mean(one, known)}")
        self.asked_levels = [known.index(one) for one in self.asked]
        self.views = ("without",)
        self.needs: frozenset[str] = frozenset()
        if self.form == "picture":
            self.views, self.needs = ("without", "blind"), frozenset({"image"})

    def data_hash(self) -> str:
        """Of version, lengths and seed: nothing is stored."""
        facts = ["data/tasks/needle", self.version, self.asked, self.options.seed]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """Held-out problems, as many of every length."""
        limit = limit or EACH * len(self.asked)
        for i, (level, length) in enumerate(zip(self.asked_levels, self.asked)):
            # The first lengths get one more where the limit cannot be shared evenly.
            each = len(range(i, limit, len(self.asked)))
            for problem in self.task.test_problems(each, self.options.seed, level):
                # With zeros, so that names are in the order of the numbers.
                category, meta = f"{int(length):06d} tokens", {"problem": problem}
                yield Question(problem.key, "", problem.answer, category, meta=meta)

    def prompts(self, question: Question) -> list[Prompt]:
        """The document, without its needle, and with grey pictures."""
        problem: Haystack = question.meta["problem"]
        shown, without = (self.asked_of(one) for one in (problem, problem.without()))
        prompts: list[Prompt] = [shown, without]
        return [*prompts, [grey(part) for part in shown]] if "blind" in self.views else prompts

    def asked_of(self, problem: Haystack) -> list[Segment]:
        """As in training."""
        return list(problem.prompt("picture" if self.form == "picture" else "twin"))

    def judged(self, question: Question, output: Generation) -> Record:
        """Exact words."""
        problem, text = question.meta["problem"], whole(output)
        extracted, score, _ = self.task.judge(problem, text)
        return {"extracted": extracted, "score": score, "target": question.target, "depth": problem.category}

    def aggregate(self, records: Sequence[Record]) -> Record:
        """As of visual tasks, by length, and by length and depth."""
        result = super().aggregate(records)
        deep = [record | {"category": f"{record['category']}, {record['depth']}"} for record in records]
        rows = result["by_category"] | super().aggregate(deep)["by_category"]
        return {**result, "by_category": dict(sorted(rows.items()))}
