"""Loader: the data of one rank, step by step, resumed exactly.

    sizes = dict(length=1024, tokens=4096, max_patches=4096)
    loader = Loader(config, tokenizer, vision, **sizes, lanes=8, rank=r, world_size=W)
    for step in range(steps):
        batches = loader.next_step()          # lanes r, r + W, ...: one PackedBatch each
        ...
        state = loader.state_dict()           # after exactly this step, however far the prefetch has run

A stage with another length, batch size or number of lanes is a new Loader with the next `stage` number.

Who prepares the next steps (`data.prefetch`): the caller itself, a thread, or processes. All give the same
steps in the same order. The state of each lane travels with its batch, so what a checkpoint saves is what was
consumed, however far ahead the preparation has run. A worker that dies or stands still is told with the
sample it held; nobody waits for it.

`skipped.jsonl` in the run folder holds one line for each sample left out: stage, lane, step (of the lane, for
which it was being prepared), source, shard, key, epoch, index, reason, message. Every process writes a file
of its own. A resume goes through the same samples again, so a line may stand there twice; `read_skipped`
gives each once.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError, told
from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.data.loading.lane import Geometry, Lane, Spec, Watch, add_skip
from earlyfusion.data.loading.order import Schedule
from earlyfusion.data.sources.base import Source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record, read_jsonl
from earlyfusion.vision.config import VisionConfig

FILE = "skipped.jsonl"
"""Lines about what was left out."""
STALL_S = 600.0
"""Seconds that a preparation may spend on one sample before the run stops and names it."""
_POLL_S = 0.2
MIN_READ = 200
"""Samples of a process before the share of bad ones says anything."""
_PIPE_BYTES, _SET_PIPE_SIZE = 1 << 20, 1031
"""1 MiB in place of 64 KiB; F_SETPIPE_SZ of Linux."""

States = Mapping[int, Record | None]


class Step(NamedTuple):
    """One optimizer step of some lanes."""

    batches: dict[int, PackedBatch]
    states: dict[int, Record]
    """Lane -> its state after the batch."""
    skipped: list[Record]
    """Samples left out while the step was prepared (loader.py)."""


def prepare(lanes: Sequence[Lane]) -> Step:
    """One step, prepared here and now."""
    # States are taken right after the batch: they say where its lane stands then.
    step = Step({}, {}, [])
    for lane in lanes:
        step.batches[lane.index], skipped = lane.next_batch()
        step.states[lane.index] = lane.state_dict()
        step.skipped.extend(skipped)
    return step


def build_lanes(spec: Spec, sources: Mapping[str, Source], states: States, watch: Watch) -> list[Lane]:
    """Lanes by index, each at its state."""
    # Lanes of one worker share a watch: it does one thing at a time.
    return [Lane(spec, sources, index, watch, state) for index, state in states.items()]


class Feed:
    """The steps that `make` gives, `depth` of them kept ready by a thread; made when asked for if that is 0.

    `process`: who prepares them, if `make` only receives them.
    """

    def __init__(
        self, name: str, make: Callable[[], Step], watch: Watch, depth: int, process: Any = None
    ) -> None:
        self.name, self.watch, self.process = name, watch, process
        self._make, self._depth, self._stopped = make, depth, False
        # Bounded: steps in advance hold their pictures in memory.
        self._free, self._ready = threading.Semaphore(depth), queue.SimpleQueue[Step | BaseException]()
        self._error: BaseException | None = None
        # A daemon: one that is stuck in a sample must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._single = threading.Event()
        if depth:
            threads = torch.get_num_threads()
            self._thread.start()
            # What the thread sets there holds for MKL in the whole process: take that back.
            self._single.wait()
            torch.set_num_threads(threads)

    def _run(self) -> None:
        # OpenMP lets the threads of training sleep between operations once there are more threads than cores:
        # a third slower on two. Asked for first, since torch sets the number when a thread first needs it.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._single.set()
        try:
            while not self._stopped:
                self._ready.put(self._make())
                self._free.acquire()
        except BaseException as error:
            self._ready.put(error)

    def get(self) -> Step:
        """The next step; raises what its preparation raised, now and ever after."""
        if not self._depth:
            return self._make()
        # An error is final: what comes after it would not be the next step.
        if self._error is None:
            made = self._wait()
            if isinstance(made, Step):
                self._free.release()
                return made
            self._error = made
            # The pipe of a process ends with it, also in the middle of a step.
            if self.process is not None and isinstance(made, EOFError | OSError):
                self.process.join(timeout=5)
                self._error = DataError(
                    f"data process {self.name} ended with code {self.process.exitcode} (killed, or out of"
                    f" memory?) while {self.watch.text or 'starting'}; resume from the last checkpoint, or"
                    " set data.prefetch = 'thread'"
                )
        raise self._error

    def _wait(self) -> Step | BaseException:
        line, since = self.watch.text, time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_POLL_S)
            if self.watch.text != line:
                line, since = self.watch.text, time.monotonic()
            # Building the sources, before the first sample, may take any time.
            elif line and time.monotonic() - since > STALL_S:
                return DataError(
                    f"{self.name} has not moved for {STALL_S:g} s; it was {line}. Take that sample out"
                )

    def close(self) -> None:
        """Stop after the sample in hand and drop what is ready; a thread stuck in one is left to die with the
        process."""
        self._stopped = True
        self._free.release()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self._depth and (self._error is None or self.process is not None):
            self._thread.join()


def open_feeds(spec: Spec, sources: Mapping[str, Source], states: States) -> list[Feed]:
    """What `data.prefetch` asks for, going on from the states of the lanes; every feed has its part of each
    step."""
    data, watch = spec.data, Watch()
    if data.prefetch != "process":
        # One thread, however many lanes: they share the interpreter's lock anyway.
        make = partial(prepare, build_lanes(spec, sources, states, watch))
        depth = data.prefetch_steps if data.prefetch == "thread" else 0
        return [Feed("earlyfusion-data", make, watch, depth)]

    # Started afresh (spawn): a fork would carry the threads' locks of torch and of the decoders along.
    context = multiprocessing.get_context("spawn")
    count = min(data.workers, len(states))
    feeds = []
    for number in range(count):
        # Each worker has whole lanes, so their number changes nothing that is delivered.
        own = {lane: states[lane] for lane in list(states)[number::count]}
        watch = context.RawValue(Watch)
        reader, writer = context.Pipe(duplex=False)
        # A pipe of the size of a step, where the system knows how.
        with contextlib.suppress(OSError):
            fcntl.fcntl(reader.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)
        name = f"earlyfusion-data-{number}"
        process = context.Process(target=_work, args=(spec, own, writer, watch), name=name, daemon=True)
        process.start()
        writer.close()  # else the pipe would outlive its worker, and a read would wait for ever
        feeds.append(Feed(name, partial(receive, reader), watch, data.prefetch_steps, process))
    return feeds


def _work(spec: Spec, states: States, writer: Connection, watch: Watch) -> None:
    """Body of a data process: prepare steps until nobody reads them any more."""
    # The parent decides when to stop; it may still need a batch.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Workers are parallel already; more threads would take the training's cores.
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        try:
            lanes = build_lanes(spec, spec.build_sources(), states, watch)
            while True:
                send(writer, prepare(lanes))
        except (DataError, BrokenPipeError) as error:
            send(writer, error)
        # Its text: other errors may not survive pickling, and an OSError would be taken for the pipe's.
        except BaseException as error:
            send(writer, DataError(f"{type(error).__name__}: {error}"))


class _Pickler(pickle.Pickler):
    """Tensors go as NumPy arrays, which hand out their buffers: torch's own way through shared memory would
    leave files behind when a worker is killed, and a pipe goes with its ends."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return torch.from_numpy, (item.detach().contiguous().numpy(),)
        return NotImplemented


