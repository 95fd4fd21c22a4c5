"""`earlyfusion prepare SRC --out DIR`: anything -> webdataset shards with an index, ready for kind =
"webdataset".

Workers read, check and count; one writer puts the samples into shards in the order of the input, so the
result is the same, byte for byte, for any number of workers and after any interruption: run the same command
again to go on. So it is for machines: --part 3/8 does the third of eight parts (each may run elsewhere, below
one shared --out), --merge joins them; --ray lets the nodes of a Ray cluster read.

What is read:

\b
folder     files of one name together (a.jpg + a.txt, clip.mp4 + clip.json,
           page.html + page.png), and the rows of .jsonl, .json lists, .csv
           and .tsv files in it
.jsonl     one object a line, also .gz and .zst; .json: a list of objects;
           .csv, .tsv: a first line of column names. Paths in a row are
           relative to its file
.parquet   one file, a folder or a glob
datasets   a folder written by Hugging Face datasets' save_to_disk (media are
           taken as stored, not decoded)
shards     tar files, to shard, index and deduplicate them anew
COCO       captions_*.json, and the pictures anywhere below the folder
classes    pictures without words in two or more folders: the folder's name
           is the caption

What a row may hold (other names by --image-field, --text-field, --question-field, --answer-field):

\b
{"image": PATH, "caption": TEXT}     a picture and its caption (or "text")
{"image": PATH, "question": TEXT, "answer": TEXT}
                                     or "questions": a list of such pairs
{"image": PATH, "conversations": [{"from", "value"}]}
                                     LLaVA; or "messages": [{"role", ...}]
{"file_name": PATH, "text": TEXT}    of a Hugging Face image folder
{"video": PATH, "caption": TEXT}
{"text": TEXT}
{"texts": [...], "images": [...]}

Files beside a picture: .txt its caption, .json a row without the path, .html .svg ... its source. A
picture with a source and a caption becomes a caption, --format code makes it source.
"""

import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from earlyfusion.data.decode_config import MOST_PIXELS, DecodeConfig
from earlyfusion.data.errors import DataError, told
from earlyfusion.data.formats import BUILDERS
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.options import Options, verb
from earlyfusion.data.prepare.parts import PARTS, Part, open_parts, part_numbers, whole
from earlyfusion.data.prepare.read import InputOptions, open_input
from earlyfusion.data.prepare.workers import outcomes
from earlyfusion.data.prepare.write import SKIPPED, Outcome, ShardSet, Worker, fault_of, open_tokenizer
from earlyfusion.data.shards.fetch import MANIFEST, as_local, read_manifest
from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.vision.config import PRESETS

STATE = ".prepare.json"
_LAYOUT = 4
"""Part of what finished shards are recognised by: raise it when they would be written otherwise."""
FORMATS = ("auto", *BUILDERS)


class PrepareOptions(Options):
    positional = ("source",)

    source: str | None = None
    """folder, file, glob, dataset on disk, tar shards or URL"""
    out: Path
    """folder for the shards"""
    verify: bool = False
    """only recheck checksums and indexes of --out"""
    workers: PositiveInt = 2
    """processes that read and check; 1 works in this process"""
    ray: str | None = None
    """address of a Ray cluster whose CPUs read and check in their place; auto: the one this machine is part
    of; local: start one here"""
    part: str | None = None
    """i/n: do part i of n only, below an --out that the machines share; --merge makes the shards of them"""
    merge: bool = False
    """join the parts in --out to the finished shards"""
    shard_mb: float = Field(256.0, ge=1e-3)
    """largest shard in MB (10^6 bytes)"""
    shard_samples: PositiveInt = 10_000
    """most samples in a shard"""
    format: str = "auto"
    """what samples are: auto, caption, qa, conversation, interleaved, grounding, ocr, video, code or text"""
    dedup: Literal["sample", "none"] = "sample"
    """leave out what has the content of an item before, or keep it"""
    image_field: str | None = None
    """field of a row with the path of a picture or video"""
    text_field: str | None = None
    """field of a row with the text"""
    question_field: str | None = None
    """field of a row with a question"""
    answer_field: str | None = None
    """field of a row with its answer"""
    split: str | None = None
    """split of a dataset on disk"""
    tokenizer: str | None = None
    """tokenizer that counts; without one the embedded one"""
    vision: str = "moonvit_v2"
    """preset whose patch rule counts"""
    max_pixels: int = Field(DecodeConfig().max_pixels, ge=1, le=MOST_PIXELS)
    """most pixels of a picture, as data.decode.max_pixels of the recipe that trains on it"""
    overwrite: bool = False
    """delete what another preparation left in --out"""


