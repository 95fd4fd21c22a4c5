"""The verbs of this floor; the package names this module (pipeline/package/__init__.py)."""

from __future__ import annotations

from earlyfusion.pipeline.verbs import VERBS, Verb

VERBS |= {
    "rl": Verb(
        "earlyfusion.rl.train:run",
        "joint vision-text reinforcement learning with verifiable rewards",
        "earlyfusion.rl.recipe:RLConfig",
        "vision-rl",
    ),
    "measure": Verb(
        "earlyfusion.rl.measure:measure",
        "held-out accuracy, p(correct), pass@k and calibration on the RL tasks",
    ),
    "rollouts": Verb(
        "earlyfusion.rl.report.run:rollouts", "the report of a reinforcement learning run, with its rollouts"
    ),
    "long2short": Verb(
        "earlyfusion.rl.long2short.cmd:app", "shorter answers: merged weights, shortest right answers, DPO"
    ),
    "study": Verb(
        "earlyfusion.rl.study.cmd:app", "studies with control arms: transfer from vision RL to text"
    ),
}
