"""Training checkpoints: everything an exact resume needs, written whole or not at all, never with pickle.

    <out>/checkpoints/step-000300/
        model.{json,safetensors}  optimizer.{json,safetensors}     the same on all ranks, written by rank 0
        rank-00000.{json,safetensors}                              RNG states and data cursors of one rank
        run.json                                                   step, resolved recipe, tokenizer, trainer
        state
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from earlyfusion.data.prepare.write import sha256_of
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.config.compose import explain_refusal, refused_on_resume
from earlyfusion.pipeline.runtime import Runtime, rng_state, seed_everything, set_rng_state
from earlyfusion.pipeline.statefile import fsync, load_tree, save_tree, tree_bytes, write_text

FORMAT = 1
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_MARGIN_BYTES = 1 << 20


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
    for path in folder.iterdir() if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and _is_complete(path):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    paths = completed(folder)
    return paths[-1] if paths else None


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint: expected a folder named step-<number>")
    return int(match[1])


def _contents(path: Path) -> dict[str, tuple[int, str]]:
    """File -> (bytes, SHA-256) as COMPLETE states them; a checkpoint of an older version has no checksums
    ("").

    Raises ValueError for a damaged COMPLETE, OSError for none.
    """
    found = json.loads((path / "COMPLETE").read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("COMPLETE is no object")
    stated = {name: (entry, "") if isinstance(entry, int) else tuple(entry) for name, entry in found.items()}
    if not all(map(_is_entry, stated.values())):
        raise ValueError("COMPLETE holds something else than sizes and checksums")
    return stated


def _is_entry(entry: tuple[Any, ...]) -> bool:
    return len(entry) == 2 and isinstance(entry[0], int) and isinstance(entry[1], str)


def _is_complete(path: Path) -> bool:
    """Whether every file is there with its size: quick, whatever the checkpoint weighs."""
    try:
        return all((path / name).stat().st_size == size for name, (size, _) in _contents(path).items())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, by its checksums; "" when it is as it was written. Reads every byte of
    it."""
    if not _is_complete(path):
        return "files are missing or of another size"
    try:
        for name, (_, digest) in _contents(path).items():
            if digest and sha256_of(path / name) != digest:
                return f"{name} has another checksum than when it was written"
    except OSError as error:
        return f"it cannot be read ({error})"
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
        problem: UserError | None = None
        if self.runtime.is_main:
            problem = self._attempt(lambda: self._prepare(partial, model, optimizer))
        self._raise_together(problem, partial)
        rank = self.runtime.rank
        own = {"rng": rng_state(), "lanes": {int(lane): state for lane, state in lanes.items()}}

        def write() -> None:
            save_tree(partial / f"rank-{rank:05d}", own)
            if rank == 0:
                save_tree(partial / "model", dict(model))
                save_tree(partial / "optimizer", dict(optimizer))
                save_tree(partial / "run", self._run_tree(step, trainer))

        self._raise_together(self._attempt(write), partial)
        path = self._name(step)  # before the rename, so that every rank sees the same free name
        self.runtime.barrier()
        if self.runtime.is_main:
            problem = self._attempt(lambda: self._seal(partial, path))
        self._raise_together(problem, partial)
        return path

    def _prepare(self, partial: Path, model: Any, optimizer: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("step-*"):
            # What a kill left behind: a half-written folder, or a half-removed one (its marker goes first).
            if ".tmp-" in path.name or not (path / "COMPLETE").exists():
                shutil.rmtree(path)
        require_space(self.folder, tree_bytes(model) + tree_bytes(optimizer))
        partial.mkdir()

    def _run_tree(self, step: int, trainer: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step,
            "world": self.runtime.world,
            "torch": torch.__version__,
            "recipe": self.facts.recipe,
            "tokenizer_hash": self.facts.tokenizer_hash,
            "vocab_size": self.facts.vocab_size,
            "trainer": dict(trainer),
        }

    def _name(self, step: int) -> Path:
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        attempts = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
        return self.folder / (f"step-{step:06d}-{max(attempts) + 1}" if attempts else f"step-{step:06d}")

    def _seal(self, partial: Path, path: Path) -> None:
        missing = [r for r in range(self.runtime.world) if not (partial / f"rank-{r:05d}.json").exists()]
        if missing:
            raise UserError(
                f"ranks {missing} wrote no state to {partial}: run.out must be on a disk all ranks share"
            )
        contents = {file.name: [file.stat().st_size, sha256_of(file)] for file in sorted(partial.iterdir())}
        write_text(partial / "COMPLETE", json.dumps(contents))
        fsync(partial)
        os.replace(partial, path)
        fsync(self.folder)
        self._thin_out()

    def _thin_out(self) -> None:
        paths = completed(self.folder)
        newest_of_step = {step_of(path): path for path in paths}
        recent = sorted(newest_of_step)[-self.keep :]
        for path in paths:
            step = step_of(path)
            for_good = self.keep_every > 0 and step % self.keep_every == 0
            if path != newest_of_step[step] or not (step in recent or for_good):
                (
                    path / "COMPLETE"
                ).unlink()  # first: a kill during the removal must not leave a believable rest
                shutil.rmtree(path)

    def _attempt(self, action: Any) -> UserError | None:
        """Run one rank's part; what goes wrong is returned, so that all ranks can leave together."""
        try:
            action()
        except UserError as error:
            return error
        except (OSError, SafetensorError) as error:
            return UserError(
                f"checkpoint not written to {self.folder}: {error}; the older checkpoints are untouched; "
                "free disk space or set run.out to another disk, then start again with --resume"
            )
        return None

    def _raise_together(self, problem: UserError | None, partial: Path) -> None:
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

    def load(self, path: Path, *, check: bool = True) -> Loaded:
        """Read a checkpoint. UserError when it is damaged and, with `check`, when recipe, vocabulary or
        layout disagree with this run."""
        if fault := "" if path == self._trusted else damage(path):
            raise UserError(
                f"checkpoint {path} is incomplete or damaged ({fault}); remove it, --resume takes the one"
                " before"
            )
        try:
            return self._read(path, check)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            SafetensorError,
        ) as error:
            raise UserError(
                f"checkpoint {path} is damaged ({type(error).__name__}: {error!s:.200}); remove it, --resume"
                " takes the one before"
            ) from None

    def _read(self, path: Path, check: bool) -> Loaded:
        run = load_tree(path / "run")
        if run["format"] != FORMAT:
            raise UserError(
                f"checkpoint {path} has format {run['format']}, this version reads format {FORMAT}"
            )
        if check:
            check_resume(run, self.facts, path)
        ranks = [load_tree(path / f"rank-{rank:05d}") for rank in range(run["world"])]
        return Loaded(
            path=path,
            step=run["step"],
            model=load_tree(path / "model"),
            optimizer=load_tree(path / "optimizer"),
            trainer=run["trainer"],
            lanes={lane: state for rank in ranks for lane, state in rank["lanes"].items()},
            rng=[rank["rng"] for rank in ranks],
            world=run["world"],
        )


def check_resume(run: Mapping[str, Any], facts: RunFacts, path: Path) -> None:
    """UserError when the run that wrote `run` (run.json) is not the run that `facts` describes."""
    if run["vocab_size"] != facts.vocab_size:
        raise UserError(
            f"cannot resume {path}: it was trained with a vocabulary of {run['vocab_size']}, the tokenizer"
            f" given has {facts.vocab_size}; give the same tokenizer.path, or start another run (run.out)"
        )
    if run["tokenizer_hash"] != facts.tokenizer_hash:
        raise UserError(
            f"cannot resume {path}: the tokenizer differs from the one it was trained with (same size, other"
            " tokens); give the same tokenizer.path, or start another run (run.out)"
        )
    if changes := refused_on_resume(run["recipe"], facts.recipe):
        raise UserError(
            f"cannot resume {path}: {explain_refusal(changes)}, "
            "or start another run with run.init_from and another run.out"
        )
