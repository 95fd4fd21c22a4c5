"""Recipes: composition, overrides, kind errors, a render that reads back, what a resume may change."""

import copy
from pathlib import Path

import pytest

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.cli import invoke
from earlyfusion.pipeline.config.arguments import describe, recipe_command
from earlyfusion.pipeline.config.compose import (
    compose,
    diff,
    dump,
    explain_refusal,
    load_config,
    merge,
    parse_literal,
    recipe_hash,
    refused_on_resume,
)
from earlyfusion.pipeline.config.schema import RunConfig

BASE = """
[run]
name = "tiny"
[tokenizer]
vocab_size = 300
[[data.sources]]
name = "manual"
kind = "pydoc"
weight = 0.7
[[data.sources]]
name = "code"
kind = "stdlib_code"
weight = 0.3
[vision]
preset = "tiny"
num_hidden_layers = 1
[model]
hidden_size = 32
num_hidden_layers = 2
intermediate_size = 48
num_attention_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
num_experts = 4
num_experts_per_token = 2
moe_intermediate_size = 16
[model.linear_attn_config]
num_heads = 2
head_dim = 16
[[stages]]
name = "joint"
steps = 30
length = 64
tokens = 128
warmup_steps = 3
[[stages]]
name = "cooldown"
steps = 10
length = 64
tokens = 128
schedule = "wsd"
decay_steps = 5
"""

OVERLAY = """
[run]
name = "other"
[[stages]]
name = "cooldown"
steps = 20
[[stages]]
name = "long"
steps = 5
length = 128
tokens = 128
[[data.sources]]
name = "code"
kind = "stdlib_code"
weight = 0.9
[optim]
eps = 1e-7
"""


