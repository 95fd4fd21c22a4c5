"""Rollouts on disk: OUT/rollouts.jsonl, one JSON object for each group of answers, and their pictures beside
it.

    {"update": 10, "label": "counting/0/picture", "task": "counting", "form": "picture", "difficulty": 0,
     "key": "counting/train/0/123", "prompt": "...", "target": "3", "image": "rollouts/0f3a...png",
     "mean_score": 0.5, "answers": [{"text": "3", "tokens": 2, "score": 1.0, "reward": 1.0,
     "advantage": 0.5, "logprob": -0.7, "finish": "stop", "status": "ok"}, ...]}

`image` is relative to OUT, named by what it shows and written once; null for a prompt in words alone. Nothing
of a record depends on the clock, and a resume from update u drops what came after u, so that the folder of a
resumed run equals that of one that was never interrupted.

`rollout_metrics` has the numbers of an iteration, for metrics.jsonl.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image as PILImage

from earlyfusion.data.sample import Text
from earlyfusion.data.synth.panels import render_text
from earlyfusion.eval.rewards import Scored
from earlyfusion.kernels.files import Record, plain, read_jsonl, replacing, write_atomic
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.experience import Collector, Experience
from earlyfusion.rl.rollouts.prompts import prompt_segments

FILE, FOLDER = "rollouts.jsonl", "rollouts"
_OURS = re.compile(r"[0-9a-f]{24}\.png|\.[0-9a-f]{24}\.png\.\d+\.tmp")
"""Pictures, and what a kill left of one."""


def group_records(
    config: RLConfig, experience: Experience, update: int, limit: int, runtime: Runtime
) -> list[Record]:
    """`limit` groups of all processes as records of the file, with the picture itself as "image": of every
    entry in turn, the worst, the best, the next worst, ... Every process calls it and gets the same."""
    # What every process has, as (entry, mean score), and which numbers are this one's.
    own = []
    for group, (start, end) in zip(experience.groups, experience.bounds):
        # Only numbers travel here; the groups that are shown follow below.
        own.append((group.prompt.entry, float(experience.scores_N[start:end].mean())))
    by_rank = runtime.gather(own)
    first = sum(map(len, by_rank[: runtime.rank]))
    groups = [one for part in by_rank for one in part]

    lines: list[list[int]] = [[] for _ in config.tasks]
    for g in sorted(range(len(groups)), key=lambda g: groups[g][1]):
        lines[groups[g][0]].append(g)
    chosen: list[int] = []
    end = 0
    while any(lines) and len(chosen) < limit:
        chosen += [line.pop(end) for line in lines if line]
        end = -1 - end  # the best after the worst, and so on
    chosen = chosen[:limit]

    # Each process makes the records of its own groups.
    mine = [g for g in chosen if first <= g < first + len(own)]
    records: dict[int, Record] = {}
    for part in runtime.gather({g: _record(config, experience, update, g - first) for g in mine}):
        records |= part
    return [records[g] for g in chosen]


def _record(config: RLConfig, experience: Experience, update: int, g: int) -> Record:
    group, start = experience.groups[g], experience.bounds[g][0]
    entry, problem = config.tasks[group.prompt.entry], group.problem
    answers: list[Record] = []
    for n, trajectory in enumerate(group.trajectories, start):
        # reward is after all shaping, score of the task or the reward function alone; logprob under the
        # policy that sampled it, nats.
        answers.append(
            {
                "text": trajectory.text,
                "tokens": len(trajectory.ids),
                "score": float(experience.scores_N[n]),
                "reward": float(experience.rewards_N[n]),
                "advantage": float(experience.advantages_N[n]),
                "logprob": sum(trajectory.completion.logprobs),
                "finish": trajectory.completion.finish_reason,
                "status": experience.scored[n].status,
            }
        )
    words = [
        segment.text
        for segment in prompt_segments(problem, entry, group.prompt.pool.environments)
        if isinstance(segment, Text)
    ]
    picture = None
    if entry.form == "picture":
        picture = problem.image
    elif entry.form == "rendered":
        picture = render_text(problem.description)
    return {
        "update": update,
        "label": entry.label,
        "task": entry.name,
        "form": entry.form,
        "key": problem.key,
        "difficulty": entry.difficulty,
        "prompt": "".join(words),
        "target": problem.target,
        "answers": answers,
        "mean_score": sum(answer["score"] for answer in answers) / len(answers),
        "image": picture,
    }


def read_rollouts(path: str | Path) -> list[Record]:
    """The records of a rollout file (or of OUT), in order; [] when there is none. Torn lines are left out."""
    path = Path(path)
    records = read_jsonl(path / FILE if path.is_dir() else path)
    return [record for record in records if isinstance(record.get("update"), int)]


class RolloutLog:
    """Appends to OUT/rollouts.jsonl. Made by one process of a run, the first.

    start_update: updates already done. 0 begins the file anew; u > 0 keeps the records up to u. Torn lines
    go, and so do pictures that no record shows any more.
    """

    def __init__(self, out: Path, *, start_update: int) -> None:
        self.out, self.path = out, out / FILE
        kept = [record for record in read_rollouts(self.path) if 0 < record["update"] <= start_update]
        self.path.unlink(missing_ok=True)
        if kept:
            write_atomic(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
        self._pictures = {record["image"] for record in kept}
        for path in (out / FOLDER).glob("*"):
            if _OURS.fullmatch(path.name) and f"{FOLDER}/{path.name}" not in self._pictures:
                path.unlink()

    def write(self, groups: Sequence[Record], sandbox: str = "") -> None:
        """Append `group_records`; pictures are on disk before the line that names them. sandbox: walls of the
        sandbox that are missing, in words. Numbers that are not finite are written as null."""
        lines = []
        for record in groups:
            if record["image"] is not None:
                record = record | {"image": self._keep(record["image"])}
            if sandbox:
                record = record | {"sandbox": sandbox}
            lines.append(json.dumps(plain(record), allow_nan=False) + "\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _keep(self, picture: PILImage.Image) -> str:
        """The picture's path relative to OUT; written if this content is new."""
        # Equal bytes of another shape are another picture.
        about = f"{picture.mode} {picture.width} {picture.height} ".encode()
        name = f"{FOLDER}/{hashlib.sha256(about + picture.tobytes()).hexdigest()[:24]}.png"
        if name not in self._pictures:
            with replacing(self.out / name, sync=False) as temporary:
                picture.save(temporary, "PNG")
            self._pictures.add(name)
        return name


