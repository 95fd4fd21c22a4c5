"""Processes, devices, seeds, and preemption.

`Runtime` wraps accelerate's Accelerator: alone, under `accelerate launch`, or under torchrun with gloo or
nccl. The data loader never goes through `prepare()` (accelerate would let rank 0 read everything and
broadcast it). Reductions are sums and maxima of small float64 tensors; with one process they cost nothing.

How a model is spread over ranks and how their gradients meet: the one place that knows.

Three ways bring the gradients together:

    shard                what `parallel` of the recipe asks for beyond replicas (parallel/): reduced as the
                         backward pass goes, summed
    replicate            DDP: every rank runs the same number of micro-batches, and the exchange of one bucket
                         overlaps with the backward pass of the next (pretraining, fine-tuning)
    exchange_gradients   once, after the backward passes: a rank may run any number of rows, none too, and a
                         parameter that no rank has a gradient for keeps none (RL, DPO). DDP has neither: its
                         reducer waits for every rank's forward pass and makes zeros of missing gradients, and
                         a step on zeros goes along the optimizer's old momentum.

Nothing else knows about ranks' gradients.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import requested_backend
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.schema import ParallelSection, ShardSection
from earlyfusion.pipeline.parallel import shard
from earlyfusion.pipeline.parallel.mesh import Layout, sizes_of
from earlyfusion.pipeline.watchdog import Watchdog

MIN_TORCH = (2, 11)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OTHER_TRAINERS = ("DEEPSPEED", "MEGATRON_LM")
"""What `accelerate launch` announces as ACCELERATE_USE_<name>=true and nothing here obeys."""
LEAVE_S = timedelta(seconds=20)
"""Most that a process waits at its end for the others, one of which may have failed."""
COUNTS_OF_PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_versions(torch_version: str = torch.__version__) -> None:
    """UserError, one line, for a torch that is too old, or an EF_KERNELS that names no backend."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if found and tuple(map(int, found.groups())) < MIN_TORCH:
        need = ".".join(map(str, MIN_TORCH))
        raise UserError(f"torch {torch_version} is too old: earlyfusion needs torch {need} or newer")
    # It reads EF_KERNELS, and refuses a name that is no backend.
    requested_backend()


def check_launcher(
    mixed_precision: str, environment: Mapping[str, str] = os.environ, words: Sequence[str] = ()
) -> None:
    """UserError for settings of `accelerate launch` that the recipe contradicts or that nothing here would
    obey.

    mixed_precision: the recipe's. The launcher's "no" is its default, so it contradicts nothing. words: the
    launcher's command line (that of the parent process if not given), which names what it does not hand on
    through the environment.
    """
    said = {key.removeprefix("ACCELERATE_"): value for key, value in environment.items()}
    launched = "MIXED_PRECISION" in said
    if launched and not words:
        # Where there is no /proc, what the launcher keeps to itself is not known.
        with suppress(OSError):
            line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            words = line.decode(errors="replace").split("\0")
    if launched:
        options = " ".join(words).replace("=", " ").split()
        for option, value in pairwise([*options, ""]):
            if option == "--gradient_accumulation_steps":
                said["GRADIENT_ACCUMULATION_STEPS"] = value
            elif option == "--use_deepspeed":
                said[option[2:].upper()] = "true"

    precision, dynamo = said.get("MIXED_PRECISION", "no"), said.get("DYNAMO_BACKEND", "NO")
    accumulated = said.get("GRADIENT_ACCUMULATION_STEPS", "1")
    others = [name for name in OTHER_TRAINERS if said.get(f"USE_{name}", "false").lower() == "true"]
    # A CPU launch that asked for several processes and got one would train on a part of the data.
    counted = any(name in environment for name in COUNTS_OF_PROCESSES)
    problem = None
    if precision not in ("no", mixed_precision):
        problem = (
            f"accelerate was given mixed precision {precision!r}, the recipe says {mixed_precision!r}: "
            "set train.mixed_precision and launch with --mixed_precision no"
        )
    elif accumulated != "1":
        problem = (
            f"accelerate was given {accumulated} gradient accumulation steps: "
            "the recipe decides; raise the stage's lanes instead (--stages.NAME.lanes)"
        )
    elif others:
        problem = (
            f"accelerate was configured for {others[0]}, which keeps weights in flat buffers of its own,"
            " where Muon finds no matrices; use FSDP2 (fsdp_version: 2, or parallel.dp_shard of the recipe)"
        )
    elif dynamo.upper() != "NO":
        problem = f"accelerate was given the dynamo backend {dynamo}: launch with no"
    elif launched and "MASTER_ADDR" in environment and not counted:
        problem = (
            "accelerate was asked for several processes but starts one on a CPU: "
            "use torchrun --standalone --nproc-per-node N -m ..., or --num_processes 1"
        )
    if problem:
        raise UserError(problem)


