"""One optimizer step's forward and backward passes, with losses kept apart by modality and by source.

The loss is the weighted mean over the whole global step: sum(w * nll) / sum(w), both sums over every
micro-batch of every rank. So it does not matter how the micro-batches are dealt out: two processes with one
lane each take the same step as one process with two lanes.

Legend: T tokens, S sources, R = 2 S rows (source x [with a picture, text only]).

`Meter` counts speed, cost and memory: tokens/s, patches/s, MFU split into decoder and vision, data wait, step
time.

MFU = model FLOPs done / (seconds * peak FLOP/s of all ranks), for decoder and vision apart; their sum is the
whole. FLOPs are those the model needs (forward and backward, no recomputation), counted by `model/flops.py`.
Peaks are dense tensor-core peaks of the data sheets; a CPU's peak is what a short matmul reaches here, in the
dtype of the run.

`PictureExchange` says who encodes which picture: the ranks' grids, one plan, and a route for every
micro-batch. Training steps only: evaluation calls the model without a route, so that one rank may
evaluate while others wait. `parallel.exchange_pictures` turns it on; the plan decides, on all
ranks alike, whether a step is worth it.
"""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.parallel.context import cut
from earlyfusion.pipeline.parallel.encoder import DecoupledEncoder
from earlyfusion.pipeline.parallel.stages import Pipeline
from earlyfusion.pipeline.runtime import Runtime, exchange_gradients, gradient_sync
from earlyfusion.vision.balance import Route, complaint, gather_grids, plan_step
from earlyfusion.vision.patches import Grid, VisionCost

# Dense bf16 tensor-core FLOP/s by a part of torch.cuda.get_device_name. First match wins.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}
EMA = 0.95

COUNTS = ("tokens", "patches", "samples", "decoder_flops", "vision_flops")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device in `dtype`; None for a GPU that is not in the table, and for float32 on one,
    whose peak depends on how it is multiplied (MFU is then not shown)."""
    if device.type != "cuda":
        return measured_peak(dtype, torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    known = [peak for part, peak in PEAKS.items() if part in name and dtype == torch.bfloat16]
    return known[0] if known else None


@cache
def measured_peak(dtype: torch.dtype, threads: int, size: int = 512, seconds: float = 0.15) -> float:
    """The best of repeated size^3 CPU matmuls within `seconds`, in FLOP/s. `threads` keys the cache.

    Values do not matter and no random number is drawn, so a measurement never shifts a training run.
    """
    # 512 fits the cache of a core and keeps every core busy.
    a = torch.full((size, size), 0.5, dtype=dtype)
    torch.mm(a, a)
    # The best of many: whatever else the machine does only makes a product slower.
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


class Meter:
    """Counts what this rank does and reports what all ranks do.

    dtype: compute dtype of the matmuls (for the peak). peak: FLOP/s of one rank; None looks it up.
    """

    def __init__(
        self, runtime: Runtime, dtype: torch.dtype = torch.float32, peak: float | None = None
    ) -> None:
        self.runtime = runtime
        self.peak = peak_flops(runtime.device, dtype) if peak is None else peak
        self.totals = dict.fromkeys(COUNTS, 0.0)  # over all ranks, over the whole run
        self.seconds = self.step_s = 0.0  # in all, and their exponential moving average
        self._pending = dict.fromkeys(COUNTS, 0.0)  # of this rank, since the last flush
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new interval now: set-up, loading and compiling before this do not count."""
        self._before, self._began_s = dict(self.totals), self.seconds
        self._waited_s = self._not_counted_s = 0.0
        self._last = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the next batch: its share of time is reported as data_wait."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation and checkpoints: time that is not training."""
        start = time.perf_counter()
        yield
        self._not_counted_s += time.perf_counter() - start

    def step(self, **counts: float) -> None:
        """One optimizer step of this rank has ended; counts: those of COUNTS, of this rank alone."""
        now = time.perf_counter()
        took = now - self._last - self._not_counted_s
        self._last, self._not_counted_s = now, 0.0
        self.seconds += took
        # A mean over about twenty steps: one slow step must not move the ETA.
        self.step_s = EMA * (self.step_s or took) + (1 - EMA) * took
        for name, value in counts.items():
            self._pending[name] += value

    def flush(self) -> None:
        """Add this rank's pending counts to the totals of all ranks. Every rank calls it."""
        for name, value in self.runtime.sum_dict(self._pending).items():
            self.totals[name] += value
            self._pending[name] = 0.0

    def snapshot(self) -> dict[str, float]:
        """Rates since the last snapshot and totals of the run; every rank calls it.

        Keys: tokens, patches, samples (totals), tokens_per_s, patches_per_s, step_s, data_wait (share of
        time), mfu, mfu_decoder, mfu_vision (absent without a known peak), memory_gib (the fullest rank),
        seconds.
        """
        self.flush()
        elapsed = max(self.seconds - self._began_s, 1e-9)
        rates = {name: (self.totals[name] - self._before[name]) / elapsed for name in COUNTS}
        # The fullest rank and the longest wait decide what a user should look at.
        worst = [peak_memory_bytes(self.runtime.device), self._waited_s / elapsed]
        memory_bytes, wait = self.runtime.max(torch.tensor(worst, dtype=torch.float64)).tolist()
        record = {name: self.totals[name] for name in ("tokens", "patches", "samples")}
        record |= {
            "tokens_per_s": rates["tokens"],
            "patches_per_s": rates["patches"],
            "step_s": self.step_s,
            "data_wait": min(1.0, wait),
            "memory_gib": memory_bytes / 2**30,
            "seconds": self.seconds,
        }
        if self.peak:
            peak = self.peak * self.runtime.world
            record["mfu_decoder"] = rates["decoder_flops"] / peak
            record["mfu_vision"] = rates["vision_flops"] / peak
            record["mfu"] = record["mfu_decoder"] + record["mfu_vision"]
        # The next interval begins where the last step ended; totals go on.
        self._before, self._began_s, self._waited_s = dict(self.totals), self.seconds, 0.0
        return record

    def state_dict(self) -> Record:
        """Totals and times, equal on all ranks; every rank calls it."""
        self.flush()
        return {"totals": dict(self.totals), "seconds": self.seconds, "step_s": self.step_s}

    def load_state_dict(self, state: Record) -> None:
        self.totals = dict(state["totals"])
        self.seconds, self.step_s = state["seconds"], state["step_s"]
        self.restart_clock()


