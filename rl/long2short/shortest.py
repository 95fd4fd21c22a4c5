"""The shortest right answers, as documents for fine-tuning (shortest rejection sampling, k1.5 2.4); a signal
keeps what was sampled.

earlyfusion long2short shortest --model DIR --tasks counting/1/twin --problems 512 --out runs/shortest
earlyfusion sft runs/shortest/sft.toml

OUT/train.jsonl holds rows of kind "chat_files" (template "plain", pictures in OUT/images), OUT/sft.toml a
recipe that trains on them, OUT/summary.json the lengths before and after. A document is the prompt that was
asked, token for token, and the text of the answer: what reinforcement learning and `earlyfusion measure` will
ask again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic, write_json, write_jsonl
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import verb
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.long2short.samples import (
    FILE,
    Answered,
    SampleOptions,
    Sampler,
    check_resume,
    recipe_of,
)
from earlyfusion.rl.recipe import TaskEntry, start_directory

# Few and small: the model wrote these answers itself.
EPOCHS, TOKENS = 2, 4096
"""Passes over the rows and tokens of one step, of the recipe that is written."""


def lengths(answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """By entry, and "all": problems, solved (with a right answer), accuracy of single answers, and mean
    tokens of all answers, of the right ones, and of the shortest right ones; the last two over solved
    problems, problems counting alike."""
    table = {}
    for label in [*dict.fromkeys(one.label for one in answered), "all"]:
        own = [one for one in answered if label in (one.label, "all")]
        every = [answer for one in own for answer in one.answers]
        # A problem with many right answers must not count more than one with few.
        right = [[answer.tokens for answer in one.answers if answer.right] for one in own]
        solved = [tokens for tokens in right if tokens]
        table[label] = {
            "problems": float(len(own)),
            "accuracy": fmean(answer.right for answer in every),
            "tokens_all": fmean(answer.tokens for answer in every),
            "solved": float(len(solved)),
            "tokens_right": fmean(map(fmean, solved)) if solved else math.nan,
            "tokens_shortest": fmean(map(min, solved)) if solved else math.nan,
        }
    return table


def write_documents(answered: Sequence[Answered], entries: Sequence[TaskEntry], out: Path) -> list[int]:
    """Write train.jsonl, a problem with its answer as a conversation, the pictures beside; returns the tokens
    of every document. Raises UserError when no problem was solved."""
    rows, sizes = [], []
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(answered):
        index = one.shortest()
        # An empty answer that was right teaches to say nothing.
        if index is None or not one.answers[index].text.strip():
            continue

        answer, entry = one.answers[index], entries[one.prompt.entry]
        content: list[dict[str, str]] = []
        for segment in one.prompt.problem.prompt(entry.form, entry.thought):
            # PNG: the pixels that were asked, not their compression.
            if isinstance(segment, Image):
                name = f"images/{number:06d}.png"
                segment.open().convert("RGB").save(out / name)
                content.append({"type": "image", "image": name})
            elif isinstance(segment, Text):
                content.append({"type": "text", "text": segment.text})
        said = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
        about = {"task": one.label, "key": one.prompt.problem.key, "tokens": answer.tokens}
        rows.append({"messages": [{"role": "user", "content": content}, said], **about})
        sizes.append(len(one.prompt.encoded) + answer.tokens)
    if not rows:
        raise UserError(
            f"none of {len(answered)} problems got a right answer: nothing to learn from; take more"
            " --samples, easier tasks, or a model that solves some"
        )
    write_jsonl(out / "train.jsonl", rows)
    return sizes


def recipe_text(out: Path, model: Path, sizes: Sequence[int]) -> str:
    """A recipe of `earlyfusion sft` for documents of these sizes."""
    # Rows as long as the longest document, rounded up so that kernels tile well.
    length = 64 * math.ceil(max(sizes) / 64)
    tokens = max(TOKENS, length)
    steps = max(1, math.ceil(EPOCHS * sum(sizes) / tokens))
    return f"""# Fine-tuning on the shortest right answers: earlyfusion sft {out / "sft.toml"}

[run]
name = "sft-{out.name}"
init_from = {json.dumps(str(model.resolve()))}

[data]
overlong = "skip"
on_bad_sample = "skip"

[[data.sources]]
name = "shortest"
kind = "chat_files"
path = {json.dumps(str((out / "train.jsonl").resolve()))}
options = {{ template = "plain" }}

[optim]
name = "muonclip"
lr = 1e-3
weight_decay = 0.0
head_group_size = 1

[[stages]]
name = "sft"
steps = {steps}
length = {length}
tokens = {tokens}
lanes = 1
schedule = "cosine"
warmup_steps = {steps // 20}
final_lr_ratio = 0.05

[eval]
every = {max(1, steps // 2)}
tasks = ["answer_loss"]
samples = 0
"""


@verb
def shortest(options: SampleOptions) -> int:
    """Entry of `earlyfusion long2short shortest`."""
    config, out = recipe_of(options, {}), Path(options.out)
    folder = start_directory(config)
    tokenizer = Tokenizer.load(folder)
    check_resume(out, (out / FILE).is_file(), options.resume)
    runtime = Runtime(config.train.mixed_precision, config.train.threads)
    model = load_model(folder, runtime.device, torch.float32)
    sampler = Sampler(config, model, tokenizer, folder, options.problems)

    # Sample; what there is stays for --resume when a signal comes.
    # From here on a signal waits for the end of a part.
    runtime.stop.install()
    try:
        answered = sampler.gather(runtime)
    finally:
        sampler.rewards.close()
        runtime.close()
    if answered is None:
        print(f"{runtime.stop.received}: the samples are kept; --resume goes on from here")
        return EXIT_REQUEUE

    # Choose and write.
    sizes = write_documents(answered, config.tasks, out)
    write_atomic(out / "sft.toml", recipe_text(out, folder, sizes))
    rows = lengths(answered)
    write_json(out / "summary.json", {"model": str(folder), "documents": len(sizes), "entries": rows})
    show("mean tokens of the sampled answers", rows)
    print(f"{len(sizes)} documents; train on them: earlyfusion sft {out / 'sft.toml'}")
    return EXIT_OK
