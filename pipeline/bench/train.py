"""`earlyfusion bench train`: speed, memory and where the time goes, beside a peer measured in the same run.

Part 1 trains the recipe's decoder shape without vision and Attention Residuals against transformers'
KimiLinearForCausalLM (its pure-torch path on a CPU), each side in its own process, in turn (A B A B ...), on
equal token ids; it prints both medians and the ratio of pairs. Part 2 trains the whole recipe on its own data
and reports tokens/s, patches/s, MFU, memory and the share of time by part of the model. Everything is saved
as JSON.

A part's time is read off module hooks: forward from entry to exit, backward from the arrival of the output's
gradient to the departure of the input's. Its own time excludes parts inside it. What no part claims
(embedding, head and loss, residual mixing, norms between sub-layers) is "residuals, head, loss". On a GPU
every hook waits for the device, which slows the step down; tokens/s are therefore measured in other steps,
without hooks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from rich.console import Console
from torch import Tensor, nn

from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.decoder import Decoder
from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.mla import MultiHeadLatentAttention
from earlyfusion.model.mlp import SwiGLU
from earlyfusion.model.moe import MixtureOfExperts
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.peer import shared_shape, their_model
from earlyfusion.pipeline.bench.record import Result, in_turn, new_record, run_side, save_record, show
from earlyfusion.pipeline.bench.timing import clock, default_device, now, peak_mib
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.meter import peak_flops, peak_memory_bytes
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.stage_data import StageLoaders
from earlyfusion.pipeline.step import LossMeter, forward_backward
from earlyfusion.pipeline.update import update
from earlyfusion.vision.encoder import VisionTower
from earlyfusion.vision.projector import Projector

PARTS = (
    ("vision tower", VisionTower),
    ("projector", Projector),
    ("KDA", KimiDeltaAttention),
    ("MLA", MultiHeadLatentAttention),
    ("MoE", MixtureOfExperts),
    ("dense MLP", SwiGLU),
)
REST = "residuals, head, loss"


class TrainOptions(Options):
    recipe: str = "nano"
    """recipe whose shape and data are used"""
    documents: PositiveInt = 8
    """documents in a step of the comparison"""
    length: PositiveInt = 512
    """tokens of a document in the comparison"""
    steps: PositiveInt = 4
    """timed steps of one round"""
    warmup: int = 1
    """untimed steps at the start of a round"""
    rounds: PositiveInt = 2
    """rounds, each side once a round"""
    recipe_steps: int = 12
    """timed steps of the whole recipe; 0 leaves it out"""
    threads: PositiveInt = torch.get_num_threads()
    """torch CPU threads"""
    seed: int = 0
    """seed of weights and token ids"""
    mixed_precision: Literal["no", "bf16"] = "bf16" if torch.cuda.is_available() else "no"
    """autocast of both sides in the comparison"""
    out: str = "runs/bench/train.json"
    """where the numbers are saved"""


# ---- Part 1: a training step of the decoder.


def our_loss(
    shape: dict[str, Any], ids_NL: Tensor, device: torch.device
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Our decoder, and its loss on packed documents."""
    decoder = Decoder(ModelConfig.model_validate(shared_shape(shape))).to(device)
    documents, length = ids_NL.shape
    segments = Segments.from_lengths([length] * documents)
    ids = ids_NL.reshape(-1).to(device)
    labels = torch.cat([ids_NL[:, 1:], torch.full((documents, 1), -100)], dim=1).reshape(-1).to(device)
    weights = (labels >= 0).float()
    loss_kernel = resolve("linear_cross_entropy", device)

    def loss() -> Tensor:
        hidden = decoder(decoder.embed_tokens(ids), segments)
        total, _ = loss_kernel(hidden, decoder.head_weight(), labels, weights)
        return total / weights.sum()

    return decoder, loss