@verb
def prepare(options: PrepareOptions) -> None:
    """Entry of `earlyfusion prepare`."""
    source, out = options.source, options.out
    console = Console(stderr=True)
    if options.verify:
        _recheck(out, console)
        return
    if options.merge:
        _report(out, _merge(out, console), console)
        return
    if source is None:
        raise DataError(
            "prepare: name a source, --merge to join the parts in --out, or --verify to recheck it"
        )
    # Before anything is opened: a typing error should not cost a scan of the folder.
    for name, given, known in (("format", options.format, FORMATS), ("vision", options.vision, PRESETS)):
        if given not in known:
            raise DataError(f"--{name} {given}: {did_you_mean(given, known)}")
    piece = part_numbers(options.part) if options.part else None
    if piece and options.overwrite:
        raise DataError(
            "--overwrite goes with no --part: another part may be at work; delete the folder first"
        )

    make, plan = _plan(source, options, console)
    if piece:
        _part(out, piece, plan, make, options, console)
        return
    if (out / PARTS).exists():
        raise DataError(
            f"{out} holds parts of a preparation: join them with --merge, or delete {out / PARTS}"
        )
    # From here on nobody else writes in the folder.
    with _owned(out, plan["identity"], options.overwrite):
        manifest = read_manifest(str(out))
        if manifest is not None:
            console.print(f"{out} is already prepared from this source; --verify rechecks it", soft_wrap=True)
        else:
            read = lambda start: outcomes(make, start, plan["items"], options.workers, options.ray)
            manifest = _write(out, plan, read, console)
    _report(out, manifest, console)


def _plan(source: str, options: PrepareOptions, console: Console) -> tuple[Callable[[], Worker], Record]:
    """What makes a worker, and what the result depends on: the number of workers is no part of it."""
    fields = InputOptions(
        options.image_field, options.text_field, options.split, options.question_field, options.answer_field
    )
    try:
        opened = open_input(source, fields)
    except DataError:
        raise
    except Exception as error:  # files of others: whatever nobody thought of is one line, too
        raise DataError(f"{source}: cannot be opened ({type(error).__name__}: {one_line(error)})") from error
    for line in (opened.layout and f"found: {opened.layout}", *opened.notes):
        if line:
            console.print(line, soft_wrap=True, markup=False)

    # Whole paths: the processes of a cluster stand in other folders.
    local, words = as_local(source), options.tokenizer
    make = partial(
        Worker,
        source if local is None else str(local.absolute()),
        fields,
        format=options.format,
        tokenizer=words and str(Path(words).absolute()),
        vision=options.vision,
        max_pixels=options.max_pixels,
    )
    hashed = open_tokenizer(words).hash
    sizes = options.shard_mb, options.shard_samples
    how = (fields, options.format, options.dedup, options.vision, options.max_pixels, hashed)
    form = opened.form if options.format == "auto" else options.format
    return make, {
        "identity": f"{digest64(_LAYOUT, opened.fingerprint(), *how, *sizes):016x}",
        "items": opened.count,
        "max_bytes": int(sizes[0] * 1e6),
        "max_samples": sizes[1],
        "dedup": options.dedup == "sample",
        "about": {"tokenizer": hashed, "source": Path(source).name, "format": form, "vision": options.vision},
    }


def _write(out: Path, plan: Record, read: Callable[[int], Iterator[Outcome]], console: Console) -> Record:
    """Make the shards that are not yet there of the outcomes `read(start)`; returns what index.json holds."""
    with _full_disk(out):
        shards = ShardSet(out, plan["max_bytes"], plan["max_samples"], plan["dedup"])
        _fill(shards, read, plan["items"], console)
        return shards.finish(plan["items"], plan["about"])


def _part(
    out: Path,
    piece: tuple[int, int],
    plan: Record,
    make: Callable[[], Worker],
    options: PrepareOptions,
    console: Console,
) -> None:
    """Store what becomes of the items of one part."""
    # Shared by all parts, so that neither a merge nor a whole preparation goes on beside them.
    with _owned(out, plan["identity"], shared=True):
        if read_manifest(str(out)) is not None:
            console.print(f"{out} is already prepared from this source; --verify rechecks it", soft_wrap=True)
            return
        open_parts(out, piece[1], plan)
        folder = out / PARTS / f"{piece[0]}-of-{piece[1]}"
        with _locked(folder), _full_disk(out):
            part = Part(out, *piece, plan)
            part.begin()
            read = lambda start: outcomes(make, start, part.stop, options.workers, options.ray)
            _fill(part, read, part.stop, console)
            part.close(part.stop)
    console.print(
        f"part {options.part} is done: {counted(part.stop - part.start, 'item')}; when all are:  earlyfusion"
        f" prepare --merge --out {out}",
        soft_wrap=True,
    )


def _merge(out: Path, console: Console) -> Record:
    """The shards of all parts; their files are deleted once the shards are there."""
    # Killed while it deleted: the shards are whole.
    manifest = read_manifest(str(out))
    parts = [] if manifest else open_parts(out)
    with _owned(out, parts[0].plan["identity"]) if parts else _locked(out):
        if manifest is None:
            whole(out, parts)
            read = lambda start: (outcome for part in parts for outcome in part.outcomes(start))
            manifest = _write(out, parts[0].plan, read, console)
        with _full_disk(out):
            if (out / PARTS).exists():
                shutil.rmtree(out / PARTS)
    return manifest


