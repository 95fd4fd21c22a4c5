"""Machine code as a clock: loops take the steps that the launch's arguments say, and the time is that of a
sum by hand."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402
import triton.language as tl  # noqa: E402

HOME = Path(__file__).parent
COUNTS = (7, 0, 33)
PARTS = 3


@triton.jit
def walk(x, counts, out, parts, BLOCK: tl.constexpr):
    """As many additions as memory says, for the row that a division gives."""
    program = tl.program_id(0)
    at = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.load(counts + program // parts)):
        total += tl.load(x + at)
        at += parts * BLOCK
    tl.store(out + at, total)


def follow() -> None:
    """Print the additions of every program, and what was unsure on the way."""
    from sass import Warp, launched_by

    x, counts = torch.zeros(10_000), torch.tensor(COUNTS, dtype=torch.int32)
    launches = []
    call = walk[(len(COUNTS) * PARTS,)]
    launched_by(lambda: call(x, counts, x, PARTS, BLOCK=128, num_warps=4, num_stages=1), launches)
    found = []
    for program in range(len(COUNTS) * PARTS):
        warp = Warp(launches[0], (program, 0, 0))
        trace = warp.run()
        found.append([sum(launches[0].code[at].base == "FADD" for at in trace), warp.unsure])
    print(json.dumps(found))


def test_a_warp_is_followed_by_the_arguments_of_its_launch():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({str(HOME)!r}); import test_sass as t; t.follow()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    # One element a lane: as many additions as steps, however the compiler unrolls them.
    assert json.loads(done.stdout) == [[count, 0] for count in COUNTS for _ in range(PARTS)]


def test_bits_and_shifts_are_those_of_the_instruction():
    from sass import compare, funnel, table

    rng = random.Random(0)
    for _ in range(50):
        a, b, c, low, high = (rng.getrandbits(32) for _ in range(5))
        by, bits = rng.randrange(32), rng.randrange(256)
        want = 0
        for place in range(32):
            row = (a >> place & 1) << 2 | (b >> place & 1) << 1 | c >> place & 1
            want |= (bits >> row & 1) << place
        assert table(bits, a, b, c) == want
        assert table(0xC0, a, b, c) == a & b and table(0x3C, a, b, c) == a ^ b
        both = high << 32 | low
        assert funnel("SHF.R.U64", low, by, high) & 0xFFFFFFFF == both >> by & 0xFFFFFFFF
        assert funnel("SHF.L.U64.HI", low, by, high) & 0xFFFFFFFF == both << by >> 32 & 0xFFFFFFFF
        # Two words compared one after the other are one number compared at once.
        other = high << 32 | b
        lower = compare("ISETP.LT.U32.AND", low, b, None)
        assert compare("ISETP.LT.AND.EX", high, high, lower) == (both < other)


@pytest.mark.parametrize(
    "names, warps, cycles, hidden",
    [
        # One a cycle in every quarter; an integer product takes two, a special function eight.
        (["FFMA"] * 100, 1, 100, 0),
        (["FFMA"] * 100, 8, 200, 0),
        (["IMAD"] * 100, 8, 400, 1),
        # A queue before the unit hides its last cycles, and an instruction those after its issue.
        (["MUFU.EX2"] * 100, 4, 800, 8 + 7),
        # One unit for all four quarters.
        (["LDS"] * 100, 4, 400, 24),
        # A load from memory, and what waits for it.
        (["LDG.E", "wait"], 1, 552, 0),
    ],
)
def test_the_clock_is_that_of_a_sum_by_hand(names, warps, cycles, hidden):
    from sass import Instruction, Launch, simulate

    code = []
    for name in names:
        waits = name == "wait"
        sets = 0 if name == "LDG.E" else 7
        code.append(Instruction("", "FADD" if waits else name, ("R0", "R1"), 1, sets, 7, int(waits), None))
    launch = Launch("", code, 32, 0, warps, (1, 1, 1), {}, [], 0)
    found = simulate(launch, [range(len(code))], 1, 1)
    assert found.issued == warps * len(code) and found.cycles == cycles - hidden
