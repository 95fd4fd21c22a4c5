"""From a checked recipe to a running stage: what every stage (pretrain, sft, rl) does before its loop."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.checkpoint import FOLDER, latest
from earlyfusion.pipeline.config.arguments import RecipeArguments, remember
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.parallel.mesh import check_encoder, check_model, check_stage, sizes_of
from earlyfusion.pipeline.plan import show_brief
from earlyfusion.pipeline.runtime import check_launcher, tie_to_launcher
from earlyfusion.pipeline.track import check_trackers


def launch(
    stage: Callable[[Any, bool], Any],
    config: Any,
    parsed: RecipeArguments,
    check: Callable[[Any], object],
    show: Callable[[Any], object] = show_brief,
) -> int:
    """Show the plan (--dry-run, by `show`), or build the stage and train; the exit code.

    What would fail after the set-up, or hours later, is tried first: the output folder, trackers, the
    launcher's settings, and what `check` looks at (evaluation tasks, the reward). Raises UserError.
    """
    # Cheap things first: nobody should wait for a model to learn that a folder is a file.
    check_launcher(config.train.mixed_precision)
    check_parallel(config)
    check_folder(config.run.directory)
    check_trackers(config.track.trackers)
    check(config)
    if parsed.dry_run:
        show(config)
        return EXIT_OK

    # From here on processes hold memory and files, which `close` gives back whatever happens.
    tie_to_launcher()
    training = stage(config, parsed.resume or restarted(config.run.directory))
    try:
        if training.runtime.is_main:
            remember(config.run.directory, parsed)
        return training.train()
    finally:
        training.close()


def restarted(directory: str | Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started these processes again, after one of them died, and there is a checkpoint
    to go on from: nobody is there to say --resume."""
    again = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and latest(Path(directory) / FOLDER) is not None


def check_parallel(config: Any) -> None:
    """UserError where the parallel sizes do not fit the processes that were started, or the model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = sizes_of(config.parallel, world, dict(os.environ))
    # A later stage has no model of its own; what it starts from is looked at when it is there.
    if getattr(config, "model", None) is not None:
        check_model(sizes, config.model, getattr(config.parallel, "pp_virtual", 1))
    check_encoder(sizes, getattr(config.parallel, "encoder", "joint"))
    for stage in getattr(config, "stages", ()):
        check_stage(sizes, stage.name, stage.tokens, stage.lanes)


def check_folder(directory: str | Path) -> None:
    """UserError when an output folder cannot be made or written; nothing is made."""
    path = Path(directory)
    # The nearest folder above that exists decides.
    while not path.exists() and not path.is_symlink() and path.parent != path:
        path = path.parent
    if not path.is_dir():
        raise UserError(f"--out {directory}: {path} is a file; give a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--out {directory}: {path} cannot be written; give another folder")
