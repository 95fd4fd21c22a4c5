"""The schema of a reinforcement learning run: what `earlyfusion rl RECIPE` may hold.

A recipe is TOML with the sections `run tasks rollout roles reward objective correction stale length overlong
toggle repeat temperature curriculum ptx data optim train guard eval checkpoint track log sandbox`. `tasks` is
a list: one entry for each task, level of difficulty and form of the prompt.

    [[tasks]]
    name = "counting"
    difficulty = 1
    weight = 2.0
    form = "picture"

`entry_of` finds an entry by the label it has in tables and files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import FORMS
from earlyfusion.data.tasks.registry import known
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline.config.compose import SHIPPED
from earlyfusion.pipeline.config.schema import (
    AdapterSection,
    CheckpointSection,
    GuardSection,
    OptimSection,
    RunSection,
    SandboxSection,
    Section,
    ShardSection,
    TrackSection,
)
from earlyfusion.rl.environments import base as environments
from earlyfusion.rl.fleet.schedule import PolicyName
from earlyfusion.rl.objectives.length import LengthRewardConfig, OverlongConfig, RepeatConfig, ToggleConfig
from earlyfusion.rl.objectives.losses import CorrectionConfig, ObjectiveConfig, StaleConfig

RECIPES = Path(__file__).parent / "recipes"
"""Shipped recipes of reinforcement learning."""
SHIPPED.append(RECIPES)

SHORTEST_CALL = 32
"""Tokens of the shortest call of a tool, markup included, and its end."""


def start_directory(config: RLConfig) -> Path:
    """The model directory a run starts from. Raises UserError when run.init_from names none or an unknown
    one."""
    if config.run.init_from is None:
        raise UserError(
            "reinforcement learning needs a model to start from: --init-from DIR, or --init-from"
            " embedded:skills"
        )
    return model_folder(config.run.init_from)


class TemperatureConfig(Section):
    """Sampling temperature: high first, to explore; lower later."""

    start: PositiveFloat = 1.0
    """Temperature of the first update."""
    end: PositiveFloat = 1.0
    """Temperature from `updates` on."""
    updates: NonNegativeInt = 0
    """Updates from start to end."""


class CurriculumConfig(Section):
    """Which prompts are drawn, and how often."""

    mode: Literal["uniform", "hard_after_warmup", "easy_to_hard"] = "uniform"
    """hard_after_warmup: all prompts alike, then only those that are seldom solved (k1.5); easy_to_hard: the
    hardest allowed level of the tasks grows evenly from `start_difficulty` to 1."""
    warmup_updates: NonNegativeInt = 0
    """Updates until only hard prompts are left, or until all are allowed."""
    hard_from: float = Field(0.5, ge=0, le=1)
    """Failure rate from which a prompt is hard."""
    start_difficulty: float = Field(0.3, ge=0, le=1)
    """Hardest level at the start of easy_to_hard, as a share of the task's highest."""
    prioritised: bool = False
    """Draw prompts in proportion to 1 - success rate."""
    floor: float = Field(0.05, ge=0, le=1)
    """Smallest weight of a prompt that is allowed, so that no skill is forgotten unseen."""


def temperature(config: TemperatureConfig, update: int) -> float:
    """Sampling temperature of an update: `start` at 0, `end` from `updates` on. K2 starts high and cools
    down."""
    # Also for updates = 0, where there is nothing to interpolate.
    if update >= config.updates:
        return config.end
    share = max(0, update) / config.updates
    return config.start + (config.end - config.start) * share


