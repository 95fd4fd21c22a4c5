"""The verbs of this floor; the package names this module (pipeline/package/__init__.py).

A module is imported when its verb is called; the lists of them need no torch.
"""

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.verbs import BENCHES, VERBS, Verb

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
        "earlyfusion.rl.report:rollouts", "the report of a reinforcement learning run, with its rollouts"
    ),
    "watch": Verb("earlyfusion.rl.watch:watch", "a live page of runs: curves, samples, rollouts; compares"),
    "long2short": Verb(
        "earlyfusion.rl.verbs:shorter", "shorter answers: merged weights, shortest right answers, DPO"
    ),
    "swarm": Verb("earlyfusion.rl.verbs:swarms", "agents side by side over a folder of documents"),
    "study": Verb(
        "earlyfusion.rl.verbs:studies",
        "studies with control arms: transfer from vision RL to text, optimizer, fusion, QK-Clip, residuals",
    ),
}

BENCHES["environments"] = Verb(
    "earlyfusion.rl.bench:environments", "conversations with slow environments, beside the engine"
)

BENCHES["swarm"] = Verb("earlyfusion.rl.bench:swarm", "sub-agents side by side and one after the other")
BENCHES["rollouts"] = Verb(
    "earlyfusion.rl.fleet.bench:rollouts", "whole answers beside divided ones, on several engines"
)
BENCHES["drafts"] = Verb("earlyfusion.rl.fleet.bench:drafts", "drafts of siblings, beside none")
BENCHES["weightsync"] = Verb(
    "earlyfusion.rl.weightsync.bench:weightsync", "weights to another process over several rails"
)

# The fourth way, reinforcement learning with a length reward and a lower token limit, is `earlyfusion rl`.
WAYS = {
    "average": Verb("earlyfusion.rl.long2short.average:average", "merge the weights of two or more models"),
    "shortest": Verb(
        "earlyfusion.rl.long2short.samples:shortest", "shortest right answers as documents for SFT"
    ),
    "dpo": Verb("earlyfusion.rl.long2short.dpo:dpo", "preference training for shorter answers"),
}
_STUDY = "earlyfusion.pipeline.study.verbs"
STUDIES = {
    "list": Verb(f"{_STUDY}:listing", "what each study asks, and what was published"),
    "transfer": Verb(f"{_STUDY}:transfer", "facts learned by RL on pictures, asked in words"),
    "transfer_steps": Verb(
        f"{_STUDY}:transfer_steps", "longer reasoning learned on pictures, asked in words"
    ),
    "objectives": Verb(f"{_STUDY}:objectives", "objectives of RL off policy, at equal samples"),
    "toggle": Verb(f"{_STUDY}:toggle", "tokens saved by Toggle at equal accuracy"),
    "asynchronous": Verb(f"{_STUDY}:asynchronous", "rollouts one step ahead of training, and not"),
    "joint": Verb(f"{_STUDY}:joint", "RL batches of both forms against a stage for each"),
    "tools": Verb(f"{_STUDY}:tools", "tool use that needs eyes, after fine-tuning in words alone"),
    "swarm": Verb(f"{_STUDY}:swarm", "rewards that keep an orchestrator from serial collapse"),
    "mechanism": Verb(
        "earlyfusion.rl.study.mechanism:mechanism", "whether two forms of a question share what RL taught"
    ),
    "optimizer": Verb(f"{_STUDY}:optimizer", "MuonClip against AdamW: tokens for the same loss"),
    "qkclip": Verb(f"{_STUDY}:qkclip", "attention logits with and without QK-Clip"),
    "fusion": Verb(f"{_STUDY}:fusion", "vision early, midway and late at equal tokens"),
    "hybrid": Verb(f"{_STUDY}:hybrid", "KDA 3:1 MLA against all MLA and all KDA"),
    "residuals": Verb(f"{_STUDY}:residuals", "Attention Residuals against plain residuals"),
}


def long2short() -> None:
    """Give a long-thinking model's skill to short answers (Kimi k1.5, section 2.4)."""


SWARMS = {
    "run": Verb("earlyfusion.rl.swarm.verbs:run", "answer a question, with a live tree and a timeline"),
    "measure": Verb(
        "earlyfusion.rl.swarm.verbs:measure", "an orchestrator on held-out questions, beside its bounds"
    ),
    "plans": Verb("earlyfusion.rl.swarm.bounds:plans", "plans of the task gather, beside their bounds"),
    "collection": Verb(
        "earlyfusion.rl.swarm.verbs:collection", "a folder of documents and pictures to ask about"
    ),
}


def swarm() -> None:
    """An orchestrator and its sub-agents (Kimi K2.5, section 3)."""


def study() -> None:
    """Whole experiments with their controls and statistics."""


shorter, studies = cli.group_of(WAYS, long2short), cli.group_of(STUDIES, study)
swarms = cli.group_of(SWARMS, swarm)
