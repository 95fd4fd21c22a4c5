"""Options of `earlyfusion plan`; its help imports nothing else."""

from pydantic import NonNegativeInt, PositiveInt

from earlyfusion.pipeline.config.arguments import RecipeOptions


class PlanOptions(RecipeOptions):
    """What `plan` takes besides a recipe."""

    gpus: PositiveInt | None = None
    """memory, traffic, time and cost of a step on so many GPUs, as the recipe's parallel section spreads it,
    and the nearest plan that fits where that does not"""
    gpu: str = "h200"
    """kind of GPU: h200, h100, a100, b200; cpu: this machine"""
    patches: NonNegativeInt | None = None
    """patches of the pictures in a micro-batch; as many as the stage allows if not given"""
    calibrate: str | None = None
    """output folder of a run on such GPUs: times are scaled by what it measured"""
