"""`earlyfusion import SRC --to DIR`: a checkpoint of others -> a model directory.

SRC holds a text model (Kimi-Linear), or a text model with tower and projector; a directory that training
wrote is one, too. `--tower SRC` takes tower and projector from elsewhere (Kimi-VL, Kimi K2.5, SigLIP). What
is nowhere is made anew: a tower of the preset `--vision`, a projector, rows for tokens that the vocabulary
lacks. Every tensor of the model must be found in its shape, and every tensor of the parts taken must have a
place: else nothing is written.

One shard is in memory at a time. What was interrupted goes on: shards that are whole are kept, beside DIR,
until the directory is complete.
"""

import json
import os
import shutil
import sys
from collections import Counter
from math import prod
from pathlib import Path

import torch
from pydantic import PositiveInt
from rich.table import Table
from torch import Tensor

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tables import print_table
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import (
    DTYPES,
    PublicTensor,
    cast,
    check_tensors,
    public_tensors,
    save_model,
    some,
    weight_files,
    write_model,
)
from earlyfusion.model.hub.foreign import PROJECTOR, TEXT, TOWER, Foreign, Found
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import Projector, build_tower

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
REPORT = "import.json"
MEGABYTE = 1 << 20
SAID = 1000  # tensors from one line of progress to the next


class ImportOptions(Options):
    positional = ("source",)

    source: Path
    """folder of a checkpoint with a text model: config.json, safetensors, tokenizer.json"""
    to: Path
    """model directory to write"""
    tower: Path | None = None
    """folder of a checkpoint whose tower (and projector, if it fits) is taken"""
    like: str | None = None
    """recipe whose model begins with what fits of SRC, for an architecture that is not ours (Moonlight,
    Llama)"""
    tokenizer: Path | None = None
    """tokenizer.json, or a folder that holds one; the source's own if not given"""
    vision: str = "moonvit_v2"
    """preset of a tower made anew, where no checkpoint has one"""
    seed: int = 0
    """seed of what is made anew"""
    shard_mb: PositiveInt = 2000
    """size of a shard of weights, which is held in memory"""


@verb
def import_(options: ImportOptions) -> None:
    """Entry of `earlyfusion import`."""
    if options.to.exists():
        raise UserError(f"--to {options.to}: exists; give a new directory, nothing was changed")
    if options.like is not None:
        if options.tower is not None:
            raise UserError("--tower is for a model of SRC's shape; with --like the recipe has the tower")
        return like(options)
    text = Foreign(options.source)
    tower = text if options.tower is None else Foreign(options.tower, tower=True)
    if text.text is None:
        raise UserError(
            f"{options.source}: model_type {text.family!r} has no text model that is known; give one as SRC"
            f" and this as --tower"
        )
    if options.tower is not None and tower.vision is None:
        raise UserError(f"--tower {options.tower}: model_type {tower.family!r} has no tower that is known")
    tokens = Tokenizer.load(options.tokenizer or options.source)
    config = FusionConfig(
        text=text.text.model_copy(
            update={
                "vocab_size": max(text.text.vocab_size, tokens.vocab_size),
                "bos_token_id": tokens.bos_id,
                "eos_token_id": tokens.eos_id,
                "pad_token_id": tokens.pad_id,
            }
        ),
        vision=tower.vision or VisionConfig.preset(options.vision),
        media_token_id=tokens.media_pad_id,
    )
    Import(config, text, tower, options.seed).write(options.to, tokens, options.shard_mb * MEGABYTE)