class TaskEntry(Section):
    """One kind of prompt."""

    name: str
    """Task of data/tasks: counting, colour_shape, relation, grounding, pointing, polygon, ocr, chart_value,
    jigsaw, maze, odd_one_out, geometry, arithmetic, needle, rule, shelf, gather, collection, text_math, or
    "file": your own questions (data/tasks/file.py); or "package.module:Class" of your own."""
    difficulty: NonNegativeInt = 0
    """Level of the task."""
    weight: NonNegativeFloat = 1.0
    """Share of the prompts, relative to the other entries."""
    form: Literal["picture", "twin", "rendered"] = "picture"
    """picture: what is seen; twin: told in words; rendered: those words drawn as a picture."""
    chat: bool = False
    """Ask in the chat form, in place of "Q: ... A:"; the reward sees the response alone."""
    thought: bool = False
    """Ask to tell what there is before answering; in the chat form, open the thinking channel."""
    tools: bool = False
    """Ask in the chat form and let the answer call python(code), which runs in the sandbox with the picture
    as a file."""
    environment: str | None = None
    """What answers the model, turn by turn (rl/environments): functions, gymnasium, openenv, swarm,
    verifiers, or package.module:Class of your own."""
    environment_options: dict[str, Any] = {}
    """Its options."""
    isolated: bool = False
    """Run it in a process for each answer, for code that may hang or die."""
    turns: PositiveInt | None = None
    """Most replies of the tool or environment; rollout.tool_turns if not given."""
    reply_tokens: PositiveInt | None = None
    """Most tokens of a reply, pictures included; rollout.tool_output_tokens if not given."""
    # Shaping belongs to the entry: a task that pays partial credit stands beside one that does not.
    power: PositiveFloat = 1.0
    """Its rewards are scores to this power, with the sign they had. 1 pays partial credit as it is, which
    teaches a cautious middle (2 where 1 and 3 are likely); a high power pays for right answers alone."""
    options: dict[str, Any] = {}
    """Options of the task, such as { path = "gsm8k" } of text_math."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return known(name)

    @property
    def label(self) -> str:
        """ "counting/1/picture", with "/chat", "/thought" and "/tools" where they are asked for; of a file
        with its name: "file:mine/0/picture"."""
        name = self.name
        if name == "file":
            name = f"file:{Path(str(self.options.get('path', ''))).name.split('.')[0]}"
        extra = [f"/{way}" for way in ("chat", "thought", "tools") if getattr(self, way)]
        extra += [f"/{self.environment.rpartition(':')[2]}"] if self.environment else []
        return f"{name}/{self.difficulty}/{self.form}{''.join(extra)}"

    @model_validator(mode="after")
    def _one_way_to_think(self) -> TaskEntry:
        if self.tools and self.thought:
            raise ValueError(
                "thought and tools together: in the chat form a model thinks in a channel; drop thought"
            )
        if self.place and self.chat:
            raise ValueError(
                "chat with tools or an environment: they are always asked in the chat form; drop chat"
            )
        if self.tools and self.environment:
            raise ValueError("tools and environment together: an answer has one of them; drop one")
        if self.environment:
            environments.known_environment(self.environment)
        elif self.environment_options or self.isolated:
            raise ValueError("environment_options and isolated are for an environment; name one")
        return self

    @property
    def place(self) -> str | None:
        """The environment's name; None for an answer of one message."""
        return "python" if self.tools else self.environment


class RolloutSection(Section):
    # Of all processes together, so that their number does not change what is learned.
    prompts: PositiveInt = 32
    """Prompts of one iteration, over all processes together (N)."""
    group_size: int = Field(8, ge=1)
    """Answers to each prompt (K)."""
    max_new_tokens: PositiveInt = 8
    """Most tokens of an answer."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampling distribution."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Smallest probability, relative to the likeliest token's."""
    slots: PositiveInt = 128
    """Answers that are written at a time, by one process."""
    prefill_chunk: PositiveInt = 2048
    """Prompt tokens read in one step of the engine."""
    pool: NonNegativeInt = 0
    """Problems that are drawn again and again, for each task entry; 0 makes a new problem for every prompt.
    """
    token_cap: PositiveInt | None = None
    """Partial rollout (k1.5): a prompt whose unfinished answers have each written this many tokens in this
    iteration is paused and goes on in the next; "null": off."""
    prompt_cache_mb: PositiveInt = 1024
    """Pictures of prompts held by one process, in MiB; beyond it they are read again when they are needed."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out and counted, never cut: a cut could go through a picture. "null": no limit.
    """
    fraction: float = Field(1.0, gt=0, le=1)
    """Partial rollout (K3): an iteration ends when this share (lambda) of a process's answers is finished;
    groups that are complete are trained, the others go on first in the next one."""
    replay_routing: bool = True
    """Train with the experts that the engine chose (routing replay, R3), where the model has any."""
    dtype: Literal["same", "bfloat16"] = "same"
    """Weights of the engine: the trained ones themselves, or a bfloat16 copy made before every iteration."""
    tool_turns: PositiveInt = 2
    """Messages with tool calls in one answer (each of at most 8 calls); a further one ends it, without an
    answer."""
    tool_output_tokens: int = Field(256, ge=64)
    """Most tokens of one tool turn, markup included; longer outputs are cut. They do not count as
    max_new_tokens."""
    tool_timeout_s: PositiveFloat = 5.0
    """Seconds of CPU time after which a program is stopped; by the clock, which a busy machine slows, twice
    as many."""
    step_timeout_s: PositiveFloat = 60.0
    """Seconds by the clock after which a step of an environment is given up, with its answer."""
    ordered: bool = True
    """A reply joins the engine a fixed number of engine steps after the message, so that counters repeat
    whatever the clock does; false: as soon as it is there, for slow environments."""
    resample: NonNegativeInt = 0
    """Dynamic sampling (DAPO): most times that prompts whose answers all earn the same are replaced by new
    ones."""


