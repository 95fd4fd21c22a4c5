"""What cannot work is refused in one line with exit code 2, before anything is written."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_run
from tiny_run import run_here

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.cli import invoke
from earlyfusion.pipeline.config.arguments import recipe_command
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.runtime import check_launcher


def refused(capsys, code: int) -> str:
    """The one line on stderr of a refused run."""
    assert code == EXIT_USER
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [
        line for line in lines if not line.startswith(("tiny: ", "2 steps, "))
    ]  # the head of a run that began
    assert len(errors) == 1 and errors[0].startswith("error: "), lines
    return errors[0]


# What is typed, and what the one line of the error must hold.
BAD = """
--optim.weight_decai 1 | did you mean 'weight_decay'?
--stages.short.frozen ["visoin"] | visoin | matches no parameter | vision
--tokenizer.path /nowhere/at/all | /nowhere/at/all
--init-from /nowhere/at/all | /nowhere/at/all
--resume | nothing to resume | without --resume
--optim.head_group_size 3 | 3
--eval.tasks ["mmlu_pro"] | mmlu_pro | data
--track.trackers ["aim"] | aim is not installed | pip install aim
--eval.tasks ["easy_vqs"] | easy_vqs | did you mean 'easy_vqa'?
--eval.tasks ["mmlu_pro:mfc"] | mmlu_pro | mfc | mcf
--track.trackers ["wandbb"] | wandbb | did you mean 'wandb'?
--eval.tasks ["easy_vqs"] --dry-run | easy_vqs
--eval.tasks ["mmlu_pro:mfc"] --dry-run | mfc
--track.trackers ["wandbb"] --dry-run | wandbb
"""


@pytest.mark.parametrize("case", BAD.strip().splitlines())
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(run, recipe, tmp_path, capsys, case):
    words, *parts = case.split(" | ")
    line = refused(capsys, run(recipe, tmp_path / "out", *words.split()))
    assert all(part in line for part in parts), line
    assert not (tmp_path / "out").exists()


UNFIT = """
--parallel.dp_shard 3 | does not give 4 processes; start 3
--parallel.cp 4 | parallel.cp = 4 does not divide 2 attention heads
--parallel.dp_shard 4 --parallel.ep 4 --model.num_experts 6 | parallel.ep = 4 does not divide 6 experts
--parallel.pp 4 --model.tie_word_embeddings false | would cut an AttnRes block of 1 layers | at most 3
--parallel.dp_shard 4 | 1 lanes cannot be shared evenly by 4
"""


@pytest.mark.parametrize("case", UNFIT.strip().splitlines())
def test_sizes_that_do_not_fit_are_refused_before_ranks_meet(
    run, recipe, tmp_path, capsys, monkeypatch, case
):
    """As one of four processes, of which the others were never started: who waited for them would hang."""
    words, *parts = case.split(" | ")
    for key, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    line = refused(capsys, run(recipe, tmp_path / "out", *words.split()))
    assert all(part in line for part in parts), line
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_is_told_first(run, recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("a file")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for words in ((), ("--dry-run",)):
            line = refused(capsys, run(recipe, out, *words))
            assert f"{tmp_path / 'file'} is a file" in line and "--out" in line


LAUNCHED = """
ACCELERATE_MIXED_PRECISION=bf16 | mixed precision 'bf16', the recipe says 'no'
ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 | lanes
ACCELERATE_USE_DEEPSPEED=true | DEEPSPEED
ACCELERATE_DYNAMO_BACKEND=INDUCTOR | INDUCTOR
ACCELERATE_MIXED_PRECISION=no MASTER_ADDR=127.0.0.1 | torchrun
"""


@pytest.mark.parametrize("case", LAUNCHED.strip().splitlines())
def test_settings_of_a_launcher_that_nothing_obeys_are_refused(case):
    settings, part = case.split(" | ")
    with pytest.raises(UserError, match=part):
        check_launcher("no", dict(pair.split("=") for pair in settings.split()))


@pytest.mark.parametrize(
    "option", ["--gradient_accumulation_steps=4", "--gradient_accumulation_steps 4", "--use_deepspeed"]
)
def test_options_that_a_launcher_does_not_hand_on_are_read_from_its_command_line(option):
    words = ["python", "accelerate", "launch", *option.split(), "-m", "x"]
    with pytest.raises(UserError, match="accelerate was"):
        check_launcher("no", {"ACCELERATE_MIXED_PRECISION": "no"}, words)
    check_launcher("no", {}, words)


def test_settings_of_a_launcher_that_agree_pass():
    check_launcher(
        "bf16", {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    )
    check_launcher("bf16", {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"})
    check_launcher("no", {"MASTER_ADDR": "node0", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"})
    check_launcher("no", {"MASTER_ADDR": "node0"})


def test_pictures_that_are_missing_or_unreadable_are_named_and_leave_no_model(
    run, tokenizer, tmp_path, capsys
):
    pictures = tmp_path / "pictures"
    changes = {
        "data__sources": [{"name": "mine", "kind": "folder", "path": str(pictures)}],
        "stages": [{"name": "only", "steps": 2, "length": 96, "tokens": 256}],
        "train__loss_weights": {},
        "data__val_fraction": 0.0,
    }
    recipe = tiny_run.write_recipe(tmp_path / "r.toml", tiny_run.tiny_recipe(tokenizer, **changes))
    line = refused(capsys, run(recipe, tmp_path / "out"))
    assert "mine" in line and str(pictures) in line and "does not exist" in line
    assert not (tmp_path / "out").exists()

    pictures.mkdir()
    for index in range(4):
        (pictures / f"{index}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot a picture at all")
        (pictures / f"{index}.txt").write_text("a caption")
    line = refused(capsys, run(recipe, tmp_path / "out"))
    assert ".png" in line and str(pictures) in line
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "checkpoints").exists()


@pytest.fixture(scope="module")
def stopped(folder, recipe) -> Path:
    """A run of two steps, to resume wrongly."""
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(recipe, folder / "stopped", "--steps 2", monkeypatch=patch) == EXIT_OK
    return folder / "stopped"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fresh_run_never_writes_over_checkpoints(run, recipe, stopped, capsys):
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped))
    assert "step-000002" in line and "--resume" in line and "--out" in line
    assert files(stopped) == before


def test_a_recipe_changed_under_a_resume_is_refused_by_key(run, recipe, stopped, capsys):
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped, "--resume --optim.lr 0.5 --stages.short.length 64"))
    assert "optim.lr: 0.01 -> 0.5" in line and "stages.0.length: 96 -> 64" in line
    assert files(stopped) == before


def test_a_resume_takes_the_run_s_own_overrides_and_refuses_others(run, recipe, tmp_path, capsys):
    """As a README reader types it: the override is said once."""
    out = tmp_path / "mine"
    words = ("--optim.lr 4e-3 --eval.every 0",)
    assert run(recipe, out, "--steps 2", *words) == EXIT_OK
    assert run(recipe, out, "--steps 3 --resume") == EXIT_OK
    assert [record["step"] for record in tiny_run.numbers(out)] == [1, 2, 3]
    assert "lr = 0.004" in (out / "recipe.toml").read_text()
    capsys.readouterr()
    line = refused(capsys, run(recipe, out, "--resume --optim.lr 1e-3"))
    assert "optim.lr: 0.004 -> 0.001" in line and "put these back" in line
    command = recipe_command("pretrain", "", RunConfig, lambda parsed: parsed, "nano")
    parsed = invoke(command, ["--out", str(out), "--resume"], "pretrain")
    assert parsed.recipes == [str(recipe)], "without a recipe on the line it is the run's own"
    (out / "command.json").write_text("{")
    assert "command.json" in refused(capsys, run(recipe, out, "--resume"))


def test_another_vocabulary_under_a_resume_is_refused_with_both_sizes(run, recipe, stopped, folder, capsys):
    other = tiny_run.make_tokenizer(folder, 300)
    assert Tokenizer.load(other).vocab_size == 300
    before = files(stopped)
    line = refused(capsys, run(recipe, stopped, "--resume --tokenizer.path", str(other)))
    assert "vocabulary of 320" in line and "300" in line
    assert files(stopped) == before


def test_a_warm_start_from_another_shape_is_refused(run, recipe, stopped, tmp_path, capsys):
    words = ("--init-from", str(stopped / "model"), "--model.hidden_size", "40")
    line = refused(capsys, run(recipe, tmp_path / "out", *words))
    assert str(stopped / "model") in line and not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays(run, recipe, tmp_path, monkeypatch, capsys):
    """The disk fills up between the first checkpoint (step 3, two trees of state and the weights) and the
    second."""
    calls, real = [0], shutil.disk_usage

    def usage(path):
        calls[0] += 1
        return real(path) if calls[0] <= 3 else SimpleNamespace(total=1, used=1, free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert run(recipe, tmp_path) == EXIT_USER
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "no disk space" in lines[0] and "MiB" in lines[0]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000003"]
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert run(recipe, tmp_path, "--resume", "--steps", "4") == EXIT_OK
