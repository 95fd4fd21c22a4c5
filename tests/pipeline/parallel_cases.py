"""What a rank of test_parallel.py does beside training."""

import json
from pathlib import Path

import torch

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.optim.routing import local_part
from earlyfusion.pipeline.pretrain import Pretraining
from earlyfusion.vision import balance


def shared(argv: list[str]) -> int:
    """The command line, with pictures as small as the tests' large enough for all ranks together."""
    balance.LEAST_SHARE = 4
    return cli.main(argv)


def held(recipe: str, out: str, *overrides: tuple[str, object]) -> None:
    """Bytes of weights, gradients and optimizer state that this rank holds after one step, as
    OUT/bytes-RANK.json."""
    config = load_config([recipe], [("run.out", out), ("run.steps", 1), *overrides])
    training = Pretraining(config, resume=False)
    found = {"gradients": 0}
    step = training.optimizer.step

    def watched(*given):
        # In the step: afterwards gradients are gone.
        grads = [p.grad for p in training.fusion.parameters() if p.grad is not None]
        found["gradients"] = sum(local_part(grad).nbytes for grad in grads)
        return step(*given)

    training.optimizer.step = watched  # type: ignore[method-assign]
    try:
        training.train()
        found["weights"] = sum(local_part(p).nbytes for p in training.fusion.parameters())
        tensors = [value for state in training.optimizer.state.values() for value in state.values()]
        found["optimizer"] = sum(local_part(one).nbytes for one in tensors if isinstance(one, torch.Tensor))
        Path(out, f"bytes-{training.runtime.rank}.json").write_text(json.dumps(found))
    finally:
        training.close()
