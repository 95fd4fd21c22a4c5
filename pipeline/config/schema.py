"""The schema of a training run: one pydantic model per section, unknown keys forbidden.

A recipe is TOML with the sections `run tokenizer data vision model optim stages train parallel guard eval
checkpoint track`. `pipeline/config/compose.py` merges recipes and dotted overrides into one plain dict; this
file says what that dict may hold. The rooms own their sections: `data` is DataConfig, `vision` is
VisionConfig, `model` is ModelConfig. TOML has no null: the string "null" stands for None everywhere.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from earlyfusion.data.config import DataConfig
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import ModelConfig
from earlyfusion.pipeline.config.size import SIZE_KEYS
from earlyfusion.vision.config import PRESETS, VisionConfig

READ_BEFORE = {
    "model": {
        "preset": ("str | null", "null", SIZE_KEYS["preset"]),
        "scale": ("float", "1.0", SIZE_KEYS["scale"]),
        "from": ("str | null", "null", SIZE_KEYS["from"]),
    },
    "vision": {"preset": ("str | null", "null", f"Begin with one of {', '.join(PRESETS)}.")},
}
"""Section -> key -> (type, default, meaning) of keys that become others before the schema sees the recipe."""


class Section(BaseModel):
    """Base of the sections: no unknown keys, no silent mutation, attribute docstrings become help texts."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class RunSection(Section):
    name: str = "run"
    """Name of the run; names the default output folder."""
    seed: NonNegativeInt = 0
    """One seed for weights, data order and sampling."""
    out: str | None = None
    """Output folder; runs/<name> when not given."""
    steps: PositiveInt | None = None
    """Stop after this many steps of the recipe's schedule (the schedule itself does not change)."""
    init_from: str | None = None
    """Model directory for a warm start: weights only; step, optimizer and data order start afresh."""
    model_from: str | None = None
    """What model.from names: a checkpoint of which every tensor that fits is taken."""

    @model_validator(mode="after")
    def _check(self) -> RunSection:
        if self.init_from is not None and self.model_from is not None:
            raise ValueError("give run.init_from or model.from, not both: one place has the weights")
        return self

    @property
    def directory(self) -> str:
        """The output folder: `out` or runs/<name>."""
        return self.out or f"runs/{self.name}"


class TokenizerSection(Section):
    path: str | None = None
    """Your tokenizer: a file that `tokenizers` saved (tokenizer.json) or a directory that holds one; special
    tokens that it lacks are added. None trains a byte-level BPE on the embedded corpus."""
    vocab_size: PositiveInt = 4096
    """Size of the vocabulary to train, special tokens included; ignored when `path` is given."""


class OptimSection(Section):
    name: str = "muonclip"
    """muonclip: Muon with QK-Clip for hidden matrices, AdamW for the rest; adamw: AdamW for everything;
    package.module:function for one of yours (pipeline/optim/registry.py)."""
    lr: PositiveFloat = 2e-3
    """Learning rate; a stage may name its own."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon momentum."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    ns: str = "polar_express"
    """Newton-Schulz preset: polar_express, keller_jordan, deepseek_v4, cubic."""
    qk_clip: PositiveFloat | None = 100.0
    """Largest allowed attention logit tau; "null" turns QK-Clip off."""
    head_group_size: PositiveInt | None = None
    """Heads orthogonalised together; "null" treats the whole matrix as one block."""
    lr_factors: dict[str, float] = {}
    """Factors on the learning rate by part: vision, text, projector, or fnmatch patterns of parameter names;
    the first that fits counts."""
    muon_vision: bool = False
    """Also use Muon for the matrices of the vision tower."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm limit; "null" turns clipping off (the norm is still measured)."""


class MixSection(Section):
    """A change of the mixture inside a stage ([[stages.mix]])."""

    at: float = Field(ge=0, le=1)
    """Where it happens, as a share of the stage's steps."""
    weights: dict[str, float] = {}
    """New mixture weights by data source; empty keeps those in force."""
    vision_share: float | None = Field(None, ge=0, le=1)
    """New vision_share; "null" keeps the one in force."""
    ramp: Literal["step", "linear"] = "step"
    """Change at once, or evenly from the point before (that named the same) up to here."""

    @model_validator(mode="after")
    def _check(self) -> MixSection:
        if not self.weights and self.vision_share is None:
            raise ValueError("a mix point changes nothing: give it weights or a vision_share")
        return self


