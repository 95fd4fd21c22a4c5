"""`earlyfusion eval`: benchmarks on a model directory, a transformers model or an endpoint.

A stopped run goes on when the same command is given again. `earlyfusion compare` reads the --out folders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.eval.benchmarks.lm_eval import run_harness
from earlyfusion.eval.benchmarks.mmlu_pro import rescore as rescore_mmlu_pro
from earlyfusion.eval.contamination import NGRAM, report
from earlyfusion.eval.harness import RunOptions, run_task
from earlyfusion.eval.models.base import open_model
from earlyfusion.eval.protocol import EvalError, Model, Task, TaskOptions
from earlyfusion.eval.registry import build_by_name, known_benchmarks
from earlyfusion.kernels.files import write_json

HEADLINE = ("score", "standard_error", "chance", "majority", "unextracted")


def evaluate(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="model directory, embedded:NAME, hf:PATH (transformers, also .gguf), or http(s)://host/v1",
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help="task names, each with :form if not its default form")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="data, as PATH or TASK=PATH; may be given again"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="folder of records and summaries")] = None,
    sha256: Annotated[
        list[str] | None,
        typer.Option(metavar="[TASK=]HEX", help="refuse data whose hash (in the summary) differs"),
    ] = None,
    form: Annotated[
        str | None, typer.Option(metavar="FORM", help="form of all tasks that have it: cot, mcf, cf, ...")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="questions per task, spread over its categories (default all)"),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(metavar="N", help="worked examples in the prompt (default the task's own number)"),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(metavar="K", min=1, help="answers per question; the score is their mean (avg@k)"),
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="default: 0 for one sample, 1.0 with top-p 0.95 for several"),
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="sample from the likeliest mass P")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="longest answer (default the task's own)")
    ] = None,
    seed: Annotated[int, typer.Option(help="of sampling and generated data")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a task's extra option; may be given again"),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="most sequences at once")] = 16,
    batch_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="most tokens read at once")] = 4096,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16")] = "auto",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="one sequence in a call: the same bits whatever else is asked; slower"),
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="put generation prompts as the user's message (default: as a model directory was trained,"
            " else no)"
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="model name to ask an endpoint for (default its first)"),
    ] = None,
    harness: Annotated[
        Literal["own", "lm-eval"], typer.Option(help="lm-eval: run lm-evaluation-harness' tasks")
    ] = "own",
    rescore: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="extract again from published MMLU-Pro outputs; needs no model"),
    ] = None,
    levels: Annotated[int, typer.Option(min=1, max=3, help="MMLU-Pro extraction levels")] = 3,
    contamination: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="training text or shards to look for the questions in"),
    ] = None,
    ngram: Annotated[int, typer.Option(metavar="N", help="words per n-gram of --contamination")] = NGRAM,
    listed: Annotated[bool, typer.Option("--list", help="show the tasks and leave")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Run benchmarks; --list shows the tasks. A stopped run goes on when the same command is given again.

    earlyfusion eval --model RUN/model --tasks mmlu_pro:mcf,counting --data mmlu_pro=DIR --limit 280
    earlyfusion eval --model hf:PATH --tasks gpqa_diamond --data gpqa_diamond.csv --samples 8 --out evals/gpqa
    earlyfusion eval --model http://localhost:8000/v1 --tasks counting --out evals/served
    earlyfusion eval --model RUN/model --harness lm-eval --tasks piqa,mmlu_pro_math --data mmlu_pro=DIR
    earlyfusion eval --rescore outputs.jsonl.gz --levels 1
    earlyfusion eval --contamination SHARDS --tasks mmlu_pro --data DIR --out evals/overlap
    """
    # Questions that need no model.
    if listed:
        print("\n".join(f"{name:<15} {found.text}" for name, found in known_benchmarks().items()))
        return
    if rescore is not None:
        _rescore(rescore, levels, out)
        return
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise EvalError("nothing to do: give --tasks (see --list)")
    paths, default = data_paths(data or ())

    def opened() -> Model:
        if not model:
            raise EvalError("--model is missing: a model directory, hf:PATH or http://host/v1")
        return open_model(
            model,
            device=device,
            dtype=dtype,
            batch_size=batch,
            batch_tokens=batch_tokens,
            chat=chat,
            endpoint_model=endpoint_model,
            exact=exact,
        )

    # The tasks of lm-evaluation-harness are its own; ours are built and checked before a model is read.
    if harness == "lm-eval":
        run_harness(opened(), names, paths, default, limit=limit, shots=shots, seed=seed, out=out)
        return
    options = TaskOptions(
        data=default,
        samples=samples,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        extra=extra_of(settings or (), levels),
    )
    built = []
    for name in names:
        whole = f"{name}:{form}" if form and ":" not in name else name
        built.append(build_by_name(whole, options, paths))
        check_data(built[-1], sha256 or ())
    if contamination is not None:
        report(built, contamination, ngram, limit, seed, out)
        return

    asked, run = opened(), RunOptions(limit, shots, samples, seed)
    show([run_task(asked, task, run, out=out, progress=not quiet) for task in built])
    if out is not None:
        print(f"records and summaries: {out}", file=sys.stderr)


def extra_of(settings: Sequence[str], levels: int) -> dict[str, Any]:
    """The extra options of KEY=VALUE pairs. Raises EvalError for something else."""
    extra: dict[str, Any] = {} if levels == 3 else {"levels": levels}
    for pair in settings:
        key, found, value = pair.partition("=")
        if not found:
            raise EvalError(f"--set {pair}: expected KEY=VALUE")
        extra[key] = value
    return extra


def check_data(task: Task, pinned: Sequence[str]) -> None:
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


def show(summaries: Sequence[dict[str, Any]]) -> None:
    """A table of scores beside their baselines, on standard output."""
    table = Table(title="evaluation")
    for column in ("task", "n", "score", "± SE", "chance", "majority", "unextracted", "more"):
        table.add_column(column, justify="left" if column in ("task", "more") else "right")
    for summary in summaries:
        metrics = summary["metrics"]
        shown = {"n", "samples", "by_category", *HEADLINE}
        more = [f"{k} {v:.4g}" for k, v in metrics.items() if k not in shown and isinstance(v, int | float)]
        if summary.get("refused"):
            more.append(f"refused (too long) {summary['refused']}")
        cells = [_cell(metrics.get(name)) for name in HEADLINE]
        table.add_row(summary["task"], str(metrics.get("n")), *cells, ", ".join(more))

    print_table(Console(width=None if sys.stdout.isatty() else 160), table)
    for summary in summaries:
        for line in summary.get("explained", ()):
            print(f"{summary['task']}: {line}")


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and value == value else "-"


def _rescore(path: Path, levels: int, out: Path | None) -> None:
    if not path.is_file():
        raise EvalError(f"--rescore {path}: no such file")
    result = rescore_mmlu_pro(path, levels)
    if out is not None:
        write_json(out / "rescore.json", result)

    categories = result.pop("by_category", {})
    print(json.dumps(result, indent=1))
    for name, entry in categories.items():
        print(f"{name:<20} {entry['n']:>6} {100 * entry['score_strict']:6.2f} %")
    print(
        f"{result['n']} answers, {result['differences']} differ from the stored predictions; accuracy"
        f" {100 * result['score_strict']:.2f} % (unextracted wrong), {100 * result['score']:.2f} % (with"
        " guesses)"
    )
