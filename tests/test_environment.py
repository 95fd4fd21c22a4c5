"""The installation traps that have cost others hours: CUDA packages on a machine without a GPU, and broken
torchvision."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "vision", "model", "data", "eval", "pipeline", "rl")


def test_constraints_pin_torch_and_every_install_command_carries_them():
    """Without the pin, an extra that wants a newer torch swaps it for gigabytes of CUDA packages."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line
    )
    assert {"torch", "triton"} <= set(pins)
    setup = (ROOT / "setup.sh").read_text()
    installs = re.findall(r"^.*\bpip install\b.*$", setup, flags=re.MULTILINE)
    assert len(installs) >= 4
    assert all("-c " in line or "torch==${TORCH}" in line for line in installs), installs


def test_no_cuda_package_is_installed_without_a_gpu():
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch is a GPU build, installed on purpose")
    names = {(d.metadata["Name"] or "").lower() for d in distributions()}
    assert not sorted(name for name in names if name.startswith("nvidia-"))


def test_timm_and_torchvision_are_optional_and_never_imported_with_our_modules():
    """There is no CPU torchvision: importing PyPI's raises, and timm cannot be imported without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = " ".join(project["dependencies"])
    assert "timm" not in required and "torchvision" not in required
    modules = [
        "earlyfusion." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        # These two are vLLM's to import.
        if path.name not in ("__init__.py", "vllm_plugin.py", "vllm_model.py")
    ]
    assert len(modules) > 100
    code = (
        "import importlib, sys\n"
        "sys.modules['timm'] = sys.modules['torchvision'] = None  # an import of either now fails\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_make_starts_the_run_without_a_launcher():
    """The `accelerate` command imports timm where it is installed, and dies with a broken torchvision; any
    launcher hides the run's exit code (tests/pipeline/test_launchers.py)."""
    makefile = (ROOT / "Makefile").read_text()
    assert "-m earlyfusion.pipeline.pretrain" in makefile and "accelerate" not in makefile


def test_the_package_itself_has_a_version_a_loader_and_types():
    """`earlyfusion` is the folder pipeline/package; read from there, whatever is installed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = ROOT / settings["package-dir"]["earlyfusion"]
    assert "earlyfusion" in settings["packages"] and (folder / "py.typed").is_file()
    assert settings["package-data"]["earlyfusion"] == ["py.typed"]
    spec = importlib.util.spec_from_file_location("front", folder / "__init__.py")
    front = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(front)
    assert front.__version__ == version("earlyfusion")
    loaded = front.load("embedded:skills")
    assert not loaded.model.training
    assert loaded.model.config.text.vocab_size >= loaded.tokenizer.vocab_size
    code = "import sys, earlyfusion; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_make_gpu_takes_all_figures_although_a_test_fails_and_says_so(tmp_path):
    """Time on a GPU is rare: what can be measured is, and the exit code still tells."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.sh"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "env/bin").mkdir(parents=True)
    for command, code in (("python", 1), ("earlyfusion", 0)):
        path = tmp_path / "env/bin" / command
        path.write_text(f'#!/bin/sh\necho "{command} $*" >> calls\nexit {code}\n')
        path.chmod(0o755)
    for mark in (".installed", ".installed-dev"):
        (tmp_path / "env" / mark).touch()
    done = subprocess.run(["make", "gpu", "VENV=env"], cwd=tmp_path, capture_output=True, text=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode != 0 and "failed: env/bin/python -m pytest -m gpu" in done.stderr
    assert calls[0] == "python -m pytest -m gpu"
    benches = [" ".join(call.split()[1:3]) for call in calls[1:]]
    assert benches == ["bench kernels", "bench train", "bench engine", "bench engine"]
    (tmp_path / "env/bin/python").write_text("#!/bin/sh\nexit 0\n")
    assert subprocess.run(["make", "gpu", "VENV=env"], cwd=tmp_path, capture_output=True).returncode == 0


def test_the_kit_for_a_gpu_machine_lists_what_it_needs_and_never_torch(tmp_path, monkeypatch, capsys):
    from earlyfusion.pipeline import cli, gpu_kit

    assert (
        cli.run_alone(
            gpu_kit.gpu_kit, "gpu-kit", ["--python", "3.12", "--out", str(tmp_path / "kit"), "--dry-run"]
        )
        == 0
    )
    lines = capsys.readouterr().out.split()
    names = {line.partition("==")[0] for line in lines}
    assert {
        "pydantic",
        "pydantic-core",
        "typing-inspection",
        "easy-vqa",
        "webdataset",
        "fla-core",
        "pytest",
    } <= names
    assert not names & {"torch", "triton", "earlyfusion"} and not [
        name for name in names if name.startswith("nvidia")
    ]
    assert f"transformers=={version('transformers')}" in lines

    commands = []

    def fake(command, **_):
        """pip that has no wheel of easy-vqa, and cannot build numpy."""
        commands.append(command)
        missing = ("easy-vqa" in command[-1] and "download" in command) or "numpy==" in command[-1]
        return subprocess.CompletedProcess(
            command, int(missing), "", "no matching distribution" if missing else ""
        )

    monkeypatch.setattr(gpu_kit.subprocess, "run", fake)
    assert (
        cli.run_alone(gpu_kit.gpu_kit, "gpu-kit", ["--python", "3.12", "--out", str(tmp_path / "kit")]) == 1
    )
    assert all("-c" in command and "--no-deps" in command for command in commands)
    assert all("--python-version=3.12" in command for command in commands if "download" in command)
    said = capsys.readouterr().err
    assert "missing: numpy==" in said and "no matching distribution" in said and "easy-vqa" not in said
    kept = (tmp_path / "kit/requirements.txt").read_text()
    assert "easy-vqa==" in kept and "numpy==" not in kept and "-c constraints.txt" in gpu_kit.INSTALL
