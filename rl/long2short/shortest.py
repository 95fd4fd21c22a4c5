"""Shortest rejection sampling (k1.5 2.4): of n sampled answers the shortest right one, as documents for
fine-tuning.

    OUT/train.jsonl      rows of kind "chat_files" (data/chat/rows.py), template "plain", pictures in
                         OUT/images/
    OUT/sft.toml         a recipe that trains on them: earlyfusion sft OUT/sft.toml
    OUT/summary.json     lengths before and after, by entry

A document is the prompt that was asked, token for token, and the text of the answer: what reinforcement
learning and `earlyfusion measure` will ask again. Every row is read back by the pipeline's own reader before
it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.chat.rows import Media, messages_of
from earlyfusion.data.chat.template import chat_sample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic, write_json
from earlyfusion.pipeline.config.compose import to_toml
from earlyfusion.rl.long2short.preferences import shortest_correct
from earlyfusion.rl.long2short.samples import Answered
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.vision.config import VisionConfig

EPOCHS, TOKENS = 2, 4096
"""Passes over the rows and tokens of one step, of the recipe that is written."""


def shortest(answered: Sequence[Answered]) -> dict[int, int]:
    """Number of the problem -> number of its shortest right answer; problems without one are left out."""
    flat = [(g, i) for g, one in enumerate(answered) for i in range(len(one.answers))]
    lengths_N = torch.tensor([answered[g].answers[i].tokens for g, i in flat])
    correct_N = torch.tensor([answered[g].answers[i].right for g, i in flat], dtype=torch.bool)
    best = shortest_correct(lengths_N, correct_N, torch.tensor([g for g, _ in flat], dtype=torch.int64))
    return {g: flat[n][1] for g, n in best.items()}


def write_documents(
    answered: Sequence[Answered],
    entries: Sequence[TaskEntry],
    tokenizer: Tokenizer,
    vision: VisionConfig,
    out: Path,
    model: Path,
) -> dict[str, Any]:
    """Write the files of the file's head; returns the summary. Raises UserError when no problem was
    solved."""
    best = shortest(answered)
    best = {g: i for g, i in best.items() if answered[g].answers[i].text.strip()}
    if not best:
        raise UserError(
            f"none of {len(answered)} problems got a right answer: nothing to learn from; take more"
            " --samples, easier tasks, or a model that solves some"
        )
    rows, sizes = [], []
    for g, i in sorted(best.items()):
        row = _row(answered[g], entries[answered[g].asked.entry], i, g, out)
        rows.append(row)
        sizes.append(_read_back(row, g, answered[g].prompt.ids, tokenizer, vision, out))
    write_atomic(out / "train.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_atomic(out / "sft.toml", _recipe(out, model, sizes))
    summary = {"model": str(model), "documents": len(rows), "entries": lengths(answered, best)}
    write_json(out / "summary.json", summary)
    return summary


def lengths(answered: Sequence[Answered], best: dict[int, int]) -> dict[str, dict[str, float | None]]:
    """By entry, and "all": problems, solved (with a right answer), accuracy of single answers, and mean
    tokens of all answers, of the right ones, and of the shortest right ones; the last two over solved
    problems, problems counting alike."""
    labels = list(dict.fromkeys(one.label for one in answered))
    table = {}
    for label in [*labels, "all"] if len(labels) > 1 else labels:
        own = [g for g, one in enumerate(answered) if label in (one.label, "all")]
        some = [g for g in own if g in best]
        every = [answer for g in own for answer in answered[g].answers]
        right = [_mean([a.tokens for a in answered[g].answers if a.right]) for g in some]
        table[label] = {
            "problems": len(own),
            "solved": len(some),
            "accuracy": _mean([float(a.right) for a in every]),
            "tokens_all": _mean([a.tokens for a in every]),
            "tokens_right": _mean([value for value in right if value is not None]),
            "tokens_shortest": _mean([answered[g].answers[best[g]].tokens for g in some]),
        }
    return table


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _row(one: Answered, entry: TaskEntry, index: int, number: int, out: Path) -> dict[str, Any]:
    """A problem with its answer as a conversation; the picture is written beside."""
    content: list[dict[str, str]] = []
    for segment in one.problem.prompt(entry.form, entry.thought):
        if isinstance(segment, Image):
            name = f"images/{number:06d}.png"
            (out / "images").mkdir(parents=True, exist_ok=True)
            segment.open().convert("RGB").save(out / name)
            content.append({"type": "image", "image": name})
        elif isinstance(segment, Text):
            content.append({"type": "text", "text": segment.text})
    answer = one.answers[index]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer.text}]},
        ],
        "task": one.label,
        "key": one.problem.key,
        "tokens": answer.tokens,
        "sampled_tokens": [a.tokens for a in one.answers],
        "right": sum(a.right for a in one.answers),
    }


def _read_back(
    row: dict[str, Any],
    number: int,
    prompt_ids: torch.Tensor,
    tokenizer: Tokenizer,
    vision: VisionConfig,
    out: Path,
) -> int:
    """Tokens of the document that training will make of the row. Raises UserError when it does not begin with
    the prompt."""
    where = f"train.jsonl:{number}"
    messages = messages_of(row, where, Media(out))
    document = encode(
        chat_sample(messages, source="shortest", key=where, template="plain"), tokenizer, vision
    )
    if not torch.equal(document.ids[: len(prompt_ids)], prompt_ids):
        raise UserError(
            f"{where}: the document does not begin with the tokens of the prompt that was asked; report this"
        )
    return len(document)


def _recipe(out: Path, model: Path, sizes: Sequence[int]) -> str:
    length = 64 * math.ceil(max(sizes) / 64)
    tokens = max(TOKENS, length)
    steps = max(1, math.ceil(EPOCHS * sum(sizes) / tokens))
    source: dict[str, Any] = {
        "name": "shortest",
        "kind": "chat_files",
        "path": str((out / "train.jsonl").resolve()),
    }
    source["options"] = {"template": "plain"}
    stage = {
        "name": "sft",
        "steps": steps,
        "length": length,
        "tokens": tokens,
        "lanes": 1,
        "schedule": "cosine",
    }
    stage |= {"warmup_steps": steps // 20, "final_lr_ratio": 0.05}
    tree = {
        "run": {"name": f"sft-{out.name}", "init_from": str(model.resolve())},
        "data": {"overlong": "skip", "on_bad_sample": "skip", "sources": [source]},
        "optim": {"name": "muonclip", "lr": 1e-3, "weight_decay": 0.0, "head_group_size": 1},
        "stages": [stage],
        "eval": {"every": max(1, steps // 2), "tasks": ["answer_loss"], "samples": 0},
    }
    return f"# Fine-tuning on the shortest right answers: earlyfusion sft {out / 'sft.toml'}\n\n" + to_toml(
        tree
    )
