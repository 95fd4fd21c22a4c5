"""Every Triton kernel of KDA compiles for sm_90 and sm_80 without a device, without spills, within a block's
memory."""

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

MODULE = "earlyfusion.kernels.kda.triton.aot"
# Compiled in every run; the slow test compiles all.
QUICK = "K64 V64 C64 softplus"
SHAPES = ((32, 32), (64, 64), (128, 128), (256, 256), (128, 256), (64, 128))


def compile_table(tmp_path, *options):
    """Rows of the printed table, compiled in a process of its own: here the interpreter may be on."""
    out = tmp_path / "rows.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "earlyfusion.kernels.aot", MODULE, "--json", str(out), *options],
        capture_output=True,
        text=True,
        env=environment,
    )
    print(done.stdout, done.stderr)
    assert out.exists(), done.stderr
    rows = json.loads(out.read_text())
    assert (done.returncode == 0) == all(row["fits"] for row in rows)
    return rows


def assert_fits(rows):
    bad = [(row["name"], row["arch"], row["spills"], row["shared_bytes"]) for row in rows if not row["fits"]]
    assert rows and not bad, bad


def test_the_training_kernels_of_one_shape_do_not_spill_and_use_tensor_cores(tmp_path):
    rows = compile_table(tmp_path, "--arch", "90", "--only", QUICK)
    assert_fits(rows)
    assert {row["name"].split()[0] for row in rows} == {"prep", "grad"}
    assert all(row["uses_wgmma"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 80])
def test_no_kernel_spills(tmp_path, arch):
    rows = compile_table(tmp_path, "--arch", str(arch))
    assert_fits(rows)
    names = [row["name"] for row in rows]
    for key_dim, value_dim in SHAPES:
        for kernel in ("prep", "grad", "scan", "dual", "move", "join"):
            assert any(
                name.startswith(kernel) and f"bf16 K{key_dim} V{value_dim}" in name for name in names
            ), kernel
    assert any(name.startswith("conv") for name in names) and any(name.startswith("decode") for name in names)
    products = [
        row for row in rows if row["name"].split()[0] in ("prep", "grad", "scan", "dual", "move", "join")
    ]
    assert all(row["uses_mma"] for row in products)
    if arch == 90:
        # all but the join, whose products have K rows (32 at least, a warp group wants 64)
        large = [
            row
            for row in products
            if " bf16 " in row["name"] and "C64" in row["name"] and row["name"][:4] != "join"
        ]
        assert large and all(row["uses_wgmma"] for row in large)


def test_the_clamp_of_the_gate_lets_nan_through():
    """Triton's maximum drops a NaN unless told otherwise, and the interpreter never does: so the PTX is read.
    A dropped NaN would become a full decay, and the run would go on with finite numbers."""
    code = """
import re
from earlyfusion.kernels.aot import compile_variant
from earlyfusion.kernels.kda.triton.aot import decode_variants, kda_variants
made = [v for bounded in (False, True) for v in kda_variants('bf16', 64, 64, bounded)]
made = [v for v in made if v.name[:4] in 'prep grad']
for variant in made + decode_variants('bf16', 64, 64)[:2]:
    ptx = compile_variant(variant, 90).ptx
    quiet = len(re.findall(r'max\\.f32.*0fC2200000', ptx))
    print(len(re.findall(r'max\\.NaN\\.f32.*0fC2200000', ptx)), quiet, variant.name)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(found) == 5 and all(int(kept) > 0 and int(dropped) == 0 for kept, dropped, _ in found), found


def test_a_kernel_that_spills_is_caught(tmp_path):
    """The same kernel under a cap of 64 registers has to spill, and the table has to say so."""
    code = (
        "import dataclasses\n"
        "from earlyfusion.kernels.aot import compile_variant\n"
        "from earlyfusion.kernels.kda.triton.aot import kda_variants\n"
        "v = dataclasses.replace(kda_variants('bf16', 64, 64, True)[0], num_stages=1)\n"
        "row = compile_variant(v, 90, max_registers=64)\n"
        "print(row.spills, row.fits)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    spills, fits = out.stdout.split()
    assert int(spills) > 0 and fits == "False"
