import pytest
from pydantic import ValidationError

from earlyfusion.data.config import DataConfig, SourceConfig
from earlyfusion.data.sources.options import OPTIONS
from earlyfusion.data.sources.registry import KINDS


def test_every_kind_with_options_has_a_class():
    assert set(OPTIONS) == set(KINDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "easy_vpa"}, "did you mean 'easy_vqa'"),
        ({"kind": "easy_vqa", "options": {"question_per_image": 3}}, "did you mean 'questions_per_image'"),
        (
            {"kind": "easy_vqa", "options": {"questions_per_image": -1}},
            "option questions_per_image.*given -1",
        ),
        (
            {"kind": "synth_words", "options": {"min_side": 90, "max_side": 64}},
            "min_side 90 is more than max_side 64",
        ),
        ({"kind": "folder"}, "needs path"),
        ({"kind": "pydoc", "path": "/tmp"}, "path is for kind = 'folder'"),
        ({"kind": "pydoc", "weight": -1}, "greater than or equal to 0"),
        ({"kind": "pydoc", "wieght": 1}, "wieght"),
    ],
)
def test_a_wrong_source_is_one_clear_error(fields, message):
    with pytest.raises(ValidationError, match=message):
        SourceConfig(name="x", **fields)


def test_options_are_resolved_so_that_a_recipe_prints_whole():
    config = SourceConfig(name="v", kind="easy_vqa", options={"questions_per_image": 3})
    assert config.options == {"questions_per_image": 3, "question_loss": 0.0}
    assert SourceConfig.model_validate(config.model_dump(mode="json")) == config


def test_two_sources_of_one_name_and_all_zero_weights_are_refused():
    one = {"name": "a", "kind": "pydoc"}
    with pytest.raises(ValidationError, match="two sources are called 'a'"):
        DataConfig(sources=[one, one])
    with pytest.raises(ValidationError, match="weight 0"):
        DataConfig(sources=[{**one, "weight": 0}])
    with pytest.raises(ValidationError):
        DataConfig(sources=[])
