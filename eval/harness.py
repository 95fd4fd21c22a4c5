"""Runs a task on a model: asks in chunks, writes one line per question at once, goes on where a stopped run
ended.

    OUT/<label>/settings.json    what is asked of whom; a folder is never continued with other settings
    OUT/<label>/records.jsonl    id, repeat, category, seed, prompt_hash, output, extracted, score, tokens,
                                 ...
    OUT/<label>/summary.json     the numbers (BaseTask.aggregate), the settings, seconds; written when all is
                                 answered

Of private tasks no output is kept.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from earlyfusion.eval.benchmarks.base import BaseTask, request_seed
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    Interrupted,
    LossRequest,
    Model,
    Question,
    Request,
    RollingRequest,
    ScoreRequest,
    prompt_hash,
)
from earlyfusion.kernels.files import Record, write_json

EXAMPLES = 3
UNREAD = (
    "what to do: the model does not answer in the form that is asked for; take a form that compares"
    " log-likelihoods (--form mcf or cf) where the task has one, a model that was tuned on such answers, or"
    " --chat"
)
WRONG = (
    "what to do: the answers are in the right form and wrong; compare them with the targets in records.jsonl"
    " (--out), and the data's answers with what the model was taught to say"
)
SETTINGS, RECORDS, SUMMARY = "settings.json", "records.jsonl", "summary.json"
METHODS: dict[type, str] = {
    GenerateRequest: "generate",
    ScoreRequest: "loglikelihood",
    RollingRequest: "rolling",
    LossRequest: "losses",
}
Records = dict[tuple[str, int], Record]
"""(id, repeat) -> record"""


class Pending(NamedTuple):
    """A question without a record, and what is asked for it."""

    question: Question
    repeat: int
    requests: Sequence[Request]
    prompt_hash: str


def run_task(
    model: Model,
    task: BaseTask,
    *,
    limit: int | None = None,
    out: Path | None = None,
    progress: Callable[[int, int], object] = lambda done, every: None,
    chunk: int = 64,
    share: tuple[int, int] = (0, 1),
    gather: Callable[[Records], Sequence[Records]] = lambda own: [own],
    stopping: Callable[[], bool] = lambda: False,
) -> Record:
    """Ask every question of the task (those not yet answered in `out`); returns the summary.

    limit: questions (None: all). progress is given (answered, all). chunk: questions handed to the model at
    once; what a stopped run loses is at most one chunk. share, gather: (rank, world) of processes that ask
    every world-th question each, and what brings their records together; every process then calls it and gets
    the same summary. stopping: whether to ask no further, looked at after every chunk. Raises EvalError when
    the model cannot do what the task needs, or `out` holds a run with other settings; Interrupted, in every
    process, where `stopping` of any left questions unasked.
    """
    # What cannot work is said before anything is written.
    needed = {*task.needs, "generate" if task.kind == "generate" else "score"}
    if missing := needed - model.capabilities:
        raise EvalError(
            f"task {task.name!r} needs a model with {', '.join(sorted(missing))}; {model.name} has "
            f"{', '.join(sorted(model.capabilities))}: choose another task or model"
        )
    task.prepare(model)
    # All at once: two equal ids would overwrite each other's records hours later.
    questions = list(task.questions(limit))
    if len({question.id for question in questions}) != len(questions) or not questions:
        raise EvalError(
            f"task {task.name!r} has no question to ask, or two with one id; look at --data and --limit"
        )
    # What a run is defined by; two runs with equal settings are the same measurement.
    settings: Record = {"task": task.label, "version": task.version, "form": task.form}
    settings |= {"limit": limit, "data_hash": task.data_hash(), "model": model.identity()}
    for name, value in vars(task.options).items():
        # Options left alone are not written: a new option does not part old runs from new ones.
        if name not in ("data", "form") and value not in (None, {}):
            settings[name] = value
    folder = out and out / task.label
    records = resume(folder, settings) if folder else {}

    # Ask what is missing; every chunk is on the disk before the next is asked.
    started = time.monotonic()
    order = [(question, repeat) for repeat in range(task.options.samples) for question in questions]
    order_here = order[share[0] :: share[1]]
    pending = _pending(task, order_here, records)
    while not stopping():
        progress(len(records), len(order_here))
        asked = list(islice(pending, chunk))
        if not asked:
            break
        answered = answer(model, task, asked)
        records |= {(record["id"], record["repeat"]): record for record in answered}
        if folder:
            append_records(folder / RECORDS, answered)

    # The numbers, with everything that they were measured under.
    for part in gather(records):
        records |= part
    if any((question.id, repeat) not in records for question, repeat in order):
        raise Interrupted
    kept = [records[question.id, repeat] for question, repeat in order]
    summary = {**settings, "metrics": task.aggregate(kept), "seconds": round(time.monotonic() - started, 3)}
    summary["refused"] = sum(record.get("finish") == "refused" for record in kept)
    if lines := explain(task, summary["metrics"], kept):
        summary["explained"] = lines
    if folder:
        write_json(folder / SUMMARY, summary)
    return summary


# questions and answers


def _pending(
    task: BaseTask, order: Sequence[tuple[Question, int]], records: Mapping[tuple[str, int], Record]
) -> Iterator[Pending]:
    """Questions without a record; a record whose prompt has changed is an error."""
    for question, repeat in order:
        # Made one after the other: the pictures of all questions would not fit into memory.
        requests = task.requests(question, repeat)
        pending = Pending(question, repeat, requests, prompt_hash(requests))
        record = records.get((question.id, repeat))
        if record is None:
            yield pending
        elif record.get("prompt_hash") != pending.prompt_hash:
            raise EvalError(
                f"task {task.name!r}: question {question.id!r} was answered under another prompt; the data or"
                " the task has changed since: use a new --out"
            )


def answer(model: Model, task: BaseTask, asked: Sequence[Pending]) -> list[Record]:
    """One record for each of the pending questions."""
    requests: list[Request] = []
    for pending in asked:
        requests += pending.requests
    outputs = iter(ask(model, requests))

    records = []
    for question, repeat, own_requests, hashed in asked:
        own = list(islice(outputs, len(own_requests)))
        seed = request_seed(task.options.seed, question.id, repeat)
        record: Record = {"id": question.id, "repeat": repeat, "category": question.category, "seed": seed}
        record["prompt_hash"] = hashed
        # Likelihoods leave numbers in the record; only words have to be kept or hidden.
        texts = [output.text for output in own if isinstance(output, Generation)]
        if texts:
            # The first answer is the task's own, those behind it are controls.
            first = next(output for output in own if isinstance(output, Generation))
            record |= {"tokens": first.tokens, "finish": first.finish}
            # A model may repeat a private question in its answers.
            if not task.private:
                record["output"] = texts[0] if len(texts) == 1 else texts
        records.append(record | task.score(question, repeat, own))
    return records


def ask(model: Model, requests: Sequence[Request]) -> list[Any]:
    """Outputs in the order of the requests; a task may mix kinds: an answer and a likelihood for one
    question."""
    results: dict[int, Any] = {}
    # One call a kind, so that the backend can batch all of them.
    for kind, method in METHODS.items():
        places = [place for place, request in enumerate(requests) if isinstance(request, kind)]
        if places:
            outputs = getattr(model, method)([requests[place] for place in places])
            results |= zip(places, outputs)
    return [results[place] for place in range(len(requests))]


# why a score is nothing


def explain(task: BaseTask, metrics: Record, records: Sequence[Record]) -> list[str]:
    """Lines for beneath the table: why a score is 0. Of private tasks no answer."""
    if task.kind != "generate" or metrics.get("score") != 0:
        return []

    # Unread answers and wrong ones call for different remedies.
    unread = metrics["unextracted"]
    lines = [
        f"score 0: none of {len(records)} answers is right; nothing could be read out of {unread:.0%} of them"
    ]
    if not task.private:
        # A model that says nothing says it often; one of each is enough.
        found: dict[str, str] = {}
        for record in records:
            output = record["output"]
            text = output if isinstance(output, str) else output[0]
            found[text] = f"{text.strip()[:60]!r} where {record.get('target')!r} was expected"
        lines.append(f"the model said {'; '.join(list(found.values())[:EXAMPLES])}")
    return [*lines, UNREAD if unread > 0.5 else WRONG]


# files


def resume(folder: Path, settings: Record) -> Records:
    """Records of an earlier, stopped run with the same settings (its limit may have been smaller). Raises
    EvalError for other settings."""
    path = folder / SETTINGS
    # As it will be read back: tuples are lists in the file.
    earlier = now = json.loads(json.dumps(settings))
    if path.is_file():
        try:
            earlier = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise EvalError(
                f"{path}: not settings ({error}); use a new --out, or remove that folder"
            ) from None

    differing = [key for key in earlier | now if earlier.get(key) != now.get(key)]
    # A larger limit goes on with the same questions; every other change is another measurement.
    if "limit" in differing and earlier.get("limit") and (now["limit"] or math.inf) >= earlier["limit"]:
        differing.remove("limit")
    if differing:
        changes = [f"{key}: {earlier.get(key)!s:.60} there, {now.get(key)!s:.60} now" for key in differing]
        raise EvalError(
            f"{folder}: holds another run ({'; '.join(changes)}); use a new --out, or remove that folder"
        )
    write_json(path, settings)
    # What a killed run left of its last line is cut off: the next record begins a line of its own.
    with (folder / RECORDS).open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return read_records(folder / RECORDS)


def read_records(path: Path) -> Records:
    """Complete lines of a records file by (id, repeat); of several with one key the last. Raises EvalError
    for a line that is no record."""
    records: Records = {}
    # A killed run leaves half a line at most, and only as the last.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), 1):
        try:
            record = json.loads(line)
            records[str(record["id"]), int(record["repeat"])] = record
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise EvalError(f"{path}:{number}: not a record; remove the line and run again") from None
    return records


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Add lines and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")  # ASCII: an answer may hold any line end
        file.flush()
        os.fsync(file.fileno())
