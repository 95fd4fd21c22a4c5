"""`earlyfusion bench rollouts`: whole answers beside divided ones, by engines that run and by engines that
are simulated; `bench drafts`: tokens of siblings proposed, beside none.

Real engines take turns in this process, each on a clock of its own that its steps and its moves of states
advance: what they compute is real, that they do it side by side is not. Lengths are drawn beforehand,
log-normal with a correlation within groups; no engine and no scheduler knows them. The simulator is given
what was measured of the engines' steps, and its error against the real clocks stands beside it. Then,
simulated alone: how the gain over whole answers goes with correlation, group size and cache, and the
conditions of Seer's table 3 for Moonlight on 64 engines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch.nn.functional import pad

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import (
    Event,
    PausedRequest,
    Prompt,
    Request,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.model.layers import Experts
from earlyfusion.pipeline.bench.engine import our_model
from earlyfusion.pipeline.bench.frame import alternate, compared, numbers, save_record
from earlyfusion.pipeline.config.compose import compose, load_config, validate
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import keep_freed_memory
from earlyfusion.rl.fleet.fleet import Fleet, Local
from earlyfusion.rl.fleet.schedule import PolicyName, Room
from earlyfusion.rl.fleet.simulate import Found, StepTime, found_of, heavy_tailed, simulate
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.prompts import PromptPool

PAGE = 16
ROWS = (1, 2, 4, 8, 12, 16)
"""Answers at once in the steps that are measured."""
PARTS = 4
"""Lengths at which steps are measured."""
SEER = StepTime(first=0.010, row=5e-5, held=9.3e-9, read=2e-5)
"""A guess at an H800 with Moonlight's 16B-A3B in bfloat16: 32 GB of weights at 3.35 TB/s, 31 kB of latents a
token at the same rate, and a twentieth of a millisecond an answer. Not measured."""
SEER_MEAN, SEER_LIMIT = 22_386, 65_536
"""Tokens of an answer."""
SEER_CASES = ((0.8, 300_000), (0.8, 600_000), (0.8, 1_100_000), (0.4, 600_000), (0.0, 600_000))
"""Correlation, and tokens that an engine's cache holds."""


class RolloutsOptions(Options):
    engines: PositiveInt = 4
    """engines"""
    slots: PositiveInt = 16
    """answers at once on an engine"""
    room: NonNegativeFloat = 0.5
    """an engine's cache, as a share of what the longest answers in all slots would take"""
    groups: PositiveInt = 96
    """groups of answers"""
    size: PositiveInt = 8
    """answers of a group"""
    mean: PositiveInt = 100
    """mean tokens of an answer"""
    limit: PositiveInt = 400
    """most tokens of an answer"""
    correlation: NonNegativeFloat = 0.8
    """of log-lengths within a group"""
    chunk: PositiveInt = 64
    """tokens of a part"""
    prompt: PositiveInt = 32
    """tokens of a prompt"""
    rounds: PositiveInt = 3
    """rounds, each policy once a round"""
    simulated: PositiveInt = 64
    """engines that are simulated alone"""
    out: str = "runs/bench/rollouts.json"
    """where the numbers are saved"""


