"""`earlyfusion bench environments`: how well slow environments keep the engine busy; `bench swarm`: how much
sooner a group of sub-agents is done side by side.

Many conversations of a few turns at once, each with a scripted environment that takes its time; the model is
`nano` with random weights, made to end its messages after some thirty tokens. Replies that join as soon as
they are there (rollout.ordered = false) beside replies after a fixed number of engine steps. busy: of the
time in which there was a request for the engine, the share that was spent inside it (its steps, and taking
requests); the rest is what happens in between.

Of a swarm the same assignments run four at a time and one at a time, by the clock: sub-agents that search and
read a collection and wait before every message, as for a server, and sub-agents that this machine's engine
writes (nano's shape, random weights), where a batch shares what a step costs.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveInt

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.options import Options, verb
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.collection import Collection
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.engine import pack_prompts
from earlyfusion.model.engine.requests import TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.layers import moe_layers
from earlyfusion.pipeline.bench.frame import Result, alternate, compared, run_side, save_record
from earlyfusion.pipeline.build import fusion_config
from earlyfusion.pipeline.config.compose import load_config, validate
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.environments.base import Environment, Step
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.episodes import Episodes
from earlyfusion.rl.rollouts.experience import Collector
from earlyfusion.rl.rollouts.prompts import PromptPool
from earlyfusion.rl.swarm.agents import Limits, Local, Scripted, Speaker
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.plans import AGENT
from earlyfusion.rl.swarm.reader import Reader
from earlyfusion.rl.train import build_engine

END_LOGIT = 9.0
"""Of the end of a message, the others lying around 0: messages of about thirty tokens."""


class Slow(Environment):
    """Says the same after every message, `latency_s` later, for `turns` turns."""

    def __init__(self, latency_s: float, turns: int) -> None:
        self.latency_s, self.left = latency_s, turns

    def reset(self, problem: Problem) -> list[Message]:
        """The same question for all."""
        return [Message("user", (Text("what is next?", 0.0),))]

    async def step(self, message: Message) -> Step:
        """The reply, paid at the end."""
        await asyncio.sleep(self.latency_s)
        self.left -= 1
        return Step((Message("user", (Text("and then?", 0.0),)),), None if self.left else 1.0, not self.left)


async def late(problem: Problem, response: str) -> float:
    """A reward of nothing that takes 60 ms, as one that asks somebody would."""
    await asyncio.sleep(0.06)
    return 0.0


class EnvironmentsOptions(Options):
    conversations: PositiveInt = 1024
    """conversations at once"""
    turns: PositiveInt = 4
    """turns of each"""
    latency_ms: NonNegativeFloat = 100.0
    """what the environment takes for a reply"""
    slots: PositiveInt = 128
    """conversations that the engine writes at once"""
    rounds: PositiveInt = 2
    """rounds, each side once a round"""
    out: str = "runs/bench/environments.json"
    """where the numbers are saved"""


class SwarmOptions(Options):
    assignments: PositiveInt = 8
    """assignments of one message"""
    concurrent: PositiveInt = 4
    """sub-agents at work at a time"""
    latency_ms: NonNegativeFloat = 100.0
    """what a sub-agent waits before each of its messages"""
    tokens: PositiveInt = 96
    """tokens that a sub-agent writes on this machine's engine"""
    rounds: PositiveInt = 3
    """rounds, each side once a round"""
    out: str = "runs/bench/swarm.json"
    """where the numbers are saved"""


@torch.no_grad()
def brief(model: NativeFusion, tokenizer: Tokenizer) -> NativeFusion:
    """The model with END_LOGIT at the end of a message, whatever it reads."""
    words = [tokenizer.bos_id, *tokenizer.encode("what is next? and then? it is a red circle.")]
    hidden_TD = model.eval().hidden(pack_prompts(model, [TokenPrompt(torch.tensor(words))]))
    mean_D = hidden_TD.mean(0)
    model.decoder.head_weight()[tokenizer.end_of_msg_id] = mean_D * END_LOGIT / mean_D.square().sum()
    return model


