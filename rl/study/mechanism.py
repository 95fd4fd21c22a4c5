"""Where in a model what reinforcement learning taught lies, and whether two forms of a question share it.

    earlyfusion study mechanism --start runs/start/model --model runs/vision/model --out runs/mechanism

cosine     at the start, of the gradients of -log p(first token of the target) of one problem in both forms,
           over the weights of the decoder; of two problems with other answers as its control
probe      accuracy of a linear probe by depth: "picture>twin" is fitted on pictures, read off words
exchange   accuracy of the start with none, the lower half, the upper half, or all of the trained weights

The probe reads the state that enters the feed-forward of each layer at the last token of the prompt, before a
word of the answer is said, and behind the last layer the state that chooses the first token. One ridge
regression from the state to the answers of the training split, solved exactly in fp64; the answer with the
largest value counts. Fitted on one form and read off another it says whether both forms keep the answer in
the same directions, which a transfer from pictures to words would need.

Sources: arXiv 2501.02669 (gradients of two forms), 2602.12395 (layers exchanged).
Legend: N problems, D hidden size, C answers.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.data.options import Options, verb
from earlyfusion.data.tasks.problem import SEED_STEP, Problem
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import ask
from earlyfusion.eval.measured import summary
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.engine.engine import evaluating, pack_prompts
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.recipe import TaskEntry, entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt

FORMS = ("picture", "twin")
ROWS = 64
"""Prompts of one pass: as many as fit into the memory of a small machine, pictures included."""
RIDGE = 0.1
"""Penalty beside the mean square of a standardised state, which is 1."""


class MechanismOptions(Options):
    start: str
    """model directory that the training began with"""
    model: str
    """model directory after it"""
    out: Path
    """folder for summary.json"""
    label: str = "rule/1"
    """task/difficulty"""
    problems: PositiveInt = 120
    """held-out problems"""
    fit: PositiveInt = 300
    """problems that the probe is fitted on"""
    seed: int = 777
    """which problems"""


@verb
def mechanism(options: MechanismOptions) -> None:
    """Entry of `earlyfusion study mechanism`."""
    folders = [model_folder(folder) for folder in (options.start, options.model)]
    (start, trained), tokenizer = (load_model(folder) for folder in folders), Tokenizer.load(folders[0])
    numbers = {"fit": options.fit, "test": options.problems, "seed": options.seed}
    found: Record = {"cosine": cosines(start, tokenizer, options.label, options.problems, options.seed)}
    found["probe"] = probe(trained, tokenizer, options.label, FORMS, **numbers)
    found["exchange"] = exchanged(start, trained, tokenizer, options)
    write_json(options.out / "summary.json", found)
    print(f"written: {options.out / 'summary.json'}")


# ---- Gradients of two forms.


def cosines(model: NativeFusion, tokenizer: Any, label: str, count: int, seed: int) -> Record:
    """Mean cosine of the decoder's gradients: "same" problem in both forms, "other" problem of another
    answer.

    Every category is asked once.
    """
    entries = [entry_of(f"{label}/{form}") for form in FORMS]
    asked = make_task(entries[0].name, **entries[0].options).test_problems(count, seed, entries[0].difficulty)
    problems = [*{problem.category: problem for problem in asked}.values()]
    weights = [p for p in model.decoder.parameters() if p.requires_grad]
    rows = []
    with evaluating(model), torch.enable_grad():
        for entry in entries:
            found = []
            for problem in problems:
                prompt = encode_prompt(problem, entry, tokenizer, model.config.vision)
                logits_V = (
                    model.hidden(pack_prompts(model, [prompt]))[-1].float() @ model.decoder.head_weight().T
                )
                target = tokenizer.encode(problem.solution().text)[0]
                grads = torch.autograd.grad(-logits_V.log_softmax(-1)[target], weights, allow_unused=True)
                flat = torch.cat([g.flatten() for g in grads if g is not None])
                found.append(flat / flat.norm())
            rows.append(torch.stack(found))
    table_NN = rows[0] @ rows[1].T
    other = torch.tensor([[a.target != b.target for b in problems] for a in problems])
    return {"same": float(table_NN.diagonal().mean()), "other": float(table_NN[other].mean())}


# ---- Layers exchanged.


def exchanged(
    start: NativeFusion, trained: NativeFusion, tokenizer: Any, options: MechanismOptions
) -> Record:
    """What of the trained model the start was given -> form -> accuracy."""
    entries = [entry_of(f"{options.label}/{form}") for form in FORMS]
    half = len(start.decoder.layers) // 2
    own = {name: value.clone() for name, value in start.state_dict().items()}
    new = trained.state_dict()
    found: Record = {}
    for name, layers in (
        ("lower", range(half)),
        ("upper", range(half, 2 * half)),
        ("none", ()),
        ("all", None),
    ):
        prefixes = () if layers is None else tuple(f"decoder.layers.{layer}." for layer in layers)
        mixed = {key: new[key] if layers is None or key.startswith(prefixes) else own[key] for key in own}
        start.load_state_dict(mixed)
        asked = ask(start, tokenizer, entries, problems=options.problems, seed=options.seed, max_new_tokens=4)
        told = summary(asked.measured())
        found[name] = {form: told[f"{options.label}/{form}"]["accuracy"] for form in FORMS}
    start.load_state_dict(own)
    return found


# ---- The probe.


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
