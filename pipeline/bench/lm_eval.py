"""`earlyfusion bench lm-eval`: how much quicker the letter form of MMLU-Pro is here than with
lm-evaluation-harness: one process, one model, the same requests in turn, tokenisation included, task building
left out on both sides.

earlyfusion bench lm-eval --model PATH --data mmlu_pro --categories 2 --questions 30 --out ratio.json

PATH is a transformers checkpoint or a .gguf file. The gain comes from the five examples, which all questions
of a category share: the more questions a category has (the set has 381 to 1351), the larger it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.tasks.scoring.answers import best_choice
from earlyfusion.eval.benchmarks.lm_eval import require_lm_eval
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.models.base import open_model
from earlyfusion.eval.protocol import ScoreRequest, TaskOptions
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.options import Options, verb


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
    rounds: int = 1
    """measurements, the best counts"""
    device: str = "cpu"
    """cpu, cuda, ..."""
    dtype: str = "float32"
    """dtype of the weights"""
    out: str = ""
    """also write the JSON here"""


def requests_of(data: Path, categories: int, questions: int) -> list[list[ScoreRequest]]:
    """The requests of the first `questions` questions of the first `categories` categories, one list a
    question."""
    task = MmluPro(TaskOptions(data=data, form="mcf"))
    found: dict[str, list[list[ScoreRequest]]] = {}
    for question in task.questions(None, None):
        if question.category not in found and len(found) == categories:
            continue
        rows = found.setdefault(question.category, [])
        if len(rows) < questions:
            rows.append([r for r in task.requests(question, 0) if isinstance(r, ScoreRequest)])
    return [row for rows in found.values() for row in rows]


def compare(
    model: Any, rows: Sequence[Sequence[ScoreRequest]], batch_size: int, rounds: int
) -> dict[str, Any]:
    """Seconds of both evaluators (the best of `rounds`, in turn), their ratio, and how far their answers
    differ."""
    require_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(
        pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch_size, max_length=model.max_length
    )

    # The very requests of our task, so that both read the same words.
    flat = [request for row in rows for request in row]
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=(r.context, r.continuation), idx=i)
        for i, r in enumerate(flat)
    ]
    model.loglikelihood(flat[:1])  # the first call of a process also reads the weights in
    theirs.loglikelihood(asked[:1], disable_tqdm=True)

    # In turn, ours without what it has kept of the round before.
    ours_s, theirs_s = [], []
    for _ in range(rounds):
        model.forget()
        started = time.perf_counter()
        own = model.loglikelihood(flat)
        ours_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        other = theirs.loglikelihood(asked, disable_tqdm=True)
        theirs_s.append(time.perf_counter() - started)

    # Both give the answers in the order of the requests: a question's stand together.
    mine, others = iter([answer.sum for answer in own]), iter([value for value, _ in other])
    different = sum(
        best_choice(list(islice(mine, len(row)))) != best_choice(list(islice(others, len(row))))
        for row in rows
    )
    return {
        "questions": len(rows),
        "requests": len(flat),
        "batch_size": batch_size,
        "ours_s": min(ours_s),
        "lm_eval_s": min(theirs_s),
        "ratio": min(theirs_s) / min(ours_s),
        "all_ours_s": ours_s,
        "all_lm_eval_s": theirs_s,
        "largest_difference": max(abs(a.sum - value) for a, (value, _) in zip(own, other)),
        "different_answers": different,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "dtype": str(model.model.dtype),
        "parameters": sum(p.numel() for p in model.model.parameters()),
    }


@verb
def lm_eval(options: LmEvalOptions) -> None:
    """Measure and print one JSON object."""
    model = open_model(
        f"hf:{options.model}", device=options.device, dtype=options.dtype, batch_size=options.batch
    )
    rows = requests_of(options.data, options.categories, options.questions)
    result = compare(model, rows, options.batch, options.rounds)
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, indent=1))
