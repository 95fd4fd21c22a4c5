"""A run's log of samples left out belongs to the run: training starts it afresh, a loader without a folder
never touches it."""

import pytest
from tiny_run import forget_processes

from earlyfusion.data.loading.loader import skip_file
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.stage_data import StageLoaders

LINE = '{"reason": "kept"}\n'


@pytest.fixture
def real_run(recipe, tmp_path, monkeypatch):
    """runs/<name> of an earlier run of the tiny recipe, with its log."""
    monkeypatch.chdir(tmp_path)
    forget_processes()
    config = load_config([str(recipe)])
    log = skip_file(config.run.directory)
    log.parent.mkdir(parents=True)
    log.write_text(LINE)
    return config, log


def test_a_loader_without_a_folder_logs_nothing_and_a_new_run_starts_its_log_afresh(real_run):
    config, log = real_run
    runtime = Runtime(config.train.mixed_precision, 1)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)
    for out, kept in ((None, True), (log.parent, False)):
        loaders = StageLoaders(config, tokens, runtime, out)
        assert loaders.at(0).log == (None if out is None else log)
        loaders.close()
        assert log.exists() == kept
