"""`earlyfusion eval`: benchmarks on a model directory, a transformers model or an endpoint.

    earlyfusion eval --model RUN/model --tasks mmlu_pro:mcf,counting --data mmlu_pro=DIR --limit 280 --out
    evals/run earlyfusion eval --model hf:PATH --tasks gpqa_diamond --data gpqa_diamond.csv --samples 8 --out
    evals/gpqa earlyfusion eval --model http://localhost:8000/v1 --tasks ocr,board --out evals/served
    earlyfusion eval --model RUN/model --harness lm-eval --tasks piqa,mmlu_pro_math --data mmlu_pro=DIR --out
    evals/lm earlyfusion eval --rescore outputs.jsonl.gz --levels 1 earlyfusion eval --contamination SHARDS
    --tasks mmlu_pro --data DIR --out evals/overlap earlyfusion eval --list

A stopped run goes on when the same command is given again. `earlyfusion compare` reads the --out folders.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.eval.harness import RunOptions, build_by_name, run_task
from earlyfusion.eval.protocol import TASKS, EvalError, Task, TaskOptions


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion eval",
        description="Run benchmarks; --list shows the tasks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="WHERE",
        help="model directory, embedded:NAME, hf:PATH (transformers, also .gguf), or http(s)://host/v1",
    )
    add("--tasks", metavar="A,B", help="task names, each with :form if not its default form")
    add(
        "--data",
        metavar="PATH",
        action="append",
        default=[],
        help="data, as PATH or TASK=PATH; may be given again",
    )
    add("--out", metavar="DIR", type=Path, help="folder of records and summaries")
    add(
        "--sha256",
        metavar="[TASK=]HEX",
        action="append",
        default=[],
        help="refuse data whose hash (in the summary) differs",
    )
    add("--form", metavar="FORM", help="form of all tasks that have it: cot, mcf, cf, ...")
    add("--limit", type=int, metavar="N", help="questions per task, spread over its categories (default all)")
    add(
        "--shots", type=int, metavar="N", help="worked examples in the prompt (default the task's own number)"
    )
    add(
        "--samples",
        type=int,
        default=1,
        metavar="K",
        help="answers per question; the score is their mean (avg@k)",
    )
    add(
        "--temperature",
        type=float,
        metavar="X",
        help="default: 0 for one sample, 1.0 with top-p 0.95 for several",
    )
    add("--top-p", type=float, metavar="P", help="sample from the likeliest mass P")
    add("--max-new-tokens", type=int, metavar="N", help="longest answer (default the task's own)")
    add("--seed", type=int, default=0, help="of sampling and generated data")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a task's extra option; may be given again",
    )
    add("--batch", type=int, default=16, metavar="N", help="most sequences at once")
    add("--batch-tokens", type=int, default=4096, metavar="N", help="most tokens read at once")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", help="auto (as stored), float32, bfloat16, float16")
    add(
        "--exact",
        action="store_true",
        help="one sequence in a call: the same bits whatever else is asked; slower",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=(
            "put generation prompts as the user's message (default: as a model directory was trained,"
            " else no)"
        ),
    )
    add("--endpoint-model", metavar="NAME", help="model name to ask an endpoint for (default its first)")
    add(
        "--harness",
        choices=("own", "lm-eval"),
        default="own",
        help="lm-eval: run lm-evaluation-harness' tasks",
    )
    add(
        "--rescore",
        metavar="FILE",
        type=Path,
        help="extract again from published MMLU-Pro outputs; needs no model",
    )
    add("--levels", type=int, default=3, choices=(1, 2, 3), help="MMLU-Pro extraction levels")
    add(
        "--contamination",
        metavar="PATH",
        type=Path,
        help="training text or shards to look for the questions in",
    )
    add("--ngram", type=int, default=13, metavar="N", help="words per n-gram of --contamination")
    add("--list", action="store_true", help="show the tasks and leave")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code."""
    options = build_parser().parse_args(argv)
    if options.list:
        print("\n".join(f"{name:<15} {text}" for name, (_, text) in TASKS.items()))
        return 0
    if options.rescore is not None:
        return _rescore(options)
    if not options.tasks:
        raise EvalError("nothing to do: give --tasks (see --list)")
    if options.samples < 1:
        raise EvalError(f"--samples {options.samples}: give at least 1")
    data, default = data_paths(options.data)
    if options.harness == "lm-eval":
        from earlyfusion.eval.benchmarks.lm_eval import run_harness

        return run_harness(_model(options), _names(options.tasks), data, default, options)
    tasks = [_task(name, options, data, default) for name in _names(options.tasks)]
    if options.contamination is not None:
        from earlyfusion.eval.contamination import report

        return report(tasks, options.contamination, options.ngram, options.limit, options.seed, options.out)
    model = _model(options)
    run = RunOptions(options.limit, options.shots, options.samples, options.seed)
    summaries = []
    for task in tasks:
        summaries.append(run_task(model, task, run, out=options.out, progress=not options.quiet))
    show(summaries)
    if options.out is not None:
        print(f"records and summaries: {options.out}", file=sys.stderr)
    return 0


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _model(options: argparse.Namespace) -> Any:
    from earlyfusion.eval.models.base import open_model

    if not options.model:
        raise EvalError("--model is missing: a model directory, hf:PATH or http://host/v1")
    return open_model(
        options.model,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch,
        batch_tokens=options.batch_tokens,
        chat=options.chat,
        endpoint_model=options.endpoint_model,
        exact=options.exact,
    )


