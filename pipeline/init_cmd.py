"""`earlyfusion init NAME --from SRC`: looks at data of your own, says what it found, and writes a recipe for
it.

    earlyfusion init shapes --from photos/
        ->  shapes/recipe.toml, and the next three commands

SRC is anything that `earlyfusion prepare` reads. Of many samples some are looked at, evenly spread.
"""

import hashlib
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import Template

import torch
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import DataError, told
from earlyfusion.data.formats import MEDIA, PICTURES, ending
from earlyfusion.data.options import Options, verb
from earlyfusion.data.picture import open_header
from earlyfusion.data.prepare.read import InputOptions
from earlyfusion.data.prepare.write import Outcome, Worker
from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.vision.config import VisionConfig

PATCH, PATCHES = 8, 1024
"""Pixels of a patch, and most patches of a picture."""
ASK = "what does the picture show?"
"""The question that captions answer."""
TOKENS = 4096
"""Tokens of a training step, as nano takes them."""
PASSES = 12
"""How often the recipe sees a sample, if the steps allow it."""
STEPS = (200, 640)
"""Fewest and most steps that are written: one and a half to six minutes on two CPU cores."""

RECIPE = """# $name: written by `earlyfusion init` for $count samples of $mean tokens in the mean.
# Every key: docs/config.md. More parameters: model.preset = "small", or model.scale = 2.

[run]
name = "$name"

[tokenizer]
vocab_size = 2048               # trained on English and code; path = "FILE" takes your own

[[data.sources]]
name = "$source"
kind = "webdataset"
path = "$data"$ask
weight = 0.8                    # share of the tokens; a part is held out and measured, also grey

[[data.sources]]                # the Python manual: words without pictures; your own texts are better
name = "pydoc"
kind = "pydoc"
weight = 0.2

[vision]
preset = "tiny"
patch_size = $patch
hidden_size = 96
num_hidden_layers = 2
num_attention_heads = 3
head_dim = 32
intermediate_size = 256
pos_emb_height = 16
pos_emb_width = 16
initializer_range = 0.1
in_patch_limit = $patches           # larger pictures are made smaller: 1,024 patches are 256 x 256 pixels

[model]
preset = "nano"                 # 2.2 M parameters

[optim]
name = "muonclip"
lr = 5e-3
weight_decay = 0.05
head_group_size = 1
muon_vision = true

[[stages]]
name = "joint"
steps = $steps # about $passes passes over your samples; take more if the curve still falls
length = $length # tokens of a row; one sample in a hundred has more than $longest
tokens = $tokens
lanes = 1
max_patches = 8192
schedule = "cosine"
warmup_steps = 20
final_lr_ratio = 0.05

[train]
mixed_precision = "no"$weights

[guard]
policy = "skip"

[eval]
every = $every
tasks = ["bpb"]
samples = 8                     # held-out pictures of yours that the report shows with what the model says

[checkpoint]
every = $keep
keep = 1

[track]
log_every = 10
"""
"""nano's shape and optimizer, for one source of one's own."""


class InitOptions(Options):
    positional = ("name",)

    name: str
    """folder of the project, and name of its runs"""
    source: str = Field(serialization_alias="from")
    """what `earlyfusion prepare` reads: folder, jsonl, parquet, csv, dataset on disk, shards"""
    look: PositiveInt = 2000
    """most samples that are looked at"""


