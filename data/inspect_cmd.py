"""`earlyfusion data inspect PATH`: what a mix, a folder or a set of shards holds, as a tree and as a contact
sheet.

PATH is a recipe (name or .toml with a [data] section), a folder or file of shards (also a URL or
pipe:command), a folder of pictures and texts, or a text file. Counts of prepared shards are exact, all others
come from the samples looked at.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from earlyfusion.data.config import DataConfig
from earlyfusion.data.contact_sheet import Card, bad_card, make_card, sheet
from earlyfusion.data.errors import BadSample, DataError, one_sample
from earlyfusion.data.examples import write_examples
from earlyfusion.data.formats.build import describe
from earlyfusion.data.prepare.work import open_tokenizer
from earlyfusion.data.shards.fetch import TABLES as COUNTED
from earlyfusion.data.shards.fetch import TAR_ENDS, TOTALS, as_local, braces, is_url
from earlyfusion.data.sources.base import Source, SourceConfig, build_source
from earlyfusion.data.sources.folder import Folder
from earlyfusion.data.sources.shards import WebDataset
from earlyfusion.data.sources.text_files import LINES, TABLES
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.kernels.files import write_atomic
from earlyfusion.vision.config import PRESETS, VisionConfig

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_BARS = " ▁▂▃▄▅▆▇█"


def parser() -> argparse.ArgumentParser:
    """The options of `data inspect`."""
    made = argparse.ArgumentParser(
        prog="earlyfusion data inspect",
        description="Print what a mix holds as a tree, and write a contact sheet.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("path", help="recipe (name or .toml), shards, folder, text file, URL")
    made.add_argument("--out", type=Path, metavar="HTML", help="write a contact sheet here")
    made.add_argument(
        "--samples", type=int, default=12, help="samples of each source to look at, evenly spread"
    )
    made.add_argument("--heldout", action="store_true", help="look at held-out samples instead")
    made.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer that counts; without one the recipe's or the embedded one",
    )
    made.add_argument(
        "--vision", choices=sorted(PRESETS), help="patch rule; without one the recipe's, or moonvit_v2"
    )
    made.add_argument(
        "--run-commands",
        action="store_true",
        help="a recipe is code: run the commands (pipe:...) that it names",
    )
    return made


@dataclass
class Mix:
    """What is inspected."""

    data: DataConfig
    vision: VisionConfig
    tokenizer: Tokenizer
    own_rule: bool = False
    """whether patch rule and tokenizer were named (by a recipe or an option), so that counts must be theirs
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run `data VERB ...`; returns the exit code. Raises DataError for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help"):
        print(
            "usage: earlyfusion data inspect PATH [--out sheet.html]\n"
            "       earlyfusion data examples FOLDER\n\n"
            "inspect: what a mix or shards hold (options: earlyfusion data inspect --help)\n"
            "examples: a dozen pictures with captions, to try the commands on"
        )
        return 0
    if verb == "examples":
        if len(arguments) != 2 or arguments[1].startswith("-"):
            raise DataError("data examples: give one folder to write to, for example photos/")
        print(f"{write_examples(Path(arguments[1]))} pictures with captions: {arguments[1]}")
        return 0
    if verb != "inspect":
        raise DataError(f"data {verb}: no such verb; {did_you_mean(verb, ['inspect', 'examples'])}")
    args = parser().parse_args(arguments[1:])
    if args.samples < 1:
        raise DataError(f"--samples {args.samples}: expected at least 1")
    mix = open_mix(args.path, args.tokenizer, args.vision, run_commands=args.run_commands)
    console = Console()
    tree = Tree(f"[bold]{escape(one_line(args.path))}[/]")
    cards: list[Card] = []
    total = sum(source.weight for source in mix.data.sources) or 1.0
    for config in mix.data.sources:
        source = build_source(config, seed=mix.data.seed, val_fraction=mix.data.val_fraction)
        seen = look(source, mix, args.samples, heldout=args.heldout)
        cards += seen
        _branch(tree, config, source, seen, config.weight / total, mix)
    console.print(tree)
    if args.out is not None:
        write_atomic(args.out, sheet(f"{args.path}: {len(cards)} samples", cards))
        console.print(f"contact sheet: {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")
    return 0


