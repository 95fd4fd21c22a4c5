"""Training checkpoints: everything an exact resume needs, written whole or not at all, never with pickle.

    <out>/checkpoints/step-000300/
        shard-00001-*.safetensors                      weights and optimizer state that rank 0 wrote
        rank-00000.{json,safetensors}                  RNG states and data cursors of one rank
        run.json                                       step, resolved recipe, tokenizer, trainer's state
        COMPLETE                                       every file with its size and SHA-256; written last

A checkpoint is written into `step-000300.tmp-partial`, fsynced and renamed; a folder without a true COMPLETE
does not count, so a kill at any instant leaves the older checkpoint in force. A resume reads the newest one
whose checksums hold (one flipped bit of a weight would train on in silence), says so when it passes over
another. A step saved again (after a rollback) becomes `step-000300-1`. Data cursors are kept by lane
(micro-batch of a step), so another number of processes can take them over. A warm start (weights from a model
directory, `run.init_from`) is another thing and not done here.

Asynchronous (`checkpoint.asynchronous`): tensors are copied to host memory, and training goes on while a
thread writes. The next save, a rollback and the end of the run wait for it; what went wrong is raised there,
on all ranks alike.

Beside weights and optimizer, state is nested dicts (any scalar keys), lists, tuples, tensors, numbers,
strings and None: tensors lie in the safetensors file, all else in JSON. Python floats, integers and tensor
bits come back exactly; anything else is a TypeError that names its place, so nothing is ever lost silently.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from earlyfusion.data.prepare.write import sha256_of
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, replacing, write_atomic
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline import state
from earlyfusion.pipeline.config.compose import dump, explain_refusal, refused_on_resume
from earlyfusion.pipeline.runtime import Runtime, rng_state, seed_everything, set_rng_state

FORMAT = 4
FOLDER = "checkpoints"
TOKENIZER = "tokenizer"
"""Beside the checkpoints: what `earlyfusion export` needs of the run besides."""
MARGIN_BYTES = 1 << 20
"""Free disk space that a checkpoint leaves."""
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
"""What reading a file raises that holds something else than it should."""


@dataclass(frozen=True)
class RunFacts:
    """What a resume must agree with.

    recipe: the resolved recipe (`compose.dump`). tokenizer_hash: any text that identifies the vocabulary.
    """

    recipe: Record
    tokenizer_hash: str
    vocab_size: int


@dataclass
class Loaded:
    """A checkpoint but for its weights. `lanes`: data cursor by lane, of all ranks. `rng`: by rank that
    saved. routing, rest: see state.py."""

    path: Path
    step: int
    routing: Record
    rest: Record
    trainer: Record
    lanes: dict[int, Any]
    rng: list[Record]

    def restore_weights(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put its weights and optimizer state into these, however they are sharded. Raises UserError for
        those of another model."""
        state.restore_model(model, self.path)
        state.restore_optimizer(optimizer, model, self.path, self.routing, self.rest)

    def restore_rng(self, rank: int, seed: int) -> None:
        """This rank's generators as they were; a rank that did not exist then gets a seed of its own."""
        # More ranks than before: a new one needs numbers that no other draws.
        if rank < len(self.rng):
            set_rng_state(self.rng[rank])
        else:
            seed_everything(seed + 7919 * rank + self.step)


# --------------------------------------------------------------------------------------------- state on disk


