"""`earlyfusion bench growth`: what a token of training costs as documents get longer, the model wider and its
experts more.

Forward, loss and backward of the recipe's decoder on random ids, every case in a process of its own, in turn.
A step holds `tokens` tokens, or one document where that is longer. share: useful FLOPs (model/flops.py) over
the rate of a large product, measured in the same process. Every length stands there twice, the second time
with KDA in every layer: what is left of growth there is not attention's.
"""

import statistics
import time

import torch
from pydantic import PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.flops import decoder_flops
from earlyfusion.pipeline.bench.frame import (
    GROWTH,
    Result,
    alternate,
    default_device,
    medians,
    numbers,
    peak_mib,
    run_side,
    save_record,
)
from earlyfusion.pipeline.bench.train import our_loss, with_kda
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.size import sized
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import keep_freed_memory
from earlyfusion.pipeline.step import peak_flops

KEYS = ("length", "hidden_size", "num_experts")
"""What a case is looked up by: `earlyfusion plan` takes the nearest one."""


class GrowthOptions(Options):
    recipe: str = "nano"
    """recipe whose shape is used"""
    tokens: PositiveInt = 4096
    """tokens of a step"""
    lengths: str = "512,1024,4096,16384,65536"
    """tokens of a document"""
    factors: str = "2,4"
    """times the width, and times the experts"""
    steps: PositiveInt = 1
    """timed steps of one round"""
    rounds: PositiveInt = 2
    """rounds, each case once a round"""
    out: str = GROWTH
    """where the numbers are saved"""


def step_side(shape: Record, length: int, tokens: int, steps: int) -> Result:
    """One case in its process."""
    keep_freed_memory()
    device, text = default_device(), ModelConfig.model_validate(shape)
    documents = max(1, tokens // length)
    torch.manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (documents, length)).to(device)
    model, loss = our_loss(text, ids)
    seconds = []
    # The first step allocates.
    for _ in range(1 + steps):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()
        value.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    step = statistics.median(seconds[1:])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = peak_flops(device, dtype) or float("nan")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "us a token": 1e6 * step / ids.numel(),
        "share of the roofline": 3 * sum(decoder_flops(text, [length] * documents).values()) / step / peak,
        "roofline, GFLOP/s": peak / 1e9,
        "peak MiB": peak_mib(),
    }


def cases(options: GrowthOptions) -> dict[str, tuple[Record, int]]:
    """Name -> decoder shape and length of a document."""
    base = load_config([options.recipe]).model.model_dump(mode="json")
    recurrent = with_kda(base, [*range(1, base["num_hidden_layers"] + 1)])
    lengths = numbers(options.lengths)
    found = {f"{length:,} tokens": (base, length) for length in lengths}
    found |= {f"{length:,} tokens, KDA alone": (recurrent, length) for length in lengths}
    for times in numbers(options.factors):
        wide = base | sized(base, {"hidden_size": times * base["hidden_size"]})
        found[f"{times} times as wide"] = wide, lengths[0]
        found[f"{times} times the experts"] = base | {"num_experts": times * base["num_experts"]}, lengths[0]
    return found


@verb
def growth(options: GrowthOptions) -> None:
    """Entry of `earlyfusion bench growth`."""
    asked = cases(options)

    def run(case: str) -> Result:
        shape, length = asked[case]
        about = {"shape": shape, "length": length, "tokens": options.tokens, "steps": options.steps}
        return run_side(step_side, about)

    rounds = alternate(asked, options.rounds, run)
    rows = {case: medians(found) for case, found in rounds.items()}
    first = next(iter(rows.values()))["us a token"]
    for row in rows.values():
        row["times the first"] = row["us a token"] / first
    for case, (shape, length) in asked.items():
        rows[case] |= dict(zip(KEYS, (length, shape["hidden_size"], shape["num_experts"])))
    names = [name for name in next(iter(rows.values())) if name not in KEYS]
    columns = {name: {case: row[name] for case, row in rows.items()} for name in names}
    show(f"{options.recipe}: a token of training", columns)
    save_record(options.out, options.model_dump(), cases=rows)
