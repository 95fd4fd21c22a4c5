"""lm-evaluation-harness on our models, and our data in its tasks.

    lm_eval.simple_evaluate(model=lm_eval_model(model), tasks=[...])       any Model as a TemplateLM
    earlyfusion eval --model DIR --harness lm-eval --tasks piqa,mmlu_pro_math --data mmlu_pro=DIR

Tasks read from local files through YAML overrides that are written to a temporary folder: `include` of the
installed YAML (its Python functions still resolve), `dataset_path: json` and the files. A dict given to
lm-eval 0.4.13 in place of a file is not merged with the registered task. Nothing is fetched: the hub is
switched off while it runs.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from earlyfusion.eval.benchmarks.base import request_seed
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Model, RollingRequest, ScoreRequest
from earlyfusion.kernels.files import Record, write_json

SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")
ENDINGS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".gz": "json"}
DEFAULT_NEW_TOKENS = 256
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
KEPT = ("results", "groups", "versions", "n-shot", "n-samples")


def require_lm_eval() -> Any:
    """The lm_eval package; raises EvalError naming the extra when it is not installed."""
    try:
        import lm_eval
    except ModuleNotFoundError:
        raise EvalError("lm-evaluation-harness is not installed; pip install 'earlyfusion[eval]'") from None
    return lm_eval


def lm_eval_model(model: Any, *, seed: int = 0) -> Any:
    """A Model that is a TokenModel as an lm_eval.api.model.TemplateLM. Images in requests (`visual`) are not
    supported."""
    require_lm_eval()
    from lm_eval.api.model import TemplateLM

    class Adapter(TemplateLM):
        """Hands every request of the harness to a Model of this project."""

        # The harness asks for these; documents end where ours do.
        eot_token_id = prefix_token_id = model.begin_id
        max_length = model.max_length or 1 << 20
        max_gen_toks = DEFAULT_NEW_TOKENS
        tokenizer_name = model.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(model.encode(string, add_special_tokens is not False))

        def loglikelihood(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            answers = model.loglikelihood([ScoreRequest(*request.args) for request in requests])
            return [(answer.sum, answer.greedy) for answer in answers]

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            raise NotImplementedError("loglikelihood splits texts itself")

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            texts = [RollingRequest(request.args[0]) for request in requests]
            return [answer.sum for answer in model.rolling(texts)]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [_generation(request.args, number, seed) for number, request in enumerate(requests)]
            return [answer.text for answer in model.generate(asked)]

    return Adapter()


def _generation(args: tuple[str, Record], number: int, seed: int) -> GenerateRequest:
    """A request of the harness with its generation options."""
    context, options = args
    until = options.get("until") or []
    temperature = float(options.get("temperature") or 0.0)
    # do_sample goes before the temperature, which tasks leave set.
    if "do_sample" in options:
        temperature = (temperature or 1.0) if options["do_sample"] else 0.0
    longest = options.get("max_gen_toks") or options.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    stop = tuple(filter(None, [until] if isinstance(until, str) else until))
    own = request_seed(seed, str(number), 0)
    return GenerateRequest(context, int(longest), stop, temperature, float(options.get("top_p") or 1.0), own)


def _override(name: str, path: Path, index: Record, folder: Path) -> str:
    """Write the YAML of a task or group that reads local data; -> the name to run."""
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    # A task's YAML with its includes, functions left unresolved.
    source, local = Path(index[name].yaml_path), f"{name}_local"
    config = dict(load_yaml(source, resolve_func=False))
    if isinstance(config.get("task"), list):  # a group: its tasks first
        # A group names its children; each gets a file of its own beside the group's.
        tasks = []
        for child in config["task"]:
            child_name = child if isinstance(child, str) else child["task"]
            tasks.append(_override(child_name, path, index, folder))
        content = {**config, "group": local, "task": tasks}
    else:
        files, kind = _files(path, config)
        # A split that the local data lack is switched off, or the loader would look for it.
        content = {key: None for key in SPLIT_KEYS if config.get(key) not in (None, *files)}
        content |= {"include": str(source), "task": local, "dataset_path": kind, "dataset_name": None}
        content["dataset_kwargs"] = {"data_files": files}
    (folder / f"{local}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return local


def _files(path: Path, config: Record) -> tuple[dict[str, str], str]:
    """split -> file for every split the task names, and the kind of loader."""
    asked = config.get("test_split") or config.get("validation_split") or "test"
    files = {asked: path}
    if path.is_dir():
        files = {}
        # Only splits that the task reads are looked for.
        for split in (config[key] for key in SPLIT_KEYS if config.get(key)):
            for file in sorted(path.glob(f"{split[:5]}*")):  # valid.jsonl as well
                if file.suffix in ENDINGS and file.name.split(".")[0] in (split, split[:5]):
                    files[split] = file
    if asked not in files:
        raise EvalError(f"--data {path}: holds no {asked}.jsonl (or .json, .csv, .parquet)")
    return {split: str(file) for split, file in files.items()}, ENDINGS[files[asked].suffix]


def evaluate(
    lm: Any,
    names: Sequence[str],
    data: Mapping[str, Path],
    *,
    limit: int | None = None,
    shots: int | None = None,
) -> Record:
    """lm_eval.simple_evaluate on local data; `lm` is an lm_eval model (see lm_eval_model). limit is per task.

    data: the name of a task, of one of its groups or of a prefix of it ("mmlu_pro" for mmlu_pro_math) ->
    file, or folder with <split>.jsonl / .json / .csv / .parquet. Tasks without data are run as installed.
    Private benchmarks are refused: the harness keeps their text in dataset caches and logs.
    """
    lm_eval = require_lm_eval()
    for name in names:
        # The harness writes what it asks into caches that outlive the run.
        if "gpqa" in name:
            raise EvalError(
                f"--harness lm-eval caches question text: run {name} with our own harness instead"
            )
    from datasets import config
    from lm_eval.tasks import TaskManager

    # No hub, and a dataset cache that is gone afterwards; the package has read its environment when it was
    # first imported.
    with (
        tempfile.TemporaryDirectory(prefix="earlyfusion-tasks-") as folder,
        patch.dict(os.environ, OFFLINE),
        patch.multiple(config, HF_DATASETS_CACHE=Path(folder, "cache"), HF_DATASETS_OFFLINE=True),
    ):
        index = TaskManager().task_index
        run = []
        for name in names:
            if name not in index:
                raise EvalError(f"--tasks {name}: lm-evaluation-harness has no such task")
            # The nearest of the data: the task's own, those of its group, those of all.
            fitting = [key for key in data if f"_{key}_" in f"_{name}_" or not key]
            if fitting:
                name = _override(name, data[max(fitting, key=len)], index, Path(folder))
            run.append(name)
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=run,
            limit=limit,
            num_fewshot=shots,
            task_manager=TaskManager(include_path=folder),
            log_samples=False,
            bootstrap_iters=0,
        )
    return dict(found)


def run_harness(
    model: Model, names: Sequence[str], data: Mapping[str, Path], *, seed: int, out: Path | None, **how: Any
) -> None:
    """The verb's --harness lm-eval: run, print the harness' tables, write OUT/lm_eval.json. data "": the path
    of tasks that have none of their own. how: as in `evaluate`."""
    found = evaluate(lm_eval_model(model, seed=seed), names, data, **how)
    from lm_eval.utils import make_table

    for table in ("results", "groups"):
        if found.get(table):
            print(make_table(found, table))
    if out is not None:
        kept = {key: found[key] for key in KEPT if key in found}
        path = write_json(out / "lm_eval.json", {"harness": "lm-eval", "model": model.identity(), **kept})
        print(f"results: {path}", file=sys.stderr)
