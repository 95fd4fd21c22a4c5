"""Short conversations as files, and a tiny model directory to fine-tune: what the tests of the chat stage
share."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
from PIL import Image

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import build, sft
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.runtime import seed_everything

MODULE = "earlyfusion.pipeline.sft"
COLOURS = ("red", "green", "blue")


def write_chats(folder: Path, count: int = 48, seed: int = 0) -> Path:
    """A .jsonl of `count` conversations in turn plain, with a picture, with thinking and a tool, and of two
    questions."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour, value = COLOURS[number % 3], int(rng.integers(2, 9))
        call = {"name": "python", "arguments": {"code": f"{value} + 1"}}
        turns: list[dict[str, Any]] = [{"role": "user", "content": f"say {colour} {value}"}]
        row: dict[str, Any] = {"messages": turns}
        if number % 4 == 1:
            pixels = np.full((24 + 8 * value, 32, 3), 25 * value, np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            turns[0]["content"] = f"<image>which {colour}?"
            row["images"] = [f"{number}.png"]
        if number % 4 == 2:
            turns.append(
                {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]}
            )
            turns.append({"role": "tool", "name": "python", "content": str(value + 1)})
        turns.append({"role": "assistant", "content": f"{colour} {value}"})
        if number % 4 == 3:
            turns += [{"role": "user", "content": "again"}, {"role": "assistant", "content": colour}]
        rows.append(row)
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_start(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """A model directory of the tiny recipe with fresh weights."""
    config = load_config([tiny_run.tiny_recipe(tokenizer)])
    tokens = Tokenizer.load(tokenizer)
    seed_everything(seed)
    return save_model(build.model(build.with_tokenizer(config, tokens), tokens), tokens, folder)


def chat_recipe(start: Path, chats: Path, **changes: Any) -> dict[str, Any]:
    """A chat stage of ten steps; `changes` as in tiny_run.tiny_recipe."""
    recipe: dict[str, Any] = {
        "run": {"name": "tiny-sft", "seed": 5, "init_from": str(start)},
        "data": {
            "seed": 2,
            "prefetch": "none",
            "lookahead": 2,
            "overlong": "skip",
            "sources": [{"name": "chats", "kind": "chat_files", "path": str(chats)}],
        },
        "optim": {"lr": 5e-3, "head_group_size": 1, "muon_vision": True, "qk_clip": 0.03},
        "stages": [{"name": "sft", "steps": 10, "length": 288, "tokens": 512, "lanes": 2, "warmup_steps": 2}],
        "train": {"threads": 1},
        "eval": {"samples": 0},
        "checkpoint": {"every": 3, "keep": 2},
        "track": {"log_every": 1},
    }
    return tiny_run.changed(recipe, **changes)


tune = partial(tiny_run.run_here, main=sft.main)
"""`earlyfusion sft` in this process: (recipe, out, *words, monkeypatch=, report=False) -> exit code."""
