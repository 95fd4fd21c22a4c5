"""Environments behind OpenEnv's HTTP server: one session (a WebSocket) for each conversation.

    environment = "openenv"
    environment_options = { url = "http://localhost:8000", field = "message" }

The assistant's text is the field `field` of the action; with json = true it is the action itself. What is
shown of an observation is its field `shown` if that is named (a text, or {"image": base64} as a picture),
else all of it as JSON. Protocol: openenv-core 0.3, messages reset, step, close.
"""

import base64
import io
import json as json_module
from typing import Any

from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.files import Record
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment, message_of

MAX_BYTES = 1 << 24
"""Longest answer of a server that is read."""


@environment("openenv")
class OpenEnv(Environment):
    """See the module. system: what the model is told first. Raises EnvironmentFault without the package
    websockets, DataError for what the server refuses."""

    def __init__(
        self, url: str, field: str = "message", json: bool = False, shown: str = "", system: str = ""
    ) -> None:
        try:
            import websockets.asyncio.client as client  # of the extra `environments`
        except ImportError:
            raise EnvironmentFault("environment 'openenv': pip install 'earlyfusion[environments]'") from None
        if not url.startswith(("http://", "https://")):
            raise EnvironmentFault(f"openenv: url {url!r}; expected http://host:port")
        self.url = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self.field, self.json, self.shown, self.system = field, json, shown, system
        self._client = client
        self._socket: Any = None

    async def reset(self, problem: Problem) -> list[Message]:
        """A session of its own, begun with the problem's seed."""
        self._socket = await self._client.connect(self.url, max_size=MAX_BYTES)
        seed = int(problem.meta.get("seed", 0)) % 2**31
        found = await self._ask("reset", {"seed": seed})
        first = [Message("system", (Text(self.system, 0.0),))] if self.system else []
        return [*first, self._message(found, problem.question)]

    async def step(self, message: Message) -> Step:
        """One action."""
        action: Any = {self.field: message.text}
        if self.json:
            try:
                action = json_module.loads(message.text)
            except (ValueError, RecursionError):
                told = Message("user", (Text("That is no JSON. Answer with an action as JSON.", 0.0),))
                return Step([told], counts={"not_an_action": 1})
        found = await self._ask("step", action)
        reward = found.get("reward")
        done = bool(found.get("done"))
        return Step([self._message(found)], None if reward is None else float(reward), done, {"actions": 1})

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            # The server hangs up when it is told; one that finds the line dead logs an error.
            await self._socket.send(json_module.dumps({"type": "close"}))
            await self._socket.wait_closed()

    async def _ask(self, kind: str, data: Any) -> Record:
        await self._socket.send(json_module.dumps({"type": kind, "data": data}))
        answer = json_module.loads(await self._socket.recv())
        if answer.get("type") == "error":
            raise DataError(f"openenv {kind}: {str(answer.get('data'))[:200]}")
        found: Record = answer.get("data") or {}
        return found

    def _message(self, found: Record, question: str = "") -> Message:
        seen = found.get("observation", found)
        if self.shown and isinstance(seen, dict):
            seen = seen.get(self.shown)
        parts: list[Any] = []
        if isinstance(seen, dict) and isinstance(seen.get("image"), str):
            raw = base64.b64decode(seen["image"].rpartition("base64,")[2])
            parts.append(PILImage.open(io.BytesIO(raw)).convert("RGB"))
            seen = {name: value for name, value in seen.items() if name != "image"}
        text = seen if isinstance(seen, str) else json_module.dumps(seen, ensure_ascii=False)
        return message_of([*parts, "\n".join(filter(None, [text if seen else "", question]))])
