"""Every Triton kernel compiles for sm_90 and sm_80 without a device, as its operation launches it: without
spills, within a block's memory. In processes of their own: here the interpreter may be on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HOME = Path(__file__).parent
# Each line is one process: starting one takes as long as an operation.
OPERATIONS = [
    "kda",
    "kda_decode short_conv attention qkv_rope mla_decode attnres moe_experts loss newton_schulz",
]
KDA_PRODUCTS = "pair_scores pair_gradients chunk_gradients forward_scan dual_scan transition combine".split()
SHAPES = ("K32 V32", "K64 V64", "K128 V128", "K256 V256", "K128 V256", "K64 V128")


def python(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


def printed(code):
    """What lines of code print that have `compile_operation`."""
    done = python(
        "-c", f"import sys; sys.path.append({str(HOME)!r})\nfrom aot import compile_operation\n" + code
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("operations", OPERATIONS)
def test_no_kernel_spills(operations):
    done = python(HOME / "aot.py", *operations.split())
    _, _, *rows = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    assert rows and done.returncode == 0, (done.stdout, done.stderr[-2000:])
    for arch in ("90", "80"):
        # The columns: name, arch, warps, registers, spills, shared memory, cores.
        assert all(row[4] == "0" for row in rows)
        # The first launch of KDA multiplies nothing.
        found = {row[0]: row[6] for row in rows if row[1] == arch and not row[0].startswith("prep ")}
        if operations != "kda":
            assert arch == "80" or found["symmetric_tiles 1 None"] == "wgmma"
            continue
        for shape in SHAPES:
            for kernel in KDA_PRODUCTS:
                assert any(name.startswith(f"{kernel} bfloat16 {shape} ") for name in found), (kernel, shape)
        assert "-" not in found.values()
        # Chunks of 64, but for the joins, whose products have K rows (32 at least, a warp group wants 64).
        large = {found[name] for name in found if "bfloat16 K128 V128" in name and name[:7] != "combine"}
        assert arch == "80" or large == {found["pair_scores bfloat16 K64 V64 bound -5.0"]} == {"wgmma"}


@pytest.mark.slow
def test_integer_arguments_equal_to_one_compile_as_the_constants_the_launcher_makes_of_them():
    """Triton turns an integer argument of 1 into a compile-time constant, on which tensor methods do not
    exist."""
    # All of them would take minutes, and differ in shapes alone.
    code = f"""
for name in {" ".join(OPERATIONS).split()}:
    print(len(compile_operation(name, 90, "K64" if name.startswith("kda") else "", ones=True)))
"""
    counts = printed(code)
    assert len(counts) == 10 and "0" not in counts


def test_the_clamp_of_the_gate_lets_nan_through():
    """Triton's maximum drops a NaN unless told otherwise, and the interpreter never does: so the PTX is read.
    A dropped NaN would become a full decay, and the run would go on with finite numbers."""
    # The clamps -40 and, with bfloat16 operands, -15.75 in float32.
    code = """
import re
rows = compile_operation("kda_decode", 90, "K64")
for kernel in ("prep", "chunk_gradients"):
    rows += compile_operation("kda", 90, kernel + " bfloat16 K64 V64 bound")
for row in rows:
    clamps = "f32.*0fC(2200000|17C0000)"
    kept, dropped = (len(re.findall(rf"max\\.{nan}{clamps}", row.ptx)) for nan in (r"NaN\\.", ""))
    print(kept, dropped, row.name)
"""
    found = [line.split(maxsplit=2) for line in printed(code)]
    assert len(found) == 6 and all(int(kept) > 0 and int(dropped) == 0 for kept, dropped, _ in found), found


def test_a_kernel_that_spills_is_caught():
    """The same kernel under a cap of 96 registers has to spill, and the table has to say so."""
    only = "pair_scores bfloat16 K64 V64 bound -"
    compiled = f"compile_operation('kda', 90, {only!r}, maxnreg=96, num_stages=1)"
    spills, fits = printed(f"for row in {compiled}: print(row.spills, row.fits)")[-1].split()
    assert int(spills) > 0 and fits == "False"
