"""Machine code of an H100 as a clock: how long a compiled kernel would take, from its instructions alone.

    python tests/kernels/sass.py kda --only "T8192 H64 R2" [--calibrate runs/bench/kernels.json]

The cases are those of `earlyfusion bench kernels`, ours and fla's, each launched as it launches itself.
First one warp is followed through its integer instructions, with the launch's own arguments (integers are
read from the tensors of the launch), so that loops and branches are those of the launch; what depends on data
that is not there is counted as unsure and falls through. Then the blocks of one multiprocessor issue those
instructions side by side: stall counts and scoreboards from the machine code, rates of Hopper's units
(`UNITS`), latencies that are assumed (`LATENCY`). The time of a launch is the larger of that and of its
tensors' bytes at the memory's rate. Conflicts in shared memory and the second-level cache are not modelled,
and so it is too quick (fla on an H200 took 1.3 to 1.4 times as long, docs/kernels.md). It compares, and
measures nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import json
import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from aot import compiling, cuobjdump, resources

from earlyfusion.kernels.dispatch import ENVIRONMENT
from earlyfusion.pipeline.bench.case import Case, Setting, tensors_in
from earlyfusion.pipeline.bench.cases import CASES

GHZ, MULTIPROCESSORS, BYTES_PER_US = 1.85, 132, 4.2e6
PARAMETERS = 0x210
"""Where a launch's arguments begin in the constant bank of compute capability 9.0."""
MOST = 4_000_000
"""Instructions of a warp after which it is given up."""
SAMPLES = 8
"""Programs of a grid that are followed: loops may be longer for some."""
MASK = 0xFFFFFFFF


# ---- the instructions


class Instruction(NamedTuple):
    """One line of machine code. guard: predicate under which it runs; stall: cycles to the next one; sets,
    reads: scoreboards (7: none) that it releases when its result is there, and when its operands are read;
    waits: mask of those it waits for; target: index of the instruction that it jumps to."""

    guard: str
    name: str
    args: tuple[str, ...]
    stall: int
    sets: int
    reads: int
    waits: int
    target: int | None

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


CODE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:(@\S+)\s+)?(\S+)\s*(.*?)\s*;\s*/\* 0x\w+ \*/\s*/\* 0x(\w{16})")


def instructions(cubin: bytes) -> list[Instruction]:
    """All of a kernel's."""
    lines = CODE.findall(cuobjdump(cubin, "-sass"))
    index = {int(address, 16): number for number, (address, *_) in enumerate(lines)}
    found = []
    for _, guard, name, args, high in lines:
        parts = tuple(part.replace(".reuse", "") for part in re.split(r",\s*", args) if part)
        bits = int(high, 16)
        jumps = name.startswith(("BRA", "CALL")) and re.search(r"0x[0-9a-f]+", args)
        target = index.get(int(jumps[0], 16)) if jumps else None
        fields = bits >> 41 & 15, bits >> 46 & 7, bits >> 49 & 7, bits >> 52 & 63
        found.append(Instruction(guard[1:], name, parts, *fields, target))
    return found


# ---- one warp, followed through its integers


@dataclass
class Launch:
    """What a kernel was started with. values: of the constant bank, by offset; memory: tensors of
    integers, which may be read."""

    name: str
    code: list[Instruction]
    registers: int
    shared: int
    warps: int
    grid: tuple[int, int, int]
    values: dict[int, int]
    memory: list[torch.Tensor]
    bytes: int


