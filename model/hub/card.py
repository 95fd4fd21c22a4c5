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

from jinja2 import Environment

from earlyfusion.model.config import FusionConfig

Facts = Mapping[str, Any]

CARD = """\
---
library_name: earlyfusion
pipeline_tag: image-text-to-text
{% if facts.licence %}
license: {{ facts.licence | lower }}
{% endif %}
tags:
  - multimodal
  - kimi-linear
  - attention-residuals
  - moonvit
---

# {{ facts.name or "earlyfusion model" }}

A natively multimodal model of {{ amount }} parameters, trained jointly on text and images from the first \
step with [earlyfusion](https://github.com/earlyfusion/earlyfusion): MoonViT patches at native \
resolution, a \
Kimi Linear decoder (KDA and NoPE MLA), Attention Residuals and a mixture of experts.

With the project installed (`make setup` in a checkout of its repository):

```bash
earlyfusion generate --model . --image picture.png --question "what color is the circle?"
```
{% macro table(title, rows) %}
{% for name, value in rows if value is defined and value not in (none, "") %}
{% if loop.first %}

## {{ title }}

| | |
|---|---|
{% endif %}
| {{ name }} | {{ value | cell }} |
{% endfor %}
{% endmacro %}
{% for note in facts.notes or () %}
{% if loop.first %}

## How it was made

{% endif %}
- {{ note }}
{% endfor %}
{{ table("Run", (
    ("recipe", facts.recipe if not recipe_text),
    ("made from", facts.base),
    ("optimizer steps", facts.steps),
    ("tokens seen", facts.tokens),
    ("images seen", facts.images),
    ("training time, minutes", (facts.seconds / 60) | round(1) if facts.seconds is not none),
    ("device", facts.device),
    ("precision", facts.precision),
    ("seed", facts.seed | string if facts.seed is not none),
    ("earlyfusion version", facts.version),
    ("command", "`%s`" | format(facts.command) if facts.command),
)) }}
{% if facts.evals %}
{{ table("Measured", facts.evals.items()) }}
{% else %}

## Measured

Nothing was measured on this model.
{% endif %}
{{ table("Model", (
    ("parameters", parameters),
    ("decoder", "%d layers (%d KDA, %d MLA), width %d" | format(
        plan | length, plan.count("kda"), plan.count("mla"), text.hidden_size)),
    ("feed-forward", "%d experts, %d a token, in %d layers" | format(
        text.num_experts, text.num_experts_per_token, moe) if moe else "dense"),
    ("attention residuals", text.attn_res ~ (
        ", blocks of %d layers" | format(text.attn_res_block_size) if text.attn_res == "block" else "")),
    ("vocabulary", text.vocab_size),
    ("vision tower", "%d layers, width %d, patches of %d" | format(
        vision.num_hidden_layers, vision.hidden_size, vision.patch_size)),
    ("pixels of one image token", "%d x %d" | format(
        vision.patch_size * vision.merge_kernel_size[1], vision.patch_size * vision.merge_kernel_size[0])),
)) }}
{% if facts.sources is mapping %}

## Data

| source | share of tokens | licence | note |
|---|---|---|---|
{% for name, about in facts.sources.items() %}
{% set about = about if about is mapping else {"note": about} %}
| {{ name | cell }} | {{ "%.1f %%" | format(100 * about.share) if about.share is defined }} \
| {{ about.licence | cell }} | {{ about.note | cell }} |
{% endfor %}
{% elif facts.sources %}

## Data

{% for source in facts.sources %}
- {{ source }}
{% endfor %}
{% endif %}

## Licence

{% if facts.licence %}
The weights are released under {{ facts.licence }}.
{%- else %}
No licence has been chosen for these weights; the licences of the data above apply to what they permit.
{%- endif %}
 {{ facts.licence_note or "" }}
{% if recipe_text %}

## Recipe

```toml
{{ recipe_text }}
```
{% endif %}
"""


def model_card(config: FusionConfig, facts: Facts, parameters: int) -> str:
    """Markdown with YAML front matter. parameters: number of parameters of the whole model."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    amount = f"{parameters:,}"
    for unit, size in (("million", 10**6), ("billion", 10**9)):
        if parameters >= size:
            amount = f"{parameters / size:.2f} {unit}"

    # A name stands in the table of the run, a whole recipe at the end.
    recipe = str(facts.get("recipe") or "")
    text = config.text
    return environment.from_string(CARD).render(
        facts={"seconds": None, "seed": None, **facts},
        recipe_text=recipe.strip() if "\n" in recipe else "",
        amount=amount,
        parameters=parameters,
        text=text,
        vision=config.vision,
        plan=text.plan(),
        moe=sum(text.is_moe(index) for index in range(text.num_hidden_layers)),
    )


def _cell(value: Any) -> str:
    """A number or text that breaks no table."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int):
        value = f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