def _task(name: str, options: argparse.Namespace, data: dict[str, Path], default: Path | None) -> Task:
    extra: dict[str, Any] = {}
    for pair in options.set:
        key, found, value = pair.partition("=")
        if not found:
            raise EvalError(f"--set {pair}: expected KEY=VALUE")
        extra[key] = value
    if options.levels != 3:
        extra["levels"] = options.levels
    given = TaskOptions(
        data=default,
        form=None,
        samples=options.samples,
        seed=options.seed,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        extra=extra,
    )
    if options.form and ":" not in name:
        name = f"{name}:{options.form}"
    task = build_by_name(name, given, data)
    _check_data(task, options.sha256)
    return task


def _check_data(task: Task, pinned: Sequence[str]) -> None:
    """Raises EvalError when the task's data is not what was pinned by the first digits of its hash."""
    for value in pinned:
        name, _, digits = value.rpartition("=")
        if len(digits) < 8:
            raise EvalError(f"--sha256 {value}: give at least 8 digits of the hash")
        if name in ("", task.name) and not task.data_hash().startswith(digits.lower()):
            raise EvalError(
                f"{task.name}: its data has the hash {task.data_hash()}, not {digits}; get the pinned files,"
                " or pin this"
            )


def data_paths(given: Sequence[str]) -> tuple[dict[str, Path], Path | None]:
    """TASK=PATH pairs, and the one path without a task. Raises EvalError for two of the latter."""
    named: dict[str, Path] = {}
    default: Path | None = None
    for value in given:
        name, found, path = value.partition("=")
        if found and "/" not in name and not Path(value).exists():
            named[name] = Path(path)
        elif default is None:
            default = Path(value)
        else:
            raise EvalError(f"--data {default} and --data {value}: say which task each is for, as TASK=PATH")
    return named, default


def show(summaries: Sequence[dict[str, Any]]) -> None:
    """A table of scores beside their baselines, on standard output."""
    from rich.console import Console
    from rich.table import Table

    from earlyfusion.data.tables import print_table

    table = Table(title="evaluation")
    for column in ("task", "n", "score", "± SE", "chance", "majority", "unextracted", "more"):
        table.add_column(column, justify="left" if column in ("task", "more") else "right")
    for summary in summaries:
        metrics = summary["metrics"]
        known = {
            "n",
            "samples",
            "score",
            "standard_error",
            "chance",
            "majority",
            "unextracted",
            "by_category",
        }
        more = [f"{k} {v:.4g}" for k, v in metrics.items() if k not in known and isinstance(v, int | float)]
        if summary.get("refused"):
            more.append(f"refused (too long) {summary['refused']}")
        cells = [
            _cell(metrics.get(k)) for k in ("score", "standard_error", "chance", "majority", "unextracted")
        ]
        table.add_row(summary["task"], str(metrics.get("n")), *cells, ", ".join(more))
    print_table(Console(width=None if sys.stdout.isatty() else 160), table)
    for summary in summaries:
        for line in summary.get("explained", ()):
            print(f"{summary['task']}: {line}")


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and value == value else "-"


def _rescore(options: argparse.Namespace) -> int:
    from earlyfusion.eval.benchmarks.mmlu_pro import rescore
    from earlyfusion.eval.results import write_json

    if not options.rescore.is_file():
        raise EvalError(f"--rescore {options.rescore}: no such file")
    result = rescore(options.rescore, options.levels)
    if options.out is not None:
        write_json(options.out / "rescore.json", result)
    categories = result.pop("by_category", {})
    print(json.dumps(result, indent=1))
    for name, entry in categories.items():
        print(f"{name:<20} {entry['n']:>6} {100 * entry['score_strict']:6.2f} %")
    print(
        f"{result['n']} answers, {result['differences']} differ from the stored predictions; accuracy"
        f" {100 * result['score_strict']:.2f} % (unextracted wrong), {100 * result['score']:.2f} % (with"
        " guesses)"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(f"error: {error}")
