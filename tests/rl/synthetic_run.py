"""A run folder with everything the report of a reinforcement learning run knows, made without a model."""

import json
import math
from dataclasses import asdict
from random import Random

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.eval.measured import Measured
from earlyfusion.rl.objectives.advantages import advantages
from earlyfusion.rl.objectives.losses import ObjectiveConfig
from earlyfusion.rl.rollouts.log import RolloutLog

ENTRIES = (
    ("counting", 0, "picture"),
    ("relation", 1, "twin"),
    ("ocr", 0, "rendered"),
    ("grounding", 0, "picture"),
)


def shown(problem, form):
    """The picture of a prompt, as a trainer would log it."""
    return {"picture": problem.picture, "rendered": render_text(problem.description), "twin": None}[form]


CONSTANT = """{"event": "train", "time": 0.0, "length_max": 8, "cut": 0.02, "mismatch_max": 0.01,
    "staleness": 0.0, "lr": 0.0005, "temperature": 1.0, "samples_per_s": 900.0, "updates_per_min": 40.0,
    "time/rollout_s": 0.8, "time/score_s": 0.05, "time/train_s": 0.6, "time/other_s": 0.05,
    "memory_gib": 1.2, "prompts/too_long": 3.0}"""


def metrics(out, updates, entries):
    rng, lines = Random(1), []
    for update in range(1, updates + 1):
        done, noise = update / updates, rng.random()
        record = json.loads(CONSTANT) | dict(
            step=update,
            length=3 + done,
            entropy=1.2 * math.exp(-2 * done),
            mismatch_kl=1e-4 * (1 + done),
            clip_share=0.01 + 0.02 * noise,
            k3=1e-3 * noise,
            grad_norm=0.3 + 0.1 * noise,
            informative=0.8 - 0.5 * done,
            tokens_per_s=5000.0 + 100 * noise,
            engine_idle=0.04 + 0.02 * noise,
            ptx_loss=2.0 - 0.3 * done,
            refused=int(update == 9),
            reward=0.3 + 0.4 * done,
        )
        record["rewards/timeout"] = float(update // 50)
        for index, (task, level, form) in enumerate(entries):
            value = 0.3 + 0.5 * done * (1 - index / 5) + 0.1 * rng.random()
            record |= {f"reward/{task}/{level}/{form}": value, f"score/{task}/{level}/{form}": value + 0.01}
        lines.append(json.dumps(record))
    lines.append('{"step": 7, "event": "guard", "kind": "spike", "message": "grad norm 9 > <5>"}')
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def rollouts(out, updates, entries):
    rng, log = Random(2), RolloutLog(out, start_update=0)
    for update in updates:
        groups = []
        for task, level, form in entries:
            for number in range(3):
                problem = make_task(task).sample(10 * update + number, "train", level)
                texts = [
                    problem.target if rng.random() < number / 2 else f"<b>{rng.randrange(3)}</b>"
                    for _ in range(6)
                ]
                groups.append(group(update, problem, form, texts))
        log.write(groups)


def group(update, problem, form, texts):
    import torch

    scores = [make_task(problem.task).reward(problem, text) for text in texts]
    won = advantages(
        ObjectiveConfig(), torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long)
    ).tolist()
    answers = []
    for text, score, gain in zip(texts, scores, won):
        about = {"tokens": 4, "logprob": -1.0, "finish": "stop", "status": "ok"}
        answers.append({"text": text, "score": score, "reward": score, "advantage": gain, **about})
    answers[-1]["finish"] = "length"
    return dict(
        update=update,
        task=problem.task,
        form=form,
        key=problem.key,
        difficulty=problem.meta["difficulty"],
        prompt=problem.question,
        target=problem.target,
        answers=answers,
        mean_score=sum(scores) / len(scores),
        image=shown(problem, form),
    )


def measure(out, update, share, entries, problems=24):
    """Each problem is solved by chance `share`, drawn anew at every measurement."""
    rng, lines = Random(update), []
    for task, level, form in entries:
        for seed in range(problems):
            problem = make_task(task).sample(seed, "test", level)
            right = rng.random() < share
            record = asdict(
                Measured(
                    task,
                    form,
                    problem.key,
                    problem.meta["category"],
                    problem.question,
                    problem.target,
                    problem.target if right else "<i>no</i>",
                    float(right),
                    right,
                    0.9 * right + 0.05,
                    0.8,
                    0.4 - 0.2 * share,
                    (float(right), 0.0),
                )
            )
            record.pop("picture")
            lines.append(json.dumps(record) + "\n")
    (out / "eval").mkdir(exist_ok=True)
    (out / "eval" / f"update-{update:06d}.jsonl").write_text("".join(lines))


def synthetic_run(out, updates=200, entries=ENTRIES):
    """The whole folder."""
    out.mkdir(parents=True, exist_ok=True)
    metrics(out, updates, entries)
    rollouts(out, (1, updates // 2, updates), entries)
    for update, share in ((0, 0.2), (updates // 2, 0.5), (updates, 0.8)):
        measure(out, update, share, entries)
    (out / "recipe.toml").write_text('[run]\nname = "<skills>"\n\n[[tasks]]\nname = "counting"\n')
    (out / "facts.json").write_text(json.dumps({"name": "skills <1>", "parameters": "1.5 M"}))
    return out
