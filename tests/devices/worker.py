"""What the tests of this folder run in a process of its own: `worker.py
pretrain|engine|layers|ahead|rl|commands FOLDER [cpu] [EMULATED ...]`.

Runs on the GPU if torch sees one, else on the CPU; with more words once for each: cpu, then on an emulated
device with these kernels (torch, auto) or dry: Triton kernels are launched but do nothing (the interpreter
takes minutes). The last line printed is a JSON list of what each found.
"""

import json
import os
import shlex
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

WAYS = sys.argv[3:]
# Turns Triton's interpreter on.
if WAYS:
    import emulated_cuda

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in (".", "pipeline", "model", "rl")]
torch.set_num_threads(1)


def noted():
    """Host syncs and kernel launches of the emulated device since the last call."""
    if not WAYS:
        return {}
    found = {
        "syncs": [[*key, count] for key, count in Counter(emulated_cuda.SYNCS).items()],
        "launches": dict(Counter(emulated_cuda.LAUNCHES)),
        "unguarded": sorted(emulated_cuda.UNGUARDED),
    }
    emulated_cuda.SYNCS.clear()
    emulated_cuda.LAUNCHES.clear()
    return found


def pretrain(folder):
    """Losses of the tiny recipe, five steps of two stages, in float32 and in bfloat16."""
    import tiny_run

    from earlyfusion.pipeline import evaluate
    from earlyfusion.pipeline import pretrain as loop
    from earlyfusion.pipeline.track import read_metrics

    evaluate.write_report = lambda out: out / "report.html"
    changes = dict(
        stages__0__steps=3, stages__0__warmup_steps=1, stages__1__steps=2, stages__1__decay_steps=1
    )
    recipe = tiny_run.tiny_recipe(tiny_run.make_tokenizer(folder, 300), **changes)
    # A width of the kernels.
    recipe["model"]["linear_attn_config"]["head_dim"] = 32
    found = {}
    for name, precision in (("float32", "no"), ("bfloat16", "bf16")):
        tiny_run.forget_processes()
        train = {**recipe["train"], "mixed_precision": precision}
        path = tiny_run.write_recipe(folder / f"{name}.toml", {**recipe, "train": train})
        noted()
        if loop.main([str(path), "--out", str(folder / name)]):
            raise SystemExit(f"the run in {name} failed")
        records = read_metrics(folder / name / "metrics.jsonl")
        keys = ("loss", "grad_norm", "loss/image", "loss/text")
        found[name] = [
            {key: record[key] for key in keys if key in record} for record in records if "grad_norm" in record
        ]
    return found | noted()


def engine(folder):
    """Tokens of requests of every kind, from a float32 and a bfloat16 model with experts, and how many graphs
    there were."""
    from engine_cases import PLAIN, SHAPE, TOKENIZER, all_returned, drawn, model, pictured, requests, tokens

    from earlyfusion.model.engine.engine import Engine
    from earlyfusion.model.engine.requests import Request

    found = {}
    for name, net in (("float32", model(0, **PLAIN)), ("bfloat16", model(0, **SHAPE).to(torch.bfloat16))):
        # Every kind of request: plain, with a picture, in a group, with nucleus sampling.
        given = [
            *requests([5, 9, 17, 33], drawn(10, seed=3)),
            Request("image", pictured(0), drawn(6)),
            Request("group", tokens(11), drawn(8, n=3)),
            Request("top", tokens(7), drawn(6, top_p=0.8, temperature=0.7)),
        ]
        made = Engine(net.to(DEVICE), TOKENIZER, max_slots=8, page_size=8, prefill_chunk=32)
        noted()
        answers = [list(done.ids) for done in made.generate(given)]
        all_returned(made)
        graphs = made.runner.graphs
        found[name] = {"ids": answers, "graphs": 0 if graphs is None else len(graphs._captured), **noted()}
    return found


