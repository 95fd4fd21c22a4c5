"""Environments of the package verifiers (0.1 and 0.2: `load_environment`), played by our engine.

    [[tasks]]
    name = "verifiers"
    options = { id = "my-env" }           # its dataset asks; args = {...} of load_environment
    environment = "verifiers"
    environment_options = { id = "my-env" }

The environment's own `rollout` runs as it is; where it asks a model, the conversation waits for the engine.
What its rubric gives at the end is the reward. Text only: the messages of these environments hold strings.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from earlyfusion.data.chat.template import Media, Message, messages_of, tools_message
from earlyfusion.data.loading.order import Permutation
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Problem, Split, Task, TaskError, task
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record, plain
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment


@lru_cache(maxsize=8)
def loaded(id: str, args: str) -> Any:
    """The environment of a name; one for all conversations, as its makers mean it. Raises
    EnvironmentFault."""
    try:
        import verifiers  # installed by whoever has such environments
    except ImportError:
        raise EnvironmentFault("environment 'verifiers': pip install 'verifiers<0.3'") from None
    if not hasattr(verifiers, "load_environment"):
        raise EnvironmentFault(
            f"verifiers {verifiers.__version__} has no load_environment; take verifiers<0.3"
        )
    try:
        return verifiers.load_environment(id, **json.loads(args))
    except Exception as error:  # whatever the package of the environment raises
        raise EnvironmentFault(f"verifiers.load_environment({id!r}): {one_line(error, 200)}") from None


@task("verifiers")
class VerifiersTask(Task):
    """Rows of an environment's dataset as problems; its evaluation dataset is held out."""

    levels = ({},)

    def __init__(self, id: str, args: Mapping[str, Any] | None = None) -> None:
        made = loaded(id, json.dumps(args or {}, sort_keys=True))
        self.id, self.rows = id, {"train": made.get_dataset(), "test": made.get_eval_dataset()}

    def sample(self, seed: int, split: Split = "train", difficulty: int = 0) -> Problem:
        """The row of a number."""
        if split not in self.rows or difficulty:
            raise TaskError(
                f"verifiers: split {split!r}, level {difficulty}; there are train and test, and level 0"
            )
        number = seed % len(self.rows[split])
        row = plain(dict(self.rows[split][number]))
        messages = messages_of(
            {"messages": row["prompt"]}, f"{self.id}:{number}", Media(Path(".")), learned=False
        )
        return Problem(
            question=messages[-1].text,
            picture=None,
            description="",
            answer=row.get("answer"),
            target=str(row.get("answer") or ""),
            combination=str(number),
            category=str(row.get("task") or ""),
            meta={"row": row, "seed": number},
            task=self.name,
            key=f"verifiers/{split}/0/{number}",
            messages=tuple(messages),
        )

    def numbered(self, number: int, seed: int, difficulty: int = 0) -> Problem:
        """Every row once in a mixed order before any comes again."""
        size = len(self.rows["train"])
        epoch, step = divmod(number, size)
        return self.sample(Permutation(size, seed, "verifiers", epoch)[step])

    def test_problems(self, count: int, seed: int, difficulty: int = 0) -> list[Problem]:
        """The first rows of the evaluation dataset."""
        return [self.sample(number, "test") for number in range(min(count, len(self.rows["test"])))]

    def score(self, problem: Problem, answer: str) -> float:
        """Nothing: the rubric pays, through the environment."""
        return 0.0


@lru_cache(maxsize=1)
def _bridge() -> type[Any]:
    """What `rollout` takes for a client: it hands its prompts to the conversation and waits for the
    answer."""
    from verifiers import types
    from verifiers.clients import Client

    class Bridge(Client):  # type: ignore[misc]
        """asked: whole conversations, open where the assistant is to speak; said: its messages."""

        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[list[Any]] = asyncio.Queue()
            self.said: asyncio.Queue[Message] = asyncio.Queue()

        def setup_client(self, config: Any) -> None: ...

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, Record]:
            return messages, {}

        async def get_native_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Message:
            await self.asked.put(list(prompt))
            return await self.said.get()

        async def raise_from_native_response(self, response: Message) -> None: ...

        async def from_native_response(self, response: Message) -> Any:
            calls = []
            for i, call in enumerate(response.calls):
                given = json.dumps(call.arguments)
                calls.append(types.ToolCall(id=f"call_{i}", name=call.tool, arguments=given))
            said = types.ResponseMessage(
                content=response.text,
                reasoning_content=response.thinking,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return types.Response(id="engine", created=int(time.time()), model="engine", message=said)

        async def close(self) -> None: ...

    return Bridge


@environment("verifiers")
class Verifiers(Environment):
    """See the module. id, args: of verifiers.load_environment."""

    def __init__(self, id: str, args: Mapping[str, Any] | None = None) -> None:
        self.made = loaded(id, json.dumps(args or {}, sort_keys=True))
        self._known = 0

    async def reset(self, problem: Problem) -> list[Message]:
        """The environment's prompt, its tools declared before it."""
        self._bridge = _bridge()()
        row: Record = dict(problem.meta["row"])
        row.setdefault("example_id", problem.meta["seed"])
        self._rollout = asyncio.create_task(self._play(row))
        step = await self._next()
        tools = []
        for tool in self.made.tool_defs or ():
            about = plain(tool if isinstance(tool, dict) else tool.model_dump(exclude={"strict"}))
            tools.append({"type": "function", "function": about})
        return [*([tools_message(tools)] if tools else []), *step.messages]

    async def step(self, message: Message) -> Step:
        """What the environment answers; at the end what its rubric gives."""
        self._known += 1
        await self._bridge.said.put(message)
        return await self._next()

    def close(self) -> None:
        """Drop an unfinished rollout."""
        if hasattr(self, "_rollout"):
            self._rollout.get_loop().call_soon_threadsafe(self._rollout.cancel)

    async def _play(self, row: Record) -> float:
        state = await self.made.rollout(row, self._bridge, "engine", {})
        await self.made.rubric.score_rollout(state)
        if state.get("error") is not None:
            raise RuntimeError(str(state["error"]))
        return float(state["reward"])

    async def _next(self) -> Step:
        """The messages of the next question to a model, or the end."""
        asked = asyncio.create_task(self._bridge.asked.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return Step((), self._rollout.result(), True)
        whole = asked.result()
        new, self._known = whole[self._known :], len(whole)
        messages = []
        for one in new:
            turn = one if isinstance(one, dict) else one.model_dump()
            content = turn.get("content") or ""
            text = content if isinstance(content, str) else json.dumps(content)
            messages.append(Message(str(turn["role"]), (Text(text, 0.0),)))
        return Step(messages, counts={"actions": 1} if self._known else {})
