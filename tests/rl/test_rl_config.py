"""Settings of reinforcement learning: presets, and one clear line for what cannot work."""

import pytest
from pydantic import ValidationError

from earlyfusion.rl.objectives.losses import PRESETS, CorrectionConfig, ObjectiveConfig
from earlyfusion.rl.recipe import RewardSection, RLConfig


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_build_and_survive_saving(name):
    cfg = ObjectiveConfig(name=name, **({"constant_tokens": 64} if name == "dr_grpo" else {}))
    assert ObjectiveConfig.model_validate_json(cfg.model_dump_json()) == cfg
    assert all(getattr(cfg, key) == value for key, value in PRESETS[name].items())


def test_the_default_is_k25_and_k3_is_the_same_loss():
    parts = lambda name: ObjectiveConfig(name=name).model_dump(exclude={"name"})
    assert ObjectiveConfig() == ObjectiveConfig(name="k2.5")
    assert parts("k3") == parts("k2.5")


@pytest.mark.parametrize(
    "given,message",
    [
        ({"name": "dappo"}, "unknown objective 'dappo'; did you mean 'dapo'"),
        ({"name": "zzz"}, "known: cispo, dapo"),
        ({"name": ["grpo"]}, "unknown objective"),
        ({"log_low": 0.5, "log_high": 2.0}, "log_low < 0 < log_high"),  # bounds on the ratio by mistake
        ({"log_low": float("nan")}, "log_low < 0 < log_high"),
        ({"name": "dr_grpo"}, "constant_tokens"),
        ({"name": "k2", "tau": 0.0}, "tau above 0"),
        ({"name": "gspo", "tau": 0.1}, "sequence_mean"),
        ({"name": "gspo", "normaliser": "tokens"}, "does not fit"),
        ({"name": "grpo", "normaliser": "sequences"}, "does not fit"),
        ({"name": "cispo", "ratio": "sequence_mean"}, "works with ratio token"),
        ({"baseline": "log_mean_exp", "tau": 0.0}, "tau above 0"),
    ],
)
def test_what_cannot_work_is_named(given, message):
    with pytest.raises(ValidationError) as error:
        ObjectiveConfig.model_validate(given)
    assert message in str(error.value)


def test_an_environment_pays_any_range():
    playing = {"name": "episode", "environment": "gymnasium", "environment_options": {"id": "CartPole-v1"}}
    assert RLConfig(tasks=[playing], reward={"high": 500.0}).reward.high == 500


def test_token_corrections_do_not_fit_ratios_of_whole_answers():
    tasks = [{"name": "counting"}]
    token, geometric = {"mode": "tis"}, {"mode": "tis", "level": "geometric"}
    for name in ("k1.5", "k2", "gspo"):
        objective = {"name": name, "reset_optimizer": False}
        with pytest.raises(ValueError, match="'sequence' or 'geometric'"):
            RLConfig(tasks=tasks, objective=objective, correction=token)
        RLConfig(tasks=tasks, objective=objective, correction=geometric)
        RLConfig(tasks=tasks, objective=objective)
    RLConfig(tasks=tasks, objective={"name": "k2.5"}, correction=token)


@pytest.mark.parametrize(
    "model,given,message",
    [
        (RewardSection, {"name": "a:b", "low": 1.0}, "expected low below high"),
        (RLConfig, {"tasks": [{"name": "counting"}], "reward": {"low": -1.0}}, "pays 0 to 1"),
        (CorrectionConfig, {"low": 1.5, "high": 3.0}, "must lie between"),
        (CorrectionConfig, {"high": 0.5}, "must lie between"),
    ],
)
def test_other_sections_name_what_is_wrong(model, given, message):
    with pytest.raises(ValidationError) as error:
        model.model_validate(given)
    assert message in str(error.value)


def whole(**changes):
    return RLConfig.model_validate({"tasks": [{"name": "counting"}], **changes})


STALE = {"fraction": 0.5}


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"overlong": {"mode": "soft"}},
            "needs 1 to 7",
        ),  # the default buffer is wider than the default answer
        ({"overlong": {"mode": "soft", "max_tokens": 1024}}, "no answer would ever be overlong"),
        ({"rollout": {**STALE, "top_p": 0.9}}, "set correction.mode"),
        ({"rollout": {"token_cap": 3, "min_p": 0.1}}, "set correction.mode"),
        ({"rollout": STALE, "train": {"old_policy": "trainer"}}, "set correction.mode"),
        ({"objective": {"name": "k1.5"}}, "one update in an iteration"),
        ({"toggle": {"every": 5}}, "set rollout.pool"),
    ],
)
def test_settings_that_would_do_nothing_in_silence_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        whole(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {**STALE, "top_p": 0.9}, "correction": {"mode": "tis"}},
        {"rollout": STALE, "train": {"old_policy": "trainer"}, "correction": {"mode": "mis"}},
        {"objective": {"name": "k1.5"}, "train": {"minibatches": 2}},
        {"objective": {"name": "k1.5", "reset_optimizer": False}},
        {"toggle": {"every": 5}, "rollout": {"pool": 9}},
        {"reward": {"name": "package.module:function", "low": -1.0}},
    ],
)
def test_the_same_settings_with_what_they_need_are_taken(changes):
    assert whole(**changes)
