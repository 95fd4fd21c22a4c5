"""What test_on_an_emulated_gpu.py runs in a process of its own: `worker.py pretrain|engine|rl|commands FOLDER`.

Everything runs on the CPU first, then the emulated device is installed and everything runs again there. The last line
printed is a JSON object.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import emulated_cuda
import torch
from emulated_cuda import LAUNCHES, SYNCS, Device

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("pipeline", "model", "rl")]
torch.set_num_threads(1)


def noted() -> dict[str, Any]:
    """Host syncs and kernel launches since the last call."""
    found = {"syncs": [[*key, count] for key, count in Counter(SYNCS).items()], "launches": dict(Counter(LAUNCHES))}
    SYNCS.clear()
    LAUNCHES.clear()
    return found


def pretrain(folder: Path) -> dict[str, Any]:
    """The tiny recipe, five steps of two stages: losses on both devices; then with Triton kernels that do nothing."""
    import tiny_run

    from earlyfusion.pipeline import evaluate
    from earlyfusion.pipeline import pretrain as loop
    from earlyfusion.pipeline.track import read_metrics

    evaluate.write_report = lambda out: out / "report.html"
    changes = dict(stages__0__steps=3, stages__0__warmup_steps=1, stages__1__steps=2, stages__1__decay_steps=1)
    recipe = tiny_run.tiny_recipe(tiny_run.make_tokenizer(folder, 300), **changes)

    def losses(name: str, **more: Any) -> list[dict[str, float]]:
        tiny_run.forget_processes()
        path = tiny_run.write_recipe(folder / f"{name}.toml", {**recipe, "train": {**recipe["train"], **more}})
        assert loop.main([str(path), "--out", str(folder / name)]) == 0
        records = read_metrics(folder / name / "metrics.jsonl")
        keys = ("loss", "grad_norm", "loss/image", "loss/text")
        return [{key: record[key] for key in keys if key in record} for record in records if "grad_norm" in record]

    found: dict[str, Any] = {"cpu": losses("cpu"), "cpu_bf16": losses("cpu_bf16", mixed_precision="bf16")}
    keep = emulated_cuda.install()
    found["gpu"] = losses("gpu")
    noted()
    found["gpu_bf16"] = losses("gpu_bf16", mixed_precision="bf16")
    found["torch"] = noted()
    os.environ["EF_KERNELS"], Device.launch_for_real = "auto", False
    recipe["model"]["linear_attn_config"]["head_dim"] = 32  # a width of the kernels
    losses("triton", mixed_precision="bf16")
    found["triton"] = noted()
    del keep
    return found


def engine(folder: Path) -> dict[str, Any]:
    """Requests of every kind: tokens on both devices, in float32 without experts and in bfloat16 with them."""
    from engine_cases import PLAIN, SHAPE, TOKENIZER, all_returned, drawn, model, pictured, requests, tokens

    from earlyfusion.model.engine.engine import Engine
    from earlyfusion.model.engine.request import Request

    def ask(net: Any) -> tuple[Engine, list[list[int]]]:
        given = [
            *requests([5, 9, 17, 33], drawn(10, seed=3)), Request("image", pictured(0), drawn(6)),
            Request("group", tokens(11), drawn(8, n=3)), Request("top", tokens(7), drawn(6, top_p=0.8, temperature=0.7)),
        ]  # fmt: skip
        made = Engine(net, TOKENIZER, max_slots=8, page_size=8, prefill_chunk=32)
        answers = [list(done.ids) for done in made.generate(given)]
        all_returned(made)
        return made, answers

    nets = {"float32": model(0, **PLAIN), "bfloat16": model(0, **SHAPE).to(torch.bfloat16)}
    found: dict[str, Any] = {name: {"cpu": ask(net)[1]} for name, net in nets.items()}
    keep = emulated_cuda.install()
    for name, net in nets.items():
        there = copy.deepcopy(net).to("cuda")
        noted()
        made, answers = ask(there)
        graphs = made.runner.graphs
        found[name] |= {"gpu": answers, "graphs": 0 if graphs is None else len(graphs._captured), **noted()}
    os.environ["EF_KERNELS"], Device.launch_for_real = "auto", False
    for name, net in nets.items():
        made, answers = ask(copy.deepcopy(net).to("cuda"))
        graphs = made.runner.graphs
        found[f"{name}_triton"] = {"graphs": 0 if graphs is None else len(graphs._captured), **noted()}
    del keep
    return found


def rl(folder: Path) -> dict[str, Any]:
    """Two updates of reinforcement learning: in float32 on both devices, then with a bfloat16 engine on the emulated one."""
    import rl_cases

    from earlyfusion.pipeline.track import read_metrics

    start = rl_cases.model_directory(folder)

    def learned(name: str, **changes: Any) -> list[dict[str, float]]:
        changes = {"optim": {"lr": 1e-5, "weight_decay": 0.0}, "train": {"updates": 2}, **changes}
        assert rl_cases.run(start, folder / name, **changes) == 0
        records = read_metrics(folder / name / "metrics.jsonl")
        keys = ("reward", "grad_norm", "entropy")
        return [{key: record[key] for key in keys if key in record} for record in records if "grad_norm" in record]

    found: dict[str, Any] = {"cpu": learned("cpu")}
    keep = emulated_cuda.install()
    found["gpu"] = learned("gpu")
    noted()
    found["gpu_bf16"] = learned(
        "gpu_bf16", train={"updates": 1, "mixed_precision": "bf16"}, rollout={"dtype": "bfloat16"}
    )
    found |= noted()
    del keep
    return found


def commands(folder: Path) -> dict[str, Any]:
    """Exit codes of commands a user would run on the device; `doctor` compares every kernel with its law there."""
    from PIL import Image

    from earlyfusion.eval import run as evaluation
    from earlyfusion.pipeline import bench_engine, doctor, generate_cmd
    from earlyfusion.rl import measure_cmd
    from earlyfusion.rl.parts import model_directory

    keep = emulated_cuda.install()
    picture, model = folder / "picture.png", str(model_directory("embedded:skills"))
    Image.new("RGB", (40, 30), (200, 30, 30)).save(picture)
    codes = {
        "doctor": doctor.main([]),
        "measure": measure_cmd.main(["--model", model, "--tasks", "counting/0/picture", "--problems", "3"]),
        "generate": generate_cmd.main(["--model", model, "--image", str(picture), "--question", "what color is it?"]),
        "eval": evaluation.main(["--model", model, "--tasks", "counting", "--limit", "2", "--out", str(folder / "eval")]),
        "bench engine": bench_engine.main(
            ["--sides", "", "--contexts", "64,300", "--steps", "1", "--out", str(folder / "engine.json")]
        ),
    }  # fmt: skip
    os.environ["EF_KERNELS"] = "triton"
    codes["doctor with Triton"] = doctor.main([])
    del keep
    return codes


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    print(
        json.dumps(
            {"pretrain": pretrain, "engine": engine, "rl": rl, "commands": commands}[sys.argv[1]](Path(sys.argv[2]))
        )
    )
