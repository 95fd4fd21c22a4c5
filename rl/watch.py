"""`earlyfusion watch RUN ...`: a live page of training and reinforcement learning runs, side by side.

    earlyfusion watch runs/nano
    earlyfusion watch runs/rl-a runs/rl-b --port 8001

Curves of everything in metrics.jsonl (several runs in one chart), samples, rollouts with their pictures, what
the runs said. The page asks every few seconds for what is new, whether a run goes on, has ended, or was
begun anew; it reads and never writes. It listens on loopback alone: from elsewhere use `ssh -L`.

    GET /                                     the page (watch.html)
    GET /runs                                 names and facts
    GET /runs/N/metrics?after=PLACE           the next lines, as numbers
    GET /runs/N/rollouts?after=PLACE          the next groups, each with its place; /runs/N/rollouts/AT: one
    GET /runs/N/samples?step=STEP             answers to samples at a step, the latest by default
    GET /runs/N/files/PATH                    a picture below the run's folder
"""

import json
import os
import zlib
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, json_object, plain
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.page import file_inside, read_dict, read_steps
from earlyfusion.pipeline.serve.front import ACCEPTED, Front, guarded
from earlyfusion.pipeline.serve.listen import Listener, page, run_server
from earlyfusion.pipeline.serve.protocol import Limits
from earlyfusion.rl.report import Group
from earlyfusion.rl.rollouts.log import FILE as ROLLOUTS

SLICE = 1 << 20
"""Bytes of a file that one answer covers: the page asks again until it has all."""
LONGEST = 1 << 24
"""Bytes of one group of answers."""
MOST = 64
"""Requests and connections at a time."""
PARTS = ("metrics.jsonl", ROLLOUTS, "recipe.toml")
"""What makes a folder a run: one of these is there soon after its start."""
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="--out folders of runs")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 takes a free one")] = 8001,
) -> None:
    """Serve a live page of runs on loopback: curves, samples, rollouts with pictures; several are compared.

    earlyfusion watch runs/a runs/b --port 8001
    """
    app = create_app(runs)
    config = uvicorn.Config(
        app,
        port=port,
        log_level="error",
        access_log=False,
        ws="none",
        lifespan="off",
        http=guarded(MOST),
        backlog=ACCEPTED,
        timeout_graceful_shutdown=1,
    )
    run_server(Listener(config, f"watching {', '.join(map(str, runs))} on {{}}"))


def create_app(folders: list[Path]) -> Front:
    """The application for these runs; raises UserError for a folder that is no run."""
    for folder in folders:
        if not any((folder / part).is_file() for part in PARTS):
            near = sorted({str(path.parent) for part in PARTS for path in folder.glob(f"*/{part}")})
            hint = f"did you mean {' '.join(near[:5])}?" if near else "give the --out folder of a run"
            raise UserError(f"{folder}: no {', '.join(PARTS)} here; {hint}")
    watched = Watched(folders)
    routes = [
        Route("/", page(Path(__file__).with_name("watch.html"))),
        Route("/runs", watched.runs),
        Route("/runs/{run:int}/metrics", watched.metrics),
        Route("/runs/{run:int}/rollouts", watched.rollouts),
        Route("/runs/{run:int}/rollouts/{at:int}", watched.group),
        Route("/runs/{run:int}/samples", watched.samples),
        Route("/runs/{run:int}/files/{path:path}", watched.file),
    ]
    # Only loopback names are served, and nothing that is sent is read.
    return Front(Router(routes, redirect_slashes=False), Limits(body=0), None, frozenset(), MOST)


