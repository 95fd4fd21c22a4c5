"""`earlyfusion bench balance`: how unevenly pictures lie on the ranks, and what encoding them elsewhere
evens out.

The recipe's own data, `--lanes` micro-batches a step, shared by every number of ranks that divides them;
largest over mean vision FLOPs of the ranks: pictures where they were read (before), all steps exchanged
(after), and as training decides by itself (auto). Once as the loader deals them (lanes
are steered to equal density), once skewed: every other lane gets sources with pictures alone, the others
text. Saved as JSON; nothing of a run's folder is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.record import Result, save_record
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.picture_exchange import EXCHANGE_ABOVE
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.vision.balance import VisionCost, plan_step
from earlyfusion.vision.patches import Grid


class BalanceOptions(Options):
    recipe: str = "small"
    """recipe whose data and tower are used"""
    steps: PositiveInt = 20
    """steps of data that are read"""
    lanes: Annotated[int, Field(ge=2)] = 4
    """micro-batches of a step"""
    out: str = "runs/bench/balance.json"
    """where the numbers are saved"""


def read_grids(
    config: RunConfig, tokens: Tokenizer, lanes: int, steps: int, skewed: bool
) -> list[list[list[Grid]]]:
    """[step][lane]: grids of the pictures of a micro-batch, of the recipe's first stage.

    Skewed: pictures alone in even lanes, text alone in odd ones, the worst that a mix can do.
    """
    # No workers: nothing is timed here.
    data, stage = config.data.model_copy(update={"prefetch": "none"}), config.stages[0]
    sizes = stage.model_dump(include={"length", "tokens", "max_patches", "max_vision_flops"})
    # All lanes are read side by side, as the ranks of one step are.
    with ExitStack() as stack:
        loaders = []
        for lane in range(lanes):
            weights = dict(stage.weights) or {source.name: source.weight for source in data.sources}
            for source in data.sources:
                if skewed and source.has_pictures != (lane % 2 == 0):
                    weights[source.name] = 0.0
            if not any(weights.values()):
                text = "bench balance: the recipe needs sources with pictures and sources of text alone"
                raise UserError(text)
            places: dict[str, Any] = {"lanes": lanes, "rank": lane, "world_size": lanes}
            loader = Loader(data, tokens, config.vision, **sizes, **places, weights=weights)
            loaders.append(stack.enter_context(loader))
        return [[loader.next_step()[0].grids for loader in loaders] for _ in range(steps)]


def plan_of(
    config: RunConfig, steps: Sequence[Sequence[Sequence[Grid]]], above: float, ranks: int
) -> dict[str, float]:
    """Slowest rank over mean, over all steps weighed by their work: an even step of ten pictures counts ten
    times."""
    cost, stage = VisionCost.from_config(config.vision), config.stages[0]
    total = before = after = auto = exchanged = 0.0
    for step in steps:
        # Lanes go to ranks in turn, as in training.
        grids = [[list(part) for part in step[rank::ranks]] for rank in range(ranks)]
        plan = plan_step(grids, cost, config.vision.merge_kernel_size, stage.max_patches)
        work = sum(cost.of(part) for part in step)
        total += work
        before += plan.before * work
        after += plan.after * work
        auto += work * (plan.after if plan.pays(above) else plan.before)
        exchanged += plan.pays(above)
    total = total or 1.0
    return {
        "before": before / total,
        "after": after / total,
        "after_auto": auto / total,
        "exchanged_by_auto": exchanged,
    }


@verb
def balance(options: BalanceOptions) -> None:
    """Entry of `earlyfusion bench balance`."""
    config = load_config([options.recipe])
    tokens = build.tokenizer(config, Runtime())
    record: Result = {}
    for name, skewed in (("as dealt", False), ("skewed", True)):
        steps = read_grids(config, tokens, options.lanes, options.steps, skewed)
        record[name] = columns = {}
        for ranks in range(2, options.lanes + 1):
            # Only layouts that training accepts.
            if options.lanes % ranks == 0:
                columns[f"{ranks} ranks"] = plan_of(config, steps, EXCHANGE_ABOVE, ranks)
        show(f"{name}: largest over mean vision FLOPs of the ranks", columns)
    save_record(options.out, options.model_dump(), **record)
