"""Training checkpoints: everything an exact resume needs, written whole or not at all, never with pickle.

    <out>/checkpoints/step-000300/
        model.{json,safetensors}  optimizer.{json,safetensors}   the same on all ranks, written by rank 0
        rank-00000.{json,safetensors}                  RNG states and data cursors of one rank
        run.json                                       step, resolved recipe, tokenizer, trainer's state
        COMPLETE                                       every file with its size and SHA-256; written last

A checkpoint is written into `step-000300.tmp-partial`, fsynced and renamed; a folder without a true COMPLETE
does not count, so a kill at any instant leaves the older checkpoint in force. A resume reads the newest one
whose checksums hold (one flipped bit of a weight would train on in silence), says so when it passes over
another. A step saved again (after a rollback) becomes `step-000300-1`. Data cursors are kept by lane
(micro-batch of a step), so another number of processes can take them over. A warm start (weights from a model
directory, `run.init_from`) is another thing and not done here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from earlyfusion.data.prepare.write import sha256_of
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.pipeline.config.compose import explain_refusal, refused_on_resume
from earlyfusion.pipeline.runtime import Runtime, rng_state, seed_everything, set_rng_state
from earlyfusion.pipeline.statefile import load_tree, save_tree, tree_bytes

FORMAT = 1
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_MARGIN_BYTES = 1 << 20
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)  # what reading a file raises that holds something else than it should


@dataclass(frozen=True)
class RunFacts:
    """What a resume must agree with.

    recipe: the resolved recipe (`compose.dump`). tokenizer_hash: any text that identifies the vocabulary.
    """

    recipe: dict[str, Any]
    tokenizer_hash: str
    vocab_size: int


@dataclass
class Loaded:
    """A checkpoint in memory. `lanes`: data cursor by lane, of all ranks. `rng`: by rank that saved."""

    path: Path
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    lanes: dict[int, Any]
    rng: list[dict[str, Any]]
    world: int

    def restore_rng(self, rank: int, seed: int) -> None:
        """This rank's generators as they were; a rank that did not exist then gets a seed of its own."""
        if rank < len(self.rng):
            set_rng_state(self.rng[rank])
        else:
            seed_everything(seed + 7919 * rank + self.step)


def completed(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, oldest first; half-written or damaged ones do not count."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and not damage(path, checksums=False):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(completed(folder)[::-1]), None)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint: expected a folder named step-<number>")
    return int(match[1])


def damage(path: Path, checksums: bool = True) -> str:
    """What is wrong with a checkpoint, by what COMPLETE says of its files; "" when it is as it was written.

    checksums: read every byte of it; else sizes alone, which is quick whatever it weighs. COMPLETE of an
    older version states sizes alone.
    """
    try:
        for name, entry in json.loads((path / "COMPLETE").read_text(encoding="utf-8")).items():
            size, digest = (entry, "") if isinstance(entry, int) else entry
            if (path / name).stat().st_size != size:
                return "files are missing or of another size"
            if checksums and digest and sha256_of(path / name) != digest:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"files are missing or cannot be read: {error}"
    return ""


