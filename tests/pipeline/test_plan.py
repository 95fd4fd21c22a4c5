"""The plan: published sizes, every parameter routed once, stages as the schedule computes them, nothing
allocated."""

import io

import pytest
from rich.console import Console
from tiny_run import whole_recipes

from earlyfusion.model.flops import count_parameters
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.plan import decoder_parameters, show_plan


def shown(name: str, *overrides: tuple[str, str]) -> str:
    console = Console(file=io.StringIO(), width=200)
    show_plan(load_config([name], overrides), console)
    return console.file.getvalue()


@pytest.mark.parametrize("name", whole_recipes())
def test_every_recipe_has_a_plan_without_storage(name):
    text = shown(name)
    count = count_parameters(meta_model(load_config([name])))
    for number in (count.total, count.active, decoder_parameters(count)):
        assert f"{number:,}" in text
    assert all(part in text for part in ("resolved recipe", "who trains what", "stages:"))


def test_the_optimizer_section_steers_the_routing_shown():
    assert (
        "muon " in shown("nano")
        and "muon " not in shown("nano", ("optim.name", "adamw")).split("who trains what")[1]
    )