def layers(folder):
    """An MLA layer in bfloat16, |logit| up to 20, that reads a prompt at once and in chunks through pages:
    2-norm distances of the chunks from the whole and of the whole from the equations in float64."""
    from types import SimpleNamespace

    sys.path.insert(0, str(TESTS.parent))
    from earlyfusion.kernels.segments import Segments
    from earlyfusion.model.cache import MlaPages, Past, Pools
    from earlyfusion.model.engine.runner import Part, prefill_plan
    from earlyfusion.model.mixers import MultiHeadLatentAttention
    from tests.model.tiny import tiny_text

    torch.manual_seed(0)
    config = tiny_text(
        num_attention_heads=2, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, kv_lora_rank=32
    )
    law = MultiHeadLatentAttention(config).bfloat16().double().eval().requires_grad_(False)
    x, edges = torch.randn(96, config.hidden_size).bfloat16(), (0, 40, 41, 96)
    q, latents = law.q_proj(x.double()).view(96, 2, 32), law.kv_a_proj_with_mqa(x.double())
    k = law.kv_b_proj(law.kv_a_layernorm(latents[:, :32])).view(96, 2, 40)[..., :24]
    k = torch.cat([k, latents[:, None, 32:].expand(-1, 2, -1)], -1)
    # Logits of 20 are what trained models reach; rounding shows there.
    law.q_proj.weight *= 20 / (torch.einsum("ihd,jhd->hij", q, k) * law.scale).abs().max()
    law.bfloat16().double()
    layer = MultiHeadLatentAttention(config).bfloat16().eval().requires_grad_(False)
    layer.load_state_dict({name: value.bfloat16() for name, value in law.state_dict().items()})
    layer, y = layer.to(DEVICE), x.to(DEVICE)

    def through(memory, plan):
        parts = []
        for start, stop in pairwise(edges):
            segments, how = plan(start, stop)
            new = torch.nn.functional.pad(y[start:stop], (0, 0, 0, segments.total - (stop - start)))
            parts.append(layer(new, segments, Past(memory, how))[: stop - start])
        return torch.cat(parts)

    pages, pools = MlaPages(y.new_zeros(20 * 16, 40), 16), Pools([], 16, 1, 19)
    sample = SimpleNamespace(slot=1, pages=[7, 2, 9, 4, 11, 5, 12, 3])
    paged = lambda start, stop: prefill_plan([Part(sample, start, stop)], pools, DEVICE)
    distance = lambda a, b: ((a.cpu().double() - b.cpu().double()).norm() / b.cpu().double().norm()).item()
    # What training computes; the chunks must meet it.
    whole = layer(y, Segments((96,)))
    found = {"whole": distance(whole, law(x.double(), Segments((96,))))}
    found["pages"] = distance(through(pages, paged), whole)
    return found | noted()


def ahead(folder):
    """Long answers of a float32 model without experts, which end at stop ids or by length, and what it says
    next, with the host looking at every token and at many at once; how often it looked, and what the prefix
    cache gave."""
    from dataclasses import replace

    from engine_cases import SHAPE, TOKENIZER, all_returned, drawn, model, requests

    from earlyfusion.model.engine.engine import RUN_AHEAD, Engine
    from earlyfusion.model.engine.requests import Request, TokenPrompt

    net = model(0, **SHAPE, num_experts=0).to(DEVICE)
    sizes = dict(max_slots=6, page_size=8, prefill_chunk=32, prefix_cache=6, checkpoint_every=16)
    # One ends where the host knows beforehand, one where only the token tells.
    settings = {"length": drawn(70, seed=1), "stops": drawn(90, stop_ids=tuple(range(20, 27)), seed=2)}
    found = {}
    for name, params in settings.items():
        for most in (1, RUN_AHEAD):
            made = Engine(net, TOKENIZER, run_ahead=most, **sizes)
            given = requests([5, 9, 17, 33, 40, 8, 21, 12], params)
            done, shorter = made.generate(given), replace(params, max_new_tokens=12)
            spoken = [torch.tensor([*map(int, r.prompt.ids), *c.ids]) for r, c in zip(given, done)]
            next_ones = [Request(f"next{i}", TokenPrompt(ids), shorter) for i, ids in enumerate(spoken)]
            done += made.generate(next_ones)
            all_returned(made)
            stats = made.stats()
            counts = ("decoded_tokens", "read_tokens", "prefix_hit_tokens")
            found[f"{name}/{most}"] = {
                "answers": [[c.ids, c.text, c.finish_reason, c.cached_tokens, c.versions] for c in done],
                "logprobs": [p for c in done for p in c.logprobs],
                "looks": stats["host_syncs"],
                "counts": [stats[key] for key in counts],
            }
    return found