def tie_to_launcher() -> None:
    """Under accelerate or torchrun: SIGTERM for this process when the launcher ends, so that no orphan trains
    on. Linux only. A run without a launcher outlives its shell, as nohup wants it."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        # The kernel sends it, also where the launcher was killed and can tell nobody.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def installed(package: str) -> str | None:
    """Version of a distribution, torch's with its build ("2.11.0+cu130"); None if absent. Nothing is
    imported."""
    try:
        return str(torch.__version__) if package == "torch" else version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def objects_at_rest() -> Iterator[None]:
    """For a loop: the garbage collector passes over what exists when it begins. A full collection looks at
    every object, 400,000 with torch alone, and stops a step for 0.2 s and more; what is made inside is
    collected as ever."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (every device)."""
    random.seed(seed)
    # numpy takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> Record:
    """State of every generator that training may draw from, in this process."""
    kind, words, *rest = np.random.get_state()
    state: Record = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),  # plain numbers: no array in a checkpoint
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Record) -> None:
    """Put back what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def meet_again(environment: Mapping[str, str] = os.environ) -> None:
    """For processes that torchrun has started again: begin the process group in a corner of the store that
    the processes before them have not used. (torch 2.13 leaves their addresses there with rendezvous c10d,
    and the new ones would try to reach the dead.)"""
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    place = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.PrefixStore(f"earlyfusion/attempt-{attempt}", dist.TCPStore(*place, is_master=False))
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def keep_freed_memory(most: int = 2**31 - 1) -> None:
    """Tell glibc to keep large freed buffers for reuse, `most` bytes in all; nothing where there is no glibc.

    By default every tensor above 128 KiB is mapped anew and its pages are faulted in and zeroed again, which
    on a CPU costs as much as the arithmetic. Tensors of a training step have the same sizes in every step, so
    keeping them costs little memory. A server, whose sizes others choose, sets a bound: single buffers above
    it are never kept.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        if libc.mallopt(M_MMAP_THRESHOLD, min(1 << 30, most)):
            libc.mallopt(M_TRIM_THRESHOLD, most)


