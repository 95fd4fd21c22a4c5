"""Run benchmarks; --list shows the tasks. A stopped run goes on when the same command is given again.

    earlyfusion eval --model RUN/model --tasks mmlu_pro:mcf,counting \\
        --data mmlu_pro=DIR --limit 280
    earlyfusion eval --model hf:PATH --tasks gpqa_diamond \\
        --data gpqa_diamond.csv --samples 8 --out evals/gpqa
    earlyfusion eval --model http://localhost:8000/v1 --tasks counting \\
        --out evals/served
    earlyfusion eval --model RUN/model --harness lm-eval \\
        --tasks piqa,mmlu_pro_math --data mmlu_pro=DIR
    earlyfusion eval --contamination SHARDS --tasks mmlu_pro --data DIR \\
        --out evals/overlap

`earlyfusion compare` reads the --out folders.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from earlyfusion.data.options import Options, verb
from earlyfusion.eval.benchmarks.base import BaseTask, build_task, known_benchmarks
from earlyfusion.eval.benchmarks.lm_eval import run_harness
from earlyfusion.eval.contamination import report
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.models.base import open_model
from earlyfusion.eval.protocol import EvalError, Model, TaskOptions
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline import figures
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.pipeline.progress import is_finite


class EvalOptions(Options):
    model: str = ""
    """model directory, embedded:NAME, hf:PATH (transformers, also .gguf), or http(s)://host/v1"""
    tasks: str = ""
    """task names, A,B, each with :form if not its default form"""
    data: list[str] = []
    """data, as PATH or TASK=PATH; may be given again"""
    out: Path | None = None
    """folder of records and summaries"""
    form: str | None = None
    """form of all tasks that have it: cot, mcf, cf, ..."""
    limit: int | None = Field(None, ge=1)
    """questions per task, spread over its categories (default all)"""
    shots: int | None = None
    """worked examples in the prompt (default the task's own number)"""
    samples: int = Field(1, ge=1)
    """answers per question; the score is their mean (avg@k)"""
    temperature: float | None = None
    """default: 0 for one sample, 1.0 with top-p 0.95 for several"""
    top_p: float | None = None
    """sample from the likeliest mass P"""
    max_new_tokens: int | None = None
    """longest answer (default the task's own)"""
    seed: int = 0
    """of sampling and generated data"""
    set_: list[str] = []
    """KEY=VALUE: a task's extra option; may be given again"""
    batch: int = Field(16, ge=1)
    """most sequences at once"""
    batch_tokens: int = Field(4096, ge=1)
    """most tokens read at once"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: as stored"""
    exact: bool = False
    """one sequence in a call: the same bits whatever else is asked; slower"""
    chat: bool | None = None
    """put generation prompts as the user's message (default: as a model directory was trained, else no)"""
    endpoint_model: str | None = None
    """model name to ask an endpoint for (default its first)"""
    harness: Literal["own", "lm-eval"] = "own"
    """lm-eval: run lm-evaluation-harness' tasks"""
    contamination: Path | None = None
    """training text or shards to look for the questions in"""
    list_: bool = False
    """show the tasks and leave"""
    quiet: bool = False
    """no progress bar"""


@verb
def evaluate(options: EvalOptions) -> None:
    """See the module."""
    # Questions that need no model.
    if options.list_:
        print("\n".join(f"{name:<15} {known.text}" for name, known in known_benchmarks().items()))
        return
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise EvalError("nothing to do: give --tasks (see --list)")

    # The tasks of lm-evaluation-harness are its own; ours are built and checked before a model is read.
    paths, default = data_paths(options.data)
    limit, out = options.limit, options.out
    if options.harness == "lm-eval":
        named = {**paths, **({"": default} if default else {})}
        chosen = options.model_dump(include={"limit", "shots", "seed", "out"})
        run_harness(_model(options), names, named, **chosen)
        return
    tasks = build_tasks(options, names, paths, default)
    if options.contamination is not None:
        report(tasks, options.contamination, limit, out)
        return

    # Data that are missing are told before the weights are read and a bar is drawn.
    for task in tasks:
        task.data_hash()

    # One bar a task, on standard error: the table below is the verb's output.
    model = _model(options)
    summaries = []
    with Progress(console=Console(stderr=True), disable=options.quiet) as bar:
        for task in tasks:
            row = bar.add_task(task.label, total=None)
            advance = lambda done, every, row=row: bar.update(row, completed=done, total=every)
            summaries.append(run_task(model, task, limit=limit, out=out, progress=advance))
    show(summaries)
    for summary in summaries:
        show_categories(summary)
    if out is not None:
        print(f"records and summaries: {out}", file=sys.stderr)


def _model(options: EvalOptions) -> Model:
    if not options.model:
        raise EvalError("--model is missing: a model directory, hf:PATH or http://host/v1")
    chosen = options.model_dump(include={"dtype", "batch_tokens", "chat", "endpoint_model", "exact"})
    return open_model(options.model, device=device_of(options.device), batch_size=options.batch, **chosen)


def build_tasks(
    options: EvalOptions, names: Sequence[str], paths: dict[str, Path], default: Path | None
) -> list[BaseTask]:
    """The tasks by name. Raises EvalError for an option that is no pair."""
    extra: Record = {}
    for pair in options.set_:
        key, found, value = pair.partition("=")
        if not found:
            raise EvalError(f"--set {pair}: expected KEY=VALUE")
        extra[key] = value
    chosen = options.model_dump(
        include={"form", "shots", "samples", "seed", "temperature", "top_p", "max_new_tokens"}
    )
    return [build_task(name, TaskOptions(data=default, extra=extra, **chosen), paths) for name in names]


def data_paths(given: Sequence[str]) -> tuple[dict[str, Path], Path | None]:
    """TASK=PATH pairs, and the one path without a task. Raises EvalError for two of the latter."""
    named: dict[str, Path] = {}
    default: Path | None = None
    # A path may hold "=" itself: what exists is a path.
    for value in given:
        name, found, path = value.partition("=")
        if found and "/" not in name and not Path(value).exists():
            named[name] = Path(path)
        elif default is None:
            default = Path(value)
        else:
            raise EvalError(f"--data {default} and --data {value}: say which task each is for, as TASK=PATH")
    return named, default


def show_categories(summary: Record) -> None:
    """A table of a task's categories with their errors, where it has several."""
    rows = summary["metrics"].get("by_category") or {}
    columns: dict[str, Record] = {}
    for name, found in rows.items() if len(rows) > 1 else ():
        for figure, value in found.items():
            columns.setdefault(figure, {})[name] = value
    if columns:
        figures.show(f"{summary['task']} by category", columns)


def show(summaries: Sequence[Record]) -> None:
    """A table of every task's numbers, on standard output."""
    columns: dict[str, Record] = {}
    # Tasks have numbers of their own: each is a column, a number that it lacks stays empty.
    for summary in summaries:
        numbers = {name: value for name, value in summary["metrics"].items() if is_finite(value)}
        columns[summary["task"]] = numbers | {"refused (too long)": summary["refused"] or None}
    figures.show("evaluation", columns)
    for summary in summaries:
        for line in summary.get("explained", ()):
            print(f"{summary['task']}: {line}")
