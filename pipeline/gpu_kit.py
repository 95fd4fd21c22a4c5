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

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import Field

from earlyfusion.data.options import Options, verb
from earlyfusion.pipeline.cli import run_alone
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK

PROJECT, MACHINE = "earlyfusion", "x86_64"
# The machine's own builds of these fit its driver; ours would not.
THERE = frozenset({"torch", "triton", "torchvision"})
BUILDING = ("setuptools", "wheel")
"""For `pip install --no-build-isolation -e .`."""
PLATFORMS = (
    "manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux_2_12 manylinux_2_5"
    " manylinux2014 manylinux2010 manylinux1 linux"
)
"""What a wheel may be built for, from the newest glibc to the oldest."""
INSTALL = """#!/bin/sh
# On the GPU machine, from the project's folder: sh KIT/install.sh ENV (ENV/bin/python has torch and triton).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
"$1/bin/python" -m pip install --no-index --no-deps -c constraints.txt --find-links "$here" \\
    -r "$here/requirements.txt"
"$1/bin/python" -m pip install --no-index --no-deps -c constraints.txt --no-build-isolation -e .
touch "$1/.installed" "$1/.installed-dev"
"""


def listed(environment: Mapping[str, str]) -> dict[str, str]:
    """{name: "name==version"} of everything the project and its tests need where markers see this
    environment, itself, torch and triton left out."""
    found: dict[str, str] = {}
    waiting, seen = [(PROJECT, ("dev",)), *((name, ()) for name in BUILDING)], set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            lines = requires(name) or []
            if name != PROJECT:
                found[name] = f"{name}=={version(name).partition('+')[0]}"
        except PackageNotFoundError:  # needed there and not here: any version that fits
            continue
        for requirement in map(Requirement, lines):
            other, marker = canonicalize_name(requirement.name), requirement.marker
            # A marker may ask for an extra, one of those that are wanted.
            worlds = [{**environment, "extra": extra} for extra in ("", *wanted)]
            needed = marker is None or any(marker.evaluate(world) for world in worlds)
            if needed and other not in THERE and not other.startswith("nvidia-"):
                found.setdefault(other, f"{other}{requirement.specifier}")
                waiting.append((other, tuple(sorted(requirement.extras))))
    return dict(sorted(found.items()))


def fetch(line: str, options: KitOptions) -> str:
    """One wheel into the folder; "" or why there is none."""
    folder = options.out

    def run(*words: str) -> str:
        """pip's last word where it fails. Without dependencies, so that nothing pulls torch in."""
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
        command += ["--no-deps", "-c", "constraints.txt", line]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stderr.strip().splitlines() or ["pip failed without a word"]
        return said[-1] if done.returncode else ""

    # Wheels of the other Python and machine, whatever this one is.
    there = ["--implementation=cp", f"--python-version={options.python}", "--only-binary=:all:"]
    there += [f"--platform={kind}_{MACHINE}" for kind in PLATFORMS.split()]
    absent = run("download", *there, "-d", str(folder))
    if not absent:
        return ""
    # No wheel there: one built here serves only if it is pure Python.
    before = set(folder.glob("*.whl"))
    failed = run("wheel", "-w", str(folder))
    for path in set(folder.glob("*.whl")) - before:
        if not path.name.endswith("-none-any.whl"):
            path.unlink()
            failed = absent
    return failed


class KitOptions(Options):
    python: Annotated[str, Field(pattern=r"^3\.\d+$")] = "3.12"
    """version of the other machine's Python"""
    out: Path = Path("runs/gpu-kit")
    """the folder"""
    dry_run: bool = False
    """print the list only"""


@verb
def gpu_kit(options: KitOptions) -> int:
    """Gather the wheels; exit code 1 if one is missing, the others stay."""
    out = options.out
    environment = {
        "python_version": options.python,
        "python_full_version": f"{options.python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": MACHINE,
    }
    lines = list(listed(environment).values())
    print("\n".join(lines))
    if options.dry_run:
        return EXIT_OK

    # The others are worth having where one is missing: the list of those is short.
    out.mkdir(parents=True, exist_ok=True)
    missing = {line: reason for line in lines if (reason := fetch(line, options))}
    for line, reason in missing.items():
        print(f"missing: {line}: {reason}", file=sys.stderr)
    kept = [f"{line}\n" for line in lines if line not in missing]
    (out / "requirements.txt").write_text("".join(kept))
    (out / "install.sh").write_text(INSTALL)
    print(f"{out}: {len(kept)} of {len(lines)} wheels")
    return EXIT_FAILURE if missing else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_alone(gpu_kit, "gpu-kit"))