@verb
def init(options: InitOptions) -> None:
    """Entry of `earlyfusion init`."""
    folder = Path(options.name)
    name = folder.name
    if not name or name != name.strip(". "):
        raise UserError(f"init {options.name!r}: expected the name of a folder to make, such as my-project")
    recipe = folder / "recipe.toml"
    if recipe.exists():
        raise UserError(f"{recipe} exists already; take another name, or delete it to have it written anew")

    console = Console()
    torch.set_num_threads(1)
    most = DecodeConfig().max_pixels
    worker = Worker(
        options.source, InputOptions(), format="auto", tokenizer=None, vision="moonvit_v2", max_pixels=most
    )
    # Counted as the recipe below will see it.
    tower = {"patch_size": PATCH, "in_patch_limit": PATCHES}
    worker.vision = VisionConfig.preset("tiny").model_copy(update=tower)
    count = worker.input.count
    numbers = range(0, count, -(-count // options.look)) if count > options.look else range(count)
    looked = [worker.outcome(number) for number in track(numbers, "looking", console=Console(stderr=True))]
    good = [one for one in looked if not one.reason]
    _tell(options.source, count, worker.input.layout, worker.input.notes, looked, console)
    if not good:
        raise DataError(
            f"{options.source}: none of {len(looked):,} samples can be used; the first: {looked[0].message}"
            if looked
            else f"{options.source}: holds no samples"
        )

    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(recipe, recipe_of(name, folder / "data", good, round(count * len(good) / len(looked))))
    quoted = [shlex.quote(str(part)) for part in (options.source, folder / "data", recipe, f"runs/{name}")]
    source, data, recipe_path, run = quoted
    console.print(f"\nwritten: {recipe}; now", soft_wrap=True)
    for line in (
        f"earlyfusion prepare {source} --out {data}",
        f"earlyfusion pretrain {recipe_path}",
        f"earlyfusion serve --model {run}",
    ):
        console.print(f"    {line}", soft_wrap=True, markup=False, highlight=False)
    if any(one.format in ("caption", "video") for one in good):
        console.print(f"and ask it: {ASK}", soft_wrap=True)


def _tell(
    source: str, count: int, layout: str, notes: Sequence[str], looked: Sequence[Outcome], console: Console
) -> None:
    """The table of what was found, and an example of everything that is left out."""
    good = [one for one in looked if not one.reason]
    pictures: Counter[bytes] = Counter()
    sides: list[tuple[int, int]] = []
    for one in good:
        for member, data in one.members.items():
            if ending(member) in MEDIA:
                pictures[hashlib.blake2b(data, digest_size=16).digest()] += 1
            if ending(member) in PICTURES:
                sides.append(open_header(data).size)
    samples = Counter(one.digest for one in good)
    tokens = [one.tokens for one in good]

    table = Table(title=source, show_header=False)
    table.add_row("layout", layout)
    share = "" if len(looked) == count else f", {len(looked):,} looked at, evenly spread"
    table.add_row("samples", f"{count:,}{share}")
    table.add_row("formats", told(Counter(one.format for one in good)) or "none")
    if sides:
        sides.sort(key=lambda side: side[0] * side[1])
        shown = [f"{width}x{height}" for width, height in (sides[0], sides[len(sides) // 2], sides[-1])]
        table.add_row("pictures", f"{len(sides):,}; smallest, middle, largest: {', '.join(shown)}")
    if tokens:
        middle, most = round(statistics.median(tokens)), max(tokens)
        table.add_row("tokens", f"{sum(tokens):,} in those looked at; middle {middle:,}, most {most:,}")
    twice = f"{samples.total() - len(samples):,} samples, {pictures.total() - len(pictures):,} pictures"
    table.add_row("duplicates", twice)
    reasons = Counter(one.reason for one in looked if one.reason)
    table.add_row("left out", told(reasons) or "nothing")
    print_table(table, console)
    for reason in reasons:
        first = next(one for one in looked if one.reason == reason)
        console.print(f"{reason}, such as {first.origin}: {first.message}", soft_wrap=True, markup=False)
    remarks = {one.note for one in good if one.note}
    for line in (*notes, *sorted(remarks)):
        console.print(line, soft_wrap=True, markup=False)


def recipe_of(name: str, data: Path, good: Sequence[Outcome], count: int) -> str:
    """The recipe, with the reason of every number that depends on the data. good: the samples looked at;
    count: those that there are."""
    tokens = sorted(one.tokens for one in good)
    longest = tokens[int(0.99 * (len(tokens) - 1))]
    length = next(size for size in (512, 1024, 2048, 4096) if size >= min(2 * longest, 4096))
    mean = sum(tokens) / len(tokens)
    wanted = PASSES * count * mean / (0.8 * TOKENS)
    steps = int(min(max(wanted, STEPS[0]), STEPS[1]))
    passes = steps * 0.8 * TOKENS / (count * mean)
    asks = any(one.format in ("qa", "conversation") for one in good)
    weights = ""
    if asks:
        weights = f"\nloss_weights = {{ {name_of(name)} = 10.0 }}  # an answer is short, and would drown"
    ask = ""
    if any(one.format in ("caption", "video") for one in good):
        ask = f'''\noptions = {{ ask = "{ASK}" }}  # what captions answer; without it ask for none'''
    return Template(RECIPE).substitute(
        name=name,
        source=name_of(name),
        count=f"{count:,}",
        mean=f"{mean:.0f}",
        data=data.as_posix(),
        ask=ask,
        patch=PATCH,
        patches=PATCHES,
        steps=f"{steps:<23}",
        passes=f"{passes:.1f}",
        length=f"{length:<22}",
        longest=longest,
        tokens=TOKENS,
        weights=weights,
        every=max(50, steps // 4),
        keep=max(50, steps // 2),
    )


def name_of(name: str) -> str:
    """A name of a source: letters, digits and underscores."""
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name) or "mine"
