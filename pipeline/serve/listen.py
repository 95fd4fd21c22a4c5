"""What every server of a page needs: the page with a policy that runs nothing but its own script, and a start
that says where it listens.

    Route("/", page(Path(__file__).with_name("playground.html")))
    run_server(Listener(uvicorn.Config(app, port=0), "serving on {}"))
"""

import base64
import hashlib
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from earlyfusion.kernels.errors import UserError

QUEUED = 2048
"""Connections that the kernel keeps until they are accepted."""


def page(path: Path) -> Callable[[Request], Awaitable[Response]]:
    """The route of one HTML file that is complete in itself.

    The browser runs its inline script and style, known by their hashes, and nothing else; it talks to this
    server alone and shows pictures of this server or of the page's own.
    """
    text = path.read_text(encoding="utf-8")
    allowed = {}
    for tag in ("script", "style"):
        found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = hashlib.sha256(found.group(1).encode() if found else b"").digest()
        allowed[tag] = f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'"
    policy = (
        f"default-src 'none'; {allowed['script']}; {allowed['style']}; connect-src 'self';"
        " img-src 'self' data:; media-src data:; frame-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    # A new version of the package must not meet an old page.
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }

    async def answer(http: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return answer


class Listener(uvicorn.Server):
    """uvicorn's server that says where it listens and ends with code 0. words: what it says, {} standing
    for http://host:port. on_stop: called when it is told to stop."""

    def __init__(
        self, config: uvicorn.Config, words: str, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self.words, self.on_stop = words, on_stop

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        for server in getattr(self, "servers", []):
            for bound in server.sockets:
                # uvicorn's backlog is also what it accepts in one turn; the kernel may keep more.
                with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
                    same.listen(QUEUED)
                host, port = bound.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(self.words.replace("{}", f"http://{shown}:{port}"), flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Without uvicorn's, which raises the signal again at the end.
        self.force_exit = self.should_exit and sig == signal.SIGINT  # asked a second time
        self.should_exit = True
        self.on_stop()


def run_server(server: Listener) -> None:
    """Serve until a signal ends it; raises UserError when nobody can listen there."""
    try:
        server.run()
    except (KeyboardInterrupt, SystemExit):  # uvicorn leaves this way when it cannot listen
        pass
    # uvicorn only logs why, and its log is off.
    if not server.started:
        place = f"{server.config.host}:{server.config.port}"
        raise UserError(f"could not listen on {place}; is the port in use? try --port 0")