def launch_of(name: str, kernel: Any, given: dict[str, Any], grid: tuple[int, int, int]) -> Launch:
    """Lay a launch's arguments out as the device would find them."""
    # Threads of a block, blocks, and where a thread's stack begins.
    values = {0: kernel.metadata.num_warps * 32, 4: 1, 8: 1, **dict(zip((12, 16, 20), grid)), 40: 0}
    tensors: dict[int, torch.Tensor] = {}
    at = PARAMETERS
    pending = [(kind, given[name]) for name, kind in reversed(kernel.src.signature.items())]
    while pending:
        kind, value = pending.pop()
        if isinstance(kind, tuple):
            pending += reversed(list(zip(kind, value)))
        elif kind != "constexpr":
            wide = 8 if kind[0] == "*" or kind.endswith("64") else 4
            at = -(-at // wide) * wide
            if kind[0] == "*":
                tensors[value.data_ptr()] = value
                value = value.data_ptr()
            elif kind.startswith("fp"):
                value = bits_of(value)
            for word in range(wide // 4):
                values[at + 4 * word] = value >> 32 * word & MASK
            at += wide
    whole = [one for one in tensors.values() if not one.is_floating_point()]
    size = sum(one.numel() * one.element_size() for one in tensors.values())
    code, (registers, _) = instructions(kernel.asm["cubin"]), resources(kernel.asm["cubin"])
    about = kernel.metadata
    return Launch(name, code, registers, about.shared, about.num_warps, grid, values, whole, size)


def bits_of(number: Any) -> int:
    return int(np.float32(number).view(np.uint32))


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def funnel(name: str, low: int, by: int, high: int) -> int:
    """SHF: a shift of two words."""
    both = high << 32 | low
    if ".L" in name:
        return (both << by) >> 32 if ".HI" in name else low << by
    if ".HI" in name:
        return signed(high) >> by if ".S32" in name else high >> by
    return both >> by


def compare(name: str, a: int, b: int, below: int | None) -> int | None:
    """ISETP; below: what the lower words said, where these are the upper ones."""
    if ".U32" not in name:
        a, b = signed(a), signed(b)
    sign = name.split(".")[1]
    if ".EX" in name and a == b:
        return below
    return int({"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b}[sign])


def table(bits: int, *inputs: int, width: int = 32) -> int:
    """LOP3, PLOP3: any function of three bits, bit by bit."""
    a, b, c = inputs
    full, found = (1 << width) - 1, 0
    for row in range(8):
        if bits >> row & 1:
            picked = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            found |= picked & full
    return found


@dataclass
class Warp:
    """Lane 0 of a warp of the program `block`. Registers hold 32 bits; None: not known."""

    launch: Launch
    block: tuple[int, int, int]
    registers: dict[str, int | None] = field(default_factory=dict)
    stack: dict[int, int | None] = field(default_factory=dict)
    unsure: int = 0

    def value(self, text: str) -> int | None:
        """An operand."""
        if text[0] in "-~!" and not text[1:2].isdigit():
            inner = self.value(text[1:])
            if inner is None:
                return None
            # A carry must see 2**32 - 0.
            return {"-": (1 << 32) - inner, "~": inner ^ MASK, "!": 1 - inner}[text[0]]
        if text.startswith(("-0x", "0x")):
            return int(text, 16) & MASK
        if found := re.fullmatch(r"c\[0x0\]\[(0x\w+)\]", text):
            return self.launch.values.get(int(found[1], 16))
        name = text.partition(".")[0]
        if name in ("RZ", "URZ", "SRZ"):
            return 0
        if name in ("PT", "UPT"):
            return 1
        if name == "SR_CTAID" or name == "SR_TID":
            axis = "XYZ".index(text[-1])
            return self.block[axis] if name == "SR_CTAID" else 0
        return self.registers.get(name)

    def pair(self, text: str) -> int | None:
        """Two registers, or two words of the constant bank."""
        low, high = self.value(text), self.value(after(text, 1))
        return None if low is None or high is None else high << 32 | low

    def put(self, name: str, value: int | None, words: int = 1) -> None:
        for word in range(words):
            part = None if value is None else value >> 32 * word & MASK
            self.registers[after(name, word)] = part

    def run(self) -> list[int]:
        """Indices of the instructions in the order in which they are issued."""
        code, trace, calls, at = self.launch.code, list[int](), list[int](), 0
        while len(trace) < MOST:
            one = code[at]
            trace.append(at)
            guard = self.value(one.guard) if one.guard else 1
            at += 1
            if one.base in ("BRA", "EXIT", "RET"):
                conditions = [guard] + [self.value(arg) for arg in one.args if re.match("!?U?P", arg)]
                self.unsure += None in conditions
                if not all(conditions):
                    continue
                if one.base == "EXIT" or one.target == at - 1:
                    return trace
                at = calls.pop() if one.base == "RET" else at if one.target is None else one.target
            elif one.base == "CALL" and one.target is not None:
                calls.append(at)
                at = one.target
            elif guard != 0:
                self.step(one, known=guard == 1)
        raise RuntimeError(f"{self.launch.name}: a warp did not end after {MOST:,} instructions")

    def step(self, one: Instruction, known: bool) -> None:
        """What an instruction writes; anything that is not an integer's is unknown."""
        name, base = one.name, one.base.removeprefix("U")
        # What was spilled comes back; the stack pointer stands still.
        if base in ("STL", "LDL"):
            register, place = (one.args[1], one.args[0]) if base == "STL" else one.args[:2]
            at = int((re.search(r"\+(-?0x\w+)", place) or ["", "0"])[1], 16)
            for word in range(self.words(one)):
                if base == "STL":
                    self.stack[at + 4 * word] = self.value(after(register, word)) if known else None
                else:
                    self.registers[after(register, word)] = self.stack.get(at + 4 * word) if known else None
            return
        # Results first: registers and predicates, then what is read.
        first = one.args[0] if one.args else ""
        outs = 2 if PREDICATE.fullmatch(first) else 1
        while outs < len(one.args) and base in CARRIES and PREDICATE.fullmatch(one.args[outs]):
            outs += 1
        results, words = one.args[:outs], self.words(one)
        try:
            found = self.work(base, name, one.args[outs:]) if known and base in WORK else None
        except TypeError:  # an operand is not known
            found = None

        # Beside a register: its carry, or whether it is anything but 0.
        beside = None
        if found is not None and base in CARRIES:
            beside = found >> 32 * words & 1
        elif found is not None and base == "LOP3":
            beside = int(found != 0)
        for place, text in enumerate(results):
            if re.match(r"U?R\d", text):
                self.put(text, found, words)
            elif re.match(r"U?P\d", text):
                self.put(text, found if base in ("ISETP", "PLOP3") and place == 0 else beside)

    def words(self, one: Instruction) -> int:
        """Registers that an instruction writes."""
        if one.base == "HGMMA":
            return int(one.name.split("x")[1]) // 2
        if one.base == "HMMA":
            return 4
        return 2 if ".WIDE" in one.name or one.base == "CS2R" else width(one.name)

    def work(self, base: str, name: str, reads: Sequence[str]) -> Any:
        """Integer arithmetic; TypeError where an operand is not known."""
        if base in ("LDG", "LD"):
            return self.load(name, reads)
        read = [self.value(text) for text in reads]
        if base in ("LDC", "S2R", "S2UR", "CS2R", "MOV", "R2UR"):
            return self.pair(reads[0]) if ".64" in name else read[0]
        if base in ("IADD3", "VIADD"):
            carried = read[3:] if ".X" in name else []
            return sum([*read[:3], *carried])
        if base == "IMAD":
            a, b = read[:2]
            if ".U32" not in name and (".WIDE" in name or ".HI" in name):
                a, b = signed(a), signed(b)
            if ".WIDE" in name:
                return (a * b + self.pair(reads[2])) & (1 << 65) - 1
            if ".HI" in name:
                return (a * b >> 32) + read[2]
            return a * b + read[2] + (read[3] if ".X" in name else 0)
        if base == "LEA":
            shift = int(reads[-2] if ".X" in name else reads[-1], 16)
            if ".HI" not in name:
                return (read[0] << shift & MASK) + read[1]
            high = (MASK if read[0] >> 31 else 0) if ".SX32" in name else read[2]
            extra = read[-1] if ".X" in name else 0
            return ((high << 32 | read[0]) << shift >> 32 & MASK) + read[1] + extra
        if base == "SHF":
            return funnel(name, read[0], read[1] & 63, read[2])
        if base == "LOP3":
            return table(read[3], *(part & MASK for part in read[:3]))
        if base == "PLOP3":
            return table(read[3], *read[:3], width=1)
        if base == "SEL":
            return read[0] if read[2] + 0 else read[1]
        if base == "SGXT":
            kept = read[0] & (1 << read[1]) - 1
            return kept - (1 << read[1]) if ".U32" not in name and kept >> read[1] - 1 else kept
        if base in ("IMNMX", "VIMNMX"):
            parts = read[:2] if ".U32" in name else [signed(part & MASK) for part in read[:2]]
            return min(parts) if read[2] + 0 else max(parts)
        if base == "IABS":
            return abs(signed(read[0]))
        # A division of integers begins with a reciprocal in float32, from above; what follows mends it.
        if base == "I2F":
            return bits_of(np.nextafter(np.float32(read[0]), np.float32(np.inf)))
        if base in ("MUFU", "F2I"):
            number = np.uint32(read[0] & MASK).view(np.float32)
            if base == "F2I":
                return int(number)
            return bits_of(1 / number) if ".RCP" in name and number else None
        # ISETP, the last one.
        found = compare(name, read[0] & MASK, read[1] & MASK, read[3] if ".EX" in name else None)
        return {"AND": found & read[2], "OR": found | read[2], "XOR": found ^ read[2]}[
            name.split(".")[-2 if ".EX" in name else -1]
        ]

    def load(self, name: str, reads: Sequence[str]) -> int | None:
        """An integer of a tensor of the launch."""
        place = re.search(r"\[(U?R\w+)\.64(?:\+(-?0x\w+))?\]$", reads[0])
        if place is None or (address := self.pair(place[1])) is None:
            return None
        address += int(place[2] or "0", 16)
        wide = 8 if ".64" in name else 4
        for one in self.launch.memory:
            if 0 <= address - one.data_ptr() <= one.nbytes - wide:
                return int.from_bytes(ctypes.string_at(address, wide), "little")
        return None


WORK = set(
    "LDG LD LDC S2R S2UR CS2R MOV R2UR IADD3 VIADD IMAD LEA SHF LOP3 PLOP3 SEL SGXT IMNMX VIMNMX IABS ISETP"
    " I2F MUFU F2I".split()
)
PREDICATE = re.compile(r"U?P[0-9T]")
CARRIES = {"IADD3", "IMAD", "LEA"}
"""Those that may write predicates beside their result."""


def width(name: str) -> int:
    """Words a lane that an instruction moves."""
    if ".128" in name or name.endswith(".4"):
        return 4
    return 2 if ".64" in name or name.endswith(".2") else 1


def after(name: str, count: int) -> str:
    """The register or the constant's word so many further on."""
    if name.startswith("c[0x0][0x"):
        return f"c[0x0][{int(name[7:-1], 16) + 4 * count:#x}]"
    found = re.match(r"(U?R)(\d+)", name)
    return f"{found[1]}{int(found[2]) + count}" if found else name.partition(".")[0]


# ---- a multiprocessor

UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys("FFMA FMUL FADD HADD2 HMUL2 HFMA2 FSWZADD".split(), ("fma", 1)),
    **dict.fromkeys("MUFU I2F F2I F2F FRND".split(), ("special", 8)),
    **dict.fromkeys(
        "LDS STS LDSM STSM SHFL LDL STL LDG LD LDGSTS STG ST RED ATOM ATOMG".split(), ("memory", 1)
    ),
    **dict.fromkeys("LDC R2UR".split(), ("uniform", 2)),
    "IMAD": ("fma", 2),
    **dict.fromkeys(
        "IADD3 LOP3 ISETP SEL FSEL FSETP FMNMX PRMT SHF LEA MOV F2FP I2FP P2R R2P SGXT VIADD PLOP3 IABS IMNMX"
        " VIMNMX FLO POPC HSETP2 HMNMX2 VOTE CS2R S2R".split(),
        ("alu", 2),
    ),
}
"""The unit of a quarter of a multiprocessor, and the cycles that one warp's instruction keeps it; "memory" is
one for all quarters."""
LATENCY = {"fma": 4, "alu": 12, "special": 24, "uniform": 12, "none": 4, "memory": 30, "tensor": 24}
"""Cycles from a unit to the result, assumed."""
GLOBAL, BARRIER, START, QUEUE = 550, 22, 300, 24
"""Cycles of a load from memory, of a barrier's release, of a block's start, and that memory's queue holds."""


def cost(one: Instruction) -> tuple[str, float, float]:
    """Unit, cycles there, and latency."""
    base, name = one.base, one.name
    if base == "HGMMA":
        _, columns, _ = re.findall(r"\d+", name.partition(".")[2])[:3]
        both_shared = one.args[1].startswith("gdesc")
        return "tensor", max(int(columns) / 2, 16 + int(columns) / 4 if both_shared else 0), LATENCY["tensor"]
    if base == "HMMA":
        short = "1688" in name
        return "tensor", 3.2 if short and "TF32" not in name else 6.4, 24 if short else 34
    unit, cycles = UNITS.get(base, ("uniform", 2) if base[0] == "U" else ("none", 1))
    if base == "IMAD" and ".WIDE" in name:
        cycles = 4
    if unit == "memory":
        return unit, width(name), GLOBAL if base in ("LDG", "LD", "LDGSTS") else LATENCY[unit]
    return unit, cycles, LATENCY[unit]


class Run:
    """A warp that issues a trace. boards: when its scoreboards are released; products, copies: when its
    groups of tensor products and of asynchronous copies are done."""

    def __init__(self, trace: Sequence[int], quarter: int, block: list[Any]) -> None:
        self.trace, self.quarter, self.block, self.at = trace, quarter, block, 0
        self.boards = [0.0] * 6
        self.products: list[float] = []
        self.copies: list[float] = []
        self.copied = 0.0

    def ready(self, one: Instruction) -> float:
        """When what it waits for is there."""
        found = max([self.boards[board] for board in range(6) if one.waits >> board & 1], default=0.0)
        groups = {"WARPGROUP.DEPBAR.LE": self.products, "DEPBAR.LE": self.copies}.get(one.name, [])
        left = int(one.args[-1], 16) if groups and one.args[-1].startswith("0x") else 0
        return max(found, groups[-1 - left]) if len(groups) > left else found


@dataclass
class Clock:
    """What a simulation gave. cycles: of all blocks; busy: of each unit, of all quarters."""

    cycles: float
    issued: int
    busy: Counter[str]


def simulate(launch: Launch, traces: Sequence[Sequence[int]], blocks: int, total: int) -> Clock:
    """`blocks` blocks side by side, until `total` have ended."""
    code = launch.code
    costs = [cost(one) for one in code]
    free: Counter[tuple[str, int]] = Counter()  # when a unit of a quarter takes the next
    busy: Counter[str] = Counter()
    heap: list[tuple[float, int, Run]] = []
    begun = order = issued = 0
    last = 0.0

    def later(when: float, run: Run) -> None:
        nonlocal order
        order += 1
        heapq.heappush(heap, (when, order, run))

    def start(when: float) -> None:
        nonlocal begun
        block: list[Any] = [launch.warps, []]  # warps that run, and those at a barrier
        for warp in range(launch.warps):
            run = Run(traces[begun % len(traces)], (begun * launch.warps + warp) % 4, block)
            later(when, run)
        begun += 1

    for _ in range(min(blocks, total)):
        start(37.0 * begun)  # they do not begin in step
    while heap:
        now, _, run = heapq.heappop(heap)
        index = run.trace[run.at]
        one, (unit, cycles, latency) = code[index], costs[index]
        shared = (unit, 0 if unit == "memory" else run.quarter)
        # Queues before a unit: who issues need not wait until it is free.
        slack = {"memory": QUEUE, "special": 8, "none": math.inf}.get(unit, 0)
        if one.base == "HGMMA":
            slack = math.inf
        possible = max(now, free["issue", run.quarter], run.ready(one), free[shared] - slack)
        if possible > now:
            later(possible, run)
            continue
        free["issue", run.quarter] = now + 1
        issued += 1
        begins = max(free[shared], now)
        free[shared] = begins + cycles
        busy[unit] += cycles
        done = begins + cycles + latency
        # What waits for it.
        if one.base == "HGMMA" and "gsb0" in one.args:
            run.products = [*run.products[-7:], done]
        elif one.base == "LDGSTS":
            run.copied = done
        elif one.base == "LDGDEPBAR":
            run.copies = [*run.copies[-7:], max(now, run.copied)]
        if one.sets != 7:
            run.boards[one.sets] = max(run.boards[one.sets], done)
        if one.reads != 7:
            run.boards[one.reads] = max(
                run.boards[one.reads], now + 10, begins + 4 if unit == "memory" else 0
            )
        # The next instruction, the other warps, or the next block.
        run.at += 1
        then = now + max(1, one.stall)
        last = max(last, then)
        if run.at == len(run.trace):
            run.block[0] -= 1
            if not run.block[0] and begun < total:
                start(then + START)
        elif one.base == "BAR" and ("SYNC" in one.name or "RED" in one.name):
            run.block[1].append((then, run))
            if len(run.block[1]) == launch.warps:
                release = max(when for when, _ in run.block[1]) + BARRIER
                for _, waiting in run.block[1]:
                    later(release, waiting)
                run.block[1] = []
        else:
            later(then, run)
    return Clock(last, issued, busy)


def blocks_side_by_side(registers: int, shared: int, warps: int) -> int:
    """By registers, shared memory and warps of a multiprocessor of compute capability 9.0."""
    held = -(-registers // 8) * 8 * 32 * warps
    return max(1, min(65_536 // held, 228 * 1024 // (shared + 1024), 64 // warps, 32))


def predicted(launch: Launch) -> dict[str, Any]:
    """Row of a table: what a launch would take, and the unit that is busiest."""
    programs = math.prod(launch.grid)
    traces, unsure = [], 0
    for sample in range(min(SAMPLES, programs)):
        # In golden steps: even ones would meet one column of the grid alone.
        rest = int((0.31 + sample * 0.6180339887) % 1 * programs)
        place = (
            rest % launch.grid[0],
            rest // launch.grid[0] % launch.grid[1],
            rest // math.prod(launch.grid[:2]),
        )
        warp = Warp(launch, place)
        traces.append(warp.run())
        unsure = max(unsure, warp.unsure)
    most = blocks_side_by_side(launch.registers, launch.shared, launch.warps)
    each = math.ceil(programs / MULTIPROCESSORS)
    side = min(most, each)
    # Twice as many as run side by side: the second ones start while the first ones end.
    total = side if each <= side else max(2 * side, SAMPLES)
    clock = simulate(launch, traces, side, total)
    # Turns of as many blocks as run side by side; few of them come whole.
    turns = programs / MULTIPROCESSORS / side
    turns = math.ceil(turns) if turns < 8 else turns
    us = clock.cycles * side / total * turns / GHZ / 1e3
    unit, cycles = max(clock.busy.items(), key=lambda each: each[1] / (1 if each[0] == "memory" else 4))
    share = cycles / clock.cycles / (1 if unit == "memory" else 4)
    floor = launch.bytes / BYTES_PER_US
    return {
        "kernel": launch.name,
        "registers": launch.registers,
        "blocks": most,
        "programs": programs,
        "instructions": clock.issued // (total * launch.warps),
        "unsure": unsure,
        "busiest": f"{unit} {share:.0%}" if us > floor else "bytes",
        "us": max(us, floor),
    }


# ---- the cases of `earlyfusion bench kernels`

TUNED: dict[str, dict[str, int]] = {
    "chunk_kda_fwd_kernel_intra_token_parallel": {"BH": 2, "num_warps": 1},
    "chunk_kda_fwd_kernel_intra_sub_chunk": {"num_warps": 1, "num_stages": 2},
    "chunk_kda_fwd_kernel_inter_solve_fused": {"BK": 64, "num_warps": 1},
    "recompute_w_u_fwd_kda_kernel": {"num_warps": 4, "num_stages": 2},
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32, "num_warps": 4, "num_stages": 2},
    "chunk_gla_fwd_kernel_o": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 2},
    "chunk_kda_bwd_kernel_dAv": {"num_warps": 4, "num_stages": 2},
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "chunk_kda_bwd_kernel_wy_dqkg_fused": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 2},
    "chunk_kda_bwd_kernel_intra": {"num_warps": 2, "num_stages": 3},
    "chunk_kda_bwd_kernel_intra safe": {"num_warps": 1, "num_stages": 2},
}
"""Of fla's own lists, what such a model found quickest with Triton 3.6; of kernels that are not here, the
first."""


class Shapes(Setting):
    """The cases' sizes, and no numbers: memory that nobody writes costs nothing."""

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype or self.dtype)


def tuned(self: Any, *args: Any, **options: Any) -> Any:
    """In the place of a search with a clock."""
    name = self.base_fn.__name__ + " safe" * bool(options.get("SAFE_GATE"))
    wanted = TUNED.get(name, {})
    picked = [one for one in self.configs if wanted.items() <= one.all_kwargs().items()]
    return self.fn.run(*args, **options, **(picked or self.configs)[0].all_kwargs())


def launched_by(call: Callable[[], Any], found: list[Launch]) -> None:
    """Add what a call would launch."""

    def launched(compile: Any, kernel: Any, args: tuple[Any, ...], grid: Any, options: Any) -> None:
        given = dict(zip(kernel.arg_names, args)) | options
        made = compile(*args, **options)
        size = grid(given) if callable(grid) else grid
        found.append(launch_of(kernel.__name__, made, given, (*size, 1, 1)[:3]))

    with compiling(90, launched):
        call()


def rows_of(case: Case, side: str) -> list[dict[str, Any]]:
    """Every launch of a side, forward and backward; what is launched twice alike is followed once."""
    found: list[Launch] = []
    marks: list[int] = []

    def call() -> None:
        outputs = [one for one in tensors_in(case.sides[side](*case.leaves)) if one.requires_grad]
        marks.append(len(found))
        torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])

    launched_by(call, found)
    rows: list[dict[str, Any]] = []
    known: dict[Any, dict[str, Any]] = {}
    for place, one in enumerate(found):
        key = one.name, one.grid, len(one.code), one.bytes
        if key not in known:
            known[key] = predicted(one)
        rows.append(known[key] | {"pass": "forward" if place < marks[0] else "backward"})
    return rows