class RolesSection(Section):
    """Who writes answers. Processes of the launch train; each may have engines of its own beside it."""

    engines: NonNegativeInt = 0
    """Engines in processes of their own, for every process that trains; on GPUs each takes a device after
    those of the trainers. 0: the engine lives in the process that trains, and they take turns."""
    ahead: NonNegativeInt = 0
    """Iterations whose prompts are in work beside the one that is waited for. 0: all answers are of the
    newest weights; 1: engines write while there is training, one step off policy; more: the same with longer
    queues. Answers go on with new weights where they are, and `stale.max_lag` bounds what is trained of
    them."""
    policy: PolicyName = "context"
    """Which answers are written where (rl/fleet/schedule.py): request, divided, context."""
    chunk: PositiveInt = 256
    """Tokens of an answer before it may move to another engine."""
    servers: list[str] = []
    """In place of engines of our own: OpenAI-compatible servers that take and tell token ids
    ("http://localhost:8000/v1"), started on the model that the run begins with (rl/fleet/served.py)."""
    weights_to: str = "weights"
    """Folder, seen by the servers, that they are given new weights in."""
    reload: Literal["update_weights_from_disk", "update_weights"] = "update_weights_from_disk"
    """The route by which they take it: that one (SGLang, earlyfusion serve), or without a folder vLLM's
    update_weights, over NCCL (rl/weightsync/vllm.py)."""


class JudgeSection(Section):
    model: str
    """An OpenAI-compatible endpoint (http://localhost:8000/v1), a model directory, or hf:PATH."""
    name: str | None = None
    """Model name at the endpoint; "null" takes the first that it lists."""
    kind: Literal["rubrics", "score"] = "rubrics"
    """rubrics: a generative judge is asked; score: hf:PATH is a reward model whose one output is the
    reward."""
    weight: float = Field(1.0, gt=0, le=1)
    """1: the judge alone decides. Below 1: its share of the reward of answers that earn something without it.
    """


class RewardSection(Section):
    name: str | list[str] = "task"
    """task (each task's own), random (control arm), or package.module:function (eval/rewards.py), which may
    return any finite number; or a list of these."""
    weights: list[FiniteFloat] = []
    """Weight of each in the sum; 1 if not given."""
    anneal_updates: NonNegativeInt = 0
    """Updates over which the weights of all functions but the first fall evenly to 0; 0 keeps them."""
    low: FiniteFloat = 0.0
    """Lowest of your rewards: what an answer earns that could not be scored, or that exceeds Toggle's budget.
    """
    high: FiniteFloat = 1.0
    """Highest of your rewards: what a right answer earns. Rewards outside are not cut, but counted."""
    judge: JudgeSection | None = None
    """A judge or a reward model, alone or on top (rl/judge.py). Not given: none."""
    # Bounds of what a run did not write itself; the tasks of the project run without them.
    timeout_s: PositiveFloat = 10.0
    """Deadline of one call of a reward function of yours."""
    workers: PositiveInt = 2
    """Calls at a time."""
    memory_mb: PositiveInt | None = 512
    """Memory of one worker process beyond its imports; "null" for no limit."""

    @property
    def of_tasks(self) -> bool:
        """Whether the tasks themselves pay, and nothing else."""
        names = [self.name] if isinstance(self.name, str) else self.name
        return names in (["task"], ["random"]) and not self.weights and self.judge is None

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        if not self.low < self.high:
            raise ValueError(f"reward.low={self.low:g}, reward.high={self.high:g}: expected low below high")
        names = [self.name] if isinstance(self.name, str) else self.name
        if not names or (self.weights and len(self.weights) != len(names)):
            raise ValueError(
                f"reward.weights: {len(self.weights)} for {len(names)} functions; give one for each"
            )
        if self.judge is not None and self.judge.kind == "score" and not self.judge.model.startswith("hf:"):
            raise ValueError(f"reward.judge.model={self.judge.model!r}: kind 'score' takes hf:PATH")
        return self


