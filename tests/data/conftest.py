"""The embedded tokenizer in a cache of the test session's own, the standard mix, and loaders that are
closed."""

import pytest

from earlyfusion.data.config import DataConfig
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sources.base import SourceConfig
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.vision.config import VisionConfig

STANDARD_MIX = {
    "easy_vqa": 0.40,
    "pydoc": 0.15,
    "stdlib_code": 0.10,
    "synth_scenes": 0.15,
    "synth_words": 0.06,
    "synth_charts": 0.06,
    "synth_grid": 0.04,
    "synth_clips": 0.04,
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EF_CACHE", str(path))
        yield path


@pytest.fixture
def own_cache(tmp_path, tokenizer, monkeypatch):
    """A cache of the test's own; the tokenizer saved there, because workers start in their own processes."""
    monkeypatch.setenv("EF_CACHE", str(tmp_path / "cache"))
    tokenizer.save(tmp_path / "tokenizer")


@pytest.fixture(scope="session")
def tokenizer(cache):
    return embedded_tokenizer(2048)


@pytest.fixture(scope="session")
def vision():
    return VisionConfig.preset("tiny")


@pytest.fixture
def mix():
    """mix({"easy_vqa": 0.5, "pydoc": 0.5}, seed=1, ...) -> DataConfig; everything else is a setting."""

    def build(weights=None, options=None, **settings):
        weights = weights or STANDARD_MIX
        options = options or {}
        sources = [
            SourceConfig(name=k, kind=k, weight=w, options=options.get(k, {})) for k, w in weights.items()
        ]
        return DataConfig(sources=sources, **{"prefetch": "none", **settings})

    return build


@pytest.fixture
def loader(tokenizer, vision, mix):
    """loader(config or None, **sizes) -> Loader of small batches; closed at the end."""
    made = []

    def build(config=None, **settings):
        shape = {"length": 192, "tokens": 512, "max_patches": 2048, **settings}
        made.append(Loader(config or mix(), tokenizer, vision, **shape))
        return made[-1]

    yield build
    for one in made:
        one.close()


def folder_config(path, **settings):
    """The folder `path` as the only source "mine"."""
    source = SourceConfig(name="mine", kind="folder", path=str(path))
    return DataConfig(sources=[source], **{"val_fraction": 0.0, "prefetch": "none", **settings})