# Largest over mean vision FLOPs of the ranks. Handing pictures over costs two collectives a step; where the
# ranks' work differs by less than a tenth there is little to win by it.
EXCHANGE_ABOVE = 1.1


class PictureExchange:
    """Plans the exchange of a step; idle with one rank, or where the recipe turns it off.

    Its collectives run in groups of their own, so that they cannot meet the gradient all-reduces that DDP
    starts while the backward pass runs. Raises UserError when the ranks were started with different settings.
    """

    def __init__(self, section: ParallelSection, config: FusionConfig, runtime: Runtime) -> None:
        self.runtime, self.vision, self.pad_id = runtime, config.vision, config.text.pad_token_id
        self.cost = VisionCost.from_config(config.vision)
        # Ranks of one row deal its pictures out among themselves; of a pipeline only the first stage sees.
        sizes = runtime.layout.sizes
        alone = runtime.world == 1 or sizes.cp > 1 or sizes.pp > 1
        self.setting = "off" if alone else section.exchange_pictures
        self.above = 1.0 if self.setting == "on" else EXCHANGE_ABOVE
        if runtime.world == 1:
            return
        # Ranks with different settings would wait for one another for ever.
        if len(set(runtime.gather(self.setting))) > 1:
            raise UserError(
                f"parallel.exchange_pictures is {self.setting!r} on rank {runtime.rank} and something else on"
                " another: start all ranks with the same recipe"
            )
        self.decoupled = section.encoder == "decoupled"
        if self.decoupled or self.setting != "off":
            self.group = self.planning = runtime.new_group()
            if dist.is_gloo_available():
                # Grids are host numbers: over gloo they reach the other hosts without a wait for the device.
                self.planning = runtime.new_group("gloo")

    def spread(
        self, batches: Sequence[PackedBatch], max_patches: int | None = None
    ) -> tuple[list[PackedBatch], list[Any]]:
        """(what this rank computes of its micro-batches, a route for the pictures of each); every rank calls
        it, once a step."""
        layout = self.runtime.layout
        if layout.sizes.cp == 1:
            return list(batches), list(self.routes(batches, max_patches))
        group, merge = layout.mesh["cp"].get_group(), self.vision.merge_kernel_size
        parts = [cut(one, layout.cp_rank, group, self.pad_id, self.cost, merge) for one in batches]
        return [part for part, _ in parts], [way for _, way in parts]

    def grids(self, batches: Sequence[Any], *settings: Any) -> list[list[list[Grid]]]:
        """Those of every rank, by micro-batch. Raises UserError, on all ranks, where they disagree about
        these settings, or one has a batch that does not fit together."""
        return gather_grids(
            [batch.grids for batch in batches],
            self.planning,
            repr((*settings, self.vision)),
            complaint(batches, self.vision.merge_kernel_size),
        )

    def encode(
        self, model: NativeFusion, batches: Sequence[PackedBatch], max_patches: int | None
    ) -> DecoupledEncoder | None:
        """The step's pictures, encoded (see parallel/encoder.py); None: with each micro-batch."""
        if self.runtime.world == 1 or not self.decoupled:
            return None
        encoder = DecoupledEncoder(model, self.runtime, self.group, self.cost, max_patches)
        encoder.begin(batches, self.grids(batches, "decoupled", max_patches))
        return encoder

    def routes(self, batches: Sequence[Any], max_patches: int | None = None) -> list[Route | None]:
        """A route for each of this rank's micro-batches; None: encode the own pictures.

        max_patches: most patches that a rank may get to encode in a micro-batch. Every rank calls it, once a
        step. Raises UserError, on all ranks, where they disagree.
        """
        # No route: every rank encodes what it holds.
        nothing: list[Route | None] = [None] * len(batches)
        if self.setting == "off" or self.decoupled:
            return nothing
        # The same plan on every rank, from the same grids; it may say that the step is not worth it.
        grids = self.grids(batches, self.setting, self.above, max_patches)
        plan = plan_step(grids, self.cost, self.vision.merge_kernel_size, max_patches)
        if not plan.pays(self.above):
            return nothing
        # A micro-batch in which nothing moves needs no collective at all.
        rank = self.runtime.rank
        return [Route(part, rank, self.group) if part.moves else None for part in plan.parts]