class StageSection(Section):
    name: str
    """Name of the stage; dotted overrides and overlay recipes address a stage by it."""
    steps: PositiveInt
    """Optimizer steps in this stage."""
    length: PositiveInt = 1024
    """Longest document in tokens."""
    tokens: PositiveInt = 4096
    """Tokens in one packed micro-batch."""
    lanes: PositiveInt = 1
    """Micro-batches in one optimizer step, over all ranks together."""
    max_patches: PositiveInt = 16384
    """Most image patches in one micro-batch."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning-rate shape after the warm-up: half cosine, or stable then linear decay."""
    lr: PositiveFloat | None = None
    """Peak learning rate; "null" takes optim.lr."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the stage's end as a share of the peak."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    decay_steps: NonNegativeInt = 0
    """wsd only: steps of linear fall at the end."""
    weights: dict[str, float] = {}
    """Mixture weight by data source; empty takes the weights of data.sources."""
    vision_share: float | None = Field(None, ge=0, le=1)
    """Share of the tokens in documents with a picture, whatever the weights; "null" lets the weights decide.
    """
    mix: list[MixSection] = []
    """Changes of weights or vision_share inside the stage, in the order of `at`."""
    skip: list[tuple[NonNegativeInt, PositiveInt]] = []
    """Steps of the stage's data to leave out, [first, end) each, for example around a loss spike."""
    frozen: list[str] = []
    """What is not trained: vision, text, projector, or fnmatch patterns of parameter names."""

    @model_validator(mode="after")
    def _check(self) -> StageSection:
        # A document never spans two micro-batches.
        if self.length > self.tokens:
            raise ValueError(
                f"length {self.length} is more than tokens {self.tokens}: raise tokens or lower length"
            )
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} + decay_steps {self.decay_steps} exceed steps {self.steps}"
            )
        # Ignored silently it would look as if it had been obeyed.
        if self.schedule == "cosine" and self.decay_steps:
            raise ValueError('decay_steps is for schedule = "wsd"; a cosine decays over the whole stage')
        for weights in (self.weights, *(point.weights for point in self.mix)):
            if any(w < 0 for w in weights.values()):
                raise ValueError("a mixture weight is negative; use 0 to leave a source out")
            if weights and not any(weights.values()):
                raise ValueError("every mixture weight is 0; give at least one source a positive weight")
        # Walked in order while training: an earlier point behind a later one would never be reached.
        places = [point.at for point in self.mix]
        if places != sorted(places):
            raise ValueError(f"mix points at {places}: put them in the order of `at`")
        # A line needs two ends.
        ramps = [point.ramp for point in self.mix if point.vision_share is not None]
        if self.vision_share is None and ramps[:1] == ["linear"]:
            raise ValueError("a linear ramp of vision_share needs the stage's vision_share to start from")
        if any(first >= end for first, end in self.skip):
            raise ValueError(
                f"skip = {[list(span) for span in self.skip]}: expected [first, end] with first < end"
            )
        return self


class TrainSection(Section):
    mixed_precision: Literal["no", "bf16"] = "no"
    """Autocast dtype of the forward and backward pass."""
    cpu_products: Literal["float32", "bfloat16", "auto"] = "float32"
    """Operands of large float32 products on a CPU; all else stays float32. auto: bfloat16 where the CPU has
    instructions for it and is measured to be quicker when the run begins; its head and its report say so."""
    recompute: Literal["no", "block", "layer"] = "no"
    """Keep no activations inside an AttnRes block, or inside a layer, nor inside a block of the tower, and
    compute them again in the backward pass: less memory for about a third more arithmetic. layer: for large
    AttnRes blocks; FSDP keeps the weights of a whole block while it is computed again."""
    threads: PositiveInt | None = None
    """torch CPU threads; "null" keeps torch's choice."""
    loss_weights: dict[str, float] = {}
    """Loss multiplier by data source; 1 where not named."""


class ShardSection(Section):
    dp_replicate: PositiveInt | None = None
    """Replicas of the model; null: what the other sizes leave of the processes."""
    dp_shard: PositiveInt = 1
    """Shards of weights, gradients and optimizer state (FSDP2); with dp_replicate it is HSDP."""
    ep: PositiveInt = 1
    """Processes that share out every layer's experts; divides dp_shard x cp."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds in which no process moves before they say where each of them is, and leave."""


class ParallelSection(ShardSection):
    cp: PositiveInt = 1
    """Processes that share a packed row of tokens (context parallel)."""
    pp: PositiveInt = 1
    """Processes of a pipeline, each with layers of its own."""
    pp_virtual: PositiveInt = 1
    """Pipeline stages of every process: more of them wait less (interleaved schedule), and send more."""
    encoder: Literal["joint", "decoupled"] = "joint"
    """decoupled: the pictures of a step are encoded before its decoder passes, dealt over all processes, and
    once more for the gradients: even work and no activations of the tower, for one more forward pass."""
    exchange_pictures: Literal["auto", "on", "off"] = "auto"
    """Pictures encoded where there is least vision work, whatever rank holds them: auto, in steps where the
    ranks' work differs by more than a tenth; on, in every step that gets more even; off, never. One process
    never does."""


class GuardSection(Section):
    policy: Literal["stop", "skip", "rollback"] = "skip"
    """What a non-finite or spiking step does: stop the run, skip the update, go back to the last checkpoint.
    """


