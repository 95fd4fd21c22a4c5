"""`earlyfusion serve`: an OpenAI-compatible endpoint over one model directory.

    earlyfusion serve --model runs/nano/model --port 8000
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_client.py

Chat and completions, streamed or whole; pictures, video files and video frames as data URLs. It listens on
loopback unless told otherwise, and there serves only loopback names. SIGTERM or Ctrl-C: no new requests,
those in flight get --grace seconds to end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from earlyfusion.data.chat.template import template_of
from earlyfusion.data.loading.encode import MAX_TEXT_CHARS
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.hub.config import model_folder, model_name
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.pipeline.runtime import keep_freed_memory

LAST_WORDS_S = 2
"""Time to send what is left to say after the grace."""
KEEP = 64 * 2**20
"""Bytes of freed memory that the C library keeps for reuse."""
KEY_VARIABLE = "EARLYFUSION_API_KEY"


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion serve", description=__doc__, formatter_class=BenchFormatter
    )
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="model directory, or embedded:NAME")
    add("--name", default="", help="name of the model in the API; empty: the run's")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port; 0 takes a free one")
    add("--api-key", default="", help=f"clients must send it as bearer token; better given as {KEY_VARIABLE}")
    add(
        "--template",
        choices=("auto", "chat", "qa"),
        default="auto",
        help="form of the messages; auto: as trained",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--slots", type=int, default=16, help="samples decoded at a time")
    add("--context", type=int, default=4096, help="memory for this many tokens per slot, shared by all slots")
    add("--queue", type=int, default=256, help="open requests; more are refused with 429")
    add("--prefix-cache", type=int, default=16, help="checkpoints of shared beginnings; 0: off")
    add(
        "--connections",
        type=int,
        default=256,
        help="open connections; idle ones give way, more are refused with 503",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="serve this Host (also); loopback names always",
    )
    add("--max-body-mb", type=float, default=32.0, help="largest request")
    add("--max-images", type=int, default=64, help="most pictures and frames of a request")
    add("--max-new-tokens", type=int, default=4096, help="longest answer, in tokens")
    add("--grace", type=int, default=30, help="seconds that requests in flight have when the server stops")
    return parser


def build_service(options: argparse.Namespace) -> Any:
    """Model, engine and limits as the options say. Raises UserError or the loaders' errors."""
    from earlyfusion.pipeline.serve.answer import Service
    from earlyfusion.pipeline.serve.engine import EngineWorker
    from earlyfusion.pipeline.serve.front import is_loopback
    from earlyfusion.pipeline.serve.prepare import Preparer, Setup
    from earlyfusion.pipeline.serve.schema import Limits

    options.model = model_folder(options.model)
    model = load_model(options.model, device=device_of(options.device)).eval()
    tokenizer = Tokenizer.load(options.model)
    page = 64
    try:
        engine = Engine(
            model,
            tokenizer,
            max_slots=options.slots,
            page_size=page,
            prefix_cache=options.prefix_cache,
            max_pages=options.slots * -(-options.context // page),
            max_waiting=options.queue,
            run_ahead=4,  # a piece of text is not long in coming
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    tokenizer.cached_texts = 1024  # strangers send them
    template = template_of(options.model) if options.template == "auto" else options.template
    body = int(options.max_body_mb * 2**20)
    tokens = engine.pools.num_pages * page
    return Service(
        worker=EngineWorker(engine, max_open=options.queue),
        preparer=Preparer(Setup(tokenizer, model.config.vision, template)),
        tokenizer=tokenizer,
        name=options.name or model_name(options.model),
        template=template,
        api_key=options.api_key or os.environ.get(KEY_VARIABLE) or None,
        hosts=frozenset(map(str.lower, options.allow_host))
        if options.allow_host or is_loopback(options.host)
        else None,
        connections=options.connections,
        limits=Limits(
            body=body,
            held=max(4 * body, 1 << 26),
            characters=min(16 * tokens, MAX_TEXT_CHARS),
            images=options.max_images,
            new_tokens=options.max_new_tokens,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; returns the exit code."""
    options = build_parser().parse_args(argv)
    try:
        import uvicorn

        from earlyfusion.pipeline.serve.app import create_app
        from earlyfusion.pipeline.serve.front import is_loopback
        from earlyfusion.pipeline.serve.protocol import ACCEPTED, guarded
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install {error.name}") from None
    if not 0 <= options.port < 65536:
        raise UserError(f"--port {options.port}: expected 0 to 65535")
    if options.connections < 1:
        raise UserError(f"--connections {options.connections}: expected at least 1")
    keep_freed_memory(KEEP)
    service = build_service(options)
    if not is_loopback(options.host) and service.api_key is None:
        print(
            f"warning: {options.host} can be reached from outside and no API key is set (--api-key)",
            file=sys.stderr,
        )
    config = uvicorn.Config(
        create_app(service),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        ws="none",
        http=guarded(options.connections),
        backlog=ACCEPTED,
        timeout_graceful_shutdown=options.grace + LAST_WORDS_S,
    )
    server = _announcing(uvicorn.Server, service, options.grace)(config)
    try:
        server.run()
    except (KeyboardInterrupt, SystemExit):  # uvicorn leaves this way when it cannot listen
        pass
    finally:
        service.preparer.close()
        service.worker.stop()
    if not server.started:
        raise UserError(
            f"could not listen on {options.host}:{options.port}; is the port in use? try --port 0"
        )
    return EXIT_OK


def _announcing(base: Any, service: Any, grace: float) -> Any:
    """A uvicorn server that says where it listens, takes no new request once it is told to stop, and ends
    with code 0."""
    from earlyfusion.pipeline.serve.protocol import QUEUED

    class Announcing(base):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            for server in getattr(self, "servers", []):
                for bound in server.sockets:
                    with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
                        same.listen(QUEUED)
                    host, port = bound.getsockname()[:2]
                    shown = f"[{host}]" if ":" in host else host
                    print(
                        f"serving {service.name} ({service.template} form) on http://{shown}:{port}/v1",
                        flush=True,
                    )

        async def shutdown(self, sockets: Any = None) -> None:
            # Streams still open at the end of the grace get an error event and [DONE] before uvicorn cuts
            # connections.
            asyncio.get_running_loop().call_later(grace, self._cut)
            await super().shutdown(sockets=sockets)

        def _cut(self) -> None:
            service.preparer.close()
            service.worker.cut()

        def handle_exit(self, sig: int, frame: Any) -> None:
            # Without uvicorn's, which raises the signal again at the end.
            self.force_exit = not service.worker.accepting and sig == signal.SIGINT  # asked a second time
            service.worker.drain()
            self.should_exit = True

    return Announcing


if __name__ == "__main__":
    sys.exit(main())