def train_side(side: str, shape: dict[str, Any], options: dict[str, Any]) -> Result:
    """One side in its process: warm up, time `steps` training steps; times in seconds, memory in MiB.

    Both sides train the same text decoder (KDA 3:1 MLA, MoE, no Attention Residuals, untied head) on the same
    token ids: `documents` documents of `length` tokens. Ours takes them packed; transformers takes them as
    the rows of a batch, because its pure-torch KDA refuses packing. Forward, cross-entropy, backward, AdamW
    step (torch.optim, fused off) on both sides.
    """
    torch.manual_seed(options["seed"])
    torch.set_num_threads(options["threads"])

    # The ids are drawn on the CPU, so that both sides see the same on any device.
    device = default_device()
    generator = torch.Generator().manual_seed(options["seed"])
    size = (options["documents"], options["length"])
    ids = torch.randint(0, shape["vocab_size"], size, generator=generator)

    model: nn.Module
    if side == "ours":
        model, loss = our_loss(shape, ids, device)
    else:
        model = their_model(shape, device).to(device).train()
        rows = ids.to(device)
        loss = lambda: model(input_ids=rows, labels=rows, use_cache=False).loss

    # What is there before the first step is weights; what comes on top is training.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaded = peak_mib()

    # The first steps compile and allocate.
    seconds, losses = [], []
    for _ in range(options["warmup"] + options["steps"]):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=options["mixed_precision"] == "bf16"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())  # also waits for the device
        seconds.append(time.perf_counter() - start)
    return {
        "side": side,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds[options["warmup"] :],
        "losses": losses,
        "peak_mib": peak_mib(),
        "loaded_mib": loaded,
    }


def compare(options: TrainOptions, console: Console) -> Result:
    """Alternate the two sides; raises UserError when a side cannot run."""
    shape = load_config([options.recipe]).model.model_dump(mode="json")

    def run(side: str) -> Result:
        return run_side(train_side, {"side": side, "shape": shape, "options": options.model_dump()})

    sides = in_turn(("ours", "transformers"), options.rounds, run, console, "decoder")
    tokens = options.documents * options.length

    # Medians of a side, and the ratio of neighbours in time.
    speeds, figures = {}, {}
    for side, found in sides.items():
        speeds[side] = [tokens / statistics.median(one["seconds"]) for one in found]
        peak, loaded = (max(one[key] for one in found) for key in ("peak_mib", "loaded_mib"))
        figures[side] = {
            "tokens_per_s": statistics.median(speeds[side]),
            "peak_mib": peak,
            "step_mib": peak - loaded,
            "parameters": found[0]["parameters"],
            "first_loss": found[0]["losses"][0],
        }
    pairs = [a / b for a, b in zip(speeds["ours"], speeds["transformers"], strict=True)]
    ratios = {
        "tokens_per_s": statistics.median(pairs),
        "peak_mib": figures["ours"]["peak_mib"] / figures["transformers"]["peak_mib"],
    }
    show(console, f"decoder training step, {tokens} tokens", {**figures, "ratio": ratios})
    return {"tokens_per_step": tokens, **figures, "ratio": ratios, "rounds": sides}


# ---- Part 2: the whole recipe.


