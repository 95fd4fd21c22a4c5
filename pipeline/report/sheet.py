"""`earlyfusion data inspect PATH`: what a mix, a folder or a set of shards holds, as a tree and as a contact
sheet.

PATH is a recipe (name or .toml with a [data] section), a folder or file of shards (also a URL or
pipe:command), a
folder of pictures and texts, or a text file. Counts of prepared shards are exact, all others come from the
samples looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from earlyfusion.data.cards import Card, bad_card, make_card
from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, one_sample
from earlyfusion.data.examples import write_examples
from earlyfusion.data.formats.build import describe
from earlyfusion.data.prepare.work import open_tokenizer
from earlyfusion.data.shards.fetch import TABLES, TOTALS, as_local, braces, is_url
from earlyfusion.data.sources.base import Source, SourceConfig, build_source
from earlyfusion.data.sources.folder import Folder
from earlyfusion.data.sources.guess import guess_kind
from earlyfusion.data.sources.shards import WebDataset
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.pipeline.config.compose import compose
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.vision.config import PRESETS, VisionConfig

BARS = " ▁▂▃▄▅▆▇█"
COUNTING = (
    "patch_size",
    "merge_kernel_size",
    "max_patches_per_side",
    "in_patch_limit",
    "in_patch_limit_each_frame",
    "pos_emb_time",
)
"""Keys of a vision section that decide how many patches and tokens a picture or video has."""


@dataclass
class Mix:
    """What is inspected. named: whether patch rule or tokenizer were (by a recipe or an option), so that
    counts must be theirs."""

    data: DataConfig
    vision: VisionConfig
    tokenizer: Tokenizer
    named: bool


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
    heldout: Annotated[bool, typer.Option("--heldout", help="look at held-out samples instead")] = False,
    tokenizer: Annotated[
        str, typer.Option(metavar="PATH", help="that counts; without one the recipe's or the embedded one")
    ] = "",
    vision: Annotated[str, typer.Option(help="patch rule; without one the recipe's, or moonvit_v2")] = "",
    run_commands: Annotated[
        bool,
        typer.Option("--run-commands", help="a recipe is code: run the commands (pipe:...) that it names"),
    ] = False,
) -> None:
    """Print what a mix, a folder or a set of shards holds as a tree, and write a contact sheet."""
    # Sources are opened one by one: a broken one ends the tree with its own error.
    mix = open_mix(path, tokenizer, vision, run_commands)
    console, tree = Console(), Tree(f"[bold]{_safe(path)}[/]")
    cards: dict[str, list[Card]] = {}
    total = sum(source.weight for source in mix.data.sources) or 1.0
    for config in mix.data.sources:
        source = build_source(config, seed=mix.data.seed, val_fraction=mix.data.val_fraction)
        cards[config.name] = look(source, mix, samples, heldout)

        limit = f", at most {config.max_epochs:g} epochs" if config.max_epochs else ""
        # Weights are relative: their share is what one wants to know.
        share = f"weight {config.weight:g} ({config.weight / total:.1%}){limit}"
        branch = tree.add(f"[bold cyan]{_safe(config.name)}[/]  {config.kind}  {share}")
        for line in facts(source, cards[config.name], mix):
            branch.add(line)
    console.print(tree)

    # The page holds all cards, the tree their counts.
    if out is not None:
        count = sum(map(len, cards.values()))
        title = f"{path}: {count} samples"
        write_page(out, "sheet.html", {"title": title, "note": "As the model gets them.", "cards_of": cards})
        console.print(f"contact sheet: {out} ({out.stat().st_size / 1e6:.1f} MB)")


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="What a mix or shards hold; example pictures."
)
app.command()(inspect)
app.command()(examples)


def open_mix(path: str, tokenizer: str = "", vision: str = "", run_commands: bool = False) -> Mix:
    """The mix that `path` names; raises DataError (or the recipe's own error) when it is none.

    A recipe that would run a command is refused without `run_commands`: to look at one is not yet to trust
    it. A command given as `path` itself was typed by whoever asks.
    """
    # A wrong rule is told before any data is opened.
    if vision and vision not in PRESETS:
        raise DataError(f"--vision {vision!r}; {did_you_mean(vision, PRESETS)}")
    local = as_local(path)
    exists = local is not None and (local.exists() or any(c in path for c in "*?[{"))
    # What lies on a disk or behind a URL is data; every other word is a recipe.
    if not path.endswith(".toml") and (exists or is_url(path) or path.startswith("pipe:")):
        source = SourceConfig(name=Path(path).name or "data", kind=guess_kind(path, local), path=path)
        rule = VisionConfig.preset(vision or "moonvit_v2")
        data = DataConfig(sources=[source], val_fraction=0.0)
        return Mix(data, rule, open_tokenizer(tokenizer or None), bool(vision or tokenizer))

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
        return _of_recipe(tree, tokenizer, vision)
    except (AttributeError, TypeError) as error:
        raise DataError(f"{path}: not a recipe ({one_line(error)})") from None


def _commands(tree: Any) -> Iterator[str]:
    """What opening the sources of a recipe would run: pipe:command, and package.module:function."""
    if isinstance(tree, str):
        # Braces may hide a command: {p,q}ipe:...
        for text in braces(tree):
            if text.startswith("pipe:") or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
                yield text
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _commands(value)


def _of_recipe(tree: dict[str, Any], tokenizer: str, vision: str) -> Mix:
    """The sections that matter here. Raises ValidationError, DataError, TypeError, AttributeError."""
    section = dict(tree.get("vision") or {})
    preset = section.pop("preset", "moonvit_v2")
    # A rule that was named on the command line stands for the whole section.
    rule = VisionConfig.preset(vision) if vision else VisionConfig.preset(preset, **section)
    given = tree.get("tokenizer") or {}
    if own := tokenizer or given.get("path"):
        words = open_tokenizer(own)
    else:
        words = embedded_tokenizer(int(given.get("vocab_size", 4096)))
    return Mix(DataConfig.model_validate(tree["data"]), rule, words, True)


def look(source: Source, mix: Mix, count: int, heldout: bool = False) -> list[Card]:
    """Cards of up to `count` samples, evenly spread over the source."""
    length = source.heldout_len() if heldout else len(source)
    cards = []
    for index in dict.fromkeys(place * length // count for place in range(count)) if length else ():
        try:
            # Called in this turn of the loop.
            with one_sample(lambda: f"source {source.name!r}, sample {index}"):  # noqa: B023
                sample = source.heldout(index) if heldout else source.get(index, 0)
                cards.append(make_card(sample, mix.tokenizer, mix.vision, _format(source, index, heldout)))
        except BadSample as error:
            cards.append(bad_card(source.name, f"sample {index}", error))
    return cards


def _format(source: Source, index: int, heldout: bool) -> str:
    if not isinstance(source, WebDataset):
        return ""
    # Training and held-out samples are numbered apart.
    where = source.split.heldout(index) if heldout else source.split.train(index)
    return describe(source.shards.group(*where), source.options)[0]


def facts(source: Source, cards: Sequence[Card], mix: Mix) -> Iterator[str]:
    """What is known of a source, line by line: exact counts where a preparation of the mix's own rule left
    them."""
    yield f"{len(source):,} samples, {source.heldout_len():,} held out"
    if isinstance(source, Folder) and source.left_out:
        yield f"[red]no samples: {_listed(source.left_out)}[/]"
    if isinstance(source, WebDataset):
        yield from _of_shards(source)
        # Counts of a preparation hold for its own patch rule and tokenizer alone.
        manifest = source.shards.manifest or {}
        if {*TOTALS, *TABLES, "vision"} <= set(manifest):
            if _counted_alike(manifest, mix):
                yield from _of_manifest(manifest)
                return
            rule = f"the rule of this mix (patches of {mix.vision.patch_size})"
            yield f"[dim]prepare counted by {_safe(manifest['vision'])}; these counts are by {rule}[/]"

    # Everything below is an estimate from the samples looked at.
    good = [card for card in cards if not card["bad"]]
    if good:
        tokens, patches, seen = (
            sum(card[key] for card in good) / len(good) for key in ("tokens", "patches", "vision_tokens")
        )
        of = f"[dim](from {len(good)} samples)[/]"
        yield f"formats: {_listed(Counter(card['kind'] for card in good))}  [dim](of {len(cards)} samples)[/]"
        whole = f"about {tokens * len(source):,.0f} in all"
        yield f"{tokens:,.0f} tokens a sample, {seen / max(1, tokens):.0%} of them vision; {whole}  {of}"
        yield f"{patches:,.0f} patches a sample  {of}"
    if bad := Counter(card["bad"] for card in cards if card["bad"]):
        yield f"[red]left out: {_listed(bad)}[/]  [dim](of {len(cards)} samples)[/]"


def _counted_alike(manifest: Mapping[str, Any], mix: Mix) -> bool:
    """Whether the counts of a preparation are those of the mix's own patch rule and tokenizer."""
    if not mix.named:
        return True
    if manifest["vision"] not in PRESETS or manifest.get("tokenizer") != mix.tokenizer.hash:
        return False
    # Only what decides the counts: other keys may differ.
    theirs = VisionConfig.preset(manifest["vision"])
    return all(getattr(theirs, key) == getattr(mix.vision, key) for key in COUNTING)


def _of_shards(source: WebDataset) -> Iterator[str]:
    shards = source.shards
    cut = ", ".join([name for name, torn in zip(shards.names, shards.cut) if torn][:5])
    told = f", [red]{sum(shards.cut)} cut short: {_safe(cut)}[/]" if cut else ""
    yield f"{len(shards.names):,} shard{'' if len(shards.names) == 1 else 's'}{told}"
    refused: Counter[str] = Counter()
    # A manifest has counted them; else the first shards are looked at.
    for number in range(min(len(shards.names), 256)) if shards.manifest is None else ():
        refused.update(shards.index(number).header["refused"])
    if refused:
        yield f"[red]members left out: {_listed(refused)}[/]"


def _of_manifest(manifest: Mapping[str, Any]) -> Iterator[str]:
    samples = max(1, manifest["samples"])
    size = f"{manifest['bytes'] / 1e6:,.1f} MB"
    yield f"{size}, {manifest['samples']:,} samples of {manifest['items']:,} items"
    yield f"formats: {_listed(manifest['formats'])}"
    for name, about in (("token", ""), ("patch", f" ({_safe(manifest['vision'])})")):
        plural = "patches" if name == "patch" else "tokens"
        bars = histogram(manifest[f"{name}_histogram"])
        yield f"{manifest[plural]:,} {plural}{about}, {manifest[plural] / samples:,.0f} a sample  {bars}"
    yield f"left out: {_listed(manifest['skipped']) or 'nothing'}"


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {_safe(name, 60)}" for name, count in ordered)


def _safe(text: object, limit: int = 300) -> str:
    """Text of others as the console may print it: no markup, nothing that a terminal obeys."""
    return escape(one_line(text, limit))


def histogram(counts: Mapping[str, int]) -> str:
    """A histogram over powers of two as a row of bars: "16▁▃█▂1024"."""
    names = sorted(int(name) for name in counts if name.isascii() and name.isdigit() and len(name) < 19)
    if not names or max(counts.values()) < 1:
        return ""
    steps = [0] if names[0] == 0 else []
    # Every power between the first and the last has a bar, also an empty one.
    power = max(1, next((name for name in names if name), 1))
    while power <= names[-1]:
        steps.append(power)
        power *= 2
    bars = "".join(BARS[-(-counts.get(str(step), 0) * 8 // max(counts.values()))] for step in steps)
    return f"[dim]{names[0]}[/]{bars}[dim]{names[-1]}[/]"