class TrainSection(Section):
    updates: PositiveInt = 100
    """Iterations: rollouts, then training on them. One whose answers teach nothing counts (and so do the
    schedules of learning rate, temperature and curriculum, which are functions of its number), but makes no
    step: "empty" of the log."""
    epochs: PositiveInt = 1
    """Passes over the answers of one iteration."""
    minibatches: PositiveInt = 1
    """Updates in one pass; prompts are shared out evenly."""
    row_tokens: PositiveInt = 8192
    """Most tokens of one packed row (a longer document makes a row of its own)."""
    old_policy: Literal["engine", "trainer"] = "engine"
    """Whose log-probabilities are pi_old: the engine's (K2.5), or the trainer's own before the first update
    (then `correction` weighs the gap to the engine)."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Autocast dtype of training; the engine always computes in the weights' dtype."""
    threads: PositiveInt | None = None
    """torch CPU threads; "null" keeps torch's choice."""
    # The same words as stages.frozen of pretraining.
    frozen: list[str] = []
    """What is not trained: vision, text, projector, or fnmatch patterns of parameter names."""
    warmup_updates: NonNegativeInt = 0
    """Updates of linear rise of the learning rate."""
    final_lr_ratio: float = Field(1.0, ge=0, le=1)
    """Learning rate of the last update as a share of the first, falling linearly."""


