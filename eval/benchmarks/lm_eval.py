"""lm-evaluation-harness on our models, and our data in its tasks.

    lm_eval.simple_evaluate(model=lm_eval_model(model), tasks=[...])       any Model as a TemplateLM
    earlyfusion eval --model DIR --harness lm-eval --tasks piqa,mmlu_pro_math --data mmlu_pro=DIR

Tasks read from local files through YAML overrides that are written to a temporary folder: `include` of the
installed YAML (its Python functions still resolve), `dataset_path: json` and the files. A dict given to
lm-eval 0.4.13 in place of a file is not merged with the registered task. Nothing is fetched: the hub is
switched off while it runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earlyfusion.eval.benchmarks.base import request_seed
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Model, RollingRequest, ScoreRequest
from earlyfusion.kernels.files import write_json

SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")
ENDINGS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".gz": "json"}
DEFAULT_NEW_TOKENS = 256


def require_lm_eval() -> Any:
    """The lm_eval package; raises EvalError naming the extra when it is not installed."""
    try:
        import lm_eval
    except ModuleNotFoundError:
        raise EvalError("lm-evaluation-harness is not installed; pip install 'earlyfusion[eval]'") from None
    return lm_eval


def lm_eval_model(model: Model, *, seed: int = 0) -> Any:
    """The model as an lm_eval.api.model.TemplateLM. Images in requests (`visual`) are not supported."""
    require_lm_eval()
    from lm_eval.api.model import TemplateLM

    class Adapter(TemplateLM):
        """Hands every request of the harness to a Model of this project."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self._rank, self._world_size = model, 0, 1

        @property
        def eot_token_id(self) -> int:
            return min(getattr(model, "stop_ids", None) or {0})

        @property
        def prefix_token_id(self) -> int:
            return getattr(model, "begin_id", self.eot_token_id)

        @property
        def max_length(self) -> int:
            return model.max_length or 1 << 20

        @property
        def max_gen_toks(self) -> int:
            return DEFAULT_NEW_TOKENS

        @property
        def tokenizer_name(self) -> str:
            return model.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(model.encode(string, add_special_tokens is not False))  # type: ignore[attr-defined]

        def loglikelihood(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            asked = [ScoreRequest(*request.args) for request in requests]
            found = [(answer.sum, answer.greedy) for answer in model.loglikelihood(asked)]
            for request, answer in zip(requests, found):
                self.cache_hook.add_partial("loglikelihood", request.args, answer)
            return found

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            raise NotImplementedError("loglikelihood splits texts itself")

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [
                answer.sum
                for answer in model.rolling([RollingRequest(request.args[0]) for request in requests])
            ]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [_generation(request, number, seed) for number, request in enumerate(requests)]
            return [answer.text for answer in model.generate(asked)]

    return Adapter()


def _generation(request: Any, number: int, seed: int) -> GenerateRequest:
    """A request of the harness with its generation options."""
    context, options = request.args
    until = options.get("until") or []
    stops = tuple([until] if isinstance(until, str) else until)
    sampled = options.get("do_sample", float(options.get("temperature") or 0) > 0)

    return GenerateRequest(
        prompt=context,
        max_new_tokens=int(
            options.get("max_gen_toks") or options.get("max_new_tokens") or DEFAULT_NEW_TOKENS
        ),
        stop=tuple(stop for stop in stops if stop),
        temperature=float(options.get("temperature") or 1.0) if sampled else 0.0,
        top_p=float(options.get("top_p") or 1.0),
        seed=request_seed(seed, str(number), 0),
    )


def write_overrides(names: Sequence[str], data: Mapping[str, Path], folder: Path) -> list[str]:
    """One YAML per task (and group) that has local data; -> the names to run.

    data: the name of a task, of one of its groups or of a prefix of it ("mmlu_pro" for mmlu_pro_math) ->
    file, or folder with <split>.jsonl / .json / .csv / .parquet. Tasks without data are run as installed.
    Raises EvalError for a name the harness does not know.
    """
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    run: list[str] = []
    for name in names:
        if name not in index:
            raise EvalError(f"--tasks {name}: lm-evaluation-harness has no such task")
        path = _data_of(name, data)
        run.append(name if path is None else _override(name, path, index, folder))
    return run


def _data_of(name: str, data: Mapping[str, Path]) -> Path | None:
    fitting = [
        key for key in data if key in ("", name) or name.startswith(f"{key}_") or name.endswith(f"_{key}")
    ]
    return data[max(fitting, key=len)] if fitting else None


def _override(name: str, path: Path, index: Mapping[str, Any], folder: Path) -> str:
    """Write the YAML of one task or group; -> its new name."""
    import yaml

    entry = index[name]
    local = f"{name}_local"
    file = folder / f"{local}.yaml"
    config = _loaded(entry)
    if isinstance(config.get("task"), list):  # a group: its tasks first
        children = [child if isinstance(child, str) else child["task"] for child in config["task"]]
        tasks = [_override(child, path, index, folder) for child in children]
        content = {key: value for key, value in config.items() if key not in ("task", "group")}
        content |= {"group": local, "task": tasks}
    else:
        files, kind = _files(path, config)
        content = {
            "include": str(entry.yaml_path),
            "task": local,
            "dataset_path": kind,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(found) for split, found in files.items()}},
            **{key: None for key in SPLIT_KEYS if config.get(key) not in (None, *files)},
        }
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return local