class Watched:
    """The routes. Nothing is kept between two requests: the page says how far it has read."""

    # Plain functions: Starlette runs them in threads, so that a slow disk holds nobody up.
    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    def folder(self, http: Request) -> Path:
        """The folder of the run that is asked for; raises HTTPException."""
        number = http.path_params["run"]
        if number >= len(self.folders):
            raise HTTPException(404, f"run {number}: there are {len(self.folders)} (counted from 0)")
        return self.folders[number]

    def runs(self, http: Request) -> Response:
        names = [
            str(read_dict(folder / "facts.json").get("name", folder.resolve().name))
            for folder in self.folders
        ]
        told = []
        for name, folder in zip(names, self.folders):
            facts = read_dict(folder / "facts.json")
            # Two runs of one recipe are told apart by their folders.
            shown = name if names.count(name) == 1 else f"{name} ({folder})"
            note = " · ".join(f"{key}: {value}" for key, value in facts.items() if key != "name")
            told.append({"name": shown, "folder": str(folder), "note": note})
        return strict(told)

    def metrics(self, http: Request) -> Response:
        found, about = news(self.folder(http) / "metrics.jsonl", http.query_params.get("after", ""))
        records = [numbers(record) for _, record in found if is_finite(record.get("step"))]
        return strict(about | {"records": records})

    def rollouts(self, http: Request) -> Response:
        found, about = news(self.folder(http) / ROLLOUTS, http.query_params.get("after", ""))
        groups = [
            {"at": at, "update": record["update"], "label": str(record.get("label", "all"))}
            for at, record in found
            if is_finite(record.get("update"))
        ]
        return strict(about | {"groups": groups})

    def group(self, http: Request) -> Response:
        try:
            with open(self.folder(http) / ROLLOUTS, "rb") as file:
                file.seek(http.path_params["at"])
                group = Group.model_validate(json_object(file.readline(LONGEST)))
        except (OSError, ValidationError):
            raise HTTPException(404, "no group of answers begins here") from None
        return strict(group.model_dump())

    def samples(self, http: Request) -> Response:
        records = read_steps(self.folder(http) / "samples")
        asked = http.query_params.get("step", "")
        shown = [record for record in records if str(record["step"]) == asked] or records
        steps = [record["step"] for record in records]
        return strict({"steps": steps, **({"step": None, "samples": []} | (shown[-1] if shown else {}))})

    def file(self, http: Request) -> Response:
        path = file_inside(self.folder(http), http.path_params["path"])
        kind = None if path is None else PICTURES.get(path.suffix.lower())
        if path is None or kind is None:
            raise HTTPException(404, "no such picture below the folder of the run")
        # Never anything but a picture, and never for the pages of others.
        headers = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
        return FileResponse(path, media_type=kind, headers=headers)


def strict(value: Any) -> Response:
    """Strict JSON, also of files that another hand has written."""
    return Response(json.dumps(plain(value), allow_nan=False), media_type="application/json")


def news(path: Path, after: str) -> tuple[list[tuple[int, Record]], Record]:
    """The next whole lines of a file that grows: (place in bytes, JSON object) of each that is one, and about
    them {"after": to be given next, "fresh": begin anew, "more": ask again at once}.

    after: of the last answer, "" at first. A file that was begun anew, cut or replaced is read from its
    start. Raises nothing for a file that is not there.
    """
    try:
        file = path.open("rb")
    except OSError:
        return [], {"after": "", "fresh": True, "more": False}
    with file:
        # A first line tells the time of its run, and a resume writes the file anew.
        first = file.readline(SLICE)
        mark = f"{os.fstat(file.fileno()).st_ino}-{zlib.crc32(first)}"
        known, _, place = after.rpartition("-")
        start = int(place) if place.isdecimal() else 0
        end = file.seek(0, 2)
        fresh = known != mark or start > end
        at = file.seek(0 if fresh else start)
        lines = file.readlines(SLICE)

    found: list[tuple[int, Record]] = []
    for line in lines:
        if not line.endswith(b"\n"):  # still being written
            break
        record = json_object(line)
        if record is not None:
            found.append((at, record))
        at += len(line)
    more = at < end and bool(lines) and lines[-1].endswith(b"\n")
    return found, {"after": f"{mark}-{at}", "fresh": fresh, "more": more}


def numbers(record: Record) -> Record:
    """What the page draws of a line of metrics.jsonl: every finite number by its name, those of the tables of
    an evaluation as heldout/METRIC/KIND; its event, its message."""
    drawn = {}
    for key, value in record.items():
        if is_finite(value):
            drawn[key] = value
        elif isinstance(value, dict) and record.get("event") == "eval":
            drawn |= {f"heldout/{name}/{key}": one for name, one in value.items() if is_finite(one)}
    message = record.get("message")
    return {"event": record.get("event"), "message": message, "numbers": drawn}