def save_tree(stem: Path, tree: Any) -> None:
    """Write `<stem>.json` and, when the tree holds tensors, `<stem>.safetensors`; both are fsynced.

    Raises TypeError for what cannot be written without pickle, and for a sharded tensor; UserError where the
    disk has no room, before a tensor is written.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _encode(tree, "", tensors, {})
    check_room(stem, sum(tensor.nbytes for tensor in tensors.values()))
    if tensors:
        with replacing(stem.with_name(stem.name + ".safetensors")) as path:
            save_file(tensors, path)
    write_atomic(stem.with_name(stem.name + ".json"), json.dumps(skeleton))


def check_room(stem: Path, needed: int) -> None:
    """UserError where the disk has no room for so many bytes."""
    free = shutil.disk_usage(stem.parent).free
    if free < needed + MARGIN_BYTES:
        raise UserError(
            f"no disk space for a checkpoint in {stem.parent.parent}: {stem.name} needs"
            f" {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free; free some, lower checkpoint.keep,"
            " or set run.out to another disk"
        )


def load_tree(stem: Path) -> Any:
    """Read what `save_tree` wrote."""
    path = stem.with_name(stem.name + ".safetensors")
    tensors = load_file(path) if path.exists() else {}

    def decode(value: Record) -> Any:
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__tuple__" in value:
            return tuple(value["__tuple__"])
        return dict(value["__items__"]) if "__items__" in value else value

    text = stem.with_name(stem.name + ".json").read_text(encoding="utf-8")
    return json.loads(text, object_hook=decode)


def _encode(value: Any, place: str, tensors: dict[str, Tensor], written: dict[Any, Any]) -> Any:
    """A tree as JSON values; its tensors are put into `tensors` by the name that stands in their place.
    written: memory -> (name, tensor); holding the tensor keeps its address from being used again."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # (A sharded tensor would be written as its first shard alone.)
    if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
        tensor = value.detach()
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if not tensor.numel() or memory not in written:
            written[memory] = place, tensor
            # The format forbids sharing: a view into a larger storage is copied.
            copied = tensor.cpu().contiguous()
            owned = copied.untyped_storage().nbytes() == copied.nbytes
            tensors[place] = copied if owned else copied.clone()
        # Tied weights: the second name points to the first.
        return {"__tensor__": written[memory][0]}
    if isinstance(value, list | tuple):
        listed = [_encode(item, f"{place}/{i}", tensors, written) for i, item in enumerate(value)]
        return {"__tuple__": listed} if isinstance(value, tuple) else listed
    if isinstance(value, Mapping):
        # JSON's keys are strings; others, and a dict that looks like a tag, become a list of pairs.
        items = [(key, _encode(item, f"{place}/{key}", tensors, written)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return dict(items)
        if all(isinstance(key, bool | int | float | str) for key in value):
            return {"__items__": items}
    raise TypeError(f"state at {place or 'the root'}: a {type(value).__name__} cannot be written")


# ------------------------------------------------------------------------------------ checkpoints in a folder


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
    return int(path.name.split("-")[1])


def damage(path: Path, checksums: bool = True) -> str:
    """What is wrong with a checkpoint, by what COMPLETE says of its files; "" when it is as it was written.

    checksums: read every byte of it; else sizes alone, which is quick whatever it weighs.
    """
    try:
        for name, (size, digest) in json.loads((path / "COMPLETE").read_bytes()).items():
            if (path / name).stat().st_size != size:
                return "files are missing or of another size"
            # A flipped bit of a weight would train on in silence.
            if checksums and sha256_of(path / name) != digest:
                return f"{name} has another checksum than when it was written"
    except _UNREADABLE as error:
        return f"files are missing or cannot be read: {error}"
    return ""


class Checkpointer:
    """Writes, finds, reads and thins out the checkpoints of one run.

    out: output folder of the run. keep: newest checkpoints kept. keep_every: multiples kept for good (0:
    none).
    """

    def __init__(
        self,
        out: str | Path,
        runtime: Runtime,
        facts: RunFacts,
        keep: int = 2,
        keep_every: int = 0,
        asynchronous: bool = False,
    ) -> None:
        self.folder = Path(out) / FOLDER
        self.runtime, self.facts, self.asynchronous = runtime, facts, asynchronous
        self.keep, self.keep_every = keep, keep_every
        # A thread must not meet the collectives of training: it has a group of its own.
        self.group = runtime.new_group("gloo") if asynchronous and runtime.world > 1 else None
        self.tokenizer: Tokenizer | None = None
        self.chat = False
        """Whether the model speaks the chat form, for an export."""
        self._thread: Thread | None = None
        self._failed: BaseException | None = None

    @classmethod
    def of(cls, config: Any, tokenizer: Tokenizer, runtime: Runtime, **more: Any) -> Checkpointer:
        """The checkpoints of a resolved recipe; more: what else a resume must agree with."""
        facts = RunFacts(dump(config) | more, tokenizer.hash, tokenizer.vocab_size)
        section = config.checkpoint
        kept = section.keep, section.keep_every
        made = cls(config.run.directory, runtime, facts, *kept, section.asynchronous)
        made.tokenizer = tokenizer
        return made

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Record,
        lanes: Mapping[int, Any],
    ) -> Path:
        """Write the state after `step` updates. Every rank calls it; returns the folder on every rank.

        trainer: guard, meter and other loop state, equal on all ranks. lanes: the data cursors of this rank's
        lanes. Raises UserError on every rank when the disk is full (asynchronous: that of the save before).
        """
        self.wait()
        tensors, rest = state.collect(model, optimizer)
        own = {"rng": rng_state(), "lanes": dict(lanes), "rest": rest}
        own["routing"] = state.routing(optimizer, model)
        run: Record = {"format": FORMAT, "step": step, "world": self.runtime.world}
        run |= asdict(self.facts) | {"trainer": trainer, "chat": self.chat}
        if isinstance(model, NativeFusion):
            run["model"] = model.config.model_dump(mode="json")
        # Told before anything is written, so that every rank sees the same free name.
        path = self._name(step)
        self.runtime.barrier()
        if not self.asynchronous:
            self._write(path, tensors, own, run)
            return path

        copies, trees = state.staged(tensors), deepcopy((own, run))

        def work() -> None:
            try:
                self._write(path, copies, *trees)
            except BaseException as error:
                self._failed = error

        self._thread = Thread(target=work, name="checkpoint")
        self._thread.start()
        return path

    def wait(self) -> None:
        """Until what is being written is on the disk. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Let a thread end that still writes; for a run that fails itself."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, path: Path, tensors: Mapping[str, Tensor], own: Record, run: Record) -> None:
        # Under another name until everything is on the disk: a kill leaves no believable half.
        partial = self.folder / f"{path.name}.tmp-partial"
        main, rank = self.runtime.is_main, self.runtime.rank
        written: Record = {}

        def prepare() -> None:
            if main:
                self._clear_rests()
                partial.mkdir()
                if self.tokenizer is not None and not (self.folder / TOKENIZER).exists():
                    self.tokenizer.save(self.folder / TOKENIZER)

        # Every rank writes its own state, the first one also what is the same on all.
        def write() -> None:
            save_tree(partial / f"rank-{rank:05d}", own)
            if main:
                save_tree(partial / "run", run)
            check_room(partial / "weights", state.nbytes(tensors.values()) // self.runtime.layout.sharing)

        # What a rank wrote it also reads again for its checksum: one rank would take as long as all.
        def write_tensors() -> None:
            state.write(tensors, partial, self.group)
            names = [f"rank-{rank:05d}.*", f"shard-{rank + 1:05d}-*", *(["run.*"] if main else [])]
            for file in (file for name in names for file in partial.glob(name)):
                written[file.name] = [file.stat().st_size, sha256_of(file)]

        def seal() -> None:
            if main:
                self._seal(partial, path, contents)

        self._together(partial, prepare)
        self._together(partial, write)
        self._together(partial, write_tensors)
        contents: list[Record] = [written]
        if self.runtime.world > 1:
            contents = [{} for _ in range(self.runtime.world)]
            dist.all_gather_object(contents, written, group=self.group)
        self._together(partial, seal)

    def _clear_rests(self) -> None:
        """What a kill left behind: a half-written folder, or a half-removed one (its marker goes first)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("step-*"):
            if ".tmp-" in path.name or not (path / "COMPLETE").exists():
                shutil.rmtree(path)

    def _name(self, step: int) -> Path:
        """step-000300, or step-000300-1 where there is one already, and so on: later ones are newer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        attempts = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
        name = f"step-{step:06d}"
        return self.folder / (f"{name}-{max(attempts) + 1}" if attempts else name)

    def _seal(self, partial: Path, path: Path, written: Sequence[Record]) -> None:
        # A rank on a disk of its own would leave a hole that shows only on resume.
        missing = [
            r for r, files in enumerate(written) if not all((partial / name).exists() for name in files)
        ]
        if missing:
            raise UserError(
                f"ranks {missing} wrote no state to {partial}: run.out must be on a disk all ranks share"
            )
        # Written last: a folder with this file is whole.
        contents = {name: fact for files in written for name, fact in files.items()}
        write_atomic(partial / "COMPLETE", json.dumps(contents))
        _fsync(partial)
        os.replace(partial, path)
        _fsync(self.folder)

        # A step that was saved again supersedes its older folder.
        newest_of_step = {step_of(other): other for other in completed(self.folder)}
        kept = sorted(newest_of_step)[-self.keep :]
        if self.keep_every:
            kept += [step for step in newest_of_step if step % self.keep_every == 0]
        for other in completed(self.folder):
            if other not in [newest_of_step[step] for step in kept]:
                # The marker first: a kill during the removal must not leave a believable rest.
                (other / "COMPLETE").unlink()
                shutil.rmtree(other)

    def _together(self, partial: Path, action: Callable[[], None]) -> None:
        """Run this rank's part; where it fails on any rank, all leave with a UserError and nothing is
        left."""
        # Nobody raises before all have agreed: a rank alone would hang the others.
        problem = None
        try:
            action()
        except UserError as error:
            problem = error
        except (OSError, SafetensorError) as error:
            problem = UserError(
                f"checkpoint not written to {self.folder}: {error}; the older checkpoints are untouched; "
                "free disk space or set run.out to another disk, then start again with --resume"
            )

        if not self._agree(int(problem is not None)):
            return
        self._agree(0)
        if self.runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise problem or UserError(f"checkpoint not written to {self.folder}: another rank could not write")

    def _agree(self, code: int) -> int:
        """`Runtime.agree`, also from the thread that writes."""
        if self.group is None:
            return self.runtime.agree(code)
        value = torch.tensor([code])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def start(self, resume: bool) -> Loaded | None:
        """The checkpoint to go on from, None for a fresh run; UserError when there is none to resume, or when
        a fresh run would write over an older one's. One that is damaged is passed over for the one before."""
        newest = latest(self.folder)
        if resume and newest is None:
            raise UserError(f"nothing to resume in {self.folder}; start without --resume")
        if not resume and newest is not None:
            raise UserError(
                f"{self.folder.parent} already holds checkpoint {newest.name}: add --resume to go on, "
                "or name another folder with --out"
            )
        return None if newest is None else self.load_intact()

    def load_intact(self) -> Loaded:
        """The newest checkpoint whose checksums hold, the same on every rank; the main one reads them all.
        UserError when there is none."""
        self.wait()
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
        return self.load(paths[passed])

    def load(self, path: Path) -> Loaded:
        """Read a checkpoint. UserError when it cannot be read, and when recipe, vocabulary or layout disagree
        with this run."""
        try:
            run = load_tree(path / "run")
            if run["format"] != FORMAT:
                raise UserError(f"checkpoint {path} has format {run['format']}, this version reads {FORMAT}")
            check_resume(run, self.facts, path)

            # Cursors are by lane, so that any number of processes can share them out anew.
            ranks = [load_tree(path / f"rank-{rank:05d}") for rank in range(run["world"])]
            merged: Record = {"lanes": {}, "routing": {}, "rest": {}}
            for rank in ranks:
                for key, found in merged.items():
                    found |= rank[key]
            rng = [rank["rng"] for rank in ranks]
            routing, rest, lanes = merged["routing"], merged["rest"], merged["lanes"]
            return Loaded(path, run["step"], routing, rest, run["trainer"], lanes, rng)
        except _UNREADABLE as error:
            raise UserError(
                f"checkpoint {path} is damaged ({type(error).__name__}: {error!s:.200}); remove it, --resume"
                " takes the one before"
            ) from None


def _fsync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_resume(run: Record, facts: RunFacts, path: Path) -> None:
    """UserError when the run that wrote `run` (run.json) is not the run that `facts` describes."""
    changes = refused_on_resume(run["recipe"], facts.recipe)
    if run["vocab_size"] != facts.vocab_size:
        reason = (
            f"it was trained with a vocabulary of {run['vocab_size']}, the tokenizer given has"
            f" {facts.vocab_size}; give the same tokenizer.path, or start another run (run.out)"
        )
    elif run["tokenizer_hash"] != facts.tokenizer_hash:
        reason = "the tokenizer differs from the one it was trained with; give the same tokenizer.path"
    elif changes:
        reason = f"{explain_refusal(changes)}, or start another run with run.init_from and another run.out"
    else:
        return
    raise UserError(f"cannot resume {path}: {reason}")
