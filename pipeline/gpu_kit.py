"""`make gpu-kit`: every wheel that `make gpu` needs, for a GPU machine that has torch and Triton but no
network.

The list is the project's requirements with those of the chosen extras, walked through as they are installed
here and as the other Python and platform read them, pinned to the versions that are installed here. torch,
triton and what only they ask for stay out: the machine brings them. Each wheel is fetched by itself and
without its dependencies, so nothing on the list can pull torch in again; a package without a wheel is built
here if it is pure Python.

The folder then holds the wheels, `requirements.txt` and `install.sh`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.cli import run_alone
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK

PROJECT = "earlyfusion"
THERE = frozenset({"torch", "triton", "torchvision"})
BUILDING = ("setuptools", "wheel")
"""For `pip install --no-build-isolation -e .`."""
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
INSTALL = """#!/bin/sh
# On the GPU machine, from the project's folder: sh KIT/install.sh ENV (ENV/bin/python has torch and triton).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
"$1/bin/python" -m pip install --no-index --no-deps -c constraints.txt --find-links "$here" \\
    -r "$here/requirements.txt"
"$1/bin/python" -m pip install --no-index --no-deps -c constraints.txt --no-build-isolation -e .
touch "$1/.installed" "$1/.installed-dev"
"""


def target(python: str, machine: str) -> dict[str, str]:
    """What markers of requirements see on the other machine."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def listed(project: str, extras: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """{name: "name==version"} of everything the project needs there, itself, torch and triton left out."""
    found: dict[str, str] = {}
    waiting = [(project, tuple(extras))]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            lines = requires(name) or []
            if name != project:
                found[name] = f"{name}=={version(name).partition('+')[0]}"
        except PackageNotFoundError:  # needed there and not here: any version that fits
            continue
        for requirement in map(Requirement, lines):
            other = canonicalize_name(requirement.name)
            marker = requirement.marker
            needed = marker is None or any(
                marker.evaluate({**environment, "extra": each}) for each in ("", *wanted)
            )
            if needed and other not in THERE and not other.startswith("nvidia-"):
                found.setdefault(other, f"{other}{requirement.specifier}")
                waiting.append((other, tuple(sorted(requirement.extras))))
    return dict(sorted(found.items()))


def fetch(line: str, folder: Path, python: str, machine: str, constraints: str) -> str:
    """One wheel into the folder; "" or why there is none."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [f"--platform=manylinux_{each}_{machine}" for each in GLIBC]
    platforms += [
        f"--platform={each}_{machine}" for each in ("manylinux2014", "manylinux2010", "manylinux1", "linux")
    ]
    there = [f"--python-version={python}", "--implementation=cp", *platforms, "--only-binary=:all:"]
    common = ["--no-deps", "-c", constraints, line]
    done = subprocess.run(
        [*pip, "download", *there, "-d", str(folder), *common], capture_output=True, text=True
    )
    if done.returncode == 0:
        return ""
    before = set(folder.glob("*.whl"))
    built = subprocess.run([*pip, "wheel", "-w", str(folder), *common], capture_output=True, text=True)
    stray = [path for path in set(folder.glob("*.whl")) - before if not path.name.endswith("-none-any.whl")]
    for path in stray:
        path.unlink()
    if built.returncode == 0 and not stray:
        return ""
    said = done.stderr if stray else built.stderr
    return (said.strip().splitlines() or ["pip failed without a word"])[-1]


def gpu_kit(
    python: Annotated[str, typer.Option(help="version of the other machine's Python")] = "3.12",
    machine: Annotated[str, typer.Option(help="its processor")] = "x86_64",
    extras: Annotated[str, typer.Option(help="extras of the project, between commas")] = "dev",
    out: Annotated[Path, typer.Option(help="the folder")] = Path("runs/gpu-kit"),
    constraints: Annotated[
        str, typer.Option(help="constraints file of every pip command")
    ] = "constraints.txt",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the list only")] = False,
) -> int:
    """Gather the wheels; exit code 1 if one is missing, the others stay."""
    if not re.fullmatch(r"3\.\d+", python):
        raise UserError(f"gpu-kit: --python {python!r}; give a version such as 3.12")
    names = [name.strip() for name in extras.split(",") if name.strip()]
    pinned = listed(PROJECT, names, target(python, machine))
    for name in BUILDING:
        if name not in pinned and _has(name):
            pinned[name] = f"{name}=={version(name)}"
    lines = list(pinned.values())
    print("\n".join(lines))
    if dry_run:
        return EXIT_OK

    out.mkdir(parents=True, exist_ok=True)
    missing = {}
    for line in lines:
        reason = fetch(line, out, python, machine, constraints)
        if reason:
            missing[line] = reason
            print(f"missing: {line}: {reason}", file=sys.stderr)
    (out / "requirements.txt").write_text("".join(f"{line}\n" for line in lines if line not in missing))
    (out / "install.sh").write_text(INSTALL)
    size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    print(f"{out}: {len(lines) - len(missing)} of {len(lines)} wheels, {size:.0f} MB")
    return EXIT_FAILURE if missing else EXIT_OK


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(run_alone(gpu_kit, "gpu-kit"))