class Clocked(Local):
    """An engine on a clock of its own. It ends answers at the lengths that were drawn for them."""

    now = 0.0
    """When what is happening happens; of all engines."""

    def __init__(self, engine: Engine, lengths: Sequence[Sequence[int]]) -> None:
        super().__init__(engine)
        self.lengths = lengths
        self.clock = self.busy = 0.0
        self.left: dict[tuple[str, int], int] = {}

    def start(self, part: PausedRequest) -> None:
        """Take a part, and the time that putting its states back takes."""
        self.clock = max(self.clock, Clocked.now)
        begun = time.perf_counter()
        super().start(part)
        self.engine.begin()
        self._spend(begun)
        group = int(part.request.id.partition("#")[0])
        for sample, number in zip(part.samples, part.request.numbers):
            self.left[part.request.id, sample.index] = self.lengths[group][number] - len(sample.ids)

    def step(self) -> list[Event]:
        """A step, by the clock."""
        begun = time.perf_counter()
        events = self.engine.step()
        self._spend(begun)
        for event in list(events):
            key = (event.request_id, event.index)
            self.left[key] -= len(event.tokens)
            if event.completion is not None:
                del self.left[key]
            elif not self.left[key]:
                self.engine.end_sample(*key)
                # What is known of it now is told at once, not in the next step.
                events += self.engine.scheduler.events
                self.engine.scheduler.events = []
                del self.left[key]
        return events

    def _spend(self, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self.clock += seconds
        self.busy += seconds


def requests_of(lengths: Sequence[Sequence[int]], limit: int, prompt: int) -> list[Request]:
    """One request a group; everything may become as long as the limit."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, group in enumerate(lengths):
        ids = torch.randint(6, 250, (prompt,), generator=generator)
        params = SamplingParams(limit, temperature=1.0, ignore_eos=True, n=len(group))
        found.append(Request(str(number), TokenPrompt(ids), params))
    return found


def real(
    engines: Sequence[Engine], lengths: Sequence[Sequence[int]], policy: PolicyName, options: RolloutsOptions
) -> Found:
    """All answers by these engines, in the order of their clocks."""
    Clocked.now = 0.0
    sites = [Clocked(engine, lengths) for engine in engines]
    # Everything waits in the scheduler: what an engine has room for is its decision.
    fleet = Fleet(sites, policy, options.chunk, max_waiting=1 << 20)
    for request in requests_of(lengths, options.limit, options.prompt):
        fleet.submit(request)
    ends: list[float] = []
    while fleet.requests:
        fleet.start()
        # The engine whose step ends first, as if all were under way.
        number = min((i for i, one in enumerate(sites) if one.engine.has_work), key=lambda i: sites[i].clock)
        fleet.turn(number)
        Clocked.now = sites[number].clock
        ends += [Clocked.now for event in fleet.events if event.completion is not None]
        fleet.events = []
    return found_of(ends, sum(map(sum, lengths)), [one.busy for one in sites], 0, fleet.scheduler.moves)


def new_engine(model: NativeFusion, options: RolloutsOptions) -> Engine:
    """An engine of the given slots and cache."""
    pages = -(-(options.prompt + options.limit) // PAGE) + 1
    held = max(pages, round(options.room * options.slots * pages))
    return Engine(model, None, max_slots=options.slots, page_size=PAGE, max_pages=held)


def measure_steps(engines: Sequence[Engine], options: RolloutsOptions) -> StepTime:
    """What a step of an engine takes, from steps of several sizes and lengths, and what a state's move takes.
    The engines take turns, as they will: each has weights of its own to bring back into the processor's
    memory."""
    measured: list[tuple[int, int, float]] = []
    read, moved = list[float](), list[float]()

    def timed(work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    steps = min(options.limit - 2, 4 * options.mean)
    for rows in [rows for rows in ROWS if rows <= options.slots]:
        requests = requests_of([[1]] * rows, options.limit, options.prompt)
        for engine in engines:
            for request in requests:
                engine.submit(request)
            read.append(timed(engine.step) / (rows * options.prompt))
        # At several lengths: attention reads all that is held.
        for part in range(PARTS):
            taken = [timed(engine.step) for _ in range(steps // PARTS) for engine in engines]
            held = rows * (options.prompt + (2 * part + 1) * steps // (2 * PARTS))
            measured.append((rows, held, statistics.median(taken)))
        for engine in engines:
            for request in requests:
                begun = time.perf_counter()
                engine.resume(engine.pause(request.id))
                engine.begin()
                moved.append(time.perf_counter() - begun)
                engine.cancel(request.id)
            engine.step()
    return StepTime.fit(measured, read=statistics.median(read), move=statistics.median(moved))


def figures(found: Found) -> dict[str, float]:
    """Rows of a table."""
    return {
        "seconds": found.seconds,
        "tail s": found.tail,
        "tokens/s": found.tokens_per_s,
        "idle": found.idle,
    }


def gains(
    lengths: Sequence[Sequence[int]],
    engines: int,
    room: Room,
    chunk: int,
    cost: StepTime,
    limit: int,
    prompt: int,
) -> Record:
    """Throughput and tail beside whole answers that are taken out where the cache is full."""
    base = simulate(lengths, engines, room, "request", chunk, cost, prompt=prompt, limit=limit, preempt=True)
    row: Record = {"taken out": base.preempted}
    for policy in ("divided", "context", "oracle"):
        found = simulate(lengths, engines, room, policy, chunk, cost, prompt=prompt, limit=limit)
        row[f"{policy}: throughput x"] = base.seconds / found.seconds
        row[f"{policy}: tail x"] = found.tail / base.tail
    return row


def sweeps(options: RolloutsOptions, room: Room, cost: StepTime) -> Record:
    """How the gain over whole answers goes with what it depends on, for this machine's engine."""

    def here(
        size: int = options.size, correlation: float = options.correlation, share: float = options.room
    ) -> Record:
        # As many answers whatever the size of the groups.
        groups = options.groups * options.size // size
        drawn = heavy_tailed(groups, size, options.mean, options.limit, correlation, seed=1)
        held = Room(room.slots, round(room.tokens * share / options.room), PAGE)
        return gains(drawn, options.engines, held, options.chunk, cost, options.limit, options.prompt)

    found: Record = {}
    for correlation in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95):
        found[f"correlation {correlation:g}"] = here(correlation=correlation)
    found |= {f"groups of {size}": here(size=size) for size in (4, 8, 16)}
    return found | {f"cache for {share:g} of the longest": here(share=share) for share in (0.25, 0.5, 1.0)}


