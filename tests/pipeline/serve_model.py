"""A small random model directory for the tests of the endpoint and the chat, and a server of it as a
process."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.model.hub.folder import save_model


def write_model(folder: Path, seed: int = 0) -> Path:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(tokenizer), seed)
    save_model(model, tokenizer, folder)
    return folder


KEY = "a secret"


class Server:
    """A started `earlyfusion serve` process."""

    def __init__(self, folder, options: str = "", key: str | None = KEY) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EARLYFUSION_API_KEY": key or ""}
        command = f"-m earlyfusion.pipeline.cli serve --model {folder} --name model --port 0 {options}"
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, *command.split()], env=environment, **pipes)
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+/v1", line)
        assert found, (line, self.process.stderr.read() if not line else "")
        self.url = found.group(0).replace("0.0.0.0", "127.0.0.1")
        self.port = int(self.url.split(":")[2].split("/")[0])
        import openai

        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=60)

    def ask(self, method: str, path: str, *, way: str = "request", **arguments) -> Any:
        """An HTTP request with the key, to a path below /v1 or, with a dot before it, beside it."""
        import httpx

        address = self.url + path if path[0] == "/" else self.url.removesuffix("/v1") + path[1:]
        headers = {"Authorization": f"Bearer {KEY}", **arguments.pop("headers", {})}
        return getattr(httpx, way)(method, address, headers=headers, **{"timeout": 60, **arguments})

    def post(self, path: str, **arguments) -> Any:
        return self.ask("POST", path, **arguments)

    def stats(self) -> dict:
        return self.ask("GET", "./stats").json()

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


def wait_for(done: Callable[[], bool], patience_s: float = 90.0) -> None:
    """Ask until it is so; a machine may be slow, a server that never gets there fails the test."""
    end = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def at_rest(server: Server) -> dict:
    """The server's figures once nothing is open."""
    busy = ("open_requests", "waiting", "reading", "running", "reserved_pages")
    wait_for(lambda: not any(map(server.stats().get, busy)))
    return server.stats()
