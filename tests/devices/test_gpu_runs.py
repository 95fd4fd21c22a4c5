"""On a GPU: pretraining, the engine with CUDA graphs and reinforcement learning give what they give on the
CPU."""

import pytest
from device_cases import check_ahead, furthest, work

pytestmark = pytest.mark.gpu
# Of a step's sums; other kernels, tf32 in three parts.
FLOAT32 = 1e-3
BFLOAT16 = 3e-2


KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton"])


@pytest.fixture
def both(tmp_path):
    """What a task finds on the CPU, and on the GPU with these kernels."""

    def run(task, kernels="auto"):
        (found,) = work(task, tmp_path / "gpu", EF_KERNELS=kernels, TRITON_INTERPRET="0")
        if task in ("pretrain", "engine", "rl"):
            hidden = dict(CUDA_VISIBLE_DEVICES="", EF_KERNELS="torch", TRITON_INTERPRET="0")
            return *work(task, tmp_path / "cpu", **hidden), found
        return None, found

    return run


@KERNELS
def test_pretraining(both, kernels):
    cpu, gpu = both("pretrain", kernels)
    single = furthest(cpu["float32"], gpu["float32"])
    assert single[0] < FLOAT32 and max(single) < 0.05
    assert furthest(cpu["float32"], gpu["bfloat16"])[0] < BFLOAT16


@KERNELS
def test_the_engine_and_its_graphs(both, kernels):
    cpu, gpu = both("engine", kernels)
    for name, least in (("float32", 8), ("bfloat16", 5)):
        same = [a == b for a, b in zip(cpu[name]["ids"], gpu[name]["ids"], strict=True)]
        # A tie may fall the other way; bfloat16 has many.
        assert sum(same) >= least, same
        assert gpu[name]["graphs"] > 0 or (kernels, name) == ("torch", "float32")


@KERNELS
def test_a_prompt_read_in_chunks_meets_the_logits_of_training(both, kernels):
    _, found = both("layers", kernels)
    assert found["whole"] < BFLOAT16 and found["pages"] < 5e-3


@KERNELS
def test_the_device_runs_ahead_of_the_host(both, kernels):
    check_ahead(both("ahead", kernels)[1])


@KERNELS
def test_reinforcement_learning(both, kernels):
    cpu, gpu = both("rl", kernels)
    # An answer may turn over.
    assert furthest(cpu["float32"][:1], gpu["float32"][:1])[0] < 0.05
    assert all(0 <= record["reward"] <= 1 and record["grad_norm"] > 0 for record in gpu["bfloat16"])


def test_commands(both):
    _, codes = both("commands")
    assert len(codes) == 6 and not any(codes.values()), codes
