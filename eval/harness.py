"""Runs a task on a model: asks in chunks, writes one line per question at once, goes on where a stopped run
ended.

    OUT/<label>/settings.json    what is asked of whom; a folder is never continued with other settings
    OUT/<label>/records.jsonl    id, repeat, category, seed, prompt_hash, output, extracted, score, tokens,
                                 ...
    OUT/<label>/summary.json     the numbers (Task.aggregate), the settings, seconds; written when all is
                                 answered

<label> is the task's name, followed by the form where it is not the task's default. Of private tasks no
output is kept: a record holds its sha256 and length instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.benchmarks.base import request_seed
from earlyfusion.eval.explain import explain
from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    LossRequest,
    Model,
    Question,
    Record,
    Request,
    RollingRequest,
    ScoreRequest,
    Task,
    TaskOptions,
    prompt_hash,
)
from earlyfusion.eval.registry import build_by_name
from earlyfusion.kernels.files import write_json
from earlyfusion.model.fusion import NativeFusion

SETTINGS, RECORDS, SUMMARY = "settings.json", "records.jsonl", "summary.json"

Records: TypeAlias = dict[tuple[str, int], Record]
"""(id, repeat) -> record"""


@dataclass(frozen=True)
class RunOptions:
    """limit: questions (None: all). shots None: the task's own number. samples: answers per question. chunk:
    questions handed to the model at once; what a stopped run loses is at most one chunk."""

    limit: int | None = None
    shots: int | None = None
    samples: int = 1
    seed: int = 0
    chunk: int = 64


@dataclass(frozen=True)
class Pending:
    """A question without a record, and what is asked for it."""

    question: Question
    repeat: int
    requests: Sequence[Request]
    prompt_hash: str


def label_of(task: Task) -> str:
    """Name of the task's folder."""
    form, forms = getattr(task, "form", ""), getattr(task, "forms", ())
    return task.name if not form or not forms or form == forms[0] else f"{task.name}_{form}"