def parts_of(scored: Sequence[Scored], names: Sequence[str]) -> dict[str, float]:
    """What each of several reward functions gave, summed over the answers."""
    if len(names) < 2:
        return {}
    return {f"reward_of/{name}": sum(one.parts.get(name, 0.0) for one in scored) for name in names}


def rollout_metrics(
    config: RLConfig,
    runtime: Runtime,
    update: int,
    collector: Collector,
    found: Experience,
    counts: Mapping[str, float],
    rewards: Sequence[str] = (),
) -> dict[str, float]:
    """Numbers of an iteration's rollouts, over all processes; every process calls it. counts: more that are
    summed, and told where they are not 0. rewards: names of the functions, whose means are told where there
    are several."""
    # By entry of the recipe: scores, rewards, answers that a limit cut off, answers.
    parts = (found.scores_N, found.rewards_N, found.cut_N, torch.ones_like(found.scores_N))
    table_E4 = torch.zeros(len(config.tasks), 4, dtype=torch.float64)
    table_E4.index_add_(0, found.entries_N, torch.stack([part.double() for part in parts], dim=1))
    table_E4 = runtime.sum(table_E4)
    completions = [answer.completion for answer in found.answers]
    lengths, spent = found.lengths_N.tolist(), collector.spent
    sums = runtime.sum_dict(
        {
            "length": sum(lengths),
            "informative": float(found.informative_N.sum()),
            "staleness": sum(update - version for done in completions for version in done.versions),
            "surprise": -sum(logp for done in completions for logp in done.logprobs),
            "tokens": spent["tokens"],
            "carried": len(collector.carried),
            **parts_of(found.scored, rewards),
            "engine_s": spent["engine_s"],
            "seconds": spent["seconds"],
            **counts,
        }
    )

    record: dict[str, float] = {"answers": float(table_E4[:, 3].sum())}
    answers, written = max(1.0, record["answers"]), max(1.0, sums["length"])
    for column, name in enumerate(("score", "reward", "cut")):
        record[name] = float(table_E4[:, column].sum()) / answers
        for entry, row in zip(config.tasks, table_E4.tolist()):
            if row[3]:
                record[f"{name}/{entry.label}"] = row[column] / row[3]
    record |= {name: sums[name] for name in counts if sums[name]}
    record |= {name: sums[name] / answers for name in sums if name.startswith("reward_of/")}
    return record | {
        "length": sums["length"] / answers,
        "length_max": float(runtime.max(max(lengths, default=0.0))),
        "informative": sums["informative"] / answers,
        "staleness": sums["staleness"] / written,
        # Mean -log p of what was drawn: the entropy of the sampling distribution, without looking at all of
        # it.
        "entropy": sums["surprise"] / written,
        "carried": sums["carried"],
        "tokens": sums["tokens"],
        "time/rollout_s": spent["seconds"],
        "engine_idle": 1 - sums["engine_s"] / max(sums["seconds"], 1e-9),
        "tokens_per_s": sums["tokens"] / max(spent["seconds"], 1e-9),
    }
