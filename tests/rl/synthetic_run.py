"""A run folder with everything the report of a reinforcement learning run knows, made without a model."""

import json
from random import Random
from statistics import fmean

from earlyfusion.data.synth.panels import render_text
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.measured import Measured, summary, write_measured
from earlyfusion.rl.rollouts.log import RolloutLog

ENTRIES = (("counting", 0, "picture"), ("relation", 1, "twin"), ("ocr", 0, "rendered"))


def shown(problem, form):
    """The picture of a prompt, as a trainer would log it."""
    return {"picture": problem.picture, "rendered": render_text(problem.description), "twin": None}[form]


CONSTANT = """{"event": "train", "length": 4, "length_max": 8, "cut": 0.02, "entropy": 1.0,
    "lr": 0.0005, "samples_per_s": 900.0, "engine_idle": 0.04, "time/rollout_s": 0.8, "time/score_s": 0.05,
    "time/train_s": 0.6, "time/other_s": 0.05, "prompts/too_long": 3.0, "rewards/timeout": 4.0}"""


def metrics(out, updates, entries, every=1):
    rng, lines = Random(1), []
    for update in range(every, updates + 1, every):
        record = json.loads(CONSTANT) | {"step": update, "reward": rng.random(), "grad_norm": rng.random()}
        for task, level, form in entries:
            record |= {f"{key}/{task}/{level}/{form}": rng.random() for key in ("reward", "score")}
        lines.append(json.dumps(record))
    lines.append('{"step": 7, "event": "guard", "kind": "spike", "message": "grad norm 9 > <5>"}')
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def rollouts(out, updates, entries):
    log = RolloutLog(out, start_update=0)
    for update in updates:
        for task, level, form in entries:
            for number in range(3):
                problem = make_task(task).sample(10 * update + number, "train", level)
                texts = [problem.target if i < number else f"<b>{i}</b>" for i in range(4)]
                log.write([group(update, problem, form, texts)])


def group(update, problem, form, texts):
    scores = [make_task(problem.task).reward(problem, text) for text in texts]
    answers = []
    for text, score in zip(texts, scores):
        about = {"text": text, "score": score, "reward": score, "finish": "stop", "status": "ok"}
        answers.append(about | {"advantage": score - fmean(scores)})
    answers[-1]["finish"] = "length"
    about = {"update": update, "form": form, "key": problem.key, "prompt": problem.question}
    about |= {"label": f"{problem.task}/{problem.key.split('/')[2]}/{form}", "target": problem.target}
    return about | {"answers": answers, "mean_score": fmean(scores), "image": shown(problem, form)}


def measure(out, update, share, entries, problems=24):
    """Each problem is solved by chance `share`, drawn anew at every measurement."""
    rng, made = Random(update), []
    for task, level, form in entries:
        for seed in range(problems):
            problem = make_task(task).sample(seed, "test", level)
            right = rng.random() < share
            said = problem.target if right else "<i>no</i>"
            about = (task, form, problem.key, "all", problem.question, problem.target, said)
            numbers = {"score": float(right), "solved": right, "p_target": 0.9 * right, "confidence": 0.8}
            made.append(Measured(*about, **numbers, entropy=0.3, label=f"{task}/{level}/{form}"))
    write_measured(out / "eval" / f"update-{update:06d}.jsonl", made)
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": update, "event": "eval", **summary(made)}) + "\n")


def synthetic_run(out, updates=200, entries=ENTRIES):
    """The whole folder."""
    out.mkdir(parents=True, exist_ok=True)
    metrics(out, updates, entries)
    rollouts(out, (1, updates), entries)
    for update, share in ((0, 0.2), (updates // 2, 0.5), (updates, 0.8)):
        measure(out, update, share, entries)
    tasks = "".join(f'\n[[tasks]]\nname = "{name}"\n' for name, *_ in entries)
    (out / "recipe.toml").write_text(f'[run]\nname = "<skills>"\n{tasks}')
    (out / "facts.json").write_text(json.dumps({"name": "skills <1>", "parameters": "1.5 M"}))
    return out
