"""Every Triton kernel outside KDA compiles for sm_90 and sm_80 without a device, without spills, and prints
its table."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MODULES = [
    "attnres.triton_phase1",
    "attnres.triton_merge",
    "attention.triton.flash",
    "attention.triton.max_logit",
    "attention.triton.rope",
    "attention.triton.decode",
    "moe.triton_experts",
    "muon.triton_symmetric",
    "loss.triton_rows",
]


def compiled(module, tmp_path, *options):
    """(rows, printed table); in a process of its own, where the interpreter is off."""
    out = tmp_path / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "earlyfusion.kernels.aot",
            f"earlyfusion.kernels.{module}",
            "--json",
            str(out),
            *options,
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    print(done.stdout)
    assert out.exists(), done.stderr[-2000:]
    return json.loads(out.read_text()), done


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_spills_and_fit_into_shared_memory(module, tmp_path):
    rows, done = compiled(module, tmp_path)
    assert {row["arch"] for row in rows} == {90, 80}
    bad = [(row["name"], row["arch"], row["spills"], row["shared_bytes"]) for row in rows if not row["fits"]]
    assert not bad and done.returncode == 0, bad
    assert done.stdout.count("\n|") > len(rows)


def test_one_kernel_of_each_kind_uses_the_tensor_cores(tmp_path):
    """The quick one for every run: the symmetric product on sm_90."""
    rows, _ = compiled("muon.triton_symmetric", tmp_path, "--arch", "90", "--only", "bf16 + C")
    assert len(rows) == 1 and rows[0]["uses_wgmma"] and rows[0]["fits"]


ONES = """
import dataclasses, importlib, sys
from earlyfusion.kernels.aot import compile_variant
for module in sys.argv[1:]:
    variants = importlib.import_module("earlyfusion.kernels." + module).aot_variants()
    for variant in {v.fn.__name__: v for v in variants if v.only_arch in (None, 90)}.values():
        names = [n for n, t in variant.signature.items() if t == "i32" and n in variant.fn.arg_names]
        ones = dict(variant.constexprs) | dict.fromkeys(names, 1)
        compile_variant(dataclasses.replace(variant, constexprs=ones, divisible=()), 90)
        print("ok", variant.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_integer_arguments_equal_to_one_compile_as_the_constants_the_launcher_makes_of_them(module):
    """Triton turns an integer argument of 1 into a compile-time constant, on which tensor methods do not
    exist."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ONES, module],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0 and done.stdout.count("ok") >= 1, done.stdout + done.stderr[-2000:]
