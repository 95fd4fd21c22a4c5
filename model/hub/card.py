"""The model card: README.md of a model directory, from the model's configuration and the facts of its run.

Facts (all optional; what is missing is left out, nothing is guessed):
    name         str, title of the card                recipe      str, name of the recipe or its resolved
                 TOML
    steps, tokens, images, seconds  numbers of the run   device, precision, seed, version
    sources      {name: {"share": float, "licence": str, "note": str}} or a list of names
    evals        {label: number or text}, as measured; the card says when there are none
    licence      licence of the weights (SPDX id)         licence_note  str
    command      str, the command line that made it
    base, notes  str, the model it was made from; list of sentences about how
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from earlyfusion.model.config import FusionConfig

Facts = Mapping[str, Any]


def model_card(config: FusionConfig, facts: Facts, parameters: int) -> str:
    """Markdown with YAML front matter. parameters: number of parameters of the whole model."""
    name = str(facts.get("name") or "earlyfusion model")
    parts = [
        _front_matter(facts),
        f"# {name}\n",
        (
            f"A natively multimodal model of {_amount(parameters)} parameters, trained jointly on text and"
            " images from the first step with [earlyfusion](https://github.com/earlyfusion/earlyfusion):"
            " MoonViT patches at native resolution, a Kimi Linear decoder (KDA and NoPE MLA), Attention"
            " Residuals and a mixture of experts.\n"
        ),
        _usage(),
        _notes(facts),
        _table("Run", _run_rows(facts)),
        _evaluations(facts),
        _table("Model", _model_rows(config, parameters)),
        _sources(facts),
        _licence(facts),
        _recipe(facts),
    ]
    return "\n".join(part for part in parts if part)


def _amount(number: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def _front_matter(facts: Facts) -> str:
    lines = ["---", "library_name: earlyfusion", "pipeline_tag: image-text-to-text"]
    if facts.get("licence"):
        lines.append(f"license: {str(facts['licence']).lower()}")
    return "\n".join(
        [
            *lines,
            "tags:",
            "  - multimodal",
            "  - kimi-linear",
            "  - attention-residuals",
            "  - moonvit",
            "---\n",
        ]
    )


def _usage() -> str:
    return (
        "With the project installed (`make setup` in a checkout of its repository):\n\n```bash\n"
        'earlyfusion generate --model . --image picture.png --question "what color is the circle?"\n```\n'
    )


def _notes(facts: Facts) -> str:
    notes = facts.get("notes")
    return "## How it was made\n\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else ""


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    kept = [(key, value) for key, value in rows if value not in (None, "")]
    if not kept:
        return ""
    lines = [f"| {key} | {_cell(value)} |" for key, value in kept]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines, ""])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _run_rows(facts: Facts) -> list[tuple[str, Any]]:
    minutes = round(facts["seconds"] / 60, 1) if facts.get("seconds") is not None else None
    recipe = facts.get("recipe")
    return [
        ("recipe", recipe if recipe and "\n" not in str(recipe) else None),
        ("made from", facts.get("base")),
        ("optimizer steps", facts.get("steps")),
        ("tokens seen", facts.get("tokens")),
        ("images seen", facts.get("images")),
        ("training time, minutes", minutes),
        ("device", facts.get("device")),
        ("precision", facts.get("precision")),
        ("seed", str(facts["seed"]) if facts.get("seed") is not None else None),
        ("earlyfusion version", facts.get("version")),
        ("command", f"`{facts['command']}`" if facts.get("command") else None),
    ]


def _evaluations(facts: Facts) -> str:
    evals = facts.get("evals")
    if not evals:
        return "## Measured\n\nNothing was measured on this model.\n"
    return _table("Measured", list(evals.items()))


def _model_rows(config: FusionConfig, parameters: int) -> list[tuple[str, Any]]:
    text, vision = config.text, config.vision
    plan = text.plan()
    moe = sum(text.is_moe(index) for index in range(text.num_hidden_layers))
    experts = (
        f"{text.num_experts} experts, {text.num_experts_per_token} a token, in {moe} layers"
        if moe
        else "dense"
    )
    blocks = f", blocks of {text.attn_res_block_size} layers" if text.attn_res == "block" else ""
    return [
        ("parameters", parameters),
        (
            "decoder",
            (
                f"{len(plan)} layers ({plan.count('kda')} KDA, {plan.count('mla')} MLA), width"
                f" {text.hidden_size}"
            ),
        ),
        ("feed-forward", experts),
        ("attention residuals", text.attn_res + blocks),
        ("vocabulary", text.vocab_size),
        (
            "vision tower",
            f"{vision.num_hidden_layers} layers, width {vision.hidden_size}, patches of {vision.patch_size}",
        ),
        (
            "pixels of one image token",
            (
                f"{vision.patch_size * vision.merge_kernel_size[1]} x "
                f"{vision.patch_size * vision.merge_kernel_size[0]}"
            ),
        ),
    ]


def _sources(facts: Facts) -> str:
    sources = facts.get("sources")
    if not sources:
        return ""
    if not isinstance(sources, Mapping):
        return "## Data\n\n" + "\n".join(f"- {source}" for source in sources) + "\n"
    lines = ["## Data\n", "| source | share of tokens | licence | note |", "|---|---|---|---|"]
    for name, about in sources.items():
        about = about if isinstance(about, Mapping) else {"note": about}
        share = f"{100 * about['share']:.1f} %" if about.get("share") is not None else ""
        lines.append(
            f"| {_cell(name)} | {share} | {_cell(about.get('licence', ''))} |"
            f" {_cell(about.get('note', ''))} |"
        )
    return "\n".join([*lines, ""])


def _licence(facts: Facts) -> str:
    note = facts.get("licence_note")
    if facts.get("licence"):
        text = f"The weights are released under {facts['licence']}."
    else:
        text = (
            "No licence has been chosen for these weights; the licences of the data above apply to what they"
            " permit."
        )
    return f"## Licence\n\n{text}{' ' + str(note) if note else ''}\n"


def _recipe(facts: Facts) -> str:
    recipe = facts.get("recipe")
    if not recipe or "\n" not in str(recipe):
        return ""
    return f"## Recipe\n\n```toml\n{str(recipe).strip()}\n```\n"