def like(options: ImportOptions) -> None:
    """A model of a recipe that begins with what fits of a checkpoint; the rest is drawn."""
    given = [("model.from", json.dumps(str(options.source))), ("run.seed", options.seed)]
    if options.tokenizer is not None:
        given.append(("tokenizer.path", json.dumps(str(options.tokenizer))))
    config = load_config([str(options.like)], given)
    if config.tokenizer.path is None:
        raise UserError(f"{options.source}: no tokenizer.json; give one, --tokenizer FILE")
    tokens = build.own_tokenizer(config.tokenizer.path)
    said: list[str] = []
    torch.manual_seed(options.seed)
    model = build.model(build.with_tokenizer(config, tokens), tokens, said)
    facts = {"name": options.to.name, "base": str(options.source), "recipe": options.like, "notes": said}
    save_model(model, tokens, options.to, facts, max_shard_bytes=options.shard_mb * MEGABYTE)
    print(*said, f"model directory: {options.to}", sep="\n")


class Import:
    """Where every tensor of a model of `config` comes from. Raises UserError, with names, for what is
    missing, of another shape, or left over."""

    def __init__(self, config: FusionConfig, text: Foreign, tower: Foreign, seed: int) -> None:
        self.config, self.text, self.tower, self.seed = config, text, tower, seed
        with torch.device("meta"):
            self.model = NativeFusion(config)
        self.own = self.model.state_dict()
        self.found: dict[str, tuple[Foreign, Found]] = {}
        self.fresh: dict[str, Tensor] = {}
        self.done = 0
        stored = next((d for name, (_, _, d) in text.shapes.items() if name.endswith(VOCABULARY[0])), "F32")
        self.dtype = DTYPES.get(stored, torch.float32)
        cast(self.model, self.dtype)
        self.parts = {TEXT: str(text.folder), TOWER: str(tower.folder), PROJECTOR: str(tower.folder)}
        self.map()

    def map(self) -> None:
        """Find every tensor."""
        missing, wrong = [], []
        projector = self.tower.vision is not None and self.fits()
        made = {TOWER: self.tower.vision is None, PROJECTOR: not projector}
        for item in public_tensors(self.model.state_dict().items()):
            part = next(part for part in (TEXT, TOWER, PROJECTOR) if item.name.startswith(part))
            if made.get(part):
                self.parts[part] = "made anew"
                continue
            source = self.text if part == TEXT else self.tower
            found = source.find(item.name)
            if found is None:
                missing.append(item.name)
                continue
            shape = list(item.view(self.own[item.ours]).shape)
            assert self.text.text is not None
            if complaint := misfit(item, source, found, shape, self.text.text.vocab_size):
                wrong.append(complaint)
            self.found[item.name] = source, found
        if missing:
            raise UserError(f"{len(missing)} tensors of the model are in no file: {some(missing)}")
        if wrong:
            raise UserError(f"{len(wrong)} tensors are not as config.json says: {some(wrong)}")
        self.drop_tied()
        left = self.text.left([TEXT])
        left += self.tower.left([TOWER, PROJECTOR] if projector else [TOWER])
        if left:
            raise UserError(f"{len(left)} tensors have no place in the model: {some(left)}")
        self.make(made)

    def fits(self) -> bool:
        """Whether the tower's checkpoint has a projector to the width of this decoder."""
        last = self.tower.find(f"{PROJECTOR}proj.2.weight")
        return last is not None and self.tower.shape(last)[0] == self.config.text.hidden_size

    def drop_tied(self) -> None:
        """A head that is the embedding once more needs no place."""
        head = next((name for name in self.text.shapes if name.endswith("lm_head.weight")), None)
        if not self.config.text.tie_word_embeddings or head is None:
            return
        embedding = self.text.find(f"{TEXT}model.{VOCABULARY[0]}")
        assert embedding is not None
        if not torch.equal(self.text.tensor(Found((head,))), self.text.tensor(embedding)):
            raise UserError(f"{self.text.folder}: tie_word_embeddings is true, but {head} is another matrix")
        self.text.used.add(head)

    def make(self, made: dict[str, bool]) -> None:
        """What no checkpoint has."""
        torch.manual_seed(self.seed)
        if made[TOWER]:
            tower = build_tower(self.config.vision)
            self.fresh |= {TOWER + name: value for name, value in tower.state_dict().items()}
        if made[PROJECTOR]:
            projector = Projector(self.config.vision, self.config.text.hidden_size)
            self.fresh |= {PROJECTOR + name: value for name, value in projector.state_dict().items()}

    def read(self, item: PublicTensor) -> Tensor:
        """The values of a public tensor."""
        self.done += 1
        if self.done % SAID == 0:
            print(f"{self.done:,} tensors, now {item.name}", file=sys.stderr, flush=True)
        if item.name not in self.found:
            return self.fresh[item.name].to(self.dtype)
        source, found = self.found[item.name]
        tensor, shape = source.tensor(found), item.view(self.own[item.ours]).shape
        if item.name.endswith(VOCABULARY) and len(tensor) < shape[0]:
            # Rows of tokens that the checkpoint does not know; a restart draws the same ones.
            generator = torch.Generator().manual_seed(self.seed + item.name.endswith(VOCABULARY[1]))
            rows = torch.empty(shape[0] - len(tensor), shape[1])
            rows.normal_(0.0, self.config.text.initializer_range, generator=generator)
            tensor = torch.cat([tensor, rows.to(tensor.dtype)])
        return tensor.view(shape)

    def write(self, to: Path, tokens: Tokenizer, shard_bytes: int) -> None:
        """Write the model directory, or go on where an import of the same was interrupted."""
        work = to.with_name(f".{to.name}.import")
        report: Record = {"made of": self.made_of(), "parts": self.parts, "seed": self.seed}
        report |= {"config": self.config.model_dump(mode="json"), "shard_bytes": shard_bytes}
        if not (work / REPORT).is_file() or json.loads((work / REPORT).read_text()) != report:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            write_json(work / REPORT, report)

        items = list(public_tensors(self.model.state_dict().items()))
        notes = [f"{part}*: {place}" for part, place in self.parts.items()]
        facts = {"name": to.name, "base": self.parts[TEXT], "notes": notes}
        write_model(work, self.model, tokens, facts, self.read, shard_bytes)
        plan = {item.name: item for item in items}
        check_tensors(work, plan, self.own, weight_files(work))
        os.replace(work, to)
        print_table(self.table(items))
        print(f"model directory: {to}")

    def made_of(self) -> list[list[object]]:
        """What tells one set of files from another."""
        files = sorted({path for one in (self.text, self.tower) for path, _, _ in one.shapes.values()})
        return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]

    def table(self, items: list[PublicTensor]) -> Table:
        """What came from where."""
        table = Table(title="imported", title_justify="left")
        for column in ("part", "from", "tensors", "parameters"):
            number = column in ("tensors", "parameters")
            table.add_column(column, overflow="fold", justify="right" if number else "left")
        tensors: Counter[str] = Counter()
        parameters: Counter[str] = Counter()
        for item in items:
            part = next(part for part in self.parts if item.name.startswith(part))
            tensors[part] += 1
            parameters[part] += item.view(self.own[item.ours]).numel()
        for part, place in self.parts.items():
            table.add_row(f"{part}*", place, f"{tensors[part]:,}", f"{parameters[part]:,}")
        grown = self.config.text.vocab_size - (self.text.text.vocab_size if self.text.text else 0)
        if grown:
            table.add_row("rows of the vocabulary", "made anew", "", f"{grown:,} tokens")
        return table


def misfit(item: PublicTensor, source: Foreign, found: Found, shape: list[int], vocabulary: int) -> str:
    """What is wrong with the shape of a tensor in the files; "" where nothing is. shape: as the model wants
    it; vocabulary: rows that the checkpoint's configuration speaks of."""
    given = source.shape(found)
    if item.name.endswith(VOCABULARY):
        shape = [vocabulary, *shape[1:]]
    # A position table and a patch's pixels may lie flat; heads and taps stand among ones.
    flat = item.name.endswith(("pos_emb.weight", "patch_embed.proj.weight")) and prod(given) == prod(shape)
    if flat or [n for n in given if n != 1] == [n for n in shape if n != 1]:
        return ""
    return f"{found.names[0]} {given}, expected {shape}"
