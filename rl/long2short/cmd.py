"""`earlyfusion long2short`: give a long-thinking model's skill to short answers (Kimi k1.5, section 2.4).

average: weights of two or more models of one configuration. shortest: of n sampled answers the shortest right
one, as documents for fine-tuning. dpo: the shortest right answer against longer wrong ones and much longer
right ones. The fourth way, reinforcement learning with a length reward and a lower token limit, is
`earlyfusion rl` with [length].
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import compose, merge, validate
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.long2short.average import average as average_models
from earlyfusion.rl.long2short.dpo import LONGER, DpoOptions
from earlyfusion.rl.long2short.run import DpoRun
from earlyfusion.rl.long2short.samples import Sampler, Stopped, refuse_taken
from earlyfusion.rl.long2short.shortest import write_documents
from earlyfusion.rl.recipe import RLConfig, start_directory

# Options of shortest and dpo alike.
Model = Annotated[str, typer.Option(metavar="DIR", help="model directory to start from, or embedded:NAME")]
Out = Annotated[str, typer.Option(metavar="DIR", help="output folder")]
Tasks = Annotated[
    list[str] | None,
    typer.Option(metavar="TASK...", help="such as counting/1/twin: task/difficulty/form[/thought]"),
]
Recipe = Annotated[
    str | None,
    typer.Option(metavar="RECIPE", help="a reinforcement learning recipe: its [[tasks]] and [rollout]"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a key of the recipe, as optim.lr=1e-4"),
]
Problems = Annotated[int, typer.Option(metavar="N", min=1, help="training problems, over all tasks together")]
Samples = Annotated[int, typer.Option(metavar="K", min=2, help="sampled answers to each problem")]
Temperature = Annotated[float, typer.Option(metavar="X", help="of the samples")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="longest answer in tokens; the recipe's (8) if left out"),
]
Seed = Annotated[int, typer.Option(min=0, help="of problems, samples and the order of pairs")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what the output folder holds")]


@dataclass(frozen=True)
class Sampling:
    """What shortest and dpo are asked alike."""

    model: str
    out: str
    tasks: list[str] | None
    recipe: str | None
    changes: list[str] | None
    samples: int
    temperature: float
    max_new_tokens: int | None
    seed: int


def recipe_of(asked: Sampling, more: dict[str, Any] | None = None) -> RLConfig:
    """The run as a recipe: the one named, or of the tasks, with what the options say laid over. Raises
    UserError.

    more: further keys, laid over as well.
    """
    if bool(asked.tasks) == bool(asked.recipe):
        raise UserError("give --tasks TASK... or --recipe RECIPE, one of them")
    if not 0 < asked.temperature < float("inf"):
        raise UserError(f"--temperature {asked.temperature}: samples need a temperature above 0")
    overrides = []
    for change in asked.changes or ():
        key, equals, value = change.partition("=")
        if not equals or "." not in key:
            raise UserError(f"--set {change}: expected section.key=VALUE, such as optim.lr=1e-4")
        overrides.append((key.strip(), value.strip()))

    if asked.recipe:
        base = compose([asked.recipe])
    else:
        base = {"tasks": [entry_of(label).model_dump(mode="json") for label in asked.tasks or ()]}
    run = {"name": Path(asked.out).name, "out": asked.out, "init_from": asked.model, "seed": asked.seed}
    rollout = {"group_size": asked.samples}
    if asked.max_new_tokens is not None:
        rollout["max_new_tokens"] = asked.max_new_tokens
    temperature = {"start": asked.temperature, "end": asked.temperature}
    options = merge({"run": run, "rollout": rollout, "temperature": temperature}, more or {})

    config: RLConfig = validate(compose([merge(base, options)], overrides), RLConfig)
    tools = [entry.label for entry in config.tasks if entry.tools]
    if tools:
        raise UserError(f"{tools[0]}: long2short samples answers without tools; leave such entries out")
    return config


def average(
    models: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="model directories of one configuration")
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="model directory to write")],
    weights: Annotated[
        list[float] | None, typer.Option(metavar="X...", help="share of each model; equal if left out")
    ] = None,
) -> None:
    """Merge the weights of two or more models.

    earlyfusion long2short average runs/long/model runs/short/model --weights 0.5 0.5 --out runs/merged
    """
    print(f"model directory: {average_models(models, weights, out)}")


def shortest(
    model: Model,
    out: Out,
    tasks: Tasks = None,
    recipe: Recipe = None,
    changes: Changes = None,
    problems: Problems = 256,
    samples: Samples = 8,
    temperature: Temperature = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    resume: Resume = False,
) -> int:
    """The shortest right answers, as documents for fine-tuning; a signal keeps what was sampled.

    earlyfusion long2short shortest --model DIR --tasks counting/1/twin --problems 512 --out runs/shortest
    earlyfusion sft runs/shortest/sft.toml
    """
    asked = Sampling(model, out, tasks, recipe, changes, samples, temperature, max_new_tokens, seed)
    config, target = recipe_of(asked), Path(out)
    folder = start_directory(config)
    tokenizer = Tokenizer.load(folder)
    refuse_taken(target, resume)
    runtime = Runtime(config.train.mixed_precision, config.train.threads)
    if runtime.world > 1:
        runtime.close()
        raise UserError(
            f"long2short shortest samples in one process, {runtime.world} were started; start it plainly"
        )

    # Sample; what there is stays for --resume when a signal comes.
    console = Console(stderr=True, highlight=False)
    trained = load_model(folder, runtime.device, torch.float32)
    sampler = Sampler(config, trained, tokenizer, target, folder, problems)
    runtime.stop.install()
    try:
        answered = sampler.gather(console, lambda: runtime.stop.received is not None)
    except Stopped as stopped:
        console.print(f"{runtime.stop.received}: {stopped}; --resume goes on from here")
        return EXIT_REQUEUE
    finally:
        sampler.close()
        runtime.close()

    # Choose and write.
    summary = write_documents(answered, config.tasks, tokenizer, trained.config.vision, target, folder)
    Console(highlight=False).print(_lengths_table(summary["entries"]))
    print(
        f"{summary['documents']} documents: {target / 'train.jsonl'}; train on them: earlyfusion sft"
        f" {target / 'sft.toml'}"
    )
    return EXIT_OK


def _lengths_table(rows: dict[str, dict[str, float | None]]) -> Table:
    """The lengths of `shortest`, a task a row."""
    table = Table(title="mean tokens of the sampled answers", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "n", "solved", "acc", "all", "right", "shortest"):
        table.add_column(name, no_wrap=True, justify="left" if name == "task" else "right")
    decimals = {"accuracy": 3, "tokens_all": 2, "tokens_right": 2, "tokens_shortest": 2}
    for label, row in rows.items():
        cells = ["-" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in decimals.items()]
        table.add_row(label, str(row["problems"]), str(row["solved"]), *cells)
    return table


def dpo(
    model: Model,
    out: Out,
    tasks: Tasks = None,
    recipe: Recipe = None,
    changes: Changes = None,
    problems: Problems = 256,
    samples: Samples = 8,
    temperature: Temperature = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    resume: Resume = False,
    beta: Annotated[float, typer.Option(metavar="X", help="strength of the pull towards the start")] = 0.1,
    longer: Annotated[
        float, typer.Option(metavar="X", help="right answers this many times as long are rejected")
    ] = LONGER,
    label_smoothing: Annotated[
        float, typer.Option(metavar="X", help="share of pairs believed to be wrong")
    ] = 0.0,
    nll: Annotated[
        float, typer.Option(metavar="X", help="weight of the chosen answers' likelihood beside DPO")
    ] = 0.0,
    pairs_per_problem: Annotated[
        int, typer.Option(metavar="N", help="most pairs of one problem; 0: all")
    ] = 0,
    batch: Annotated[int, typer.Option(metavar="N", help="pairs of one update")] = 16,
    epochs: Annotated[int, typer.Option(metavar="N", help="passes over the pairs")] = 2,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="stop after N updates of the schedule")
    ] = None,
    optimizer: Annotated[
        Literal["muonclip", "adamw"] | None, typer.Option(help="the recipe's (muonclip) if left out")
    ] = None,
    lr: Annotated[float, typer.Option(metavar="X", help="learning rate, falling linearly to a tenth")] = 2e-4,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="updates between checkpoints; 0: at the end")
    ] = 0,
    eval_problems: Annotated[
        int, typer.Option(metavar="N", help="held-out problems of each task; 0: none")
    ] = 128,
    eval_samples: Annotated[
        int, typer.Option(metavar="K", help="sampled answers to each, beside the greedy one")
    ] = 0,
) -> int:
    """Sample, pair, train, measure.

    earlyfusion long2short dpo --model DIR --recipe vision-rl --problems 512 --out runs/dpo
    """
    options = DpoOptions(beta, longer, label_smoothing, nll, batch, epochs, pairs_per_problem)
    options.check()
    more: dict[str, Any] = {
        "optim": {"lr": lr, "weight_decay": 0.0},
        "train": {"final_lr_ratio": 0.1, "warmup_updates": 0},
        "eval": {"problems": eval_problems, "samples": eval_samples},
        "checkpoint": {"every": checkpoint_every},
    }
    if optimizer is not None:
        more["optim"]["name"] = optimizer
    if steps is not None:
        more["run"] = {"steps": steps}

    asked = Sampling(model, out, tasks, recipe, changes, samples, temperature, max_new_tokens, seed)
    run = DpoRun(recipe_of(asked, more), options, problems, resume)
    try:
        return run.train()
    finally:
        run.close()


def long2short() -> None:
    """Give a long-thinking model's skill to short answers."""


_HERE = "earlyfusion.rl.long2short.cmd"
WAYS = {
    "average": cli.Verb(f"{_HERE}:average", "merge the weights of two or more models"),
    "shortest": cli.Verb(f"{_HERE}:shortest", "shortest right answers as documents for SFT"),
    "dpo": cli.Verb(f"{_HERE}:dpo", "preference training for shorter answers"),
}
app = cli.group_of(WAYS, long2short)


if __name__ == "__main__":
    sys.exit(cli.main(["long2short", *sys.argv[1:]]))