def rl(folder):
    """Rewards and gradients of reinforcement learning: two updates in float32, one in bfloat16."""
    import rl_cases

    from earlyfusion.pipeline.track import read_metrics

    start = rl_cases.model_directory(folder)

    def learned(name, **changes):
        changes = {"optim": {"lr": 1e-5, "weight_decay": 0.0}, "train": {"updates": 2}, **changes}
        # what a limit cuts off earns nothing: enough answers, and room
        # for them to end, so that every update learns
        changes["rollout"] = {"max_new_tokens": 12, "group_size": 8, **changes.get("rollout", {})}
        if rl_cases.run(start, folder / name, **changes):
            raise SystemExit(f"the run in {name} failed")
        records = read_metrics(folder / name / "metrics.jsonl")
        keys = ("reward", "grad_norm", "entropy")
        return [
            {key: record[key] for key in keys if key in record} for record in records if "grad_norm" in record
        ]

    half = dict(train={"updates": 1, "mixed_precision": "bf16"}, rollout={"dtype": "bfloat16"})
    return {"float32": learned("float32"), "bfloat16": learned("bfloat16", **half), **noted()}


def commands(folder):
    """Exit codes of commands a user would run; `doctor` compares every kernel with its law on the device."""
    from PIL import Image

    from earlyfusion.pipeline import cli
    from earlyfusion.pipeline.bench import cases

    Image.new("RGB", (40, 30), (200, 30, 30)).save(folder / "picture.png")
    model = "--model embedded:skills"
    lines = [
        "doctor",
        f"measure {model} --tasks counting/0/picture --problems 3",
        f"generate {model} --image {folder}/picture.png --question 'what color is it?'",
        f"eval {model} --tasks counting --limit 2 --out {folder}/eval",
        f"bench engine --sides '' --contexts 64,300 --steps 1 --out {folder}/engine.json",
    ]
    codes = {line: cli.main(shlex.split(line)) for line in lines}
    if WAYS:
        # The interpreter takes minutes at the doctor's own shapes.
        cases.CHECK_SHAPES = "T70 H1 D32: 70, 1 x 32"
        cases.CHECK_PATHS = (("6 sub-layers, d 96", 2, 3, 96, 9),)
        cases.CHECK_ATTENTION = (("MLA", (33, 1), 2, 192, 128, True), ("tower", (17,), 2, 72, 72, False))
    os.environ["EF_KERNELS"] = "triton"
    return codes | {"doctor with Triton": cli.main(["doctor"])}


if __name__ == "__main__":
    task, place = sys.argv[1:3]
    results, keep = [], None
    for way in WAYS or ["cpu"]:
        # The emulated device never goes away again: the CPU comes first.
        if way != "cpu":
            keep = keep or emulated_cuda.install()
            emulated_cuda.Device.launch_for_real = way != "dry"
            os.environ["EF_KERNELS"] = "auto" if way == "dry" else way
        DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        folder = Path(place) / way
        folder.mkdir(parents=True, exist_ok=True)
        results.append(globals()[task](folder))
    print(json.dumps(results))
