"""`earlyfusion bench engine`: generation beside transformers on equal weights, and decoding at long contexts.

Part 1: tokens/s of the engine and of transformers' generate (dynamic and static cache) and continuous
batching, for the recipe's decoder shape without what transformers' model lacks (Attention Residuals, gated
MLA), over batch sizes and prompt lengths, each side in its own process, in turn. With one CPU thread the
clock is the process's busy time, else wall time. Answers are greedy and compared. On a CPU our side keeps
freed buffers, as our verbs do (`pipeline.runtime.keep_freed_memory`), and multiplies as kernels/products.py
says; transformers runs as it comes, and as `generate-kept` with freed buffers kept, which its users would
have to know. `generate-tuned` is that with the chunk rule of its linear attention replaced by its own
recurrent one, which a CPU computes faster for short prompts: what somebody gets who tunes it by hand. What
transformers refuses for this model is printed with its reason.

In a grouped case GROUP neighbours have the same prompt, as the samples of one rollout group do: the engine
reads it once and forks, transformers reads it for every row (its num_return_sequences repeats the input
before reading, too). In a ragged case prompts and answers have lengths between a quarter and the whole of the
given ones. transformers' generate pads prompts on the left and runs until the longest answer is done; only
tokens that were asked for are counted.

Part 2: decoding at long contexts, the hybrid against the same model with MLA everywhere (contexts.py).

--model.KEY VALUE changes a key of the recipe's decoder. Everything is saved as JSON.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import typer
from rich.console import Console
from torch import Tensor

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams, TokenPrompt
from earlyfusion.model.generate import engine_for
from earlyfusion.model.hub.folder import cast
from earlyfusion.pipeline.bench.contexts import measure_contexts
from earlyfusion.pipeline.bench.peer import FIRST_TOKEN, our_model, shared_shape, their_model, their_names
from earlyfusion.pipeline.bench.record import (
    Result,
    SideFailed,
    in_turn,
    new_record,
    run_side,
    save_record,
    show,
)
from earlyfusion.pipeline.bench.timing import default_device, now, peak_mib, reason
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import keep_freed_memory

GROUP = 16
KEPT, TUNED = "generate-kept", "generate-tuned"
SIDES = ("engine", "generate", "static", "continuous", KEPT, TUNED)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineOptions(Options):
    recipe: str = "nano"
    """recipe whose decoder shape is used; --model.KEY VALUE changes a key of it"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    """dtype of the weights, of all sides"""
    batches: str = "1,8,64"
    """numbers of prompts"""
    prompts: str = "32,128"
    """prompt lengths in tokens"""
    new: int = 64
    """tokens to generate"""
    rounds: int = 1
    """rounds, each side once a round"""
    sides: str = ",".join(SIDES[1:])
    """of transformers; empty leaves part 1 out"""
    contexts: str = "4096,32768,131072,524288,1048576"
    """part 2: context lengths"""
    steps: int = 3
    """part 2: timed steps; 0 leaves part 2 out"""
    most_batch: int = 16
    """part 2: largest batch for the memory saved"""
    threads: int = torch.get_num_threads()
    """torch CPU threads"""
    seed: int = 0
    """seed of weights and prompts"""
    out: str = "runs/bench/engine.json"
    """where the numbers are saved"""
    words: list[str] = []


# ---- Part 1, in the process of a side.


@dataclass(frozen=True)
class Batch:
    """Prompts and how many tokens each is to be continued by. group: neighbours with the same prompt."""

    prompts: list[Tensor]
    counts: list[int]
    group: int = 1

    @classmethod
    def make(cls, batch: int, prompt: int, new: int, lengths: str, vocabulary: int, seed: int) -> Batch:
        """lengths: "equal", "ragged" or "groups". Grouped batches are multiples of GROUP."""
        generator = torch.Generator().manual_seed(seed)

        def length(most: int) -> int:
            if lengths != "ragged":
                return most
            return int(torch.randint(max(1, most // 4), most + 1, (1,), generator=generator))

        # The order of the draws is part of the seed: lengths first, then tokens.
        group = GROUP if lengths == "groups" else 1
        sizes = [length(prompt) for _ in range(batch // group)]
        counts = [length(new) for _ in range(batch)]
        prompts = []
        for size in sizes:
            ids = torch.randint(FIRST_TOKEN, vocabulary, (size,), generator=generator)
            prompts += [ids] * group
        return cls(prompts, counts, group)

    def padded(self) -> tuple[Tensor, Tensor]:
        """input_ids and attention_mask, padded on the left."""
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(self.prompts, batch_first=True, padding_side="left")
        masks = [torch.ones_like(prompt) for prompt in self.prompts]
        return ids, pad(masks, batch_first=True, padding_side="left")


Generate = Callable[[Batch], list[list[int]]]


def our_side(shape: dict[str, Any], seed: int, new: int, dtype: torch.dtype) -> Generate:
    """Our engine, made once for a number of prompts, since its pools are sized for them."""
    model = our_model(shared_shape(shape), seed, default_device(), dtype)
    engines: dict[int, Engine] = {}

    def generate(batch: Batch) -> list[list[int]]:
        prompts = [TokenPrompt(ids) for ids in batch.prompts]
        count = len(prompts)
        if count not in engines:
            engines[count] = engine_for(model, None, prompts, max(*batch.counts, new), most_slots=count)

        # A group is one request of several samples: its prompt is read once.
        requests = []
        for first in range(0, count, batch.group):
            params = SamplingParams(batch.counts[first], 0.0, ignore_eos=True, n=batch.group)
            requests.append(Request(str(first), prompts[first], params))
        return [done.ids for done in engines[count].generate(requests)]

    return generate


def their_side(side: str, shape: dict[str, Any], seed: int, dtype: torch.dtype) -> Generate:
    """transformers with our weights: generate with a dynamic or static cache, or continuous batching."""
    device = default_device()

    # Equal weights: ours, under their names.
    weights = our_model(shared_shape(shape), seed, torch.device("cpu")).decoder.state_dict()
    model: Any = their_model(shape, device)
    model.load_state_dict(their_names(weights), strict=True)
    model = cast(model, dtype).to(device).eval()
    if side == TUNED:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs

        theirs.chunk_kimi_delta_attention = theirs.recurrent_kimi_delta_attention

    def generate(batch: Batch) -> list[list[int]]:
        ids, mask = (tensor.to(device) for tensor in batch.padded())

        # transformers knows one length for the batch: what is too long is cut off afterwards.
        count = max(batch.counts)
        options: dict[str, Any] = {"cache_implementation": "static"} if side == "static" else {}
        options |= {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 2}
        with torch.no_grad():
            rows = model.generate(ids, attention_mask=mask, **options).tolist()
        return [row[ids.shape[1] :][:asked] for row, asked in zip(rows, batch.counts)]

    def generate_batch(batch: Batch) -> list[list[int]]:
        from transformers import GenerationConfig

        count = max(batch.counts)
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=2)
        done = model.generate_batch(inputs=[ids.tolist() for ids in batch.prompts], generation_config=config)
        if len(done) != len(batch.prompts):
            raise RuntimeError(f"generate_batch returned {len(done)} of {len(batch.prompts)} answers")
        ordered = sorted(done, key=lambda key: int(str(key).split("_")[-1]))
        return [list(done[key].generated_tokens)[:asked] for key, asked in zip(ordered, batch.counts)]

    return generate_batch if side == "continuous" else generate


def engine_side(
    side: str,
    shape: dict[str, Any],
    case: tuple[int, int, str],
    new: int,
    threads: int,
    seed: int,
    dtype: str,
) -> Result:
    """Seconds of the case (batch, prompt, lengths) and of one new token for the same prompts (what reading
    costs), and what was generated; {"refused": reason} for a side that transformers does not support."""
    torch.set_num_threads(threads)
    gpu = torch.cuda.is_available()
    if not gpu and side in ("engine", KEPT, TUNED):
        keep_freed_memory()

    # The same prompts with one new token tell what reading them costs.
    batch, prompt, lengths = case
    whole = Batch.make(batch, prompt, new, lengths, shape["vocab_size"], seed)
    one = Batch(whole.prompts, [1] * batch, whole.group)
    if side == "engine":
        generate = our_side(shape, seed, new, DTYPES[dtype])
    else:
        generate = their_side(side, shape, seed, DTYPES[dtype])

    try:
        generate(Batch(whole.prompts[:1], [2]))
    except Exception as error:  # whatever transformers raises for what it does not support
        return {"refused": reason(error, 300)}
    if gpu:  # kernels are compiled and CUDA graphs captured when shapes are first met
        generate(one)
        generate(whole)

    # One thread on a CPU is timed by its own busy time, which other work on the machine disturbs least.
    clock = time.process_time if not gpu and threads == 1 else now
    began = time.perf_counter()
    marks, answers = [clock()], []
    for asked in (one, whole):
        answers = generate(asked)
        marks.append(clock())
    return {
        "first_s": marks[1] - marks[0],
        "total_s": marks[2] - marks[1],
        "clock": "process_time" if clock is time.process_time else "perf_counter",
        "wall_s": time.perf_counter() - began,
        "tokens": sum(whole.counts),
        "answers": answers,
        "peak_mib": peak_mib(),
    }


# ---- Part 1, in the command.


def numbers(text: str) -> list[int]:
    """A list such as 1,8,64; raises UserError for anything else."""
    try:
        values = [int(part) for part in text.split(",") if part]
    except ValueError:
        values = [0]
    if min(values, default=1) < 1:
        raise UserError(f"bench engine: {text!r}: expected numbers of at least 1, such as 1,8,64")
    return values


def decoder_shape(recipe: str, changes: Sequence[str]) -> dict[str, Any]:
    """The decoder of a recipe, with changes such as ["--model.num_experts", "16"].

    Raises:
        UserError: the recipe or a key is unknown, a value is missing, or the shape is impossible.
    """
    keys, values = changes[::2], changes[1::2]
    if len(keys) != len(values) or not all(word.startswith("--model.") for word in keys):
        raise UserError(
            f"bench engine: {' '.join(changes)!r} is not understood; expected --model.KEY VALUE pairs"
        )
    pairs = [(key.removeprefix("--"), value) for key, value in zip(keys, values)]
    return load_config([recipe], pairs).model.model_dump(mode="json")


def compare(options: EngineOptions, shape: dict[str, Any], console: Console) -> list[Result]:
    """One record per (batch, prompt length, kind of lengths)."""
    # The engine comes first: the others' answers are compared with its.
    sides = ["engine", *(side for side in options.sides.split(",") if side)]
    for side in sides:
        if side not in SIDES:
            raise UserError(f"bench engine: --sides {side!r}: {did_you_mean(side, SIDES)}")
    batches, prompts = numbers(options.batches), numbers(options.prompts)
    cases = [(batch, prompt, "equal") for batch in batches for prompt in prompts]
    cases += [(batch, max(prompts), "ragged") for batch in batches if batch > 1]
    cases += [(batch, max(prompts), "groups") for batch in batches if batch % GROUP == 0]

    # A side that was refused once is not asked again.
    same = {"shape": shape, **options.model_dump(include={"new", "threads", "seed", "dtype"})}
    refused: dict[str, str] = {}
    records = []
    for case in cases:

        def run(side: str, case: tuple[int, int, str] = case) -> Result:
            if side in refused:
                return {}
            try:
                result = run_side(engine_side, {"side": side, "case": case, **same})
            except SideFailed as error:
                if side == "engine":
                    raise
                result = {"refused": str(error)}
            if "refused" in result:
                refused[side] = result["refused"]
                return {}
            return result

        batch, prompt, lengths = case
        what = f"batch {batch}, prompt {prompt}"
        results = in_turn(sides, options.rounds, run, console, what)
        figures = figures_of(batch, {side: list(filter(None, found)) for side, found in results.items()})
        records.append(
            {"batch": batch, "prompt": prompt, "lengths": lengths, **figures, "refused": dict(refused)}
        )
    return records


def figures_of(batch: int, results: dict[str, list[Result]]) -> Result:
    """Medians of one case, and the engine's speed over that of the quickest peer, of KEPT and of TUNED.

    equal_tokens: share of answers that equal the engine's token for token.
    """
    sides: dict[str, Any] = {}
    for side, found in results.items():
        if not found:
            continue
        total, first = (statistics.median(one[key] for one in found) for key in ("total_s", "first_s"))
        same = [a == b for a, b in zip(results["engine"][0]["answers"], found[0]["answers"])]
        sides[side] = {
            "tokens_per_s": found[0]["tokens"] / total,
            "first_token_s": first,
            "total_s": total,
            "decode_tokens_per_s": (found[0]["tokens"] - batch) / max(total - first, 1e-9),
            "peak_mib": max(one["peak_mib"] for one in found),
            "clock": found[0]["clock"],
            "equal_tokens": sum(same) / len(same),
        }

    # Against whoever is quickest as it comes, and against the two that somebody has tuned.
    figures: Result = {"sides": sides}
    plain = set(sides) - {"engine", KEPT, TUNED}
    for key, peers in (("best", plain), ("kept", {KEPT}), ("tuned", {TUNED})):
        speeds = [sides[peer]["tokens_per_s"] for peer in peers & set(sides)]
        figures[f"ratio_to_{key}"] = sides["engine"]["tokens_per_s"] / max(speeds) if speeds else None
    return figures


def show_comparison(console: Console, records: list[Result]) -> None:
    """tokens/s of every side (prompts read included), the engine's over them, decoding alone, equal
    answers."""
    columns = {}
    for record in records:
        sides = record["sides"]
        columns[f"{record['batch']} x {record['prompt']} {record['lengths']}"] = {
            **{side: figures["tokens_per_s"] for side, figures in sides.items()},
            **{f"engine / {peer}": record[f"ratio_to_{peer}"] for peer in ("best", "kept", "tuned")},
            "engine, decode only": sides["engine"]["decode_tokens_per_s"],
            "equal answers": min(figures["equal_tokens"] for figures in sides.values()),
        }
    show(console, "greedy generation, tokens/s", columns)
    for side, why in records[-1]["refused"].items():
        console.print(f"transformers refuses {side}: {why}")


@verb
def run(options: EngineOptions) -> None:
    """Entry of `earlyfusion bench engine`."""
    shape = decoder_shape(options.recipe, options.words)
    console = Console(highlight=False)
    record = new_record(options.model_dump())
    if options.sides:
        record["comparison"] = compare(options, shape, console)
        show_comparison(console, record["comparison"])
    if options.steps:
        with console.status("decoding at long contexts"):
            record["contexts"] = measure_contexts(
                shape,
                numbers(options.contexts),
                options.steps,
                options.seed,
                options.most_batch,
                DTYPES[options.dtype],
            )
        columns = {f"{one['context']:,} tokens": one for one in record["contexts"]}
        show(console, "decoding at long contexts: hybrid against all layers MLA", columns)
    save_record(record, options.out, console)


engine = typer.Typer(add_completion=False, rich_markup_mode=None)
engine.command(help=__doc__, context_settings={"ignore_unknown_options": True})(run)
