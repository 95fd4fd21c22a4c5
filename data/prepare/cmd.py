"""`earlyfusion prepare SRC --out DIR`: anything -> webdataset shards with an index, ready for kind =
"webdataset".

Workers read, check and count; one writer puts the samples into shards in the order of the input, so the
result is the same, byte for byte, for any number of workers and after any interruption: run the same command
again to go on.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from earlyfusion.data.decode_config import MOST_PIXELS, DecodeConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.formats.build import BUILDERS
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.prepare import inputs as prepare_inputs
from earlyfusion.data.prepare.inputs import Input, InputOptions, open_input
from earlyfusion.data.prepare.work import Job, Outcome, Worker, open_tokenizer, start_worker, work
from earlyfusion.data.prepare.write import ShardSet, verify, write_json
from earlyfusion.data.shards.fetch import MANIFEST, read_manifest
from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import one_line
from earlyfusion.vision.config import PRESETS

CHUNK = 32
"""Items of one task of a worker."""
STATE = ".prepare.json"
SKIPPED = "skipped.jsonl"
_LAYOUT = 1
"""Part of what finished shards are recognised by: raise it when they would be written otherwise."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside the options, and the layouts as they are written."""


def parser() -> argparse.ArgumentParser:
    """The options of the verb."""
    made = argparse.ArgumentParser(
        prog="earlyfusion prepare",
        description="Turn files, tables, datasets on disk or shards into indexed shards.",
        epilog=f"what is read\n\n{(prepare_inputs.__doc__ or '').partition('.')[2].strip()}",
        formatter_class=_Help,
    )
    made.add_argument(
        "source",
        nargs="?",
        help=(
            "folder, .jsonl(.gz|.zst), .json, .csv, .tsv, .parquet, dataset on disk, tar shards or URL (see"
            " below)"
        ),
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    made.add_argument("--verify", action="store_true", help="only recheck checksums and indexes of --out")
    made.add_argument(
        "--workers", type=int, default=2, help="processes that read and check; 1 works in this process"
    )
    made.add_argument("--shard-mb", type=float, default=256.0, help="largest shard in MB (10^6 bytes)")
    made.add_argument("--shard-samples", type=int, default=10_000, help="most samples in a shard")
    formats = ("auto", *BUILDERS)
    made.add_argument(
        "--format",
        choices=formats,
        default="auto",
        metavar="NAME",
        help=f"what the samples are: {', '.join(formats)}",
    )
    made.add_argument(
        "--check",
        choices=("full", "fast"),
        default="full",
        help="full: decode everything as training will; fast: headers",
    )
    made.add_argument(
        "--dedup",
        choices=("sample", "media", "none"),
        default="sample",
        help="same content of all members, or of media",
    )
    made.add_argument(
        "--image-field", metavar="NAME", help="field of a row with the path of a picture or video"
    )
    made.add_argument("--text-field", metavar="NAME", help="field of a row with the text")
    made.add_argument("--question-field", metavar="NAME", help="field of a row with a question")
    made.add_argument("--answer-field", metavar="NAME", help="field of a row with its answer")
    made.add_argument("--split", metavar="NAME", help="split of a dataset on disk")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N items")
    made.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer that counts; without one the embedded one"
    )
    made.add_argument(
        "--vision", choices=sorted(PRESETS), default="moonvit_v2", help="patch rule that counts"
    )
    made.add_argument(
        "--max-pixels",
        type=int,
        default=DecodeConfig().max_pixels,
        metavar="N",
        help="most pixels of a picture, as data.decode.max_pixels of the recipe that trains on it",
    )
    made.add_argument(
        "--overwrite", action="store_true", help="delete what another preparation left in --out"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code. Raises DataError for what the user can mend."""
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    if args.verify:
        return _verify(args.out, console)
    if args.source is None:
        raise DataError("prepare: name a source, or --verify to recheck --out")
    for name in ("workers", "shard_mb", "shard_samples"):
        if getattr(args, name) <= 0:
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected a number above 0")
    if not 1 <= args.max_pixels <= MOST_PIXELS:
        raise DataError(f"--max-pixels {args.max_pixels}: expected 1 to {MOST_PIXELS}")
    job = Job(
        args.source,
        InputOptions(args.image_field, args.text_field, args.split, args.question_field, args.answer_field),
        args.format,
        args.check,
        args.dedup,
        args.tokenizer,
        args.vision,
        args.max_pixels,
    )
    try:
        found = open_input(job.source, job.input)
    except DataError:
        raise
    except Exception as error:  # files of others: whatever nobody thought of is one line, too
        raise DataError(
            f"{job.source}: cannot be opened ({type(error).__name__}: {one_line(error)})"
        ) from error
    items = min(len(found), args.limit) if args.limit is not None else len(found)
    identity = digest64(
        *(
            _LAYOUT,
            found.fingerprint(),
            items,
            job.input,
            job.format,
            job.check,
            job.dedup,
            job.vision,
            job.max_pixels,
        ),
        *(open_tokenizer(job.tokenizer).hash, args.shard_mb, args.shard_samples),
    )
    with _owned(args.out, f"{identity:016x}", args.overwrite):
        manifest = read_manifest(str(args.out))
        if manifest is not None:
            console.print(
                f"{args.out} is already prepared from this source; --verify rechecks it", soft_wrap=True
            )
        else:
            limits = {"max_bytes": int(args.shard_mb * 1e6), "max_samples": args.shard_samples}
            shards = ShardSet(args.out, **limits, dedup=args.dedup != "none")
            if shards.next_item:
                console.print(
                    f"going on at item {shards.next_item}: {counted(len(shards.entries), 'finished shard')}"
                    " kept",
                    soft_wrap=True,
                )
            try:
                _fill(shards, job, items, args.workers, console)
                manifest = shards.finish(items, _about(job, found))
            except OSError as error:
                shards.abandon()
                raise DataError(
                    f"{args.out}: cannot be written ({error.strerror or error}); free disk space and run the"
                    " same command again, finished shards are kept"
                ) from None
    _report(args.out, manifest, console)
    return 0


def _about(job: Job, found: Input) -> dict[str, Any]:
    """What index.json tells of how the samples were read and counted."""
    return {
        "tokenizer": open_tokenizer(job.tokenizer).hash,
        "source": Path(job.source).name,
        "check": job.check,
        "format": job.format if job.format != "auto" else found.form,
        "vision": job.vision,
        "dedup": job.dedup,
    }


@contextmanager
def _owned(out: Path, identity: str, overwrite: bool) -> Iterator[None]:
    """The folder `out`, locked against a second run, and known to belong to this preparation."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{out}: another prepare is at work there; wait for it or take another folder"
            ) from None
        state = out / STATE
        known = state.read_text("utf-8", "replace") if state.is_file() else None
        others = [path for path in out.iterdir() if path.name not in (".lock", STATE, f".{STATE}.tmp")]
        if others and (known is None or identity not in known):
            if not overwrite or known is None:
                what = "files of its own" if known is None else "shards of another source or other options"
                hint = "take an empty folder" if known is None else "take another folder or --overwrite"
                raise DataError(f"{out} holds {what}; {hint}")
            for path in others:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(state, {"identity": identity})
        yield