class LossMeter:
    """Unweighted negative log-likelihood by source and modality since the last log line, in nats.

    Kept where the batches are: nothing waits for the device before `means`. sums_S22 float64: source x [with
    a picture, text only] x [nll, tokens], of this rank.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = list(sources)
        self.clear()

    def clear(self) -> None:
        """Forget everything added so far."""
        self.sums_S22 = torch.zeros(len(self.sources), 2, 2, dtype=torch.float64)

    def add(self, batch: PackedBatch, nll_T: Tensor) -> None:
        """Add one micro-batch; only tokens that carry loss count (and are finite: the guard tells of the
        others)."""
        # Plain nats a token, whatever a source weighs: so the curves of two recipes compare.
        valid_T = (batch.labels >= 0) & (batch.loss_weights > 0) & nll_T.isfinite()
        row_T = batch.source_ids.long() * 2 + (~batch.has_image).long()
        rows_R = torch.arange(2 * len(self.sources), device=nll_T.device)
        values_T2 = torch.stack([torch.where(valid_T, nll_T, 0.0), valid_T.to(nll_T.dtype)], dim=1).double()

        # A product, not index_add_, whose order a GPU leaves open.
        sums_R2 = (rows_R[:, None] == row_T).double() @ values_T2
        self.sums_S22 = self.sums_S22.to(nll_T.device) + sums_R2.view(-1, 2, 2)

    def means(self, runtime: Runtime) -> dict[str, float]:
        """Mean nll per token over all ranks: `loss/source/<name>`, `loss/image` (documents with an image),
        `loss/text`; absent where there was no token."""
        sums_S22 = runtime.sum(self.sums_S22)
        by_name = dict(zip([f"source/{name}" for name in self.sources], sums_S22.sum(dim=1).tolist()))
        by_name |= dict(zip(["image", "text"], sums_S22.sum(dim=0).tolist()))
        return {f"loss/{name}": nll / tokens for name, (nll, tokens) in by_name.items() if tokens}


def forward_backward(
    runtime: Runtime,
    model: nn.Module | Pipeline,
    batches: Sequence[PackedBatch],
    meter: LossMeter,
    routes: Sequence[Route | None] = (),
    encoder: DecoupledEncoder | None = None,
) -> float:
    """Accumulate the gradients of one global step into `.grad`; returns its weighted mean loss in nats.

    model: NativeFusion, replicated or bare. batches: this rank's micro-batches on its device. routes: of
    `PictureExchange`, one (or None) a micro-batch; empty: every rank encodes its own pictures. encoder: whose
    features the micro-batches take instead.
    """
    # What the loss is divided by: the weights of all ranks. DDP averages gradients, hence the world size;
    # those of shards are summed.
    layout = runtime.layout
    weights = [torch.where(b.labels >= 0, b.loss_weights, 0.0).sum().double() for b in batches]
    # (All stages of a pipeline have the same rows.)
    weight = runtime.sum(torch.stack(weights).sum() * (layout.pp_rank == 0)).clamp_min(1e-12)
    # (The tower's come last, so that its replicas meet by themselves at the end.)
    summed = layout.sharded or encoder is not None
    scale = (1 if summed else runtime.world) / weight

    losses = []
    if isinstance(model, Pipeline):
        for batch, out in zip(batches, model.step(batches, routes, scale)):
            losses.append(out.loss_sum.detach().double())
            meter.add(batch, out.nll_T)
        return float(runtime.sum(torch.stack([scale.new_zeros(()), *losses]).sum()) / weight)
    for index, batch in enumerate(batches):
        last = encoder is None and index == len(batches) - 1
        with gradient_sync(model, runtime, last):
            route: Any = routes[index] if routes else None
            if encoder is not None:
                route = encoder.leaves[index]
            with runtime.accelerator.autocast():
                out = model(batch) if route is None else model(batch, route)
            runtime.accelerator.backward(out.loss_sum * scale.to(out.loss_sum.dtype))
        losses.append(out.loss_sum.detach().double())
        meter.add(batch, out.nll_T)

    if encoder is not None:
        encoder.end()
        exchange_gradients(encoder.model, runtime)
    # The step's one host sync: everything before it is only queued on a GPU.
    return float(runtime.sum(torch.stack(losses).sum()) / weight)
