"""The model does not know devices: kernels/dispatch.py chooses, and the engine says once where rows are
exact."""

import re
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "model"
TEST = re.compile(
    r"is_cpu|is_cuda|\.type [!=]= |== \"(triton|torch|naive|cpu|cuda)\"|\bpick\(|\.item\(\)|import numpy"
)
ALLOWED = {
    "engine/runner.py": ('device.type == "cpu"', 'device.type != "cuda"'),  # exact_rows, CUDA graphs
    "engine/cpu.py": ('device.type != "cpu"',),  # the compiled form
}
NUMPY_ON_THE_HOST = ("engine/", "cache.py", "hub/portable/processing")


def test_no_file_of_the_model_tests_a_device_or_names_a_backend():
    wrong = []
    for path in sorted(MODEL.rglob("*.py")):
        name = str(path.relative_to(MODEL))
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            allowed = any(part in line for part in ALLOWED.get(name, ()))
            on_host = "numpy" in line and name.startswith(NUMPY_ON_THE_HOST)
            if TEST.search(line) and not allowed and not on_host:
                wrong.append(f"model/{name}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