def _fill(shards: ShardSet, job: Job, items: int, workers: int, console: Console) -> None:
    if shards.finished:
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("preparing", total=items, completed=shards.next_item, rate="")
        used = skipped = 0
        notes: Counter[str] = Counter()
        for outcome in _outcomes(job, shards.next_item, items, workers):
            stored = shards.add(outcome)
            notes.update([outcome.note] if outcome.note and stored else [])
            used, skipped = used + outcome.size * stored, skipped + (not stored)
            if (outcome.number + 1) % CHUNK == 0 or outcome.number + 1 == items:
                speed = used / 1e6 / max(1e-6, bar.tasks[task].elapsed or 0)
                told = f"{counted(len(shards.entries) + 1, 'shard')}, {skipped} left out, {speed:.1f} MB/s"
                bar.update(task, completed=outcome.number + 1, rate=told)
    for note, count in notes.items():
        console.print(f"{counted(count, 'item')}: {note}", soft_wrap=True, markup=False)


def _outcomes(job: Job, start: int, items: int, workers: int) -> Iterator[Outcome]:
    """Outcomes in order; a bounded number of tasks is under way, so that memory does not grow."""
    ranges = [(first, min(first + CHUNK, items)) for first in range(start, items, CHUNK)]
    if workers == 1 or len(ranges) < 2:
        worker = Worker(job)
        for first, last in ranges:
            yield from worker.outcomes(first, last)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["earlyfusion.data.prepare.work"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(job,))
    waiting: deque[tuple[int, int, Future[list[Outcome]]]] = deque()
    try:
        for first, last in ranges:
            waiting.append((first, last, pool.submit(work, first, last)))
            if len(waiting) > 3 * workers:
                yield from _result(waiting)
        while waiting:
            yield from _result(waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(waiting: deque[tuple[int, int, Future[list[Outcome]]]]) -> list[Outcome]:
    first, last, future = waiting.popleft()
    try:
        return future.result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker died (out of memory, or a crash in a decoder) at or after items {first} to {last - 1};"
            " run the same command again to go on, with --workers 1 to see it happen"
        ) from None


def counted(count: int, what: str) -> str:
    """ "1 shard", "2 shards"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _verify(out: Path, console: Console) -> int:
    manifest = read_manifest(str(out))
    if manifest is None or "earlyfusion_shards" not in manifest:
        raise DataError(f"{out}: no {MANIFEST} of a preparation; name the folder given to prepare --out")
    faults = [(name, fault) for name, fault in verify(out, manifest) if fault]
    if faults:
        told = "; ".join(f"{name}: {fault}" for name, fault in faults)
        raise DataError(f"{len(faults)} of {len(manifest['shards'])} shards are damaged: {told}")
    console.print(
        f"{out}: {counted(len(manifest['shards']), 'shard')}, {counted(manifest['samples'], 'sample')}, all"
        " as written",
        soft_wrap=True,
    )
    return 0


def _report(out: Path, manifest: dict[str, Any], console: Console) -> None:
    table = Table(title=str(out), show_header=False)
    for name, value in (
        ("samples", f"{manifest['samples']:,} of {manifest['items']:,} items"),
        ("shards", f"{len(manifest['shards'])}, {manifest['bytes'] / 1e6:,.1f} MB"),
        ("formats", ", ".join(f"{count:,} {name}" for name, count in manifest["formats"].items())),
        ("tokens", f"{manifest['tokens']:,}"),
        ("patches", f"{manifest['patches']:,} in {manifest['media']:,} pictures and videos"),
        (
            "left out",
            ", ".join(f"{count:,} {why}" for why, count in manifest["skipped"].items()) or "nothing",
        ),
    ):
        table.add_row(name, value)
    print_table(console, table)
    if manifest["skipped"] and (lines := (out / SKIPPED).read_text("ascii").splitlines()):
        first = json.loads(lines[0])
        told = f"the first left out, {first['from']}: {first['message']} (all in {out / SKIPPED})"
        console.print(one_line(told), soft_wrap=True, markup=False)
    console.print(f"look at it:  earlyfusion data inspect {out} --out sheet.html", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