class PtxSection(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of the language-model loss on curated data, which is divided by its own tokens."""
    tokens: PositiveInt = 2048
    """Tokens of curated data beside each update."""
    length: PositiveInt = 512
    """Longest document of it."""
    max_patches: PositiveInt = 8192
    """Most image patches of it."""
    only: bool = False
    """No reinforcement learning at all: the control arm that trains on curated data alone (coef counts as 1).
    """


class EvalSection(Section):
    # Held-out problems are of the split that no training prompt is drawn from.
    every: NonNegativeInt = 0
    """Updates between measurements on held-out problems; 0 measures at the start and at the end."""
    problems: NonNegativeInt = 128
    """Held-out problems for each entry; 0 measures nothing."""
    tasks: list[TaskEntry] = []
    """What is measured; empty: the task entries of training."""
    seed: NonNegativeInt = 12345
    """Which held-out problems."""
    samples: NonNegativeInt = 0
    """Sampled answers for each problem (pass@k), beside the greedy one."""


class RLCheckpointSection(CheckpointSection):
    models: bool = False
    """A model directory (models/update-NNNNNN) at every checkpoint too, to be measured, served or started
    from."""


class LogSection(Section):
    rollouts_every: PositiveInt = 10
    """Updates between records of rollouts (rollouts.jsonl, with their pictures)."""
    groups: PositiveInt = 8
    """Groups in one record."""


def replies_of(rollout: RolloutSection, entry: TaskEntry) -> int:
    """Most tokens that tools or an environment put into an answer."""
    turns, each = entry.turns or rollout.tool_turns, entry.reply_tokens or rollout.tool_output_tokens
    return turns * each if entry.place else 0


# One section a concept, in the order in which an iteration meets them.
class RLConfig(Section):
    """A whole run. Build it with `compose.load_config(..., schema=RLConfig)`."""

    run: RunSection = RunSection(name="rl")
    tasks: list[TaskEntry] = Field(min_length=1)
    """The prompts."""
    rollout: RolloutSection = RolloutSection()
    roles: RolesSection = RolesSection()
    reward: RewardSection = RewardSection()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig = CorrectionConfig()
    stale: StaleConfig = StaleConfig()
    length: LengthRewardConfig = LengthRewardConfig()
    overlong: OverlongConfig = OverlongConfig()
    toggle: ToggleConfig = ToggleConfig()
    repeat: RepeatConfig | None = None
    """Penalty for repetitions; they are also ended early. Not given: off."""
    temperature: TemperatureConfig = TemperatureConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    ptx: PtxSection = PtxSection()
    data: DataConfig | None = None
    """Curated documents of the PTX loss."""
    optim: OptimSection = OptimSection(lr=5e-4, weight_decay=0.0)
    adapter: AdapterSection = AdapterSection()
    train: TrainSection = TrainSection()
    parallel: ShardSection = ShardSection()
    guard: GuardSection = GuardSection()
    eval: EvalSection = EvalSection()
    checkpoint: RLCheckpointSection = RLCheckpointSection()
    track: TrackSection = TrackSection()
    log: LogSection = LogSection()
    sandbox: SandboxSection = SandboxSection()

    @model_validator(mode="after")
    def _check(self) -> RLConfig:
        rollout, train, ptx = self.rollout, self.train, self.ptx

        # Tasks, and tools among them.
        # Labels name columns of metrics and lines of measurements, so no two may be one.
        labels = [entry.label for entry in self.tasks]
        if len(set(labels)) != len(labels):
            twice = max(labels, key=labels.count)
            raise ValueError(f"tasks: two entries are the same: {twice}; add up their weights")
        if not any(entry.weight for entry in self.tasks):
            raise ValueError("tasks: every weight is 0; give at least one a positive weight")
        if self.reward.of_tasks and (self.reward.low, self.reward.high) != (0.0, 1.0):
            if not any(entry.environment for entry in self.tasks):
                raise ValueError(f"reward.name={self.reward.name!r} pays 0 to 1; leave out low and high")
        # A paused conversation would need the state of its running program as well.
        if self.has_tools and self.partial:
            raise ValueError(
                "tasks with tools and partial rollouts together: drop rollout.token_cap and rollout.fraction,"
                " or tools"
            )
        if any(entry.tools for entry in self.tasks) and rollout.max_new_tokens < SHORTEST_CALL:
            raise ValueError(
                f"tasks with tools and rollout.max_new_tokens {rollout.max_new_tokens}: a call alone takes"
                f" {SHORTEST_CALL} tokens and more; programs of the SFT recipes take up to 400"
            )

        # Groups and minibatches that leave something to learn from.
        if rollout.group_size == 1 and self.objective.baseline != "none" and not ptx.only:
            raise ValueError(
                "rollout.group_size = 1: a group of one has no advantage; use 2 or more, or baseline none"
            )
        if train.minibatches > rollout.prompts:
            raise ValueError(
                f"train.minibatches {train.minibatches} is more than rollout.prompts {rollout.prompts}"
            )

        # Engines of their own.
        roles = self.roles
        if roles.ahead and not (roles.engines or roles.servers):
            raise ValueError(
                "roles.ahead without roles.engines: nobody would write meanwhile; set roles.engines"
            )
        drawn = self.temperature.start, self.temperature.end, rollout.top_p, rollout.min_p
        if roles.servers and (roles.engines or rollout.replay_routing or drawn != (1, 1, 1, 0)):
            raise ValueError(
                "roles.servers: expected roles.engines = 0, rollout.replay_routing = false (they do not tell"
                " experts), and temperature.start = temperature.end = 1 without top_p and min_p (of their"
                " log-probabilities)"
            )
        if roles.ahead and (self.has_tools or rollout.token_cap is not None or rollout.fraction < 1):
            raise ValueError(
                "roles.ahead with tools, rollout.token_cap or rollout.fraction: expected answers of one"
                " message, which are waited for whole"
            )
        if roles.ahead and self.temperature.start != self.temperature.end:
            raise ValueError(
                "roles.ahead with a temperature that changes: an answer would be drawn at several; set"
                " temperature.start = temperature.end"
            )
        if roles.policy == "oracle":
            raise ValueError(
                "roles.policy 'oracle' knows lengths beforehand; expected request, divided or context"
            )

        # Curated documents.
        if (ptx.coef or ptx.only) and self.data is None:
            raise ValueError("ptx.coef is above 0 but there is no [[data.sources]] to take documents from")
        if ptx.length > ptx.tokens:
            raise ValueError(f"ptx.length {ptx.length} is more than ptx.tokens {ptx.tokens}")
        self._check_silent()
        return self

    def _check_silent(self) -> None:
        """ValueError for settings that would do nothing, or another thing than they say."""
        rollout, train, objective = self.rollout, self.train, self.objective
        correction, overlong = self.correction, self.overlong
        # A limit that no answer reaches would be a penalty that never comes.
        limit = overlong.max_tokens or rollout.max_new_tokens
        if limit > rollout.max_new_tokens:
            raise ValueError(
                f"overlong.max_tokens {limit} is more than rollout.max_new_tokens {rollout.max_new_tokens}:"
                " no answer would ever be overlong; leave it out to use that limit"
            )
        if overlong.mode == "soft" and not 0 < overlong.buffer_tokens < limit:
            raise ValueError(
                f"overlong.buffer_tokens {overlong.buffer_tokens}: the soft penalty needs 1 to {limit - 1}"
            )
        if correction.mode != "none" and correction.level == "token" and objective.ratio != "token":
            raise ValueError(
                f"correction.level='token' does not fit objective {objective.name!r}, which has one ratio for"
                " each answer; set correction.level to 'sequence' or 'geometric'"
            )
        # Where pi_old is the trainer's own, tokens of older weights need a weight of their own.
        # (Otherwise the weights of an older update would be taken for those of this one.)
        own = "train.old_policy 'trainer'" if train.old_policy == "trainer" else ""
        if rollout.top_p < 1 or rollout.min_p > 0:
            own = f"rollout.top_p {rollout.top_p:g}, min_p {rollout.min_p:g}"
        if own and self.partial and correction.mode == "none":
            raise ValueError(
                f"{own} in partial rollouts: pi_old is then the trainer's own, and tokens of older weights"
                " would count as drawn by it; set correction.mode (tis, mis or reject)"
            )
        # Adam without memory steps by the sign of the gradient, whatever its size.
        if objective.reset_optimizer and train.epochs * train.minibatches == 1 and not self.ptx.only:
            raise ValueError(
                "objective.reset_optimizer with one update in an iteration: the first step of an optimizer"
                " without memory goes by the gradient's sign alone; set train.epochs or train.minibatches"
                " above 1 (k1.5 takes many), or reset_optimizer = false"
            )
        if self.toggle.every and not rollout.pool:
            raise ValueError(
                "toggle with rollout.pool = 0: every prompt is a new problem, so there is no budget of a"
                " problem; set rollout.pool"
            )

    @property
    def partial(self) -> bool:
        """Whether answers may go on in a later iteration."""
        return self.rollout.token_cap is not None or self.rollout.fraction < 1 or self.roles.ahead > 0

    @property
    def has_tools(self) -> bool:
        """Whether some prompts are answered with tools or an environment."""
        return any(entry.place for entry in self.tasks)

    @property
    def longest_answer(self) -> int:
        """Most tokens behind a prompt, with the outputs of tools."""
        rollout = self.rollout
        # The engine holds what tools said beside what was generated.
        replies = [replies_of(rollout, entry) for entry in (*self.tasks, *self.eval.tasks)]
        return rollout.max_new_tokens + max(replies)

    @property
    def watched(self) -> bool:
        """Whether answers are looked at while they are written: partial rollouts, and answers that run in
        circles."""
        paused = self.rollout.token_cap is not None or self.rollout.fraction < 1
        return paused or self.repeat is not None

    @property
    def measured(self) -> list[TaskEntry]:
        """What is measured."""
        return list(self.eval.tasks or self.tasks)

    @property
    def total_updates(self) -> int:
        """Iterations that this run takes: train.updates, or run.steps when that is less."""
        return self.train.updates if self.run.steps is None else min(self.train.updates, self.run.steps)


# Task, level, form and how it is answered; all but the task may be left out.
_LABEL = re.compile(rf"([^/]+)(?:/(\d+)(?:/({'|'.join(FORMS)}))?)?(/chat)?(?:/(thought|tools))?")


def entry_of(label: str) -> TaskEntry:
    """TaskEntry of "counting", "counting/1", "counting/1/twin", "counting/1/twin/thought" or
    "counting/1/twin/tools". Raises DataError."""
    # A label is what tables and files show, so what is read there can be asked for again.
    match = _LABEL.fullmatch(label)
    if match is None:
        raise DataError(
            f"{label!r}: expected task, task/difficulty or task/difficulty/form, form one of"
            f' {", ".join(FORMS)}, with "/chat" for the chat form, "/thought" for answers after a thought,'
            ' "/tools" for answers with Python'
        )
    name, level, form, chat, how = match.groups()
    if name.startswith("file"):
        raise DataError(
            f"{label!r}: a file's questions need its options; name a recipe with --recipe, or take"
            " `earlyfusion eval --tasks file --data PATH`"
        )
    about = {"difficulty": level or 0, "form": form or "picture", how or "tools": how is not None}
    return TaskEntry.model_validate({"name": known(name), "chat": chat is not None, **about})
