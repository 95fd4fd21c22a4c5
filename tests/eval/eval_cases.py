"""Small models of three kinds, small data files of every benchmark, for the tests of the evaluator."""

import json
from pathlib import Path
from typing import Any

import torch
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.eval.models.hf import HfModel, load_hf
from earlyfusion.eval.protocol import GenerateRequest, Generation, LogProb, RollingRequest, ScoreRequest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
MMLU_PRO = SHARED / "data" / "mmlu_pro"


def own_model(seed: int = 0, **batch: int) -> EngineModel:
    """A random multimodal model in memory."""
    tokenizer = tiny_tokenizer()
    return EngineModel(tiny_model(tiny_config(tokenizer), seed), tokenizer, **batch)


HF_CASES = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048, "initializer_range": 0.2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def hf_folder(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A random transformers model with a byte-level tokenizer, saved as a checkpoint folder."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.save(folder)
    torch.manual_seed(seed)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(kind, vocab_size=tokenizer.vocab_size, **ids, **HF_CASES[kind])
    AutoModelForCausalLM.from_config(config).float().eval().save_pretrained(folder)
    return folder


def hf_model(folder: Path, **options: Any) -> HfModel:
    """The saved model through the adapter."""
    return load_hf(str(folder), **options)


class Scripted:
    """A Model that knows its answers: `say` maps a request to text, `value` a score request to ln p."""

    name = "scripted"
    capabilities = frozenset({"text", "score", "generate", "image", "video"})
    max_length = None

    def __init__(self, say=lambda request: "", value=lambda request: 0.0) -> None:
        self.say, self.value = say, value
        self.asked: list[Any] = []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def generate(self, requests: list[GenerateRequest]) -> list[Generation]:
        self.asked += requests
        return [Generation(self.say(request), 3, "stop") for request in requests]

    def loglikelihood(self, requests: list[ScoreRequest]) -> list[LogProb]:
        self.asked += requests
        return [LogProb(self.value(r), 1, False) for r in requests]

    def rolling(self, requests: list[RollingRequest]) -> list[LogProb]:
        self.asked += requests
        return [LogProb(-float(len(r.text)), len(r.text), False) for r in requests]

    def identity(self) -> dict[str, Any]:
        return {"kind": "scripted", "weights_sha256": "0"}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mmlu_pro_folder(folder: Path, per_category: int = 4) -> Path:
    """Two categories, five examples each, options of different number, one with the blanks that leak the
    answer."""
    test, validation = [], []
    for c, category in enumerate(("math", "computer science")):
        for n in range(per_category):
            options = [f"option {c}{n}{k}" for k in range(3 + (n + c) % 4)]
            options[n % 3] = f" {options[n % 3]} "
            row = {"question_id": 100 * c + n, "question": f"Which is number {n} of {category}?"}
            row |= {"options": [*options, "N/A"], "answer": "ABC"[n % 3], "category": category}
            row["cot_content"] = ""
            test.append(row)
        for n in range(5):
            worked = f"A: Let's think step by step. Because {n}. The answer is (B)."
            row = {"question_id": 10 * c + n, "question": f"Example {n} of {category}?", "answer": "B"}
            row |= {"options": ["one", "two", "three"], "category": category, "cot_content": worked}
            validation.append(row)
    write_jsonl(folder / "test.jsonl", test)
    write_jsonl(folder / "validation.jsonl", validation)
    return folder


def ask_all(task, answer, limit: int | None):
    """Ask a task of a model given as a function (question, request) -> text; records and sums."""
    records = []
    for question in task.questions(limit):
        outputs = [Generation(answer(question, request), 1, "stop") for request in task.requests(question, 0)]
        records.append({"id": question.id, "category": question.category, **task.score(question, 0, outputs)})
    return records, task.aggregate(records)
