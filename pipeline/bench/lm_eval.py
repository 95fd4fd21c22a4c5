"""`earlyfusion bench lm-eval`: how much quicker the letter form of MMLU-Pro is here than with
lm-evaluation-harness: one process, one model, the same requests in turn, tokenisation included, task building
left out on both sides.

earlyfusion bench lm-eval --model PATH --data mmlu_pro --categories 2 \\
    --questions 30 --out ratio.json

PATH is a transformers checkpoint or a .gguf file. The gain comes from the five examples, which all questions
of a category share: the more questions a category has (the set has 381 to 1351), the larger it is.
"""

import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tasks.scoring import best_choice
from earlyfusion.eval.benchmarks.lm_eval import require_lm_eval
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.models.base import open_model
from earlyfusion.eval.protocol import ScoreRequest, TaskOptions
from earlyfusion.pipeline.bench.frame import Result, alternate, compared, save_record
from earlyfusion.pipeline.figures import show


class LmEvalOptions(Options):
    model: str
    """transformers checkpoint or .gguf file"""
    data: Path
    """folder with MMLU-Pro's test and validation"""
    categories: int = 2
    """how many categories"""
    questions: int = 30
    """questions of each"""
    batch: int = 8
    """sequences in a call, for both"""
    device: str = "cpu"
    """cpu, cuda, ..."""
    out: str = "runs/bench/lm-eval.json"
    """where the numbers are saved"""


def requests_of(data: Path, categories: int, questions: int) -> list[list[ScoreRequest]]:
    """The requests of the first `questions` questions of the first `categories` categories, one list a
    question."""
    # Letters by likelihood: what both evaluators do alike.
    task = MmluPro(TaskOptions(data=data, form="mcf"))
    found: dict[str, list[list[ScoreRequest]]] = defaultdict(list)
    for question in task.questions():
        known = question.category in found or len(found) < categories
        if known and len(found[question.category]) < questions:
            rows = [r for r in task.requests(question, 0) if isinstance(r, ScoreRequest)]
            found[question.category].append(rows)
    return list(chain.from_iterable(found.values()))


@verb
def lm_eval(options: LmEvalOptions) -> None:
    """Entry of `earlyfusion bench lm-eval`: seconds of both evaluators, their ratio, how far their answers
    differ."""
    require_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    batch = options.batch
    model: Any = open_model(f"hf:{options.model}", device=options.device, dtype="float32", batch_size=batch)
    theirs = HFLM(
        pretrained=model.model, tokenizer=model.tokenizer, max_length=model.max_length, batch_size=batch
    )

    # The very requests of our task, so that both read the same words.
    rows = requests_of(options.data, options.categories, options.questions)
    flat = list(chain.from_iterable(rows))
    asked = [Instance("loglikelihood", {}, (r.context, r.continuation), i) for i, r in enumerate(flat)]
    model.loglikelihood(flat[:1])  # the first call of a process also reads the weights in
    theirs.loglikelihood(asked[:1], disable_tqdm=True)
    # What the warm-up has kept must not help.
    model.forget()

    # Both give the answers in the order of the requests: a question's stand together.
    found: dict[str, list[float]] = {}

    def run(side: str) -> Result:
        started = time.perf_counter()
        if side == "ours":
            found[side] = [answer.sum for answer in model.loglikelihood(flat)]
        else:
            found[side] = [value for value, _ in theirs.loglikelihood(asked, disable_tqdm=True)]
        return {"seconds": time.perf_counter() - started}

    columns = compared(alternate(("ours", "lm-eval"), 1, run))
    own, other = found.values()
    different = start = 0
    for row in rows:
        part = slice(start, start + len(row))
        # A ratio between two that answer differently would be none.
        different += best_choice(own[part]) != best_choice(other[part])
        start += len(row)
    columns["both"] = {
        "questions": len(rows),
        "requests": len(flat),
        "largest_difference": max(abs(a - b) for a, b in zip(own, other)),
        "different_answers": different,
    }
    show("letters of MMLU-Pro", columns)
    save_record(options.out, options.model_dump(mode="json"), comparison=columns)
