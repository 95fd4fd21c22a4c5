import pytest
from pydantic import ValidationError

from earlyfusion.data.config import DataConfig
from earlyfusion.data.sample import Sample, Text
from earlyfusion.data.sources.base import KINDS, Source, SourceConfig, build_source, source


@source("counted", pictures=False)
class Counted(Source):
    """A kind of one's own."""

    def __len__(self):
        return 3

    def get(self, index, epoch):
        return Sample([Text(f"{index} of {epoch}")], self.name, str(index))

    def heldout_len(self):
        return 0

    def heldout(self, index):
        raise IndexError(index)


KINDS.pop("counted")  # no part of the project knows of it


def test_a_class_of_ones_own_is_a_source_by_its_place():
    config = SourceConfig(name="own", kind=f"{__name__}:Counted")
    assert build_source(config).get(2, 1).text == "2 of 1" and not config.has_pictures
    for wrong in (f"{__name__}:Counte", "no.such.module:Counted", "math:pi"):
        with pytest.raises(ValidationError, match="no class with @source there"):
            SourceConfig(name="own", kind=wrong)


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
        ({"kind": "pydoc", "path": "/tmp"}, "path is for kind = .*'folder'.*pydoc takes none"),
        ({"kind": "pydoc", "weight": -1}, "greater than or equal to 0"),
        ({"kind": "pydoc", "wieght": 1}, "wieght"),
    ],
)
def test_a_wrong_source_is_one_clear_error(fields, message):
    with pytest.raises(ValidationError, match=message):
        SourceConfig(name="x", **fields)


def test_options_are_resolved_so_that_a_recipe_prints_whole():
    config = SourceConfig(name="v", kind="easy_vqa", options={"questions_per_image": 3})
    assert config.options == {"questions_per_image": 3, "question_loss": 0.0, "question_weights": {}}
    assert SourceConfig.model_validate(config.model_dump(mode="json")) == config


def test_two_sources_of_one_name_and_all_zero_weights_are_refused():
    one = {"name": "a", "kind": "pydoc"}
    with pytest.raises(ValidationError, match="two sources are called 'a'"):
        DataConfig(sources=[one, one])
    with pytest.raises(ValidationError, match="weight 0"):
        DataConfig(sources=[{**one, "weight": 0}])
    with pytest.raises(ValidationError):
        DataConfig(sources=[])
