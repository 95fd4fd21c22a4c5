"""Rollouts on disk: OUT/rollouts.jsonl, one JSON object for each group of answers, and their pictures beside
it.

    {"update": 10, "label": "counting/0/picture", "task": "counting", "form": "picture", "difficulty": 0,
     "key": "counting/train/0/123", "prompt": "...", "target": "3", "image": "rollouts/0f3a...png",
     "mean_score": 0.5, "answers": [{"text": "3", "tokens": 2, "score": 1.0, "reward": 1.0,
     "advantage": 0.5, "logprob": -0.7, "finish": "stop", "status": "ok"}, ...]}

`image` is relative to OUT, named by what it shows and written once; null for a prompt in words alone. Nothing
of a record depends on the clock, and a resume from update u drops what came after u, so that the folder of a
resumed run equals that of one that was never interrupted.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image as PILImage

from earlyfusion.data.sample import Text
from earlyfusion.data.synth.panels import render_text
from earlyfusion.kernels.files import Record, plain, read_jsonl, replacing, write_atomic
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.experience import Experience
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