def seer_conditions(engines: int) -> Record:
    """Lengths of Moonlight's rollouts, a hundred answers an engine."""
    found: Record = {}
    for correlation, budget in SEER_CASES:
        drawn = heavy_tailed(100 * engines // 8, 8, SEER_MEAN, SEER_LIMIT, correlation, seed=2, sigma=0.7)
        found[f"correlation {correlation:g}, {budget:,} tokens"] = gains(
            drawn, engines, Room(256, budget), 8192, SEER, SEER_LIMIT, 1000
        )
    return found


@verb
def rollouts(options: RolloutsOptions) -> None:
    """Entry of `earlyfusion bench rollouts`."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model = our_model(load_config(["nano"]).model.model_dump(mode="json"), torch.device("cpu"))
    engines = [new_engine(model, options) for _ in range(options.engines)]
    cost, room = measure_steps(engines, options), Local(engines[0]).room
    lengths = heavy_tailed(
        options.groups, options.size, options.mean, options.limit, options.correlation, seed=0
    )

    # Ours first: the others are compared with it.
    # The oracle is simulated alone: no scheduler of real engines is told the lengths.
    policies: dict[str, PolicyName] = {name: name for name in ("context", "divided", "request")}
    run = lambda side: figures(real(engines, lengths, policies[side], options))
    columns = compared(alternate(policies, options.rounds, run))
    show(f"{options.engines} real engines, each on its clock", columns)

    # The same rollout in the simulator, from what steps take alone.
    about: Record = {"prompt": options.prompt, "limit": options.limit}
    errors: Record = {}
    for policy in policies.values():
        guess = simulate(lengths, options.engines, room, policy, options.chunk, cost, **about)
        errors[policy] = {
            "simulated seconds": guess.seconds,
            "error": guess.seconds / columns[policy]["seconds"] - 1,
            "simulated tail s": guess.tail,
            "tail error": guess.tail / columns[policy]["tail s"] - 1,
        }
    show("the same, simulated", errors)
    sweep, seer = sweeps(options, room, cost), seer_conditions(options.simulated)
    show("simulated, beside whole answers: this machine's engine", sweep)
    show(f"simulated: {options.simulated} engines, lengths of Moonlight's rollouts (Seer, table 3)", seer)
    parts: Record = {"step_time": vars(cost), "simulated": errors, "sweep": sweep, "seer": seer}
    save_record(options.out, options.model_dump(mode="json"), comparison=columns, **parts)


PREFIXES = 8
"""Prompts that stay read for later answers, in `bench drafts`."""


class DraftsOptions(Options):
    model: str = "embedded:orchestrator"
    """model directory, or embedded:NAME"""
    recipe: str = "orchestrator"
    """recipe of reinforcement learning whose first prompts are answered"""
    groups: PositiveInt = 8
    """prompts"""
    answers: PositiveInt = 16
    """answers to a prompt"""
    sizes: str = "1,2,4,8,16"
    """answers at once"""
    temperature: NonNegativeFloat = 1.0
    """of the answers"""
    tokens: PositiveInt = 256
    """most tokens of an answer"""
    widen: PositiveInt = 1
    """experts so many times as wide, filled up with zeros: the same answers at a larger model's cost"""
    rounds: PositiveInt = 5
    """rounds, each side once a round"""
    out: str = "runs/bench/drafts.json"
    """where the numbers are saved"""


def draft_prompts(model: NativeFusion, tokenizer: Tokenizer, options: DraftsOptions) -> list[Prompt]:
    """What the recipe's tasks ask first."""
    config = validate(compose([options.recipe]), RLConfig)
    pool = PromptPool(config, tokenizer, model.config.vision)
    return [prompt.encoded for prompt in pool.draw(options.groups, 0, slice(None), lambda table: table)]


def widen(model: NativeFusion, times: int) -> None:
    """Experts of so many times the width that do what they did: the rest of their weights is zero."""
    for module in model.modules():
        if isinstance(module, Experts):
            # Gate rows first, then those of the other factor.
            parts = module.gate_up_proj.detach().chunk(2, dim=1)
            more = parts[0].shape[1] * (times - 1)
            joined = torch.cat([pad(part, (0, 0, 0, more)) for part in parts], dim=1)
            module.gate_up_proj = torch.nn.Parameter(joined)
            module.down_proj = torch.nn.Parameter(pad(module.down_proj.detach(), (0, more)))


def asked(prompts: Sequence[Prompt], answers: int, params: SamplingParams, name: str) -> list[Request]:
    """As `rl/fleet` asks for them: every answer a request, those of a prompt with their noise in common.

    name: of the round, whose answers are its own: an engine that has seen them would know what to draft.
    """
    return [
        Request(f"{name}/{i}/{k}", prompt, params, pieces=False, noise=f"{name}/{i}", numbers=(k,))
        for i, prompt in enumerate(prompts)
        for k in range(answers)
    ]


def in_turn(engines: dict[str, Engine], requests: Sequence[Request]) -> dict[str, float]:
    """Seconds of each engine, which take their steps in turn: a machine's pace changes from second to second,
    and both meet the same."""
    spent, order = dict.fromkeys(engines, 0.0), list(engines.items())
    for engine in engines.values():
        for request in requests:
            engine.submit(request)
    while any(engine.has_work for engine in engines.values()):
        # Who goes first is slower by a fiftieth.
        order.reverse()
        for side, engine in order:
            begun = time.perf_counter()
            if engine.has_work:
                engine.step()
                spent[side] += time.perf_counter() - begun
    return spent


@verb
def drafts(options: DraftsOptions) -> None:
    """Entry of `earlyfusion bench drafts`."""
    keep_freed_memory()
    torch.set_num_threads(1)
    folder = model_folder(options.model)
    # As in a run: the compiled engine takes float32.
    model, tokenizer = load_model(folder, dtype=torch.float32).eval(), Tokenizer.load(folder)
    widen(model, options.widen)
    prompts = draft_prompts(model, tokenizer, options)
    parts: Record = {}
    for size in numbers(options.sizes):
        params = SamplingParams(options.tokens, options.temperature, logprobs=True)
        longest = max(len(prompt.ids) for prompt in prompts) + options.tokens
        pages = (size + PREFIXES) * (-(-longest // PAGE) + 2)
        engines = {
            side: Engine(
                model,
                tokenizer,
                max_slots=size,
                page_size=PAGE,
                max_pages=pages,
                prefix_cache=PREFIXES,
                speculate=on,
            )
            for side, on in (("drafts", True), ("plain", False))
        }
        # Once for what is only slow at first: the odds and the costs of a run that has been going for long.
        first = asked(prompts, options.answers, params, "first")
        written = [[done.ids for done in engine.generate(first)] for engine in engines.values()]
        before = engines["drafts"].stats()
        rounds = []
        for number in range(options.rounds):
            rounds.append(in_turn(engines, asked(prompts, options.answers, params, str(number))))
        after = engines["drafts"].stats()
        new = {name: after[name] - before[name] for name in after}
        row: Record = {"ratio": statistics.median(one["plain"] / one["drafts"] for one in rounds)}
        for side in engines:
            row[f"{side}: tokens/s"] = new["decoded_tokens"] / sum(one[side] for one in rounds)
        for name in ("drafted_tokens", "accepted_drafts"):
            row[f"{name}/token"] = new[name] / new["decoded_tokens"]
        parts[f"{size} at once"] = row | {"same tokens": written[0] == written[1]}
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    show(f"answers of {options.model} ({millions:,.1f}M parameters) with drafts of siblings", parts)
    save_record(options.out, options.model_dump(mode="json"), **parts)