def send(connection: Connection, item: Any) -> None:
    """Write `item` (CPU tensors inside); raises BrokenPipeError when nobody reads any more."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=buffers.append).dump(item)
    # Bytes of tensors go straight from their memory: copies inside the pickle take seven times as long.
    views = [buffer.raw() for buffer in buffers]
    connection.send([view.nbytes for view in views])
    connection.send_bytes(head.getbuffer())
    for view in views:
        while view.nbytes:
            view = view[os.write(connection.fileno(), view) :]


def receive(connection: Connection) -> Any:
    """Read one item of `send`; raises the item where it is an error, and EOFError or OSError when the writer
    is gone, also in the middle of an item."""
    # Straight into memory that the tensors keep: no copy in between.
    sizes = connection.recv()
    head = connection.recv_bytes()
    buffers = []
    for size in sizes:
        buffer = np.empty(size, dtype=np.uint8)
        view = memoryview(buffer.data)
        while view.nbytes:
            read = os.readv(connection.fileno(), [view])
            if not read:
                raise EOFError("the writer went away in the middle of an item")
            view = view[read:]
        buffers.append(buffer)
    item = pickle.loads(head, buffers=buffers)
    if isinstance(item, BaseException):
        raise item
    return item


# ---- what was left out


def skip_file(folder: str | Path, rank: int = 0) -> Path:
    """Where process `rank` logs what it leaves out."""
    return Path(folder) / (FILE if rank == 0 else f"skipped-rank{rank}.jsonl")


def append_skipped(path: Path, entries: Sequence[Record]) -> None:
    """Add lines in one write, so that a kill tears at most the last."""
    # The first loss may come before the run has written anything.
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # In ASCII: names of files need not be UTF-8.
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))


def read_skipped(folder: str | Path) -> list[Record]:
    """Every sample left out by any process of the run, once, in the order of stage, step and lane."""
    found: dict[tuple[Any, ...], Record] = {}
    for path in sorted(Path(folder).glob("skipped*.jsonl")):
        for entry in read_jsonl(path):
            place = tuple(entry.get(name) for name in ("stage", "step", "lane", "source", "epoch", "index"))
            # A line torn by a kill, or a stranger's, lacks its place.
            if None not in place:
                found[place] = entry
    return [found[place] for place in sorted(found)]


def total(states: Iterable[Record]) -> dict[str, Counter[str]]:
    """Sums over lanes of their counts (`Lane.counts`), from their states."""
    # From the states and not from the lanes, which may live in another process.
    sums: dict[str, Counter[str]] = {}
    for state in states:
        for name, counts in state["counts"].items():
            sums.setdefault(name, Counter()).update(counts)
    return sums


class Loader:
    """Packed micro-batches of the lanes that `rank` of `world_size` owns.

    Args:
        data, tokenizer, vision: what is read, and how it becomes tokens and patches.
        sizes: what one micro-batch is (lane.Geometry): length, tokens, max_patches,
            lanes (micro-batches of one optimizer step over all ranks, a multiple of `world_size`) and stage.
            Documents lie end to end, each known by its segment, so a row has no edge that anything could see.
        weights: mixture weights by source, in place of those of the config.
        schedule: weights and vision share by step, in place of `weights`.
        loss_weights: factors of the loss weights by source.
        log: file that gets a line for each sample left out (`skip_file`).

    Raises:
        DataError: missing data, lanes that the ranks cannot share evenly.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        weights: Mapping[str, float] | None = None,
        schedule: Schedule | None = None,
        loss_weights: Mapping[str, float] | None = None,
        log: Path | None = None,
        **sizes: Any,
    ) -> None:
        geometry = Geometry(**sizes)
        if geometry.lanes % world_size:
            # A rank with a lane more than the others would make them wait at every step.
            nearest = max(1, round(geometry.lanes / world_size)) * world_size
            raise DataError(
                f"lanes = {geometry.lanes} cannot be shared by {world_size} processes: start as many as"
                f" divide it, or give a multiple of {world_size} (nearest: {nearest})"
            )
        mixture = {source.name: source.weight for source in data.sources}
        # A source that the stage does not name gives nothing.
        if weights:
            mixture = {name: float(weights.get(name, 0.0)) for name in mixture}
        self.spec = Spec(data, tokenizer, vision, geometry, mixture, schedule, loss_weights or {})
        self.sources = self.spec.build_sources()
        self.log = log
        # Taken once: fingerprints of sources may read a file list.
        self._identity = self.spec.identity(self.sources)
        self._feeds: list[Feed] = []
        self._states: dict[int, Record] = {}
        # Built to see their states, and to refuse impossible shares before the run.
        for index in range(rank, geometry.lanes, world_size):
            self._states[index] = Lane(self.spec, self.sources, index, Watch()).state_dict()

    @property
    def step(self) -> int:
        """Steps of this stage delivered or skipped so far."""
        return int(next(iter(self._states.values()))["steps"])

    def next_step(self) -> list[PackedBatch]:
        """The micro-batches of this rank's lanes for the next optimizer step.

        Raises BadSample (on_bad_sample = "raise") or DataExhausted at the step that meets it, and DataError
        when too many samples are bad or a worker has died.
        """
        if not self._feeds:
            # Not before the first step: a resume loads states first, and processes cost memory.
            self._feeds = open_feeds(self.spec, self.sources, self._states)
        batches: dict[int, PackedBatch] = {}
        skipped: list[Record] = []
        for step in [feed.get() for feed in self._feeds]:
            batches |= step.batches
            self._states |= step.states
            skipped += step.skipped
        # Written here and not where it is prepared: what was never consumed is no loss.
        if skipped:
            if self.log is not None:
                append_skipped(self.log, skipped)
            self._check_share(skipped[-1]["message"])
        return [batches[lane] for lane in self._states]

    def _check_share(self, last: str) -> None:
        """Raise DataError when too large a share of the samples is bad; `last` is the message of one."""
        # Few samples say nothing: the first of a run may be bad by chance.
        counts, most = total(self._states.values()), self.spec.data.max_bad_share
        bad = counts["skipped"].total()
        read = bad + counts["documents"].total()
        if read >= MIN_READ and bad > most * read:
            raise DataError(
                f"{bad} of {read} samples cannot be used ({bad / read:.1%}), data.max_bad_share allows"
                f" {most:.1%} ({told(counts['skipped'])}; last: {last}); see {FILE}"
            )

    def close(self) -> None:
        """Stop the prefetch. The loader can go on afterwards: the next step starts it again."""
        for feed in self._feeds:
            feed.close()
        self._feeds = []

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def skip(self, steps: range) -> None:
        """Leave out the data of these steps of the stage (counted as `step` is), for example around a loss
        spike.

        When a lane comes to the first of them it drops the documents waiting to be packed and moves the
        cursor of every source on by the documents that these steps would have taken, by the source's share
        and mean length so far and a tenth more (rounded up). Nothing of it is read. The next batch has the
        number after the last of them, also for a schedule. Steps already delivered stay; ranges that meet
        become one. Part of the state, the same for every prefetch and number of ranks.
        """
        # Steps that were prepared in advance are dropped and made again.
        self.close()
        for state in self._states.values():
            add_skip(state, steps.start, steps.stop)

    def state_dict(self) -> Record:
        """Where this rank's lanes stand after the last `next_step`, as JSON types; a few kB for each lane."""
        lanes = {str(lane): deepcopy(state) for lane, state in self._states.items()}
        return {"identity": self._identity, "lanes": lanes}

    def load_state_dict(self, state: Record) -> None:
        """Continue where `state_dict` was taken, bit for bit.

        On another number of ranks, give the merged states of all (`merge_states`). Raises DataError, naming
        each difference, when sources, seed, lanes, tokenizer or shapes are not those of the state.
        """
        # All differences at once: finding them one by one takes a start each.
        before, changes = state["identity"], []
        for key in sorted(before.keys() | self._identity.keys()):
            was, now = before.get(key), self._identity.get(key)
            if was != now:
                changes.append(f"{key} was {was!r} and is {now!r}")
        if changes:
            raise DataError(
                f"the data is not that of the checkpoint: {'; '.join(changes)}. Undo the change, or start a"
                " new run"
            )
        missing = [lane for lane in self._states if str(lane) not in state["lanes"]]
        if missing:
            raise DataError(
                f"data state holds lanes {', '.join(state['lanes'])} but this rank also owns {missing}; "
                "merge the states of all ranks first (merge_states)"
            )
        self.close()
        self._states = {lane: deepcopy(state["lanes"][str(lane)]) for lane in self._states}

    def stats(self) -> Record:
        """What this rank has delivered so far, as it came out and not as it was configured.

        tokens, media_tokens (image features), vision_tokens (in documents with a picture), their shares of
        all tokens, and epochs, by source; positions; samples left out (skipped) by reason.
        """
        counts = total(self._states.values())
        epochs, shares = {}, {}
        for name, source in self.sources.items():
            # This rank's lanes stand for all of them.
            read = sum(state["streams"][name]["cursor"] for state in self._states.values())
            epochs[name] = read * self.spec.geometry.lanes / len(self._states) / max(1, len(source))
            shares[name] = counts["tokens"][name] / max(1, counts["tokens"].total())
        positions = counts["positions"].total()
        return {**counts, "positions": positions, "epochs": epochs, "shares": shares}


def merge_states(states: Sequence[Record]) -> Record:
    """The states of all ranks of a run as one, which any number of ranks can load."""
    lanes: Record = {}
    for state in states:
        lanes |= state["lanes"]
    return {**states[0], "lanes": lanes}
