"""Vision work spread over ranks, as the data side sees it: the cost of pictures and the plan of an exchange.

The packer weighs documents by `VisionCost`; the plan itself stands in vision/balance.py, where the model reaches it too.
"""

from earlyfusion.vision.balance import (
    Exchange,
    StepPlan,
    VisionCost,
    assign,
    exchange,
    imbalance,
    loads,
    plan_step,
)

__all__ = ["Exchange", "StepPlan", "VisionCost", "assign", "exchange", "imbalance", "loads", "plan_step"]
