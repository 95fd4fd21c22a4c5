"""The GPU's side of the code on a machine without one: an emulated device gives what the CPU gives.

Kernels in torch are compared value by value; with Triton kernels (whose values tests/kernels proves) it is
looked at that they are launched, that nothing else is on the wrong device, and where the host waits.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from device_cases import HERE, check_ahead, furthest, work

COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="torch is a CUDA build: the device is not to be emulated"
    ),
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler"),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """worker.py on the emulated device: device_guard.cpp is compiled once and preloaded."""
    from torch.utils.cpp_extension import include_paths

    library = tmp_path_factory.mktemp("guard") / "device_guard.so"
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    flags, linked = "-std=c++20 -O0 -shared -fPIC".split(), "-lc10 -ltorch_cpu".split()
    source = str(HERE / "device_guard.cpp")
    command = [COMPILER, *flags, *includes, source, "-o", str(library), f"-L{libraries}", *linked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"device_guard.cpp does not compile against this torch: {done.stderr.strip()[-300:]}")
    loaded = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(libraries)}

    return lambda task, folder, *ways: work(task, folder, *ways, EF_KERNELS="torch", **loaded)


def waits(found, within):
    """{place: times} of the host's waits below a function."""
    return {place.split(" < ")[0]: times for _, place, times in found["syncs"] if within in place}


def test_pretraining(emulated, tmp_path):
    cpu, gpu, dry = emulated("pretrain", tmp_path, "cpu", "torch", "dry")
    single = furthest(cpu["float32"], gpu["float32"])
    # other kernels sum in another order; Muon's orthogonalisation
    # makes small differences grow from step to step (4.5e-4 in the second, on an AMD EPYC)
    assert single[0] < 1e-6 and single[1] < 1e-3 and max(single) < 5e-3
    half = furthest(cpu["bfloat16"], gpu["bfloat16"])
    assert half[0] < 1e-3 and max(half) < 5e-2
    # Autocast was on.
    assert furthest(gpu["float32"], gpu["bfloat16"])[0] > 1e-7

    steps = 5
    for kernels, found in (("torch", gpu), ("triton", dry)):
        # Between steps the host may wait: for the log, a checkpoint, an evaluation.
        elsewhere = ("pretrain.py:log", "pretrain.py:save", "pretrain.py:finish", "evaluate.py")
        between = {place for part in elsewhere for place in waits(found, part)}
        stepping = waits(found, "pretrain.py:train")
        assert {place: times for place, times in stepping.items() if place not in between} == {
            # The sums of the step.
            "pipeline/step.py:forward_backward": steps,
            # The norm of the gradient, for the guard.
            "pipeline/update.py:update": steps,
        }
        # Which rows have a loss; and in torch the gate of the largest logit of the one MLA layer.
        layers = {"kernels/loss/chunked_ce.py:_split": steps}
        if kernels == "torch":
            layers["kernels/attention/varlen.py:max_logit"] = steps
        for place, times in waits(found, "forward").items():
            if place.startswith("kernels/loss") or place.endswith(":max_logit"):
                assert layers.pop(place) == times
        assert not layers
    expected = """
        prep pair_scores forward_scan dual_scan pair_gradients chunk_gradients conv_forward
        conv_backward phase1_forward phase1_backward query_gradient merge_forward merge_backward
        flash_forward flash_backward_keys flash_backward_queries largest_logits gate_up_swiglu
        grouped_product clear_idle combine row_statistics row_gradient rope
    """
    assert set(expected.split()) <= set(dry["launches"]) and not gpu["launches"] and not dry["unguarded"]


def test_the_engine_and_its_graphs(emulated, tmp_path):
    cpu, gpu, dry = emulated("engine", tmp_path, "cpu", "torch", "dry")
    for name in ("float32", "bfloat16"):
        assert gpu[name]["ids"] == cpu[name]["ids"] and len(cpu[name]["ids"]) == 9
        assert dry[name]["graphs"] > 0
        assert {"decode", "decode_share", "forward_scan", "combine"} <= set(dry[name]["launches"])
        assert not dry[name]["unguarded"]
    # in float32 the torch form of the experts asks for their counts, which no graph may do
    assert gpu["float32"]["graphs"] == 0 and gpu["bfloat16"]["graphs"] == dry["bfloat16"]["graphs"]
    for found in (gpu["bfloat16"], dry["float32"], dry["bfloat16"]):
        # The tokens of a step, at once.
        assert set(waits(found, "")) == {"model/engine/engine.py:step"}


def test_a_prompt_read_in_chunks_meets_the_logits_of_training(emulated, tmp_path):
    """On CUDA the chunks take the flash kernel; in plain torch their logits stay float32. Bit equality is not
    promised: keys are expanded by products of other shapes, and plain torch absorbs them."""
    plain, auto = emulated("layers", tmp_path, "torch", "auto")
    # A bfloat16 layer: projections, keys and values rounded to 8 bits.
    assert plain["whole"] < 2e-2 and auto["whole"] < 2e-2
    # Rounded logits would be 5.7e-3 off; in plain torch absorbed queries are rounded once more.
    assert plain["pages"] < 5e-3 and auto["pages"] < 2**-10
    # the whole prompt, a fresh first chunk, and one launch per later chunk
    assert auto["launches"]["flash_forward"] == 4 and not auto["unguarded"] and not plain["launches"]


def test_the_device_runs_ahead_of_the_host(emulated, tmp_path):
    cpu, gpu = emulated("ahead", tmp_path, "cpu", "torch")
    assert gpu.keys() == cpu.keys() and len(gpu) == 4
    for name, found in gpu.items():
        assert found["answers"] == cpu[name]["answers"] and found["counts"] == cpu[name]["counts"]
        torch.testing.assert_close(
            torch.tensor(found["logprobs"]), torch.tensor(cpu[name]["logprobs"]), rtol=0, atol=1e-5
        )
    check_ahead(gpu)


def test_reinforcement_learning(emulated, tmp_path):
    cpu, gpu = emulated("rl", tmp_path, "cpu", "torch")
    # At this rate no update turns an answer over.
    assert max(furthest(cpu["float32"], gpu["float32"])) < 1e-3
    assert all(0 <= record["reward"] <= 1 and record["grad_norm"] > 0 for record in gpu["bfloat16"])


def test_commands(emulated, tmp_path):
    (codes,) = emulated("commands", tmp_path, "torch")
    assert len(codes) == 6 and not any(codes.values()), codes