def measured(side: str, conversations: int, turns: int, latency_ms: float, slots: int) -> Result:
    """One side: all conversations from the first prompt to the last reply, in this process."""
    group = 4
    recipe: Record = {
        "run": {"name": "bench"},
        "tasks": [
            {
                "name": "episode",
                "environment": f"{__name__}:Slow",
                "environment_options": {"latency_s": latency_ms / 1000, "turns": turns},
                "turns": turns,
                "reply_tokens": 64,
            }
        ],
        "rollout": {
            "prompts": max(1, conversations // group),
            "group_size": group,
            "max_new_tokens": 64 * turns,
            "slots": slots,
            "ordered": side == "ordered",
        },
        "train": {"threads": 1},
    }
    config = validate(recipe, RLConfig)
    folder = model_folder("embedded:skills")
    tokenizer, runtime = Tokenizer.load(folder), Runtime()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = fusion_config(load_config(["nano"]), tokenizer.media_pad_id)
    model = brief(NativeFusion(shape), tokenizer)
    engine = build_engine(config, model, tokenizer, folder, runtime)
    pool = PromptPool(config, tokenizer, model.config.vision)
    collector = Collector(config, pool, engine, runtime, bool(moe_layers(model)))

    # Time without any request: waiting for replies with nothing else to do. Taken: inside Engine.submit.
    waited, taken, due, submit = [0.0], [0.0], Episodes.due, engine.submit

    def timed(episodes: Episodes, idle: bool) -> object:
        started = time.perf_counter()
        found = due(episodes, idle)
        waited[0] += (time.perf_counter() - started) * idle
        return found

    def submitted(*given: Any, **more: Any) -> Any:
        started = time.perf_counter()
        handle = submit(*given, **more)
        taken[0] += time.perf_counter() - started
        return handle

    engine.submit = submitted  # type: ignore[method-assign]
    Episodes.due = timed  # type: ignore[method-assign,assignment]
    try:
        groups = collector.collect(0, 1.0, config.rollout.prompts)
    finally:
        Episodes.due = due  # type: ignore[method-assign]
        collector.close()
    seconds, said = collector.spent["seconds"], 0
    for one in groups:
        said += sum(len(answer.inserted) + 1 for answer in one.trajectories)
    return {
        "busy": (collector.spent["engine_s"] + taken[0]) / (seconds - waited[0]),
        "no_request_s": waited[0],
        "seconds": seconds,
        "messages": said,
        "messages_per_s": said / seconds,
        "tokens_per_s": collector.spent["tokens"] / seconds,
    }


@verb
def environments(options: EnvironmentsOptions) -> None:
    """Entry of `earlyfusion bench environments`."""
    given = options.model_dump(mode="json", include={"conversations", "turns", "latency_ms", "slots"})

    def run(side: str) -> Result:
        return run_side(measured, {"side": side, **given}, OMP_NUM_THREADS="1")

    columns = compared(alternate(("free", "ordered"), options.rounds, run))
    show("conversations with slow environments", columns)
    save_record(options.out, options.model_dump(mode="json"), comparison=columns)


def swarm_seconds(concurrent: int, work: str, assignments: int, latency_ms: float, tokens: int) -> Result:
    """One side: a message of `assignments`, in this process. work: "waits" or "decodes"."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Collection(["wide"], worlds=1)
    task.name = "collection"
    asked = [task.sample(number).meta for number in range(assignments)]
    reader = Reader()

    async def waiting(messages: Sequence[Message]) -> Message:
        await asyncio.sleep(latency_ms / 1000)
        return (await reader.say(messages, (), 0)).message

    library, sub = Library(asked[0]["docs"]), Limits()
    speaker: Speaker = Scripted(waiting)
    if work == "decodes":
        tokenizer = Tokenizer.load(model_folder("embedded:skills"))
        shape = fusion_config(load_config(["nano"]), tokenizer.media_pad_id)
        speaker, sub = Local(NativeFusion(shape).eval(), tokenizer), Limits(steps=1, tokens=tokens)

    swarm = Swarm(speaker, library, SwarmLimits(concurrent=concurrent, turns=3, sub=sub))
    work_of = [ToolCall("assign_task", {"agent": AGENT, "prompt": one["plan"][0][0]}) for one in asked]
    made = ToolCall("create_subagent", {"name": AGENT, "system_prompt": ""})
    # Once for what is only slow at first, then by the clock.
    asyncio.run(swarm.act(Message("assistant", (), calls=(made, work_of[0]))))
    started, before = time.perf_counter(), swarm.counts
    asyncio.run(swarm.act(Message("assistant", (), calls=tuple(work_of))))
    seconds = time.perf_counter() - started
    for one in (speaker, reader):
        if isinstance(one, Local | Reader):
            one.close()
    steps = swarm.critical_steps - before["critical_steps"]
    return {
        "seconds": seconds,
        "critical_steps": steps,
        "tokens": swarm.tokens - before["tokens_of_sub_agents"],
    }


@verb
def swarm(options: SwarmOptions) -> None:
    """Entry of `earlyfusion bench swarm`."""
    given = options.model_dump(mode="json", include={"assignments", "latency_ms", "tokens"})
    parts: Record = {}
    for work in ("waits", "decodes"):

        def run(side: str, work: str = work) -> Result:
            places = 1 if side == "serial" else options.concurrent
            request = {"concurrent": places, "work": work, **given}
            return run_side(swarm_seconds, request, OMP_NUM_THREADS="1")

        parts[work] = compared(alternate(("serial", "swarm"), options.rounds, run))
        show(f"a swarm whose sub-agents each {work[:-1]}", parts[work])
    save_record(options.out, options.model_dump(mode="json"), **parts)