@pytest.fixture
def base(tmp_path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path / "base.toml"


@pytest.fixture
def overlay(tmp_path) -> Path:
    (tmp_path / "overlay.toml").write_text(OVERLAY)
    return tmp_path / "overlay.toml"


def fails(*args) -> str:
    with pytest.raises(UserError) as caught:
        load_config(*args)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    return message


def test_recipes_compose_left_to_right_and_named_lists_merge_by_name(base, overlay):
    config = load_config([base, overlay])
    assert config.vision.num_hidden_layers == 1 and config.vision.patch_size == 8  # over and from the preset
    assert config.run.name == "other" and config.optim.eps == 1e-7
    assert [(s.name, s.steps) for s in config.stages] == [("joint", 30), ("cooldown", 20), ("long", 5)]
    assert config.stages[1].schedule == "wsd" and config.stages[1].decay_steps == 5  # kept from the left
    assert {s.name: s.weight for s in config.data.sources} == {"manual": 0.7, "code": 0.9}
    assert load_config([overlay, base]).run.name == "tiny"


def test_a_recipe_is_laid_over_the_one_it_extends_and_circles_are_refused(tmp_path):
    longer, longest = tmp_path / "longer.toml", tmp_path / "longest.toml"
    longer.write_text('extends = "nano"\n[run]\nname = "longer"\n[[stages]]\nname = "joint"\nsteps = 7777\n')
    longest.write_text(f'extends = "{longer}"\n[run]\nname = "longest"\n')
    nano, config = load_config(["nano"]), load_config([longest])
    assert (config.run.name, config.stages[0].steps) == ("longest", 7777)
    assert config.model == nano.model and config.stages[0].lr == nano.stages[0].lr
    longer.write_text(f'extends = "{longest}"\n')
    assert "extends itself" in fails([longest])


def test_other_lists_are_replaced_not_joined_and_arguments_left_alone():
    left = {"a": {"x": 1}, "stages": [{"name": "s", "steps": 1}], "eval": {"tasks": ["a", "b"]}}
    before = copy.deepcopy(left)
    right = {"a": {"y": 2}, "stages": [{"name": "s"}], "eval": {"tasks": ["c"]}}
    assert merge(left, right) == {**left, "a": {"x": 1, "y": 2}, "eval": {"tasks": ["c"]}}
    assert left == before


OVERRIDES = """
optim.lr | 1e-3 | 0.001
stages.0.steps | 20 | 20
stages.-1.steps | 21 | 21
stages.1.lr | 5e-4 | 0.0005
stages.0.frozen | ["vision"] | ['vision']
stages.0.weights | {manual = 1.0, code = 3} | {'manual': 1.0, 'code': 3.0}
data.sources.1.weight | 2 | 2.0
optim.qk_clip | null | None
model.attn_res | none | 'none'
model.linear_attn_config.gate_lower_bound | -5.0 | -5.0
vision.hidden_size | 48 | 48
run.out | runs/a b | 'runs/a b'
run.out | "7" | '7'
run.out | a = b | 'a = b'
"""


@pytest.mark.parametrize("line", OVERRIDES.strip().splitlines())
def test_dotted_overrides_are_toml_literals_or_text_and_reach_every_kind_of_key(base, line):
    dotted, text, value = line.split(" | ")
    named = dotted.replace("stages.1", "stages.cooldown").replace("sources.1", "sources.code")
    for key in (dotted, named):
        node = dump(load_config([base], [(key, text)]))
        for part in dotted.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        assert repr(node) == value


def test_a_value_cannot_smuggle_in_further_keys():
    assert parse_literal("1\nother = 2") == "1\nother = 2"


# Overrides, and what the one line of the error must hold.
MISTAKES = """
optim.learning_rte 1 | learning_rte | optim
optim.weight_decy 1 | 'weight_decy' | in optim | did you mean 'weight_decay'?
stages.joint.step 1 | 'step' | stages.0 | did you mean 'steps'?
model.hiden_size 1 | 'hiden_size' | in model | did you mean 'hidden_size'?
model.linear_attn_config.num_head 1 | in model.linear_attn_config | did you mean 'num_heads'?
vision.hiden_size 1 | in vision | did you mean 'hidden_size'?
data.sources.code.wieght 1 | data.sources.1 | did you mean 'weight'?
optm.lr 1 | 'optm' | top level | did you mean 'optim'?
stages.jont.steps 1 | stages | did you mean 'joint'?
stages.7.steps 1 | stages has 2 items
optim.lr 1 optim.lr.x 1 | optim.lr is the value 1, not a table
optim.lr -1 | optim.lr | greater than 0 | given -1
stages.joint.length 4096 | length 4096 is more than tokens 128
stages.joint.warmup_steps 31 | exceed steps 30
stages.joint.decay_steps 1 | decay_steps is for
stages.joint.weights {mnual=1} | 'mnual' | did you mean 'manual'?
train.loss_weights {cod=1} | train.loss_weights | did you mean 'code'?
vision.preset tyni | tyni | tiny
stages.1.name joint | share a name
optim.lrr 1 model.hiden_size 1 | lrr | hiden_size
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_with_its_place_and_the_nearest_name(base, line):
    given, *expected = line.split(" | ")
    words = given.split()
    message = fails([base], zip(words[::2], words[1::2]))
    assert all(part in message for part in expected), message


def test_a_missing_recipe_names_the_nearest_and_a_broken_file_its_line(tmp_path):
    assert "did you mean 'nano'?" in fails(["nan0"])
    assert "cannot be read" in fails([tmp_path / "absent.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert "not valid TOML" in fails([broken])
    assert "model is missing" in fails([{"run": {"name": "x"}}])


def test_the_hash_and_a_resume_follow_numbers_and_ignore_where_results_go(base):
    free = [("run.out", "x"), ("checkpoint.keep", "9")]
    old, elsewhere, other = (load_config([base], more) for more in ([], free, [*free, ("optim.lr", "1e-4")]))
    assert recipe_hash(elsewhere) == recipe_hash(old) != recipe_hash(other)
    assert [c.key for c in diff(dump(old), dump(other))] == ["checkpoint.keep", "optim.lr", "run.out"]
    assert [str(c) for c in refused_on_resume(dump(old), dump(other))] == ["optim.lr: 0.002 -> 0.0001"]
    assert diff(dump(old), dump(old)) == []


def test_a_resume_over_keys_of_another_version_says_so(base):
    """Keys that one version knows and the other does not cannot be put back."""
    new = dump(load_config([base]))
    old = copy.deepcopy(new)
    del old["train"]["recompute"]
    told = explain_refusal(refused_on_resume(old, new))
    assert "train.recompute: '(absent)' -> 'no'" in told and "another version's of earlyfusion" in told
    assert explain_refusal(diff({"a": 1}, {"a": 2})) == "the recipe changed (a: 1 -> 2); put these back"


def test_only_the_last_stage_may_grow_none_may_shrink_and_all_must_stay(base, overlay):
    old, longer = dump(load_config([base])), dump(load_config([base, overlay]))
    for key, steps, refused in (("stages.1", 9, True), ("stages.0", 40, True), ("stages.1", 99, False)):
        new = dump(load_config([base], [(f"{key}.steps", steps)]))
        assert bool(refused_on_resume(old, new)) == refused, key
    for pair in ((longer, old), (old, longer)):
        assert any(c.key.startswith("stages.2") for c in refused_on_resume(*pair))


def test_total_steps_stop_early_without_changing_the_schedule(base):
    config = load_config([base], [("run.steps", "7")])
    assert config.total_steps == 7 and config.stages[0].steps == 30
    assert load_config([base]).total_steps == 40 and config.model.vocab_size == 300


def parse(*words):
    """What a verb of recipes is asked by these words."""
    return invoke(recipe_command("pretrain", "about", RunConfig, lambda parsed: parsed), words, "pretrain")


def test_arguments_are_recipes_options_flags_and_dotted_keys(base):
    words = (
        "nano mine.toml --steps 5 --resume --optim.lr -1 --train.recompute --out=7 --dry-run --run.name=a.b"
    )
    parsed = parse(*words.split())
    assert parsed.recipes == ["nano", "mine.toml"] and parsed.resume and parsed.dry_run
    plain = [("run.out", '"7"'), ("run.steps", "5")]
    assert parsed.overrides == [*plain, ("optim.lr", "-1"), ("train.recompute", "true"), ("run.name", "a.b")]
    assert load_config([base], plain).run.directory == "7", "a folder named like a number stays text"


WRONG_WORDS = """
nano --resum | --resum | did you mean '--resume'?
nano --optm.lr 1 | 'optm' | did you mean 'optim'?
nano --lr 1 | --lr | did you mean --optim.lr or --stages.<i>.lr?
nano --steps | --steps | requires an argument
nano --resume=1 | --resume | does not take a value
nano -x | -x
 | no recipe given
"""


@pytest.mark.parametrize("line", WRONG_WORDS.strip("\n").splitlines())
def test_wrong_arguments_are_told_in_one_line(line):
    words, *expected = line.split(" | ")
    with pytest.raises(UserError) as caught:
        parse(*words.split())
    assert all(word in str(caught.value) for word in expected), caught.value


def test_help_names_every_key_with_type_and_default(capsys, monkeypatch):
    rows = {key: (kind, default, meaning) for key, kind, default, meaning in describe(RunConfig)}
    assert rows["optim.lr"][:2] == ("float", "0.002") and rows["stages.<i>.steps"][:2] == ("int", "required")
    assert rows["optim.qk_clip"][0] == "float | null" and rows["guard.policy"][0] == "stop|skip|rollback"
    own = [key for key in rows if key.split(".")[0] not in ("data", "vision", "model")]
    assert all(rows[key][2] for key in own), "a key of pipeline.config has no docstring"

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["pretrain", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{key}" in text for key in rows)
    assert "text_loss [1.0]" in text and "stdlib_code:" in text, "the options of every kind of source"


def test_strings_that_say_null_become_none_in_recipes_too():
    assert compose([{"eval": {"tasks": ["null", "a"]}}]) == {"eval": {"tasks": [None, "a"]}}