class RecipeTraining:
    """A recipe's first stage, ready to train on this machine."""

    def __init__(self, config: RunConfig, threads: int | None = None) -> None:
        self.runtime = Runtime(config.train.mixed_precision, threads)
        seed_everything(config.run.seed)
        self.tokens = build.tokenizer(config, self.runtime)
        self.config = build.with_tokenizer(config, self.tokens)
        self.fusion = build.model(self.config, self.tokens).to(self.runtime.device)
        self.optimizer = build.optimizer(self.config.optim, self.fusion)
        self.guard = Guard(**config.guard.model_dump(), agree=self.runtime.agree)
        self.losses = LossMeter([source.name for source in config.data.sources])
        self.loaders = StageLoaders(self.config, self.tokens, self.runtime)

    def read(self) -> list[PackedBatch]:
        """The micro-batches of the next step."""
        return [batch.to(self.runtime.device) for batch in self.loaders.at(0).next_step()]

    def learn(
        self,
        batches: Sequence[PackedBatch],
        seconds: dict[str, float],
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """One step; adds its time to seconds["model"] and ["optimizer"]."""
        with clock(seconds, "model"):
            loss = forward_backward(self.runtime, self.fusion, batches, self.losses)
            after_backward()
        with clock(seconds, "optimizer"):
            update(
                self.fusion,
                self.optimizer,
                self.guard,
                self.runtime,
                loss=loss.loss,
                lr=1e-4,
                clip_grad_norm=1.0,
            )


class PartTimer:
    """Seconds by part of the model while its hooks are in place."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: dict[tuple[int, str], float] = {}
        self._handles: list[Any] = []

        # The shared expert of a mixture is a SwiGLU too: its time is the mixture's.
        experts = [moe for moe in model.modules() if isinstance(moe, MixtureOfExperts)]
        inside_moe = {id(module) for moe in experts for module in moe.modules()}
        for module in model.modules():
            for part, kind in PARTS:
                if isinstance(module, kind) and not (part == "dense MLP" and id(module) in inside_moe):
                    self._watch(module, part)

    def _watch(self, module: nn.Module, part: str) -> None:
        def begin(phase: str) -> Any:
            def hook(*_: Any) -> None:
                self._open[id(module), phase] = now()

            return hook

        def end(phase: str) -> Any:
            def hook(*_: Any) -> None:
                started = self._open.pop((id(module), phase), None)
                if started is not None:
                    self.seconds[part] += now() - started

            return hook

        self._handles += [
            module.register_forward_pre_hook(begin("forward")),
            module.register_forward_hook(end("forward")),
            module.register_full_backward_pre_hook(begin("backward")),
            module.register_full_backward_hook(end("backward")),
        ]

    def close_backward(self) -> None:
        """End of a backward pass: modules whose inputs need no gradient (the tower) end here."""
        for started in self._open.values():
            self.seconds["vision tower"] += now() - started
        self._open.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def measure_recipe(recipe: str, steps: int, threads: int) -> Result:
    """Train `steps` steps of the recipe's first stage without hooks (rates), then a third as many with them
    (shares)."""
    training = RecipeTraining(load_config([recipe]), threads)

    # Kernels are compiled and buffers found in the first steps.
    for _ in range(3):
        training.learn(training.read(), defaultdict(float))

    # Rates.
    counts: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for _ in range(steps):
        with clock(seconds, "data"):
            batches = training.read()
        training.learn(batches, seconds)
        decoder_flops, vision_flops = build.step_flops(training.fusion.config, batches)
        counts["mfu_decoder"] += decoder_flops
        counts["mfu_vision"] += vision_flops
        counts["tokens_per_s"] += sum(batch.num_tokens for batch in batches)
        counts["patches_per_s"] += sum(batch.num_patches for batch in batches)

    # Waiting for data counts: tokens/s are those of a run.
    total, device = sum(seconds.values()), training.runtime.device
    bf16 = training.config.train.mixed_precision == "bf16"
    peak = peak_flops(device, torch.bfloat16 if bf16 else torch.float32)
    rates: Result = {name: count / total for name, count in counts.items()}
    for name in ("mfu_decoder", "mfu_vision"):
        rates[name] = rates[name] / peak if peak else None
    rates |= {"peak_flops": peak, "peak_mib": peak_memory_bytes(device) / 2**20}

    shares = measure_shares(training, max(1, steps // 3))
    training.loaders.close()
    return {"recipe": recipe, "steps": steps, **rates, "share_of_time": shares}


def measure_shares(training: RecipeTraining, steps: int) -> dict[str, float]:
    """Share of the time by part of the model, the largest first."""
    # The tower's input is pixels: as meant.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    timer = PartTimer(training.fusion)
    seconds: dict[str, float] = defaultdict(float)
    try:
        for _ in range(steps):
            with clock(seconds, "data"):
                batches = training.read()
            training.learn(batches, seconds, timer.close_backward)
    finally:
        timer.remove()

    # What no hook has seen lies between the parts.
    parts = dict(timer.seconds)
    parts[REST] = max(0.0, seconds["model"] - sum(parts.values()))
    parts |= {"optimizer": seconds["optimizer"], "waiting for data": seconds["data"]}
    total = sum(parts.values())
    return {name: value / total for name, value in sorted(parts.items(), key=lambda item: -item[1])}


@verb
def train(options: TrainOptions) -> None:
    """Entry of `earlyfusion bench train`."""
    console = Console(highlight=False)
    record = new_record(options.model_dump())
    record["comparison"] = compare(options, console)
    if options.recipe_steps:
        record["recipe"] = measure_recipe(options.recipe, options.recipe_steps, options.threads)
        figures = dict(record["recipe"])
        shares = {f"time in {part}": share for part, share in figures.pop("share_of_time").items()}
        show(console, "the whole recipe", {"": figures | shares})
    save_record(record, options.out, console)
