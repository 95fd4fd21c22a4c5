"""`earlyfusion data inspect PATH`: what a mix, a folder or a set of shards holds, as a tree and as a contact
sheet.

PATH is a recipe (name or .toml with a [data] section), a folder or file of shards (also a URL or
pipe:command), a
folder of pictures and texts, or a text file. Counts of prepared shards are exact, all others come from the
samples looked at.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from earlyfusion.data.cards import Card, bad_card, make_card
from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.examples import write_examples
from earlyfusion.data.formats import describe
from earlyfusion.data.prepare.write import open_tokenizer
from earlyfusion.data.sample import one_sample
from earlyfusion.data.shards.fetch import TABLES, TOTALS, as_local, braces, is_url
from earlyfusion.data.sources.base import Source, SourceConfig, build_source
from earlyfusion.data.sources.folder import Folder
from earlyfusion.data.sources.shards import WebDataset
from earlyfusion.data.sources.text_files import guess_kind
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import one_line
from earlyfusion.pipeline.config.compose import compose
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.vision.config import VisionConfig

MOST_INDEXES = 256
"""Shards without a manifest whose indexes are opened to count what they left out."""


@dataclass
class Mix:
    """What is inspected: sources, and the patch rule and tokenizer that samples are counted by."""

    data: DataConfig
    vision: VisionConfig
    tokenizer: Tokenizer


def examples(
    folder: Annotated[Path, typer.Argument(help="where to write them, for example photos/")],
) -> None:
    """A dozen pictures with captions, to try the commands on."""
    print(f"{write_examples(folder)} pictures with captions: {folder}")


def inspect(
    path: Annotated[str, typer.Argument(help="recipe (name or .toml), shards, folder, text file, URL")],
    out: Annotated[Path | None, typer.Option(metavar="HTML", help="write a contact sheet here")] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="samples of each source to look at, evenly spread")
    ] = 12,
    run_commands: Annotated[
        bool,
        typer.Option("--run-commands", help="a recipe is code: run the commands (pipe:...) that it names"),
    ] = False,
) -> None:
    """Print what a mix, a folder or a set of shards holds as a tree, and write a contact sheet."""
    # Sources are opened one by one: a broken one ends the tree with its own error.
    mix = open_mix(path, run_commands)
    console, tree = Console(), Tree(f"[bold]{_safe(path)}[/]")
    cards: dict[str, list[Card]] = {}
    total = sum(source.weight for source in mix.data.sources)
    for config in mix.data.sources:
        source = build_source(config, seed=mix.data.seed, val_fraction=mix.data.val_fraction)
        cards[config.name] = look(source, mix, samples)

        limit = f", at most {config.max_epochs:g} epochs" if config.max_epochs else ""
        # Weights are relative: their share is what one wants to know.
        share = f"weight {config.weight:g} ({config.weight / total:.1%}){limit}"
        branch = tree.add(f"[bold cyan]{_safe(config.name)}[/]  {config.kind}  {share}")
        for line in facts(source, cards[config.name], mix):
            branch.add(line)
    console.print(tree)

    # The page holds all cards, the tree their counts.
    if out is not None:
        title = f"{path}: {sum(map(len, cards.values()))} samples"
        write_page(out, "sheet.html", {"title": title, "note": "As the model gets them.", "cards_of": cards})
        console.print(f"contact sheet: {out} ({out.stat().st_size / 1e6:.1f} MB)")


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="What a mix or shards hold; example pictures."
)
app.command()(inspect)
app.command()(examples)


def open_mix(path: str, run_commands: bool = False) -> Mix:
    """The mix that `path` names; raises DataError (or the recipe's own error) when it is none.

    A recipe that would run a command is refused without `run_commands`: to look at one is not yet to trust
    it. A command given as `path` itself was typed by whoever asks.
    """
    local = as_local(path)
    exists = local is not None and (local.exists() or any(c in path for c in "*?[{"))
    # What lies on a disk or behind a URL is data; every other word is a recipe.
    if not path.endswith(".toml") and (exists or is_url(path) or path.startswith("pipe:")):
        kind = guess_kind(path, local)
        # A few samples are looked at: no shard is copied for them.
        options = {"byte_ranges": True} if kind == "webdataset" else {}
        source = SourceConfig(name=Path(path).name or "data", kind=kind, path=path, options=options)
        data = DataConfig(sources=[source], val_fraction=0.0)
        return Mix(data, VisionConfig.preset("moonvit_v2"), open_tokenizer(None))

    # A path that is none would be taken for the name of a recipe.
    if "/" in path and not Path(path).is_file():
        raise DataError(f"{path}: no such file or folder")
    tree = compose([path])
    if "data" not in tree:
        raise DataError(f"{path}: no [data] section to inspect")
    # Asked before validation: a source may run its command when it is opened.
    commands = list(_commands([tree["data"], tree.get("reward")]))
    if commands and not run_commands:
        raise DataError(
            f"{path}: names commands or functions that would run ({'; '.join(commands)[:200]}); a recipe is"
            " code: read it, then add --run-commands"
        )
    try:
        # Only these sections: a recipe need not be whole to be looked at.
        vision, words = dict(tree.get("vision", {})), tree.get("tokenizer", {})
        rule = VisionConfig.preset(vision.pop("preset", "moonvit_v2"), **vision)
        tokenizer = embedded_tokenizer(int(words.get("vocab_size", 4096)))
        if words.get("path"):
            tokenizer = open_tokenizer(words["path"])
        return Mix(DataConfig.model_validate(tree["data"]), rule, tokenizer)
    except (AttributeError, TypeError) as error:
        raise DataError(f"{path}: not a recipe ({one_line(error)})") from None


def _commands(tree: Any) -> Iterator[str]:
    """What opening the sources of a recipe would run: pipe:command, and package.module:function."""
    if isinstance(tree, str):
        # Braces may hide a command: {p,q}ipe:...
        for text in braces(tree):
            if text.startswith("pipe:") or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
                yield text
    elif isinstance(tree, dict):
        yield from _commands(list(tree.values()))
    elif isinstance(tree, list):
        for value in tree:
            yield from _commands(value)


def look(source: Source, mix: Mix, count: int) -> list[Card]:
    """Cards of up to `count` samples, evenly spread over the source."""
    cards = []
    for index in sorted({place * len(source) // count for place in range(count)}):
        if index >= len(source):
            break
        try:
            with one_sample(f"source {source.name!r}, sample {index}"):
                form = ""
                if isinstance(source, WebDataset):
                    group = source.shards.group(*source.split.train(index))
                    form = describe(group, source.options)[0]
                cards.append(make_card(source.get(index, 0), mix.tokenizer, mix.vision, form))
        except BadSample as error:
            cards.append(bad_card(source.name, f"sample {index}", error))
    return cards


def facts(source: Source, cards: Sequence[Card], mix: Mix) -> Iterator[str]:
    """What is known of a source, line by line: the exact counts of a preparation under the rule it counted
    by, and means of the samples looked at under the rule of the mix."""
    yield f"{len(source):,} samples, {source.heldout_len():,} held out"
    if isinstance(source, Folder) and source.left_out:
        yield f"[red]no samples: {_listed(source.left_out)}[/]"
    if isinstance(source, WebDataset):
        yield from _of_shards(source)

    good = [card for card in cards if not card["bad"]]
    if good:
        tokens, patches, vision = (
            fmean(card[key] for card in good) for key in ("tokens", "patches", "vision_tokens")
        )
        whole, of = tokens * len(source), f"[dim](from {len(good)} samples)[/]"
        yield f"formats: {_listed(Counter(card['kind'] for card in good))}  [dim](of {len(cards)} samples)[/]"
        share = vision / max(1, tokens)
        yield f"{tokens:,.0f} tokens a sample, {share:.0%} of them vision; {whole:,.0f} in all  {of}"
        yield f"{patches:,.0f} patches a sample (patches of {mix.vision.patch_size})  {of}"
    if bad := Counter(card["bad"] for card in cards if card["bad"]):
        yield f"[red]left out: {_listed(bad)}[/]  [dim](of {len(cards)} samples)[/]"


def _of_shards(source: WebDataset) -> Iterator[str]:
    shards, told = source.shards, ""
    if any(shards.cut):
        cut = ", ".join([name for name, torn in zip(shards.names, shards.cut) if torn][:5])
        told = f", [red]{sum(shards.cut)} cut short: {_safe(cut)}[/]"
    yield f"{len(shards.names):,} shard{'s' * (len(shards.names) != 1)}{told}"
    made = shards.manifest
    if made is None:
        refused: Counter[str] = Counter()
        for number in range(min(len(shards.names), MOST_INDEXES)):
            refused.update(shards.index(number).header["refused"])
        if refused:
            yield f"[red]members left out: {_listed(refused)}[/]"
    # A preparation counted everything, by a patch rule and a tokenizer that need not be the mix's.
    elif {*TOTALS, *TABLES, "vision"} <= made.keys():
        yield f"{made['bytes'] / 1e6:,.1f} MB, {made['samples']:,} samples of {made['items']:,} items"
        yield f"prepared: {_listed(made['formats'])}"
        yield f"{made['tokens']:,} tokens, {made['patches']:,} patches ({_safe(made['vision'])})"
        yield f"left out: {_listed(made['skipped']) or 'nothing'}"


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {_safe(name, 60)}" for name, count in ordered)


def _safe(text: object, limit: int = 300) -> str:
    """Text of others as the console may print it: no markup, nothing that a terminal obeys."""
    return escape(one_line(text, limit))