def open_mix(
    path: str, tokenizer: str | None = None, vision: str | None = None, *, run_commands: bool = False
) -> Mix:
    """The mix that `path` names; raises DataError (or the recipe's own error) when it is none.

    A recipe that would run a command is refused without `run_commands`: to look at one is not yet to trust
    it. A command given as `path` itself was typed by whoever asks.
    """
    local = as_local(path)
    exists = local is not None and (local.exists() or any(c in path for c in "*?[{"))
    if path.endswith(".toml") or not (exists or is_url(path) or path.startswith("pipe:")):
        return _recipe(path, tokenizer, vision, run_commands)
    kind = kind_of(path, local)
    data = DataConfig(
        sources=[SourceConfig(name=Path(path).name or "data", kind=kind, path=path)], val_fraction=0.0
    )
    rule = VisionConfig.preset(vision or "moonvit_v2")
    return Mix(data, rule, open_tokenizer(tokenizer), own_rule=bool(vision or tokenizer))


def kind_of(path: str, local: Path | None) -> str:
    """The kind of source that reads what is at `path` (`local`: the same as a path, None for a URL)."""
    name = path.split("?")[0].lower()
    if name.endswith((*LINES, *TABLES, ".txt", ".md")):
        return "text_files"
    if local is None or not local.is_dir() or any(p.name.endswith(TAR_ENDS) for p in local.rglob("*.t*")):
        return "webdataset"
    only_tables = any(local.rglob("*.parquet")) and not any(local.rglob("*.txt"))
    return "text_files" if only_tables else "folder"


def _commands(tree: Any) -> Iterator[str]:
    """What opening the sources of a recipe would run: pipe:command, and package.module:function."""
    if isinstance(tree, str):
        yield from (text for text in braces(tree) if text.startswith("pipe:") or _FUNCTION.fullmatch(text))
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _commands(value)


def _recipe(path: str, tokenizer: str | None, vision: str | None, run_commands: bool) -> Mix:
    """A recipe is a higher floor's business: reached by name, and only its data, vision and tokenizer are
    used."""
    if "/" in path and not Path(path).is_file():
        raise DataError(f"{path}: no such file or folder")
    try:
        compose: Any = importlib.import_module("earlyfusion.pipeline.config.compose")
    except ImportError:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    else:
        tree = compose.compose([path])
    if "data" not in tree:
        raise DataError(f"{path}: no [data] section to inspect")
    commands = list(_commands({name: tree[name] for name in ("data", "reward") if name in tree}))
    if commands and not run_commands:
        raise DataError(
            f"{path}: names commands or functions that would run ({'; '.join(commands)[:200]}); a recipe is"
            " code: read it, then add --run-commands"
        )
    try:
        return _mix_of(tree, tokenizer, vision)
    except (AttributeError, TypeError) as error:
        raise DataError(f"{path}: not a recipe ({one_line(error)})") from None


def _mix_of(tree: dict[str, Any], tokenizer: str | None, vision: str | None) -> Mix:
    """The sections of a recipe that matter here. Raises ValidationError, DataError, TypeError,
    AttributeError."""
    chosen = dict(tree.get("vision") or {})
    base = VisionConfig.preset(vision or chosen.pop("preset", "moonvit_v2")).model_dump()
    given = tree.get("tokenizer") or {}
    own = tokenizer or given.get("path")
    words = open_tokenizer(own) if own else embedded_tokenizer(int(given.get("vocab_size", 4096)))
    return Mix(
        DataConfig.model_validate(tree["data"]),
        VisionConfig.model_validate(
            base if vision else {**base, **{k: v for k, v in chosen.items() if k != "preset"}}
        ),
        words,
        own_rule=True,
    )