@contextmanager
def _full_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written ({error.strerror or error}); free disk space and run the same"
            " command again, finished shards are kept"
        ) from None


@contextmanager
def _locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """The folder, made where it is not there, and a lock of it that ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    # Readable and writable: over NFS a shared lock takes the one, an exclusive lock the other.
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{folder}: another prepare is at work there; wait for it or take another folder"
            ) from None
        yield


@contextmanager
def _owned(out: Path, identity: str, overwrite: bool = False, shared: bool = False) -> Iterator[None]:
    """The folder `out`, locked against a second run, and known to belong to this preparation.

    shared: a part's, beside other parts; it deletes and writes nothing here.
    """
    with _locked(out, shared):
        # Files of the user are never deleted; those of another preparation when --overwrite says so.
        state = out / STATE
        known = state.read_text("utf-8", "replace") if state.is_file() else ""
        ours = (".lock", STATE, f".{STATE}.", PARTS)
        others = [path for path in out.iterdir() if not path.name.startswith(ours)]
        if others and not known:
            raise DataError(f"{out} holds files of its own; take an empty folder")
        # A preparation makes no folders: such a one is the user's, whatever else lies beside it.
        folders = [path.name for path in others if path.is_dir()]
        if folders and identity not in known:
            raise DataError(f"{out} holds folders of its own ({folders[0]}); move them, or take another one")
        if others and identity not in known:
            if not overwrite:
                raise DataError(
                    f"{out} holds shards of another source or other options; take another folder or"
                    " --overwrite"
                )
            for path in others:
                path.unlink()
        # Written before the first shard: what stands there is then known to be ours.
        if not shared:
            write_json(state, {"identity": identity})
        yield


def _fill(
    target: ShardSet | Part, read: Callable[[int], Iterator[Outcome]], stop: int, console: Console
) -> None:
    """Give `target` every item before `stop` that it does not yet have, with a bar of the way."""
    # The same command goes on where it was stopped.
    start = target.next_item
    if target.entries:
        kept = counted(len(target.entries), "finished shard" if isinstance(target, ShardSet) else "file")
        console.print(f"going on at item {start}: {kept} kept", soft_wrap=True)
    if target.finished:
        return

    # Told once with a count, not once for each item.
    notes = Counter[str]()
    columns = (*Progress.get_default_columns(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing", total=stop, completed=start)
        for outcome in read(start):
            if target.add(outcome) and outcome.note:
                notes[outcome.note] += 1
            bar.advance(task)
    for note, count in notes.items():
        console.print(f"{counted(count, 'item')}: {note}", soft_wrap=True, markup=False)


def counted(count: int, what: str) -> str:
    """ "1 shard", "2 shards"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _recheck(out: Path, console: Console) -> None:
    manifest = read_manifest(str(out))
    if manifest is None:
        raise DataError(f"{out}: no {MANIFEST} of a preparation; name the folder given to prepare --out")
    shards = manifest["shards"]
    faults = []
    for entry in shards:
        fault = fault_of(out / entry["name"], entry)
        if fault:
            faults.append(f"{entry['name']}: {fault}")
    if faults:
        raise DataError(f"{len(faults)} of {len(shards)} shards are damaged: {'; '.join(faults)}")
    sizes = f"{counted(len(shards), 'shard')}, {counted(sum(entry['samples'] for entry in shards), 'sample')}"
    console.print(f"{out}: {sizes}, all as written", soft_wrap=True)


def _report(out: Path, manifest: Record, console: Console) -> None:
    # What one wants to know of a new data set before training on it.
    table = Table(title=str(out), show_header=False)
    table.add_row("samples", f"{manifest['samples']:,} of {manifest['items']:,} items")
    table.add_row("shards", f"{len(manifest['shards'])}, {manifest['bytes'] / 1e6:,.1f} MB")
    table.add_row("formats", told(Counter(manifest["formats"])))
    table.add_row("tokens", f"{manifest['tokens']:,}")
    table.add_row("patches", f"{manifest['patches']:,} in {manifest['media']:,} pictures and videos")
    table.add_row("left out", told(Counter(manifest["skipped"])) or "nothing")
    print_table(table, console)

    # An example tells more than a count of reasons.
    if manifest["skipped"] and (lines := (out / SKIPPED).read_text("ascii").splitlines()):
        first = json.loads(lines[0])
        text = f"the first left out, {first['from']}: {first['message']} (all in {out / SKIPPED})"
        console.print(one_line(text), soft_wrap=True, markup=False)
    console.print(f"look at it:  earlyfusion data inspect {out} --out sheet.html", soft_wrap=True)