class EvalSection(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    tasks: list[str] = []
    """Evaluations to run: easy_vqa, bpb, and every task of `earlyfusion eval`, as name or name:form."""
    data: dict[str, str] = {}
    """Task -> file or folder with its questions, for tasks that need one."""
    heldout: NonNegativeInt = 128
    """Held-out samples of each source whose loss is measured, up to one micro-batch of tokens; the last
    evaluation takes four times as many. 0: none."""
    samples: NonNegativeInt = 4
    """Sample pictures with answers per evaluation, one of each source at least; a text goes on for sources of
    text."""
    limits: dict[str, int] = {}
    """Most examples per task, in every evaluation."""
    limits_during: dict[str, int] = {}
    """The same before the end of the schedule: not for the last evaluation, unless run.steps ends the run
    early."""


class CheckpointSection(Section):
    every: NonNegativeInt = 0
    """Steps between training checkpoints; 0 saves only at the end and on a signal."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: NonNegativeInt = 0
    """Steps whose multiples are kept for good; 0 keeps none for good."""
    asynchronous: bool = False
    """Training goes on while a thread writes a copy in host memory (which must hold it)."""


class TrackSection(Section):
    log_every: PositiveInt = 10
    """Steps between records."""
    trackers: list[str] = []
    """Trackers of accelerate that get the numbers too, by name: tensorboard (pip install
    'earlyfusion[track]'), wandb, trackio, ..."""


class AdapterSection(Section):
    rank: PositiveInt | None = None
    """Rank of LoRA adapters: the weights stay, two thin matrices beside each are trained; "null": none."""
    alpha: PositiveFloat = 32.0
    """An adapter is added with the factor alpha / rank."""
    targets: list[str] = ["decoder.*.self_attn.*_proj*", "decoder.*.mlp.*", "decoder.*.shared_experts.*"]
    """Linear layers that get one, as fnmatch patterns of their names."""


class SandboxSection(Section):
    allow_weaker: bool = False
    """Run programs of the model although walls of the sandbox are missing on this machine
    (eval/sandbox/walls.py); every record then names those that are missing and those that stand. Otherwise
    that is an error."""


def without_preset(vision: Record) -> Record:
    """A [vision] with the fields that its preset stands for, below its own."""
    own = {key: value for key, value in vision.items() if key != "preset"}
    return VisionConfig.preset(vision["preset"]).model_dump(mode="json") | own


class RunConfig(Section):
    """The whole of a run. Build it with `compose.load_config`, which turns every mistake into one clear
    line."""

    run: RunSection = RunSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataConfig
    vision: VisionConfig
    model: ModelConfig
    optim: OptimSection = OptimSection()
    adapter: AdapterSection = AdapterSection()
    stages: list[StageSection] = Field(min_length=1)
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    guard: GuardSection = GuardSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    sandbox: SandboxSection = SandboxSection()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        """vision.preset becomes the preset's fields below the recipe's own; model.vocab_size follows the
        tokenizer."""
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        vision = raw.get("vision")
        # Before the check: a preset gives the fields that are required.
        if isinstance(vision, dict) and "preset" in vision:
            raw["vision"] = without_preset(vision)
        model = raw.get("model")
        if isinstance(model, dict) and model.get("vocab_size") is None:
            tokenizer = raw.get("tokenizer")
            size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
            # Token ids, like the size, come from the tokenizer at run time (with_vocabulary); these only fit.
            ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
            raw["model"] = {**ids, **model, "vocab_size": size or TokenizerSection().vocab_size}
        return raw

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages: two stages share a name: {', '.join(names)}")

        plan = self.parallel
        if self.adapter.rank and (plan.dp_shard, plan.ep, plan.pp, plan.cp) != (1, 1, 1, 1):
            raise ValueError(
                "adapter.rank trains a model that every process holds: dp_shard = ep = pp = cp = 1"
                " (dp_replicate is free)"
            )

        # A name that is no source would weigh nothing, and nobody would notice.
        named = [("train.loss_weights", self.train.loss_weights)]
        for stage in self.stages:
            named.append((f"stages.{stage.name}.weights", stage.weights))
            named += [(f"stages.{stage.name}.mix.weights", point.weights) for point in stage.mix]
        sources = [source.name for source in getattr(self.data, "sources", [])]
        for where, weights in named:
            for key in weights.keys() - sources:
                raise ValueError(f"{where}: no data source {key!r}; {did_you_mean(key, sources)}")
        return self

    @property
    def total_steps(self) -> int:
        """Steps that this run takes: all stages, or run.steps when that is less."""
        # Stopping early leaves the schedule as it is, so that a resume goes on with it.
        scheduled = sum(stage.steps for stage in self.stages)
        return scheduled if self.run.steps is None else min(scheduled, self.run.steps)

    def with_vocabulary(self, vocab_size: int, **token_ids: int) -> RunConfig:
        """The same run with `model.vocab_size` (and any token id fields of ModelConfig) as the tokenizer has
        them."""
        # Validated anew: ids must fit the size.
        model = self.model.model_dump(mode="json") | {"vocab_size": vocab_size, **token_ids}
        return self.model_copy(update={"model": ModelConfig.model_validate(model)})


def model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds (directly, optionally, or in a list), and whether it is a list."""
    # The schema is read for help and nearest names, so optional and list are looked through.
    origin = typing.get_origin(annotation)
    args = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    if origin is list and args:
        return model_in(args[0])[0], True
    if origin in (typing.Union, types.UnionType) and len(args) == 1:
        return model_in(args[0])
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    return None, False
