"""The stage of a transfer study that asks all models of one pretraining seed the same held-out problems.

    python -m earlyfusion.rl.study.measure OUT SEED

What is there already is kept, so a stopped stage goes on with the next model. For every run the start is
measured again at the temperature that gives it the run's entropy, label by label (eval/measure.py). A
linear probe reads the answer from the middle of every model.

A linear probe: what of the answer can be read from the middle of the model, in pictures and in words.

    probed = probe(model, tokenizer, "odd_one_out/0", ["picture", "twin"], fit=300, test=160, seed=7)
    probed["picture>twin"]                    # accuracy by depth: fitted on pictures, read off words

The state is what enters the feed-forward of each layer at the last token of the prompt, before a word of the
answer is said, and behind the last layer the state that chooses the first token. One ridge regression from
the state to the answers of the training split, solved exactly in fp64; the answer with the largest value
counts. Problems of the test split share no combination with those it was fitted on. Fitted on one form and
read off another it says whether both forms keep the answer in the same directions, which a transfer from
pictures to words would need.

Legend: N problems, D hidden size, C answers.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import SEED_STEP, Problem
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Asked, ask, match_entropy
from earlyfusion.eval.measured import by_problem, load_measured, write_measured
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.engine.engine import evaluating, pack_prompts
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.cli import guarded
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.rl.recipe import TaskEntry, entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt
from earlyfusion.rl.study.plan import (
    Arm,
    StudyConfig,
    beside,
    measured_file,
    read_study,
    run_folder,
    start_of,
)

SLOTS = 512
"""Answers written at a time: these are short."""


def examine(config: StudyConfig, folder: Path, file: Path, arm: Arm | None = None) -> Asked:
    """Ask a model directory the registered labels, with samples for pass@k, and all others without; write
    both to the file, and probe the model. Returns the first."""
    measure = config.measure
    model, tokenizer = load_model(folder, device=device_of("auto")), Tokenizer.load(folder)
    # Only the label that an arm is judged on needs samples: they cost most.
    kinds: dict[int, list[TaskEntry]] = {measure.samples: [], 0: []}
    for label in config.labels(arm):
        kinds[measure.samples if config.registered(label) else 0].append(entry_of(label))
    sizes: Record = {
        "problems": measure.problems,
        "seed": measure.seed,
        "max_new_tokens": measure.max_new_tokens,
    }
    asked = []
    for samples, entries in kinds.items():
        if entries:
            asked.append(ask(model, tokenizer, entries, samples=samples, slots=SLOTS, **sizes))
    write_measured(file, [one for part in asked for one in part.measured()])

    place = beside(file, "probe")
    if measure.probe and not place.is_file():
        forms = list(dict.fromkeys(["picture", config.primary]))
        numbers = {"fit": measure.probe, "test": measure.problems, "seed": measure.seed}
        write_json(place, probe(model, tokenizer, config.skill, forms, **numbers))
    print(f"measured {folder}", flush=True)
    return asked[0]


def matched(start: Asked, file: Path) -> Record:
    """Registered label -> the start at the entropy of a measured run: temperature, entropy, reached, p_target
    by problem."""
    found: Record = {}
    known = {question.entry.label for question in start.questions}
    for label, records in by_problem(load_measured(file)).items():
        # The start was asked every registered label, in whatever way any arm is.
        if label in known:
            result = match_entropy(start.only(label), fmean(one.entropy for one in records.values()))
            found[label] = {key: getattr(result, key) for key in ("temperature", "entropy", "reached")}
            found[label]["p_target"] = {one.key: one.p_target for one in result.measured}
    return found


def measure_seed(out: Path, seed: int) -> None:
    """Measure the start and every finished run of a pretraining seed that is not measured yet."""
    config = read_study(str(out / "study.toml"), {})
    own = measured_file(out, seed)
    # Asked at most once: hidden states of the start serve every run that is left to measure.
    start = cache(lambda: examine(config, start_of(out, seed), own))
    if not own.is_file():
        start()
    for arm, run in config.runs():
        folder = run_folder(out, seed, arm.name, run) / "model"
        file = measured_file(out, seed, arm.name, run)
        # The start at the run's entropy is written last: with it, all of a run is there.
        if (folder / "config.json").is_file() and not beside(file, "matched").is_file():
            examine(config, folder, file, arm)
            write_json(beside(file, "matched"), matched(start(), file))


# ---- The probe.

# As many as fit into the memory of a small machine, pictures included.
ROWS = 64
"""Prompts of one pass."""
RIDGE = 0.1
"""Penalty beside the mean square of a standardised state, which is 1."""


def probe(
    model: NativeFusion, tokenizer: Any, label: str, forms: Sequence[str], *, fit: int, test: int, seed: int
) -> dict[str, list[float]]:
    """ "form fitted on>form read off" -> accuracy at every depth, the last layer's output at the end.

    label: "task/difficulty". fit, test: problems of the training and of the held-out split. Raises DataError
    for counts below 2 and for a task with a single answer.
    """
    if fit < 2 or test < 2:
        raise DataError(f"a probe of {fit} problems read off {test}: give at least 2 of each")
    entry = entry_of(label)
    # Fitted on the training split: held-out problems share no combination with it.
    task = make_task(entry.name, **entry.options)
    asked = task.test_problems(test, seed, entry.difficulty)
    known = [task.sample(seed * SEED_STEP + number, "train", entry.difficulty) for number in range(fit)]
    answers = sorted({problem.target for problem in known})
    if len(answers) < 2:
        raise DataError(
            f"{label}: {fit} problems have the one answer {answers[0]!r}; there is nothing to tell apart"
        )
    # An answer that was never fitted (-1) cannot be read off.
    code = {answer: number for number, answer in enumerate(answers)}
    known_N = torch.tensor([code[problem.target] for problem in known])
    asked_N = torch.tensor([code.get(problem.target, -1) for problem in asked])

    # One pass through the model for each form; all readers work on its states.
    readers, held = {}, {}
    for form in forms:
        asks = entry_of(f"{label}/{form}")
        fitted = states_of(model, tokenizer, known, asks)
        readers[form] = [Reader(states_ND, known_N, len(answers)) for states_ND in fitted]
        held[form] = states_of(model, tokenizer, asked, asks)
    found: dict[str, list[float]] = defaultdict(list)
    for fitted_on, read_off in product(forms, repeat=2):
        for reader, states_ND in zip(readers[fitted_on], held[read_off]):
            right_N = reader(states_ND) == asked_N
            found[f"{fitted_on}>{read_off}"].append(float(right_N.double().mean()))
    return found


class Reader:
    """A ridge regression from states [N, D] to one-hot answers, in fp64; called, it says the likeliest
    answer, int64 [N]."""

    def __init__(self, states_ND: Tensor, answers_N: Tensor, count: int) -> None:
        x_ND = states_ND.double()
        self.mean_D, spread_D = x_ND.mean(0), x_ND.std(0)
        # A dead unit has no spread and must not be divided by it.
        self.scale_D = torch.where(spread_D > 0, spread_D, torch.ones_like(spread_D))
        x_ND = (x_ND - self.mean_D) / self.scale_D
        y_NC = torch.nn.functional.one_hot(answers_N, count).double()
        self.bias_C = y_NC.mean(0)
        gram_DD = x_ND.mT @ x_ND / len(x_ND) + RIDGE * torch.eye(x_ND.shape[1], dtype=torch.float64)
        self.weight_DC = torch.linalg.solve(gram_DD, x_ND.mT @ (y_NC - self.bias_C) / len(x_ND))

    def __call__(self, states_ND: Tensor) -> Tensor:
        x_ND = (states_ND.double() - self.mean_D) / self.scale_D
        return (x_ND @ self.weight_DC + self.bias_C).argmax(-1)


def states_of(
    model: NativeFusion, tokenizer: Any, problems: Sequence[Problem], entry: TaskEntry
) -> list[Tensor]:
    """For every depth the states [N, D], fp32 on the CPU, at the last token of each problem's prompt, asked
    as `entry` asks."""
    kept: list[list[Tensor]] = []
    heard: list[Tensor] = []

    def hear(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        heard.append(inputs[0].detach())

    with evaluating(model), ExitStack() as listening:
        # What enters the feed-forward of every layer, in order.
        for layer in model.decoder.layers:
            inner: Any = layer.block_sparse_moe if layer.sparse else layer.mlp
            listening.callback(inner.register_forward_pre_hook(hear).remove)
        for start in range(0, len(problems), ROWS):
            part = problems[start : start + ROWS]
            prompts = [encode_prompt(problem, entry, tokenizer, model.config.vision) for problem in part]
            heard.clear()
            last_TD = model.hidden(pack_prompts(model, prompts))
            # The last token of a prompt is where the answer is chosen.
            ends_N = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).to(last_TD.device) - 1
            kept.append([state_TD.index_select(0, ends_N).float().cpu() for state_TD in [*heard, last_TD]])
    return [torch.cat(parts) for parts in zip(*kept)]


if __name__ == "__main__":
    sys.exit(guarded(lambda: measure_seed(Path(sys.argv[1]), int(sys.argv[2]))))