def look(source: Source, mix: Mix, count: int, *, heldout: bool = False) -> list[Card]:
    """Cards of up to `count` samples, evenly spread over the source."""
    length = source.heldout_len() if heldout else len(source)
    cards = []
    for index in sorted({i * length // count for i in range(count)} if length > count else range(length)):
        try:
            with one_sample(lambda: f"source {source.name!r}, sample {index}"):  # noqa: B023 (called in this turn)
                sample = source.heldout(index) if heldout else source.get(index, 0)
                cards.append(make_card(sample, mix.tokenizer, mix.vision, _format(source, index, heldout)))
        except BadSample as error:
            cards.append(bad_card(source.name, f"sample {index}", error))
    return cards


def _format(source: Source, index: int, heldout: bool) -> str:
    if not isinstance(source, WebDataset):
        return ""
    where = source.split.heldout(index) if heldout else source.split.train(index)
    return describe(source.shards.group(*where), source.options)[0]


def _branch(
    tree: Tree, config: SourceConfig, source: Source, cards: Sequence[Card], share: float, mix: Mix
) -> None:
    limit = f", at most {config.max_epochs:g} epochs" if config.max_epochs else ""
    branch = tree.add(
        f"[bold cyan]{escape(one_line(config.name))}[/]  {config.kind}  weight {config.weight:g}"
        f" ({share:.1%}){limit}"
    )
    branch.add(f"{len(source):,} samples, {source.heldout_len():,} held out")
    if isinstance(source, Folder) and source.left_out:
        branch.add(f"[red]no samples: {_listed(source.left_out)}[/]")
    if isinstance(source, WebDataset):
        _shards(branch, source)
    manifest = source.shards.manifest if isinstance(source, WebDataset) else None
    if manifest and {*TOTALS, *COUNTED, "vision"} <= set(manifest):
        if _counted_alike(manifest, mix):
            _exact(branch, manifest)
            return
        branch.add(
            f"[dim]prepare counted by {escape(str(manifest['vision']))}; these counts are by the rule of this"
            f" mix (patches of {mix.vision.patch_size})[/]"
        )
    good = [card for card in cards if not card.bad]
    bad = Counter(card.bad for card in cards if card.bad)
    if good:
        tokens, vision = sum(card.tokens for card in good), sum(card.vision_tokens for card in good)
        patches = sum(card.patches for card in good)
        branch.add(
            f"formats: {_listed(Counter(card.kind for card in good))}  [dim](of {len(cards)} samples)[/]"
        )
        branch.add(
            f"{tokens / len(good):,.0f} tokens a sample, {vision / max(1, tokens):.0%} of them vision; about "
            f"{tokens / len(good) * len(source):,.0f} in all  [dim](from {len(good)} samples)[/]"
        )
        branch.add(f"{patches / len(good):,.0f} patches a sample  [dim](from {len(good)} samples)[/]")
    if bad:
        branch.add(f"[red]left out: {_listed(bad)}[/]  [dim](of {len(cards)} samples)[/]")


_RULE = (
    "patch_size",
    "merge_kernel_size",
    "max_patches_per_side",
    "in_patch_limit",
    "in_patch_limit_each_frame",
    "pos_emb_time",
)
"""Keys of a vision section that decide how many patches and tokens a picture or video has."""


def _counted_alike(manifest: dict[str, Any], mix: Mix) -> bool:
    """Whether the counts of a preparation are those of the mix's own patch rule and tokenizer."""
    if not mix.own_rule:
        return True
    if manifest["vision"] not in PRESETS or manifest.get("tokenizer") != mix.tokenizer.hash:
        return False
    theirs = VisionConfig.preset(manifest["vision"])
    return all(getattr(theirs, key) == getattr(mix.vision, key) for key in _RULE)


def _shards(branch: Tree, source: WebDataset) -> None:
    shards = source.shards
    cut = [name for name, torn in zip(shards.names, shards.cut) if torn]
    branch.add(
        f"{len(shards.names):,} shard{'' if len(shards.names) == 1 else 's'}"
        + (f", [red]{len(cut)} cut short: {escape(one_line(', '.join(cut[:5])))}[/]" if cut else "")
    )
    refused: Counter[str] = Counter()
    if shards.manifest is None:
        for number in range(min(len(shards.names), 256)):
            refused.update(shards.index(number).header["refused"])
    if refused:
        branch.add(f"[red]members left out: {_listed(refused)}[/]")


def _exact(branch: Tree, manifest: dict[str, Any]) -> None:
    samples = max(1, manifest["samples"])
    branch.add(
        f"{manifest['bytes'] / 1e6:,.1f} MB, {manifest['samples']:,} samples of {manifest['items']:,} items"
    )
    branch.add(f"formats: {_listed(manifest['formats'])}")
    branch.add(
        f"{manifest['tokens']:,} tokens, {manifest['tokens'] / samples:,.0f} a sample "
        f" {_bars(manifest['token_histogram'])}"
    )
    branch.add(
        f"{manifest['patches']:,} patches ({escape(str(manifest['vision']))}),"
        f" {manifest['patches'] / samples:,.0f} a sample  {_bars(manifest['patch_histogram'])}"
    )
    branch.add(f"left out: {_listed(manifest['skipped']) or 'nothing'}")


def _listed(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(
        f"{count:,} {escape(one_line(name, 60))}"
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _bars(histogram: dict[str, int]) -> str:
    """A histogram over powers of two as a row of bars: "16▁▃█▂1024"."""
    if not histogram:
        return ""
    names = sorted(int(name) for name in histogram if name.isascii() and name.isdigit() and len(name) < 19)
    if not names or max(histogram.values()) < 1:
        return ""
    first, last, top = names[0], names[-1], max(histogram.values())
    steps = [0] if first == 0 else []
    power = max(1, names[1] if first == 0 and len(names) > 1 else first)
    while power <= last:
        steps.append(power)
        power *= 2
    bars = "".join(_BARS[-(-histogram.get(str(step), 0) * 8 // top)] for step in steps)
    return f"[dim]{first}[/]{bars}[dim]{last}[/]"


if __name__ == "__main__":
    sys.exit(main())
