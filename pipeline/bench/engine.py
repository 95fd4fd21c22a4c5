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

Part 2: decoding at long contexts, the hybrid against the same model with MLA everywhere, the comparison of
Kimi Linear's own table (arXiv 2510.26692, figure 1 and section 5.6), and with KDA everywhere: seconds of a
decode step, and MiB of latents and states, over the context's length. The memory is filled with random states
and latents: a step's time does not depend on what they hold.

--model.KEY VALUE changes a key of the recipe's decoder. Everything is saved as JSON.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import typer
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.cache import KdaSlots
from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.engine.engine import Engine, engine_for
from earlyfusion.model.engine.requests import Needs, Request, SamplingParams, TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import cast
from earlyfusion.pipeline.bench.frame import (
    Result,
    alternate,
    chosen,
    compared,
    default_device,
    now,
    numbers,
    peak_mib,
    run_side,
    save_record,
)
from earlyfusion.pipeline.bench.train import shared_shape, their_model, with_kda
from earlyfusion.pipeline.config.arguments import split_overrides
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import keep_freed_memory
from earlyfusion.vision.config import VisionConfig

FIRST_TOKEN = 6
"""Prompts hold ordinary tokens only."""
# As many as a group of rollouts has.
GROUP = 16
KEPT, TUNED = "generate-kept", "generate-tuned"
PEERS = ("generate", "static", KEPT, TUNED)
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""Dtype of the weights, of all sides."""
PAGE = 64
"""Tokens of a page in part 2."""


class EngineOptions(Options):
    recipe: str = "nano"
    """recipe whose decoder shape is used; --model.KEY VALUE changes a key of it"""
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
    threads: PositiveInt | None = None
    """torch CPU threads; torch's own choice if left out"""
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


def our_model(
    shape: Record,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    drawn_there: bool = False,
) -> NativeFusion:
    """Our model of a decoder shape with the weights of one seed; its vision side is the tiny preset and stays
    unused.

    drawn_there: draw the weights on the device itself, quicker for billions and other than those of a CPU.
    """
    # The same seed on every side, so that the same weights answer.
    torch.manual_seed(0)
    text = ModelConfig.model_validate(shape)
    config = FusionConfig(text=text, vision=VisionConfig.preset("tiny"), media_token_id=FIRST_TOKEN - 1)
    with torch.device(device if drawn_there else "cpu"):
        model = NativeFusion(config)
    cast(model, dtype).to(device).eval()
    return model


