"""`earlyfusion bench engine`: generation beside transformers on equal weights, and decoding at long contexts.

Part 1: tokens/s of the engine and of transformers' generate, for the recipe's decoder shape without what
transformers' model lacks (Attention Residuals, gated MLA), over batch sizes and prompt lengths, each side in
its own process, in turn. `static` is generate with a static cache; continuous batching transformers refuses
for this model ("Invalid layer type: linear_attention"). With one CPU thread the clock is the process's busy
time, else wall time. Answers are greedy and compared. On a CPU our
side keeps freed buffers, as our verbs do (`pipeline.runtime.keep_freed_memory`), and multiplies as
kernels/products.py says; transformers runs as it comes, and as `generate-kept` with freed buffers kept, which
its users would have to know. `generate-tuned` is that with the chunk rule of its linear attention replaced by
its own recurrent one, which a CPU computes faster for short prompts: what somebody gets who tunes it by hand.

In a grouped case GROUP neighbours have the same prompt, as the samples of one rollout group do: the engine
reads it once and forks, transformers reads it for every row (its num_return_sequences repeats the input
before reading, too). In a ragged case prompts and answers have lengths between a quarter and the whole of the
given ones. transformers' generate pads prompts on the left and runs until the longest answer is done; only
tokens that were asked for are counted.

Part 2: decoding at long contexts, the hybrid against the same model with MLA everywhere (contexts.py).

--model.KEY VALUE changes a key of the recipe's decoder. Everything is saved as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import typer
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams, TokenPrompt
from earlyfusion.model.generate import engine_for
from earlyfusion.model.hub.folder import cast
from earlyfusion.pipeline.bench.contexts import measure_context, model_pair
from earlyfusion.pipeline.bench.peer import FIRST_TOKEN, our_model, shared_shape, their_model, their_names
from earlyfusion.pipeline.bench.record import Result, chosen, in_turn, medians, run_side, save_record
from earlyfusion.pipeline.bench.timing import default_device, now, peak_mib
from earlyfusion.pipeline.config.arguments import split_overrides
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import keep_freed_memory

# As many as a group of rollouts has.
GROUP = 16
KEPT, TUNED = "generate-kept", "generate-tuned"
PEERS = ("generate", "static", KEPT, TUNED)


class EngineOptions(Options):
    recipe: str = "nano"
    """recipe whose decoder shape is used; --model.KEY VALUE changes a key of it"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    """dtype of the weights, of all sides"""
    batches: str = "1,8,64"
    """numbers of prompts"""
    prompts: str = "32,128"
    """prompt lengths in tokens"""
    new: PositiveInt = 64
    """tokens to generate"""
    rounds: PositiveInt = 1
    """rounds, each side once a round"""
    sides: str = ",".join(PEERS)
    """of transformers; empty leaves part 1 out"""
    contexts: str = "4096,32768,131072,524288,1048576"
    """part 2: context lengths"""
    steps: NonNegativeInt = 3
    """part 2: timed steps; 0 leaves part 2 out"""
    threads: PositiveInt = torch.get_num_threads()
    """torch CPU threads"""
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
    def make(cls, batch: int, prompt: int, new: int, lengths: str, vocabulary: int) -> Batch:
        """lengths: "equal", "ragged" or "groups". Grouped batches are multiples of GROUP."""
        generator = torch.Generator().manual_seed(0)

        def length(most: int) -> int:
            if lengths != "ragged":
                return most
            return int(torch.randint(max(1, most // 4), most + 1, (1,), generator=generator))

        # Neighbours share one prompt, as the samples of a rollout group do.
        group = GROUP if lengths == "groups" else 1
        prompts: list[Tensor] = []
        for _ in range(batch // group):
            ids = torch.randint(FIRST_TOKEN, vocabulary, (length(prompt),), generator=generator)
            prompts += [ids] * group
        return cls(prompts, [length(new) for _ in range(batch)], group)

    def padded(self) -> tuple[Tensor, Tensor]:
        """input_ids and attention_mask, padded on the left."""
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(self.prompts, batch_first=True, padding_side="left")
        masks = [torch.ones_like(prompt) for prompt in self.prompts]
        return ids, pad(masks, batch_first=True, padding_side="left")


Generate = Callable[[Batch], list[list[int]]]


def our_side(shape: dict[str, Any], new: int, dtype: torch.dtype) -> Generate:
    """Our engine, made once for a number of prompts, since its pools are sized for them."""
    model = our_model(shared_shape(shape), default_device(), dtype)
    engines: dict[int, Engine] = {}

    def generate(batch: Batch) -> list[list[int]]:
        prompts = [TokenPrompt(ids) for ids in batch.prompts]
        count = len(prompts)
        if count not in engines:
            engines[count] = engine_for(model, None, prompts, new, most_slots=count)

        # A group is one request of several samples: its prompt is read once.
        requests = []
        for first in range(0, count, batch.group):
            params = SamplingParams(batch.counts[first], 0.0, ignore_eos=True, n=batch.group)
            requests.append(Request(str(first), prompts[first], params))
        return [done.ids for done in engines[count].generate(requests)]

    return generate


def their_side(side: str, shape: dict[str, Any], dtype: torch.dtype) -> Generate:
    """transformers with our weights, by its generate."""
    device = default_device()

    # Equal weights: ours, under their names.
    weights = our_model(shared_shape(shape), torch.device("cpu")).decoder.state_dict()
    model: Any = their_model(shape, device)
    model.load_state_dict(their_names(weights))
    model = cast(model, dtype).to(device).eval()
    if side == TUNED:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs

        theirs.chunk_kimi_delta_attention = theirs.recurrent_kimi_delta_attention

    def generate(batch: Batch) -> list[list[int]]:
        ids, mask = (tensor.to(device) for tensor in batch.padded())

        # transformers knows one length for the batch: what is too long is cut off afterwards.
        count = max(batch.counts)
        options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
        options |= {"do_sample": False, "pad_token_id": 2}
        if side == "static":
            options["cache_implementation"] = "static"
        with torch.no_grad():
            rows = model.generate(ids, attention_mask=mask, **options)
        answers = rows[:, ids.shape[1] :].tolist()
        return [row[:asked] for row, asked in zip(answers, batch.counts)]

    return generate


def engine_side(
    side: str, shape: dict[str, Any], case: tuple[int, int, str], new: int, threads: int, dtype: str
) -> Result:
    """Seconds of the case (batch, prompt, lengths) and of one new token for the same prompts (what reading
    costs), and what was generated."""
    torch.set_num_threads(threads)
    gpu = torch.cuda.is_available()
    if not gpu and side in ("engine", KEPT, TUNED):
        keep_freed_memory()

    # The same prompts with one new token tell what reading them costs.
    batch, prompt, lengths = case
    whole = Batch.make(batch, prompt, new, lengths, shape["vocab_size"])
    one = Batch(whole.prompts, [1] * batch, whole.group)
    if side == "engine":
        generate = our_side(shape, new, getattr(torch, dtype))
    else:
        generate = their_side(side, shape, getattr(torch, dtype))
    generate(Batch(whole.prompts[:1], [2]))
    if gpu:  # kernels are compiled and CUDA graphs captured when shapes are first met
        generate(one)
        generate(whole)

    # One thread on a CPU is timed by its own busy time, which other work on the machine disturbs least.
    clock = time.process_time if not gpu and threads == 1 else now
    began = clock()
    generate(one)
    first = clock()
    answers = generate(whole)
    total_s, first_s, tokens = clock() - first, first - began, sum(whole.counts)
    return {
        "tokens_per_s": tokens / total_s,
        "decode_tokens_per_s": (tokens - batch) / max(total_s - first_s, 1e-9),
        "first_token_s": first_s,
        "peak_mib": peak_mib(),
        "answers": answers,
    }


# ---- Part 1, in the command.


def numbers(text: str) -> list[int]:
    """A list such as 1,8,64; raises UserError for anything else."""
    parts = chosen(text)
    if not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"bench engine: {text!r}: expected numbers of at least 1, such as 1,8,64")
    return [int(part) for part in parts]


def decoder_shape(recipe: str, changes: list[str]) -> dict[str, Any]:
    """The decoder of a recipe, with changes such as ["--model.num_experts", "16"].

    Raises UserError: the recipe or a key is unknown, a value is missing, or the shape is impossible.
    """
    words, pairs = split_overrides(changes)
    if words or not all(key.startswith("model.") for key, _ in pairs):
        raise UserError(
            f"bench engine: {' '.join(changes)!r} is not understood; expected --model.KEY VALUE pairs"
        )
    return load_config([recipe], pairs).model.model_dump(mode="json")


def compare(options: EngineOptions, shape: dict[str, Any]) -> list[Result]:
    """One record per (batch, prompt length, kind of lengths), and the table of all."""
    # The engine comes first: the others' answers are compared with its.
    sides = ["engine", *chosen(options.sides, PEERS, "--sides")]
    prompts, cases = numbers(options.prompts), list[tuple[int, int, str]]()
    for batch in numbers(options.batches):
        cases += [(batch, prompt, "equal") for prompt in prompts]
        if batch > 1:
            cases.append((batch, max(prompts), "ragged"))
        if batch % GROUP == 0:
            cases.append((batch, max(prompts), "groups"))

    same = {"shape": shape, **options.model_dump(include={"new", "threads", "dtype"})}
    records, columns = [], {}
    for case in cases:

        def run(side: str, case: tuple[int, int, str] = case) -> Result:
            return run_side(engine_side, {"side": side, "case": case, **same})

        # Whatever transformers raises for what it does not support, it is not asked again.
        results, refused = in_turn(sides, options.rounds, run)
        sides = list(results)
        for side, why in refused.items():
            print(f"transformers refuses {side}: {why}")
        figures = figures_of(results)
        records.append(dict(zip(("batch", "prompt", "lengths"), case)) | figures | {"refused": refused})

        # Speed first (prompts read included), then what it may have cost: answers that differ.
        found = figures["sides"]
        columns["{} x {} {}".format(*case)] = {
            **{side: figures["tokens_per_s"] for side, figures in found.items()},
            **{f"engine / {peer}": ratio for peer, ratio in figures["ratio_to"].items()},
            "engine, decode only": found["engine"]["decode_tokens_per_s"],
            "equal answers": min(figures["equal_tokens"] for figures in found.values()),
        }
    show("greedy generation, tokens/s", columns)
    return records


def figures_of(results: dict[str, list[Result]]) -> Result:
    """Medians of one case, and the engine's speed over that of every peer.

    equal_tokens: share of answers that equal the engine's token for token.
    """
    sides: dict[str, Any] = {}
    ratios = {}
    expected = results["engine"][0]["answers"]
    for side, found in results.items():
        # What was answered is the same in every round.
        answers, *_ = [one.pop("answers") for one in found]
        same = [a == b for a, b in zip(expected, answers)]
        sides[side] = medians(found) | {"equal_tokens": sum(same) / len(same)}
        if side != "engine":
            ratios[side] = sides["engine"]["tokens_per_s"] / sides[side]["tokens_per_s"]
    return {"sides": sides, "ratio_to": ratios}


@verb
def run(options: EngineOptions) -> None:
    """Entry of `earlyfusion bench engine`."""
    shape = decoder_shape(options.recipe, options.words)
    record: Result = {}
    if options.sides:
        record["comparison"] = compare(options, shape)
    if options.steps:
        torch.set_num_threads(options.threads)
        models = model_pair(shape, getattr(torch, options.dtype))
        columns = {}
        for context in numbers(options.contexts):
            columns[f"{context:,} tokens"] = measure_context(models, context, options.steps)
        record["contexts"] = columns
        show("decoding at long contexts: hybrid against all layers MLA", columns)
    save_record(options.out, options.model_dump(), **record)


# --model.KEY is no option of ours: unknown words are kept for decoder_shape.
engine = typer.Typer(add_completion=False, rich_markup_mode=None)
engine.command(help=__doc__, context_settings={"ignore_unknown_options": True})(run)
