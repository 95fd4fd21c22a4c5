"""The README's commands run, each in its smallest form; its links and make targets exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What makes a training command small: the same code on a handful of tokens.
SMALL = (
    "--steps 2 --stages.joint.tokens 512 --stages.joint.length 256 --eval.tasks [] --eval.every 0 --eval.samples 0 "
    "--train.threads 1"
)
BENCH = "--documents 1 --length 64 --steps 1 --warmup 0 --rounds 1 --recipe-steps 1 --threads 1 --out bench.json"
BENCHES = {
    "train": BENCH,
    "data": "--images 8 --samples 8 --rounds 1 --out data.json",
}
SFT = "--steps 2 --stages.sft.tokens 1536 --eval.tasks [] --eval.every 0 --train.threads 1"
RL = "--steps 1 --eval.problems 4 --rollout.prompts 4 --rollout.group_size 4 --train.threads 1 --out"
LAUNCH = "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"


def bash_lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def smallest(line: str, folder: Path) -> list[str] | None:
    """The command as an argument list that takes seconds; None for make targets (checked by themselves)."""
    for name in ("runs/", "photos/", "shards/"):
        line = line.replace(name, f"{folder}/{name.removeprefix('runs/')}")
    words = shlex.split(line.replace("picture.png", str(folder / "picture.png")))
    if words[0] == "make" or "serve" in words:  # serve does not end; tests/pipeline/test_serve.py starts it
        return None
    if "|" in words:
        assert words[0] == "printf"
        return [sys.executable, "-m", "earlyfusion.pipeline.cli", *words[words.index("|") + 2 :]]
    words = ["4" if word in ("60", "50") else word for word in words]
    trains = "pretrain" in line and "--dry-run" not in line
    extra = shlex.split(SMALL) if trains else shlex.split(BENCHES[words[2]]) if "bench" in words else []
    if "sft" in words:
        extra = shlex.split(SFT)
    if "earlyfusion.rl.train" in words:
        extra = [*shlex.split(RL), str(folder / "vision-rl")]
    if "--resume" in words:
        extra[extra.index("--steps") + 1] = "3"
        words += ["--optim.lr", "4e-3"]
    if words[0] == "accelerate":  # the module form: the console script imports an optional package that may be broken
        return [sys.executable, *shlex.split(LAUNCH), *words[2:], *extra]
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:], *extra]
    assert words[0] == "earlyfusion", f"README names a command this test does not know: {line}"
    return [sys.executable, "-m", "earlyfusion.pipeline.cli", *words[1:], *extra]


@pytest.mark.slow
def test_readme_commands_run_in_their_smallest_form(tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64), "teal").save(tmp_path / "picture.png")
    (tmp_path / "photos").mkdir()
    for colour in ("teal", "red", "gold"):
        Image.new("RGB", (90, 64), colour).save(tmp_path / "photos" / f"{colour}.jpg")
        (tmp_path / "photos" / f"{colour}.txt").write_text(f"all {colour}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # `make pretrain` comes first in the README and leaves the model that `generate` reads.
    first = f"accelerate launch -m earlyfusion.pipeline.pretrain nano --out {tmp_path}/nano"
    commands = [smallest(first, tmp_path), *(smallest(line, tmp_path) for line in bash_lines())]
    assert len([c for c in commands if c]) >= 7
    for command in filter(None, commands):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, input="what is it?\n"
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_readme_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {line.split()[1] for line in bash_lines() if line.startswith("make ")}
    assert {"pretrain", "test"} <= named <= targets


def test_readme_links_and_recipes_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).exists()]
    shipped = {path.stem for path in (ROOT / "pipeline" / "recipes").glob("*.toml")}
    table = set(re.findall(r"^\| `([a-z0-9-]+)` \|", README, flags=re.MULTILINE))
    assert shipped == table


def test_readme_makes_no_unfilled_promise():
    assert not re.findall(r"\b[A-Z0-9]+_(?:SUMMARY|TABLE|P|A)\b", README)


def test_continuous_integration_calls_the_readme_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text() and "make test" in README