def run_task(
    model: Model,
    task: Task,
    options: RunOptions | None = None,
    *,
    out: Path | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> dict[str, Any]:
    """Ask every question of the task (those not yet answered in `out`); returns the summary. progress: a bar,
    or a function that is given (answered, all).

    Raises EvalError when the model cannot do what the task needs, or `out` holds a run with other settings.
    """
    options = options or RunOptions()
    # What cannot work is said before anything is written.
    check_capabilities(model, task)
    task.prepare(model)
    questions = list(task.questions(options.limit, options.shots, options.seed))
    check_ids(task, questions)
    settings = run_settings(model, task, options)
    folder = None if out is None else out / label_of(task)
    records = {} if folder is None else resume(folder, settings)

    # Ask what is missing; every chunk is on the disk before the next is asked.
    started = time.monotonic()
    order = [(question, repeat) for repeat in range(options.samples) for question in questions]
    with progress_of(progress, label_of(task), len(order)) as advance:
        advance(records)
        pending = _pending(task, order, records)
        while chunk := list(islice(pending, options.chunk)):
            answered = answer(model, task, chunk, options)
            records |= {(record["id"], record["repeat"]): record for record in answered}
            if folder is not None:
                append_records(folder / RECORDS, answered)
            advance(records)

    # The numbers, with everything that they were measured under.
    kept = [records[question.id, repeat] for question, repeat in order]
    summary = {**settings, "metrics": task.aggregate(kept), "seconds": round(time.monotonic() - started, 3)}
    hashes = "".join(sorted(record["prompt_hash"] for record in kept))
    summary["prompts_sha256"] = hashlib.sha256(hashes.encode()).hexdigest()
    summary["refused"] = sum(bool(record.get("refused")) for record in kept)
    if lines := explain(task, summary["metrics"], kept):
        summary["explained"] = lines
    if folder is not None:
        write_json(folder / SUMMARY, summary)
        if callable(keep := getattr(task, "write_shown", None)):
            keep(folder, kept, summary)
    return summary


def check_capabilities(model: Model, task: Task) -> None:
    """Raises EvalError when the model lacks what the task needs."""
    needed = {*task.needs, "generate" if task.kind == "generate" else "score"}
    if missing := needed - set(model.capabilities):
        raise EvalError(
            f"task {task.name!r} needs a model with {', '.join(sorted(missing))}; {model.name} has "
            f"{', '.join(sorted(model.capabilities))}: choose another task or model"
        )


def check_ids(task: Task, questions: Sequence[Question]) -> None:
    """Raises EvalError when the task has no question, or two of the same id."""
    if not questions:
        raise EvalError(f"task {task.name!r} has no question to ask; look at --data and --limit")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise EvalError(f"task {task.name!r}: two questions have the id {question.id!r}; mend the data")
        seen.add(question.id)


def run_settings(model: Model, task: Task, options: RunOptions) -> dict[str, Any]:
    """What a run is defined by; two runs with equal settings are the same measurement."""
    settings = {
        "task": label_of(task),
        "version": task.version,
        "form": getattr(task, "form", ""),
        "data_hash": task.data_hash(),
        "model": model.identity(),
        "limit": options.limit,
        "shots": options.shots,
        "samples": options.samples,
        "seed": options.seed,
    }

    given = getattr(task, "options", None)
    if isinstance(given, TaskOptions):
        chosen = ("temperature", "top_p", "max_new_tokens", "extra")
        settings |= {key: value for key, value in asdict(given).items() if key in chosen and value}
    return settings


# questions and answers


def _pending(
    task: Task, order: Sequence[tuple[Question, int]], records: Mapping[tuple[str, int], Record]
) -> Iterator[Pending]:
    """Questions without a record; a record whose prompt has changed is an error."""
    for question, repeat in order:
        record = records.get((question.id, repeat))
        requests = task.requests(question, repeat)
        hashed = prompt_hash(requests)
        if record is None:
            yield Pending(question, repeat, requests, hashed)
        elif record.get("prompt_hash") != hashed:
            raise EvalError(
                f"task {task.name!r}: question {question.id!r} was answered under another prompt; the data or"
                " the task has changed since: use a new --out"
            )


def answer(model: Model, task: Task, chunk: Sequence[Pending], options: RunOptions) -> list[Record]:
    """One record for each of the pending questions."""
    outputs = iter(ask(model, [request for pending in chunk for request in pending.requests]))
    records = []
    for pending in chunk:
        question, own = pending.question, list(islice(outputs, len(pending.requests)))
        record: Record = {
            "id": question.id,
            "repeat": pending.repeat,
            "category": question.category,
            "seed": request_seed(options.seed, question.id, pending.repeat),
            "prompt_hash": pending.prompt_hash,
        }

        written = [output for output in own if isinstance(output, Generation)]
        if written:
            record |= _output(written, task.private)
        records.append({**record, **task.score(question, pending.repeat, own)})
    return records


def _output(outputs: Sequence[Generation], private: bool) -> Record:
    """What a record keeps of the answers."""
    record: Record = {"tokens": outputs[0].tokens, "finish": outputs[0].finish}
    if any(output.finish == "refused" for output in outputs):
        record["refused"] = True
    texts = [output.text for output in outputs]
    if not private:
        return record | {"output": texts[0] if len(texts) == 1 else texts}
    text = "\0".join(texts)
    return record | {"output_sha256": hashlib.sha256(text.encode()).hexdigest(), "output_chars": len(text)}


def ask(model: Model, requests: Sequence[Request]) -> list[Any]:
    """Outputs in the order of the requests, whichever kinds they are of."""
    # A task may mix kinds: an answer and a likelihood for one question.
    results: list[Any] = [None] * len(requests)
    methods: tuple[tuple[type, str], ...] = (
        (GenerateRequest, "generate"),
        (ScoreRequest, "loglikelihood"),
        (RollingRequest, "rolling"),
        (LossRequest, "losses"),
    )

    for kind, method in methods:
        places = [place for place, request in enumerate(requests) if isinstance(request, kind)]
        if places:
            for place, output in zip(places, getattr(model, method)([requests[place] for place in places])):
                results[place] = output
    return results


# files


def resume(folder: Path, settings: Mapping[str, Any]) -> Records:
    """Records of an earlier, stopped run with the same settings (its limit may have been smaller). Raises
    EvalError for other settings."""
    path = folder / SETTINGS
    plain = json.loads(json.dumps(settings))
    earlier = plain
    if path.is_file():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            earlier = {}

    # A larger limit goes on with the same questions; every other change is another measurement.
    differing = [key for key in {**earlier, **plain} if earlier.get(key) != plain.get(key)]
    before, now = earlier.get("limit"), plain["limit"]
    if "limit" in differing and before is not None and (now is None or now >= before):
        differing.remove("limit")
    if differing:
        shown = "; ".join(
            f"{key}: {_short(earlier.get(key))} there, {_short(plain.get(key))} now" for key in differing
        )
        raise EvalError(f"{folder}: holds another run ({shown}); use a new --out, or remove that folder")
    write_json(path, settings)
    (folder / RECORDS).touch()
    return read_records(folder / RECORDS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_records(path: Path) -> Records:
    """Complete lines of a records file by (id, repeat). A last line without its end (a killed run) is cut
    off. Raises EvalError for a line that is no record."""
    if not path.is_file():
        return {}
    # A killed run leaves half a line at most, and only as the last.
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))

    found = {}
    for number, line in enumerate(whole.decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            found[str(record["id"]), int(record["repeat"])] = record
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise EvalError(f"{path}:{number}: not a record; remove the line and run again") from None
    return found


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Add lines and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")  # ASCII: an answer may hold any line end
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def progress_of(
    shown: bool | Callable[[int, int], None], label: str, total: int
) -> Iterator[Callable[[Records], None]]:
    """Yields a function of all records so far: a bar on standard error with the running mean score, or what
    the caller gave, or nothing."""
    if callable(shown):
        yield lambda records: shown(len(records), total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        row = bar.add_task(label, total=total, note="")

        def advance(records: Records) -> None:
            scores = [record["score"] for record in records.values()]
            note = f"score {sum(scores) / len(scores):.4f}" if scores else ""
            bar.update(row, completed=len(scores), note=note)

        yield advance


# in the training loop


def evaluate_in_memory(
    model: NativeFusion,
    tokenizer: Tokenizer,
    tasks: Sequence[str | Task],
    limit: int | None = None,
    *,
    shots: int | None = None,
    data: Mapping[str, str | Path] | None = None,
    out: Path | None = None,
    batch_size: int = 16,
    batch_tokens: int = 4096,
    seed: int = 0,
    chat: bool = False,
    progress: bool | Callable[[int, int], None] = False,
) -> dict[str, dict[str, Any]]:
    """Evaluate weights in memory, as a training loop does every n steps; -> task label -> metrics.

    tasks: "name", "name:form" or Task objects. data: task name -> path. The model's mode is restored; nothing
    is written without `out` (a folder for this step). chat: as in EngineModel.
    """
    wrapped = EngineModel(model, tokenizer, batch_size=batch_size, batch_tokens=batch_tokens, chat=chat)
    options = RunOptions(limit=limit, shots=shots, seed=seed)
    results = {}
    for given in tasks:
        task = build_by_name(given, TaskOptions(seed=seed), data or {}) if isinstance(given, str) else given
        results[label_of(task)] = run_task(wrapped, task, options, out=out, progress=progress)["metrics"]
    return results