def _loaded(entry: Any) -> dict[str, Any]:
    """A task's YAML with its includes, functions left unresolved."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(Path(entry.yaml_path), resolve_func=False))


def _files(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Path], str]:
    """split -> file for every split the task names, and the kind of loader."""
    wanted = {config.get(key) for key in SPLIT_KEYS} - {None}
    asked = str(config.get("test_split") or config.get("validation_split") or "test")
    if path.is_file():
        files = {asked: path}
    else:
        files = {}
        for split in sorted(map(str, wanted)):
            names = (split, {"validation": "valid"}.get(split, split))
            found = [p for n in names for p in sorted(path.glob(f"{n}.*")) if p.suffix in ENDINGS]
            if found:
                files[split] = found[0]

    if asked not in files:
        raise EvalError(f"--data {path}: holds no {asked}.jsonl (or .json, .csv, .parquet)")
    return files, ENDINGS[files[asked].suffix]


@contextmanager
def offline() -> Iterator[None]:
    """No hub, and a dataset cache that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="earlyfusion-lm-eval-") as cache:
        wanted = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        before = {key: os.environ.get(key) for key in wanted}
        os.environ.update(wanted)
        import datasets

        settings = datasets.config
        old = settings.HF_DATASETS_CACHE, settings.HF_DATASETS_OFFLINE
        settings.HF_DATASETS_CACHE, settings.HF_DATASETS_OFFLINE = Path(cache), True
        try:
            yield
        finally:
            settings.HF_DATASETS_CACHE, settings.HF_DATASETS_OFFLINE = old
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def evaluate(
    lm: Any,
    names: Sequence[str],
    data: Mapping[str, Path],
    *,
    limit: int | None = None,
    shots: int | None = None,
    samples: bool = False,
) -> dict[str, Any]:
    """lm_eval.simple_evaluate on local data; `lm` is an lm_eval model (see lm_eval_model). limit is per task.

    Private benchmarks are refused: the harness keeps their text in dataset caches and logs.
    """
    lm_eval = require_lm_eval()
    private = [name for name in names if "gpqa" in name]
    if private:
        raise EvalError(
            f"--harness lm-eval caches question text: run {private[0]} with our own harness instead"
        )
    with offline(), tempfile.TemporaryDirectory(prefix="earlyfusion-tasks-") as temporary:
        folder = Path(temporary)
        run = write_overrides(names, data, folder)
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=str(folder))
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=run,
            limit=limit,
            num_fewshot=shots,
            task_manager=manager,
            log_samples=samples,
            bootstrap_iters=0,
        )
    return dict(found)


def run_harness(
    model: Model,
    names: Sequence[str],
    data: Mapping[str, Path],
    default: Path | None,
    *,
    limit: int | None = None,
    shots: int | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """The verb's --harness lm-eval: run, print the harness' table, write results/lm_eval.json."""
    require_lm_eval()
    paths = dict(data) | ({"": default} if default is not None else {})
    found = evaluate(lm_eval_model(model, seed=seed), names, paths, limit=limit, shots=shots)
    from lm_eval.utils import make_table

    print(make_table(found))
    if found.get("groups"):
        print(make_table(found, "groups"))
    if out is not None:
        kept = {
            key: found[key]
            for key in ("results", "groups", "versions", "n-shot", "n-samples")
            if key in found
        }
        payload = {
            "harness": "lm-eval",
            "model": model.identity(),
            **json.loads(json.dumps(kept, default=str)),
        }
        path = write_json(out / "lm_eval.json", payload)
        print(f"results: {path}", file=sys.stderr)