def their_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our decoder's tensors under transformers' names and shapes (its convolutions are one, A_log is [1, 1,
    H, 1])."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = name if name.startswith("lm_head") else f"model.{name}"
        # Names first, then the two tensors whose shapes differ.
        theirs = theirs.replace(".block_sparse_moe.", ".mlp.")
        for part in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
            theirs = theirs.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")

        if "_conv1d.weight" not in name:
            renamed[theirs] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
        elif "q_conv1d" in name:
            parts = [tensors[name.replace("q_conv1d", f"{which}_conv1d")] for which in "qkv"]
            renamed[theirs.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return renamed


Generate = Callable[[Batch], list[list[int]]]


def our_side(shape: Record, new: int) -> Generate:
    """Our engine, made once for a number of prompts, since its pools are sized for them."""
    model = our_model(shared_shape(shape), default_device(), DTYPE)
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


def their_side(side: str, shape: Record) -> Generate:
    """transformers with our weights, by its generate."""
    device = default_device()

    # Equal weights: ours, under their names.
    weights = our_model(shared_shape(shape), torch.device("cpu")).decoder.state_dict()
    model: Any = their_model(shape, device)
    model.load_state_dict(their_names(weights))
    model = cast(model, DTYPE).to(device).eval()
    if side == TUNED:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs

        theirs.chunk_kimi_delta_attention = theirs.recurrent_kimi_delta_attention

    def generate(batch: Batch) -> list[list[int]]:
        ids, mask = (tensor.to(device) for tensor in batch.padded())

        # transformers knows one length for the batch: what is too long is cut off afterwards.
        count = max(batch.counts)
        options: Record = {"max_new_tokens": count, "min_new_tokens": count}
        options |= {"do_sample": False, "pad_token_id": 2}
        if side == "static":
            options["cache_implementation"] = "static"
        with torch.no_grad():
            rows = model.generate(ids, attention_mask=mask, **options)
        answers = rows[:, ids.shape[1] :].tolist()
        return [row[:asked] for row, asked in zip(answers, batch.counts)]

    return generate


def engine_side(side: str, shape: Record, case: tuple[int, int, str], new: int, threads: int) -> Result:
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
    generate = our_side(shape, new) if side == "engine" else their_side(side, shape)
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


# ---- Part 2, in this process.


def step_cost(model: NativeFusion, context: int, steps: int) -> tuple[float, float]:
    """Median seconds of a decode step of one sequence with `context` tokens, its pages in shuffled order; and
    MiB of its latents and states."""
    pages = context // PAGE + 1
    engine = Engine(model, None, max_slots=1, max_pages=pages, page_size=PAGE)
    runner = engine.runner

    # Fill the memory as if the sequence had been read.
    generator = torch.Generator(device=runner.device).manual_seed(0)
    held = 0
    for layer in engine.pools.layers:
        for tensor in layer.tensors() if isinstance(layer, KdaSlots) else [layer.latents_XR]:
            tensor.normal_(0.0, 0.1, generator=generator)
            # Slot 0 is a dummy.
            own = tensor[1:2] if isinstance(layer, KdaSlots) else tensor[:context]
            held += own.numel() * own.element_size()
    runner.length_S[1] = context
    runner.table_SP[1, :pages] = torch.randperm(pages, generator=generator, device=runner.device) + 1
    runner.last_S.fill_(7)
    # No token ends the sequence: a graph lets what has ended stand still.
    runner.end_S[1], runner.stops_SK[1] = torch.iinfo(torch.int64).max, -1

    # A step as the runner takes it: slots filled up to a bucket, slot 0 is a dummy.
    slots = torch.zeros(runner.bucket(1), dtype=torch.int64, device=runner.device)
    slots[0] = 1
    needs = Needs(drawn=True, top_p=False, min_p=False, logprobs=False)
    seconds = []
    with torch.no_grad():
        for _ in range(steps + 1):
            start = now()
            if runner.graphs is not None:
                runner.graphs.run(slots, context + 1, needs)
            else:
                runner.decode_step(slots, context + 1, needs, runner.banned, 1)
            seconds.append(now() - start)
            if int(runner.length_S[1]) != context + 1:
                raise RuntimeError(f"a step at {context} tokens did not advance: nothing was timed")
            runner.length_S[1] = context
    # The first one compiles, or captures a graph.
    return statistics.median(seconds[1:]), held / 2**20


def contexts(options: EngineOptions, shape: Record) -> Result:
    """Seconds and MiB of a decode step of the model of a shape, and of the same with MLA, and with KDA, in
    every layer."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    every = list(range(1, shape["num_hidden_layers"] + 1))
    models = {}
    for name, kda in (("hybrid", None), ("all_mla", []), ("all_kda", every)):
        each = shape if kda is None else with_kda(shape, kda)
        models[name] = our_model(each, default_device(), DTYPE, drawn_there=True)

    columns = {}
    for context in numbers(options.contexts):
        figures: Result = {}
        for name, model in models.items():
            figures[f"{name}_step_s"], figures[f"{name}_mib"] = step_cost(model, context, options.steps)
        figures["ratio"] = figures["all_mla_step_s"] / figures["hybrid_step_s"]
        columns[f"{context:,} tokens"] = figures
    show("decoding at long contexts: hybrid, all layers MLA, all layers KDA", columns)
    return columns


# ---- In the command.


def decoder_shape(recipe: str, changes: list[str]) -> Record:
    """The decoder of a recipe, with changes such as ["--model.num_experts", "16"].

    Raises UserError: the recipe or a key is unknown, a value is missing, or the shape is impossible.
    """
    words, pairs = split_overrides(changes)
    if words or not all(key.startswith("model.") for key, _ in pairs):
        raise UserError(
            f"bench engine: {' '.join(changes)!r} is not understood; expected --model.KEY VALUE pairs"
        )
    return load_config([recipe], pairs).model.model_dump(mode="json")


def compare(options: EngineOptions, shape: Record) -> list[Result]:
    """One record per (batch, prompt length, kind of lengths), and the table of each."""
    # The engine comes first: the others' answers are compared with its.
    sides = ["engine", *chosen(options.sides, PEERS, "--sides")]
    prompts, cases = numbers(options.prompts), list[tuple[int, int, str]]()
    for batch in numbers(options.batches):
        cases += [(batch, prompt, "equal") for prompt in prompts]
        if batch > 1:
            cases.append((batch, max(prompts), "ragged"))
        if batch % GROUP == 0:
            cases.append((batch, max(prompts), "groups"))

    same = {"shape": shape, **options.model_dump(include={"new", "threads"})}
    records = []
    for case in cases:

        def run(side: str, case: tuple[int, int, str] = case) -> Result:
            return run_side(engine_side, {"side": side, "case": case, **same})

        # What transformers does not support it is not asked for again.
        results = alternate(sides, options.rounds, run)
        sides = list(results)
        expected = results["engine"][0]["answers"]
        for found in results.values():
            for one in found:
                # Speed may have been bought with answers that differ.
                equal = [a == b for a, b in zip(expected, one.pop("answers"))]
                one["equal_answers"] = sum(equal) / len(equal)
        columns = compared(results)
        show("greedy generation: {} prompts of {} tokens, {}".format(*case), columns)
        records.append({"case": case, **columns})
    return records


@verb
def run(options: EngineOptions) -> None:
    """Entry of `earlyfusion bench engine`."""
    shape = decoder_shape(options.recipe, options.words)
    # Of the processes of both sides too.
    options.threads = options.threads or torch.get_num_threads()
    record: Result = {}
    if options.sides:
        record["comparison"] = compare(options, shape)
    if options.steps:
        record["contexts"] = contexts(options, shape)
    save_record(options.out, options.model_dump(), **record)


# --model.KEY is no option of ours: unknown words are kept for decoder_shape.
engine = typer.Typer(add_completion=False, rich_markup_mode=None)
engine.command(help=__doc__, context_settings={"ignore_unknown_options": True})(run)