def main() -> int:
    """Print every launch of the chosen cases, and the sums of ours beside fla's."""
    parser = argparse.ArgumentParser(prog="sass.py", description=__doc__)
    add = parser.add_argument
    add("groups", nargs="*", default=["kda"], help="kda, attnres, loss, ... (default: kda)")
    add("--only", default="", help="cases whose label contains this (default: all)")
    add(
        "--calibrate",
        help="record of `earlyfusion bench kernels` on an H100 or H200: measured beside predicted",
    )
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {ENVIRONMENT: "triton", "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    # What fla asks of a device at import is answered before a driver without one is there.
    import fla.utils
    import triton

    fla.utils.IS_TF32_SUPPORTED = fla.utils.IS_NVIDIA_HOPPER = fla.utils.IS_NVIDIA = True
    fla.utils.check_shared_mem = lambda *arguments, **options: True
    triton.runtime.autotuner.Autotuner.run = tuned
    measured = json.loads(Path(args.calibrate).read_text())["cases"] if args.calibrate else {}
    setting = Shapes(torch.device("cpu"), torch.bfloat16, ("fla",))
    setting.gpu = True
    ratios = []
    for group in args.groups:
        for case in CASES[group](setting):
            label = f"{group}: {case.label}"
            if args.only not in label:
                continue
            sums: dict[tuple[str, str], float] = {}
            for side in case.sides:
                rows = rows_of(case, side)
                print(f"\n{label}, {side}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
                for row in rows:
                    cells = [f"{x:,.0f}" if isinstance(x, float) else str(x) for x in row.values()]
                    print(f"| {' | '.join(cells)} |")
                sums[side, "forward"] = sum(row["us"] for row in rows if row["pass"] == "forward")
                sums[side, "both"] = sum(row["us"] for row in rows)
            for (side, name), us in sums.items():
                text = f"{label}, {side}, {name}: {us:,.0f} us"
                if side != "ours":
                    text += f", {us / sums['ours', name]:.2f} times ours"
                if (ms := measured.get(label, {}).get(side, {}).get(f"{name}_ms")) is not None:
                    ratios.append(1e3 * ms / us)
                    text += f", measured {1e3 * ms:,.0f}: {ratios[-1]:.2f} times that"
                print(text, flush=True)
    if ratios:
        spread = statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else 0.0
        print(f"measured: {statistics.geometric_mean(ratios):.2f} times that, spread {math.exp(spread):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
