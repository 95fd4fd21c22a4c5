"""`earlyfusion long2short`: give a long-thinking model's skill to short answers (Kimi k1.5, section 2.4).

    earlyfusion long2short average runs/long/model runs/short/model --weights 0.5 0.5 --out runs/merged
    earlyfusion long2short shortest --model DIR --tasks counting/1/twin --problems 512 --out runs/shortest
    earlyfusion sft runs/shortest/sft.toml
    earlyfusion long2short dpo --model DIR --recipe vision-rl --problems 512 --out runs/dpo

average: weights of two or more models of one configuration. shortest: of n sampled answers the shortest right
one, as documents for fine-tuning. dpo: the shortest right answer against longer wrong ones and much longer
right ones. The fourth way, reinforcement learning with a length reward and a lower token limit, is
`earlyfusion rl` with [length].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def build_parser() -> Parser:
    """Options of the verb and of its three ways."""
    parser = Parser(
        prog="earlyfusion long2short",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    ways = parser.add_subparsers(
        dest="way", required=True, metavar="average|shortest|dpo", parser_class=Parser
    )
    plain = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    average = ways.add_parser("average", help="merge the weights of two or more models", **plain)  # type: ignore[arg-type]
    average.add_argument("models", metavar="DIR", nargs="+", help="model directories of one configuration")
    average.add_argument(
        "--weights", metavar="X", type=float, nargs="+", help="share of each model; equal if left out"
    )
    average.add_argument("--out", metavar="DIR", required=True, help="model directory to write")
    shortest = ways.add_parser("shortest", help="shortest right answers as documents for SFT", **plain)  # type: ignore[arg-type]
    _add_sampling(shortest)
    dpo = ways.add_parser("dpo", help="preference training for shorter answers", **plain)  # type: ignore[arg-type]
    _add_sampling(dpo)
    _add_dpo(dpo)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="model directory to start from, or embedded:NAME")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tasks", metavar="TASK", nargs="+", help="such as counting/1/twin: task/difficulty/form[/thought]"
    )
    what.add_argument(
        "--recipe", metavar="RECIPE", help="a reinforcement learning recipe: its [[tasks]] and [rollout]"
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a key of the recipe, as optim.lr=1e-4",
    )
    add("--problems", type=int, default=256, metavar="N", help="training problems, over all tasks together")
    add("--samples", type=int, default=8, metavar="K", help="sampled answers to each problem")
    add("--temperature", type=float, default=1.0, metavar="X", help="of the samples")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest answer in tokens; the recipe's (8) if left out",
    )
    add("--seed", type=int, default=0, help="of problems, samples and the order of pairs")
    add("--out", metavar="DIR", required=True, help="output folder")
    add("--resume", action="store_true", help="go on with what the output folder holds")


def _add_dpo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--beta", type=float, default=0.1, metavar="X", help="strength of the pull towards the start")
    add(
        "--longer",
        type=float,
        default=1.5,
        metavar="X",
        help="right answers this many times as long are rejected",
    )
    add("--label-smoothing", type=float, default=0.0, metavar="X", help="share of pairs believed to be wrong")
    add(
        "--nll",
        type=float,
        default=0.0,
        metavar="X",
        help="weight of the chosen answers' likelihood beside DPO",
    )
    add("--pairs-per-problem", type=int, default=0, metavar="N", help="most pairs of one problem; 0: all")
    add("--batch", type=int, default=16, metavar="N", help="pairs of one update")
    add("--epochs", type=int, default=2, metavar="N", help="passes over the pairs")
    add("--steps", type=int, metavar="N", help="stop after N updates of the schedule")
    add("--optimizer", choices=("muonclip", "adamw"), help="the recipe's (muonclip) if left out")
    add("--lr", type=float, default=2e-4, metavar="X", help="learning rate, falling linearly to a tenth")
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="N",
        help="updates between checkpoints; 0: at the end",
    )
    add("--eval-problems", type=int, default=128, metavar="N", help="held-out problems of each task; 0: none")
    add(
        "--eval-samples",
        type=int,
        default=0,
        metavar="K",
        help="sampled answers to each, beside the greedy one",
    )


def recipe_of(options: argparse.Namespace) -> Any:
    """The run as an RLConfig: the recipe or the tasks, with what the options say laid over. Raises
    UserError."""
    from earlyfusion.pipeline.config.compose import compose, merge, validate
    from earlyfusion.rl.recipe import RLConfig

    for name, least in (("problems", 1), ("samples", 2), ("seed", 0), ("max_new_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    if not 0 < options.temperature < float("inf"):
        raise UserError(f"--temperature {options.temperature}: samples need a temperature above 0")
    overrides = []
    for given in options.set:
        key, found, value = given.partition("=")
        if not found or "." not in key:
            raise UserError(f"--set {given}: expected section.key=VALUE, such as optim.lr=1e-4")
        overrides.append((key.strip(), value.strip()))
    if options.recipe:
        base = compose([options.recipe])
    else:
        from earlyfusion.rl.entries import entry_of

        base = {"tasks": [entry_of(label).model_dump(mode="json") for label in options.tasks]}
    hot = {"start": options.temperature, "end": options.temperature}
    laid: dict[str, Any] = {
        "run": {
            "name": Path(options.out).name,
            "out": options.out,
            "init_from": options.model,
            "seed": options.seed,
        },
        "rollout": {"group_size": options.samples},
        "temperature": hot,
    }
    if options.max_new_tokens is not None:
        laid["rollout"]["max_new_tokens"] = options.max_new_tokens
    if options.way == "dpo":
        laid = merge(laid, _dpo_tree(options))
    config = validate(compose([merge(base, laid)], overrides), RLConfig)
    told = [entry.label for entry in config.tasks if entry.tools]
    if told:
        raise UserError(f"{told[0]}: long2short samples answers without tools; leave such entries out")
    return config


def _dpo_tree(options: argparse.Namespace) -> dict[str, Any]:
    optim: dict[str, Any] = {"lr": options.lr, "weight_decay": 0.0}
    if options.optimizer is not None:
        optim["name"] = options.optimizer
    tree: dict[str, Any] = {
        "optim": optim,
        "train": {"final_lr_ratio": 0.1, "warmup_updates": 0},
        "eval": {"problems": options.eval_problems, "samples": options.eval_samples},
        "checkpoint": {"every": options.checkpoint_every},
    }
    if options.steps is not None:
        tree["run"] = {"steps": options.steps}
    return tree


def run_average(options: argparse.Namespace) -> int:
    """Merge and say where the model lies."""
    from earlyfusion.rl.long2short.average import average

    print(f"model directory: {average(options.models, options.weights, options.out)}")
    return EXIT_OK


def run_shortest(options: argparse.Namespace) -> int:
    """Sample, choose, write; a signal keeps what was sampled."""
    import torch
    from rich.console import Console

    from earlyfusion.data.tokenizer import Tokenizer
    from earlyfusion.model.hub.folder import load_model
    from earlyfusion.pipeline.runtime import Runtime
    from earlyfusion.rl.long2short.samples import Sampler, Stopped, refuse_taken
    from earlyfusion.rl.long2short.shortest import write_documents
    from earlyfusion.rl.recipe import start_directory

    config = recipe_of(options)
    folder, out = start_directory(config), Path(options.out)
    tokenizer = Tokenizer.load(folder)
    refuse_taken(out, options.resume)
    runtime = Runtime(config.train.mixed_precision, config.train.threads)
    if runtime.world > 1:
        runtime.close()
        raise UserError(
            f"long2short shortest samples in one process, {runtime.world} were started; start it plainly"
        )
    console = Console(stderr=True, highlight=False)
    model = load_model(folder, runtime.device, torch.float32)
    sampler = Sampler(config, model, tokenizer, out, folder, options.problems)
    runtime.stop.install()
    try:
        answered = sampler.gather(console, lambda: runtime.stop.received is not None)
    except Stopped as told:
        console.print(f"{runtime.stop.received}: {told}; --resume goes on from here")
        return EXIT_REQUEUE
    finally:
        sampler.close()
        runtime.close()
    summary = write_documents(answered, config.tasks, tokenizer, model.config.vision, out, folder)
    Console(highlight=False).print(_lengths_table(summary["entries"]))
    print(
        f"{summary['documents']} documents: {out / 'train.jsonl'}; train on them: earlyfusion sft"
        f" {out / 'sft.toml'}"
    )
    return EXIT_OK


def _lengths_table(rows: dict[str, dict[str, float | None]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="mean tokens of the sampled answers", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "n", "solved", "acc", "all", "right", "shortest"):
        table.add_column(name, no_wrap=True, justify="left" if name == "task" else "right")
    for label, row in rows.items():
        decimals = {"accuracy": 3, "tokens_all": 2, "tokens_right": 2, "tokens_shortest": 2}
        cells = ["-" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in decimals.items()]
        table.add_row(label, str(row["problems"]), str(row["solved"]), *cells)
    return table


def run_dpo(options: argparse.Namespace) -> int:
    """Sample, pair, train, measure."""
    from earlyfusion.rl.long2short.dpo import DpoOptions
    from earlyfusion.rl.long2short.run import DpoRun

    dpo = DpoOptions(
        options.beta,
        options.longer,
        options.label_smoothing,
        options.nll,
        options.batch,
        options.epochs,
        options.pairs_per_problem,
    )
    dpo.check()
    made = DpoRun(recipe_of(options), dpo, options.problems, options.resume)
    try:
        return made.train()
    finally:
        made.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code."""
    from earlyfusion.pipeline.cli import guarded

    def call() -> int:
        options = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        return {"average": run_average, "shortest": run_shortest, "dpo": run_dpo}[options.way](options)

    return guarded(call)


if __name__ == "__main__":
    sys.exit(main())
