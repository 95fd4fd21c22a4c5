"""The README's commands run, each in its smallest form, in the environment that `make pretrain` makes; its
links and make targets exist."""

import json
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import tomllib
import urllib.request
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What makes a training command small: the same code on a handful of tokens.
SMALL = (
    "--steps 2 --stages.joint.tokens 512 --stages.joint.length 256 --eval.tasks [] --eval.every 0"
    " --eval.samples 0 --eval.heldout 0 --train.threads 1"
)
BENCH = "--documents 1 --length 64 --steps 1 --rounds 1 --out bench.json"
BENCHES = {
    "train": BENCH,
    "data": "--images 8 --samples 8 --rounds 1 --out data.json",
}
SFT = "--steps 2 --stages.sft.tokens 1536 --eval.tasks [] --eval.every 0 --train.threads 1"
RL = "--steps 1 --eval.problems 4 --rollout.prompts 4 --rollout.group_size 4 --train.threads 1 --out"
LAUNCH = (
    "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no"
    " --dynamo_backend no"
)


def bash_lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


# Several commands, one after another in one process: starting one takes longer than most of them.
ALL = """
import importlib, json, sys
for module, *words in json.loads(sys.argv[1]):
    print(words, flush=True)
    if importlib.import_module(module).main(words):
        sys.exit("failed: " + " ".join(words))
"""


def smallest(line: str) -> list[str] | None:
    """The command's module and its arguments so that it takes seconds; a launcher's command begins with -m.
    None for make targets (checked by themselves)."""
    words = shlex.split(line)
    if words[0] == "make":
        return None
    if "|" in words:
        assert words[0] == "printf"
        return ["earlyfusion.pipeline.cli", *words[words.index("|") + 2 :]]
    words = ["4" if word in ("60", "50") else word for word in words]
    trains = "pretrain" in line and "--dry-run" not in line
    extra = shlex.split(SMALL) if trains else shlex.split(BENCHES[words[2]]) if "bench" in words else []
    if "sft" in words:
        extra = shlex.split(SFT)
    if "earlyfusion.rl.train" in words:
        extra = [*shlex.split(RL), "runs/vision-rl"]
    if "--resume" in words:  # as it stands: what made the run small is in the run's own overrides
        extra = ["--steps", "3"]
    if words[0] == "torchrun":
        return ["-m", "torch.distributed.run", *words[1:], *extra]
    if words[0] == "accelerate":
        if "--num_cpu_threads_per_process" in words and "--resume" not in words:
            # the module form: the console script imports an optional package that may be broken
            return [*shlex.split(LAUNCH), *words[2:], *extra]
        # One command by this launcher is enough.
        return [*words[words.index("-m") + 1 :], *extra]
    assert words[0] == "earlyfusion", f"README names a command this test does not know: {line}"
    return ["earlyfusion.pipeline.cli", *words[1:], *extra]


def base_distributions() -> set[str]:
    """Names of the distributions that the base dependencies bring, extras left out; as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = [Requirement(need) for need in project["dependencies"]], set()
    while waiting:
        need = waiting.pop()
        name = need.name.lower().replace("_", "-")
        extras = need.extras or {""}
        if name in found or (
            need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras)
        ):
            continue
        try:
            needs = distribution(need.name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        for text in needs:
            below = Requirement(text)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(Requirement(f"{below.name}{''.join(sorted(f'[{e}]' for e in below.extras))}"))
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """The interpreter of an environment with the base dependencies alone: a venv whose packages are links to
    ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in {*base_distributions(), "setuptools"}:
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    # Not by its metadata: beside a checkout's own egg-info those of the installation are not found.
    for file in Path(sysconfig.get_paths()["purelib"]).glob("*earlyfusion*"):
        (packages / file.name).symlink_to(file)
    return str(folder / "bin" / "python")


def test_the_base_environment_lacks_what_only_extras_bring(python):
    code = (
        "import importlib.util as u; print([n for n in ('pyarrow', 'lm_eval', 'pytest', 'uvicorn') if"
        " u.find_spec(n)])"
    )
    assert (
        subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == "['uvicorn']"
    )


@pytest.mark.slow
def test_readme_commands_run_in_their_smallest_form(tmp_path, python):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # `make pretrain` comes first in the README and leaves the model that `generate` reads.
    first = "accelerate launch -m earlyfusion.pipeline.pretrain nano --out runs/nano"
    commands = [command for line in [first, *bash_lines()] if (command := smallest(line))]
    launched = [command for command in commands if command[0] == "-m"]
    (server,) = (command for command in commands if "serve" in command)
    others = [command for command in commands if command not in (*launched, server)]
    assert len(launched) == 2 and len(others) >= 17
    # The benchmark measures memory beside that of its own process: nothing may have run there.
    others.sort(key=lambda command: "train" not in command)
    for command in [*launched, ["-c", ALL, json.dumps(others)]]:
        done = subprocess.run(
            [python, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            input="what is it?\n",
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    serves([python, "-m", *server, "--port", "0"], tmp_path, environment)


def serves(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """The server says where it listens, names the model as the run, and stops when asked."""
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address, page = (server.stdout.readline().split()[-1] for _ in range(2))
            with urllib.request.urlopen(page, timeout=60) as answer:
                assert answer.headers.get_content_type() == "text/html"
            with urllib.request.urlopen(f"{address}/models", timeout=60) as answer:
                assert json.load(answer)["data"][0]["id"] == "nano"
            server.send_signal(signal.SIGTERM)
            # uvicorn hands the signal on when it has stopped
            assert server.wait(timeout=60) in (0, -signal.SIGTERM)
        finally:
            server.kill()


def test_readme_names_every_extra_once_and_all_holds_them():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    offered = set(extras) - {"dev", "all"}
    (listed,) = re.findall(r"but for these extras: (.*?)\. `", README, flags=re.DOTALL)
    assert set(re.findall(r"`([a-z]+)`\s\(", listed)) == offered
    assert extras["all"] == [f"earlyfusion[{','.join(sorted(offered, key=list(extras).index))}]"]
    named = re.findall(r"earlyfusion\[([a-z,]+)\]", "\n".join(p.read_text() for p in sources()))
    assert named and {name for names in named for name in names.split(",")} <= offered


def sources() -> list[Path]:
    rooms = ("kernels", "vision", "model", "data", "eval", "pipeline", "rl")
    return [path for room in rooms for path in (ROOT / room).rglob("*.py")]


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


def spread(path: str) -> list[str]:
    """Every path of one with {a,b} in it."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if not braces:
        return [path]
    before, after = path[: braces.start()], path[braces.end() :]
    return [whole for part in braces[1].split(",") for whole in spread(before + part + after)]


@pytest.mark.parametrize("document", ["support.md", "kernels.md", "post-training.md", "measurements.md"])
def test_tests_that_documents_name_exist(document):
    lost = []
    for line in (ROOT / "docs" / document).read_text(encoding="utf-8").splitlines():
        folder = ROOT / "tests"
        for words in re.findall(r"`([^`\s]+)`", line):
            path, _, name = words.partition("::")
            if not re.search(r"(^|/)test_[^/]*\.py$", path):
                continue
            for one in spread(path):
                found = list(ROOT.glob(one)) if one.startswith("tests/") else list(folder.glob(one))
                folder = found[0].parent if found else folder
                pattern = re.compile(f"def {name}".replace("*", r"\w*"))
                if not found or (name and not any(pattern.search(file.read_text()) for file in found)):
                    lost.append(words)
    assert not lost
