"""The GPU's side of the code on a machine without one: an emulated device gives what the CPU gives.

Kernels in torch are compared value by value; with Triton kernels (whose values tests/kernels proves) it is looked at
that they are launched, that nothing else is on the wrong device, and where the host waits.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="torch is a CUDA build: the device is not to be emulated"
    ),
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """device_guard.cpp as a library, and the folder of torch's libraries."""
    from torch.utils.cpp_extension import include_paths

    library = tmp_path_factory.mktemp("guard") / "device_guard.so"
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(HERE / "device_guard.cpp"),
               "-o", str(library), f"-L{libraries}", "-lc10", "-ltorch_cpu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"device_guard.cpp does not compile against this torch: {done.stderr.strip()[-300:]}")
    return library, libraries


def work(name, guard, folder):
    """The JSON that worker.py prints."""
    library, libraries = guard
    environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(libraries), "EF_KERNELS": "torch",
                   "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, str(HERE / "worker.py"), name, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def furthest(these, those):
    """Largest relative difference of two lists of records."""
    assert len(these) == len(those) > 0
    assert all(a.keys() == b.keys() for a, b in zip(these, those))
    return [max(abs(a[key] - b[key]) / abs(a[key]) for key in a) for a, b in zip(these, those)]


def waits(found, within):
    """{place: times} of the host's waits below a function."""
    return {place.split(" < ")[0]: times for what, place, times in found["syncs"] if within in place}


def test_pretraining(guard, tmp_path):
    found = work("pretrain", guard, tmp_path)
    single = furthest(found["cpu"], found["gpu"])
    # other kernels sum in another order; Muon's orthogonalisation makes small differences grow from step to step
    assert single[0] < 1e-6 and single[1] < 1e-4 and max(single) < 5e-3
    half = furthest(found["cpu_bf16"], found["gpu_bf16"])
    assert half[0] < 1e-3 and max(half) < 5e-2
    assert furthest(found["gpu"], found["gpu_bf16"])[0] > 1e-7  # autocast was on

    steps = 5
    for kernels in ("torch", "triton"):
        step = waits(found[kernels], "_one_step")
        logging = {place for place in waits(found[kernels], "_log") | waits(found[kernels], "optimizer_metrics")}
        assert {place: times for place, times in step.items() if place not in logging} == {
            "pipeline/step.py:forward_backward": steps,  # the sums of the step
            "pipeline/pretrain.py:_one_step": steps,  # the norm of the gradient, for the guard
        }
        layers = {place: times for place, times in waits(found[kernels], "forward").items()
                  if place.startswith("kernels/loss") or place.endswith(":max_logit")}  # fmt: skip
        gate = {"kernels/attention/max_logit.py:max_logit": steps} if kernels == "torch" else {}  # one MLA layer
        assert layers == {"kernels/loss/chunked_ce.py:forward": steps, **gate}
    expected = {"prep", "forward_scan", "dual_scan", "chunk_gradients", "conv_forward", "conv_backward", "phase1_forward",
                "phase1_backward", "query_gradient", "merge_forward", "merge_backward", "flash_forward",
                "flash_backward_keys", "flash_backward_queries", "largest_logits", "gate_up_swiglu", "grouped_product", "grouped_outer",
                "combine", "row_statistics", "row_gradient", "rope_forward", "rope_backward"}  # fmt: skip
    assert expected <= set(found["triton"]["launches"])
    assert not found["torch"]["launches"]


def test_the_engine_and_its_graphs(guard, tmp_path):
    found = work("engine", guard, tmp_path)
    for name in ("float32", "bfloat16"):
        assert found[name]["gpu"] == found[name]["cpu"] and len(found[name]["cpu"]) == 9
    # in float32 the torch form of the experts asks for their counts, which no graph may do
    assert found["float32"]["graphs"] == 0
    assert found["bfloat16"]["graphs"] == found["float32_triton"]["graphs"] == found["bfloat16_triton"]["graphs"] > 0
    for name in ("bfloat16", "float32_triton", "bfloat16_triton"):
        assert set(waits(found[name], "")) == {"model/engine/engine.py:step"}  # the tokens of a step, at once
    for name in ("float32_triton", "bfloat16_triton"):
        assert {"fused_decode", "decode_share", "forward_scan", "combine"} <= set(found[name]["launches"])


def test_reinforcement_learning(guard, tmp_path):
    found = work("rl", guard, tmp_path)
    assert max(furthest(found["cpu"], found["gpu"])) < 1e-3  # at this rate no update turns an answer over
    assert all(0 <= record["reward"] <= 1 and record["grad_norm"] > 0 for record in found["gpu_bf16"])


def test_commands(guard, tmp_path):
    codes = work("commands", guard, tmp_path)
    assert len(codes) == 6 and not any(codes.values()), codes