def require_space(folder: Path, needed_bytes: int) -> None:
    """UserError when the disk below `folder` has less than `needed_bytes` (and a margin) free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _MARGIN_BYTES:
        raise UserError(
            f"no disk space for a checkpoint in {folder}: it needs {needed_bytes / 2**20:.1f} MiB,"
            f" {free / 2**20:.1f} MiB are free; free some, lower checkpoint.keep, or set run.out to another"
            " disk"
        )


class Checkpointer:
    """Writes, finds, reads and thins out the checkpoints of one run.

    Args:
        out: output folder of the run. keep: newest checkpoints kept. keep_every: multiples kept for good (0:
        none).
    """

    def __init__(
        self, out: str | Path, runtime: Runtime, facts: RunFacts, keep: int = 2, keep_every: int = 0
    ):
        self.folder = Path(out) / FOLDER
        self.runtime, self.facts = runtime, facts
        self.keep, self.keep_every = keep, keep_every
        self._trusted: Path | None = None
        """The checkpoint whose checksums were just compared."""

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        trainer: Mapping[str, Any],
        lanes: Mapping[int, Any],
    ) -> Path:
        """Write the state after `step` updates. Every rank calls it; returns the folder on every rank.

        model, optimizer: state dicts, equal on all ranks. trainer: guard, meter and other loop state, equal
        on all ranks. lanes: the data cursors of this rank's lanes. Raises UserError on every rank when the
        disk is full.
        """
        partial = self.folder / f"step-{step:06d}.tmp-partial"
        self._together(partial, lambda: self._prepare(partial, model, optimizer), only_main=True)

        # Every rank writes its own state, the first one also what is the same on all.
        def write() -> None:
            own = {"rng": rng_state(), "lanes": {int(lane): state for lane, state in lanes.items()}}
            save_tree(partial / f"rank-{self.runtime.rank:05d}", own)
            if self.runtime.is_main:
                save_tree(partial / "model", dict(model))
                save_tree(partial / "optimizer", dict(optimizer))
                run = {
                    "format": FORMAT,
                    "step": step,
                    "world": self.runtime.world,
                    "torch": torch.__version__,
                }
                save_tree(partial / "run", {**run, **asdict(self.facts), "trainer": dict(trainer)})

        self._together(partial, write)

        path = self._name(step)  # before the rename, so that every rank sees the same free name
        self.runtime.barrier()
        self._together(partial, lambda: self._seal(partial, path), only_main=True)
        return path

    def _prepare(self, partial: Path, model: Any, optimizer: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("step-*"):
            # What a kill left behind: a half-written folder, or a half-removed one (its marker goes first).
            if ".tmp-" in path.name or not (path / "COMPLETE").exists():
                shutil.rmtree(path)
        require_space(self.folder, tree_bytes(model) + tree_bytes(optimizer))
        partial.mkdir()

    def _name(self, step: int) -> Path:
        """step-000300, or step-000300-1 where there is one already, and so on."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        attempts = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
        return self.folder / (f"step-{step:06d}-{max(attempts) + 1}" if attempts else f"step-{step:06d}")

    def _seal(self, partial: Path, path: Path) -> None:
        # A rank on a disk of its own would leave a hole that shows only on resume.
        missing = [r for r in range(self.runtime.world) if not (partial / f"rank-{r:05d}.json").exists()]
        if missing:
            raise UserError(
                f"ranks {missing} wrote no state to {partial}: run.out must be on a disk all ranks share"
            )
        contents = {file.name: [file.stat().st_size, sha256_of(file)] for file in sorted(partial.iterdir())}
        write_atomic(partial / "COMPLETE", json.dumps(contents))
        _fsync(partial)
        os.replace(partial, path)
        _fsync(self.folder)
        self._thin_out()

    def _thin_out(self) -> None:
        paths = completed(self.folder)

        # A step that was saved again supersedes its older folder.
        newest_of_step = {step_of(path): path for path in paths}
        recent = sorted(newest_of_step)[-self.keep :]

        for path in paths:
            step = step_of(path)
            for_good = self.keep_every > 0 and step % self.keep_every == 0
            if path != newest_of_step[step] or not (step in recent or for_good):
                # The marker first: a kill during the removal must not leave a believable rest.
                (path / "COMPLETE").unlink()
                shutil.rmtree(path)

    def _together(self, partial: Path, action: Callable[[], None], only_main: bool = False) -> None:
        """Run this rank's part (only_main: the first rank alone has one); where it fails on any rank, all
        leave with a UserError and nothing is left."""
        problem = None
        try:
            if self.runtime.is_main or not only_main:
                action()
        except UserError as error:
            problem = error
        except (OSError, SafetensorError) as error:
            problem = UserError(
                f"checkpoint not written to {self.folder}: {error}; the older checkpoints are untouched; "
                "free disk space or set run.out to another disk, then start again with --resume"
            )

        if not self.runtime.agree(int(problem is not None)):
            return
        self.runtime.barrier()
        if self.runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise problem or UserError(
            f"checkpoint not written to {self.folder}: another rank could not write its part"
        )

    def latest(self) -> Path | None:
        """The newest complete checkpoint of this run, or None."""
        return latest(self.folder)

    def start(self, resume: bool) -> Loaded | None:
        """The checkpoint to go on from, None for a fresh run; UserError when there is none to resume, or when
        a fresh run would write over an older one's. One that is damaged is passed over for the one before."""
        # A fresh run never writes over an older one's checkpoints.
        newest = self.latest()
        if resume and newest is None:
            raise UserError(f"nothing to resume in {self.folder}; start without --resume")
        if not resume and newest is not None:
            raise UserError(
                f"{self.folder.parent} already holds checkpoint {newest.name}: add --resume to go on, "
                "or name another folder with --out"
            )
        return None if newest is None else self.load(self.intact())

    def intact(self) -> Path:
        """The newest checkpoint whose checksums hold, the same on every rank; the main one reads them all.
        UserError when there is none."""
        paths = completed(self.folder)[::-1]

        # Reading every byte is the main rank's work; the others follow its choice.
        passed = 0
        while self.runtime.is_main and passed < len(paths) and (fault := damage(paths[passed])):
            print(
                f"warning: checkpoint {paths[passed]} is damaged ({fault}); the one before is taken",
                file=sys.stderr,
            )
            passed += 1
        passed = self.runtime.agree(passed)
        if passed == len(paths):
            raise UserError(
                f"none of the {len(paths)} checkpoints in {self.folder} is whole; start another run"
            )
        self._trusted = paths[passed]
        return paths[passed]

    def load(self, path: Path) -> Loaded:
        """Read a checkpoint. UserError when it is damaged, and when recipe, vocabulary or layout disagree
        with this run."""
        fault = "" if path == self._trusted else damage(path)
        if fault:
            raise UserError(
                f"checkpoint {path} is incomplete or damaged ({fault}); remove it, --resume takes the one"
                " before"
            )
        try:
            return self._read(path)
        except _UNREADABLE as error:
            raise UserError(
                f"checkpoint {path} is damaged ({type(error).__name__}: {error!s:.200}); remove it, --resume"
                " takes the one before"
            ) from None

    def _read(self, path: Path) -> Loaded:
        run = load_tree(path / "run")
        if run["format"] != FORMAT:
            raise UserError(
                f"checkpoint {path} has format {run['format']}, this version reads format {FORMAT}"
            )
        check_resume(run, self.facts, path)

        # Cursors are by lane, so that any number of processes can share them out anew.
        ranks = [load_tree(path / f"rank-{rank:05d}") for rank in range(run["world"])]
        lanes: dict[int, Any] = {}
        for rank in ranks:
            lanes |= rank["lanes"]
        return Loaded(
            path=path,
            step=run["step"],
            model=load_tree(path / "model"),
            optimizer=load_tree(path / "optimizer"),
            trainer=run["trainer"],
            lanes=lanes,
            rng=[rank["rng"] for rank in ranks],
            world=run["world"],
        )


def _fsync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_resume(run: Mapping[str, Any], facts: RunFacts, path: Path) -> None:
    """UserError when the run that wrote `run` (run.json) is not the run that `facts` describes."""
    changes = refused_on_resume(run["recipe"], facts.recipe)
    if run["vocab_size"] != facts.vocab_size:
        reason = (
            f"it was trained with a vocabulary of {run['vocab_size']}, the tokenizer given has"
            f" {facts.vocab_size}; give the same tokenizer.path, or start another run (run.out)"
        )
    elif run["tokenizer_hash"] != facts.tokenizer_hash:
        reason = (
            "the tokenizer differs from the one it was trained with (same size, other tokens);"
            " give the same tokenizer.path, or start another run (run.out)"
        )
    elif changes:
        reason = f"{explain_refusal(changes)}, or start another run with run.init_from and another run.out"
    else:
        return
    raise UserError(f"cannot resume {path}: {reason}")