class StopFlag:
    """SIGTERM, SIGINT and SIGUSR1 ask for a stop at the next step boundary; a second SIGINT stops at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> StopFlag:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def restore(self) -> None:
        """Give the handlers back that were there before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Somebody presses Ctrl-C twice: waiting for the end of a step is too long.
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class Runtime:
    """The processes of this run.

    mixed_precision: "no" or "bf16". threads: torch CPU threads; None keeps torch's choice.
    """

    def __init__(
        self,
        mixed_precision: str = "no",
        threads: int | None = None,
        parallel: ShardSection | None = None,
    ) -> None:
        check_versions()
        if threads is not None:
            torch.set_num_threads(threads)
        # Before accelerate reads its words: it would shard by them a second time.
        world = int(os.environ.get("WORLD_SIZE", "1"))
        parallel = parallel or ParallelSection()
        sizes = sizes_of(parallel, world)
        # On a GPU tensors come from torch's own pool; who shards on a CPU wants memory more than time.
        if not torch.cuda.is_available() and sizes.plain:
            keep_freed_memory()
        meet_again()
        # Buffers hold per-rank statistics (max logits, expert load):
        # DDP must not overwrite them with rank 0's.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=mixed_precision,
            kwargs_handlers=[ddp],
        )
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        virtual = parallel.pp_virtual if isinstance(parallel, ParallelSection) else 1
        self.layout = Layout(sizes, self.rank, self.device.type, virtual)
        self.stop = StopFlag()
        self.watchdog = Watchdog(self.rank, self.world, parallel.timeout_s).start()
        self.groups: list[dist.ProcessGroup] = []

    def new_group(self, backend: str | None = None) -> dist.ProcessGroup:
        """A group of all processes beside the default one, closed with the runtime. Every rank calls it."""
        self.groups.append(dist.new_group(backend=backend))
        return self.groups[-1]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor | float | int) -> Tensor:
        """Element-wise sum over ranks, float64, on the run's device."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_of_layers(self, values: Tensor) -> Tensor:
        """The sum over ranks that hold the same layers (all, but for a pipeline's), in the dtype given."""
        group = self.layout.holders if self.layout.sizes.pp > 1 else None
        return self._reduce(values, dist.ReduceOp.SUM, group).to(values.dtype)

    def sum_dict(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks by name, in one message; every rank gives the same names in the same order."""
        sums = self.sum(torch.tensor(list(values.values()), dtype=torch.float64)).tolist()
        return dict(zip(values, sums, strict=True))

    def max(self, values: Tensor | float | int) -> Tensor:
        """Element-wise maximum over ranks, float64, on the run's device."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor | float | int, op: Any, group: Any = None) -> Tensor:
        # float64: sums of a million tokens must not depend on the number of ranks.
        reduced = torch.as_tensor(values).detach().to(device=self.device, dtype=torch.float64, copy=True)
        if self.world > 1:
            dist.all_reduce(reduced, op=op, group=group)
        return reduced

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in their order, on every rank; for small things that can be pickled."""
        return [value] if self.world == 1 else list(gather_object([value]))

    def agree(self, code: int) -> int:
        """The largest `code` of all ranks: how a decision of one becomes the decision of all."""
        return code if self.world == 1 else int(self.max(code).item())

    def should_stop(self) -> bool:
        """True on every rank when any rank has received a stop signal. Call once per step, on every rank."""
        return bool(self.agree(int(self.stop.received is not None)))

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process groups and give the signal handlers back."""
        self.watchdog.stop()
        self.stop.restore()
        if self.world > 1 and dist.is_initialized():
            # A rank that has left its last collective may tear its connections down while another is still
            # inside, which then waits for ever. So nobody closes anything before all have come here. They
            # meet in the store and not in a collective: a rank that failed alone must not hang the others.
            self._meet("ended", range(self.world))
            # Groups of their own before the default one, in the same order on every rank.
            while self.groups:
                dist.destroy_process_group(self.groups.pop())
            # Rank 0 serves the store that the others still talk to: it is the last one out.
            self._meet("left", range(1, self.world) if self.is_main else ())
        self.accelerator.end_training()

    def _meet(self, place: str, ranks: Sequence[int]) -> None:
        """Say in the store that this rank is there, and wait until `ranks` have said so, or LEAVE_S."""
        # torch has no public name for the store that its default group was made with.
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):
            store.set(f"earlyfusion/{place}/{self.rank}", "1")
            store.wait([f"earlyfusion/{place}/{rank}" for rank in ranks], LEAVE_S)


def replicate(model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model on its device, with autocast and (several processes) DDP around it."""
    return runtime.accelerator.prepare_model(model)


def spread(build: Callable[[], NativeFusion], runtime: Runtime) -> tuple[Any, NativeFusion, NativeFusion]:
    """(what is called in training, the module itself, what evaluates): replicated, or spread as the recipe
    asks (then the first may be a Pipeline). The last is the module, or a copy that holds weights inside
    `whole` alone."""
    if not runtime.layout.sharded:
        fusion = build()
        return replicate(fusion, runtime), fusion, fusion
    return shard.spread(build, runtime.layout, runtime.device, runtime.accelerator)


def policy(build: Callable[[], NativeFusion], runtime: Runtime) -> tuple[NativeFusion, NativeFusion]:
    """(the module, what evaluates), as `spread`, for training whose gradients `exchange_gradients` brings
    together."""
    if runtime.layout.sharded:
        return spread(build, runtime)[1:]
    fusion = build()
    return fusion, fusion


def whole(
    plain: NativeFusion, fusion: NativeFusion, runtime: Runtime
) -> AbstractContextManager[NativeFusion]:
    """Around evaluation: `plain` (of `spread`) with the weights that `fusion` has now. Every rank calls
    it."""
    return nullcontext(plain) if plain is fusion else shard.gathered(plain, fusion, runtime.layout)


def gradient_sync(model: nn.Module, runtime: Runtime, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch of a replicated model: gradients are exchanged in the last one of a step only.
    Sharded gradients are reduced in every one: kept whole they would take the memory that was saved."""
    kept = last or runtime.layout.sharded
    return nullcontext() if kept else runtime.accelerator.no_sync(model)


def exchange_gradients(model: nn.Module, runtime: Runtime) -> None:
    """Sum the gradients over ranks, for losses that were divided by the totals of all ranks."""
    # Those of shards have been summed on the way.
    if runtime.world == 1 or runtime.layout.sharded:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # All ranks send the same shapes; who has no gradient sends zeros and says so.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    known_P = grads[0].new_tensor([float(p.grad is not None) for p in trained])

    # One message: two hundred small ones cost more than the sum.
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), known_P])
    torch.distributed.all_reduce(flat)

    *sums, known_P = flat.split([*(grad.numel() for grad in grads), len(trained)])
    for parameter, grad, known in zip(trained, sums, known_P.tolist()):
        parameter.grad = grad.view_as(parameter) if known else None
