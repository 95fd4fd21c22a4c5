"""The console entry: exit codes, one-line errors, help, lazy verbs."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from earlyfusion.data.errors import BadSample
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import TrainingStopped
from earlyfusion.pipeline.runtime import check_versions


def earlyfusion(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "earlyfusion.pipeline.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def test_an_unknown_verb_names_the_nearest_and_exits_2_with_a_traceback_only_on_request():
    done = earlyfusion("pretrian")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "did you mean 'pretrain'?" in done.stderr
    done = earlyfusion("pretrian", EF_DEBUG="1")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_the_console_entry_imports_no_torch_until_a_verb_needs_it():
    calls = "; ".join(
        f"cli.main({words!r})"
        for words in (["--help"], *([verb, "--help"] for verb in ("pretrain", "sft", "plan")))
    )
    code = f"import sys; from earlyfusion.pipeline import cli; {calls}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--optim.lr" in done.stdout


def test_version_is_that_of_the_distribution(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"earlyfusion {version('earlyfusion')}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("bad recipe"), 2),
        (BadSample("file x:\n  unreadable"), 2),
        (TrainingStopped("guard"), 1),
    ],
)
def test_known_errors_become_one_line_and_their_exit_code(error, code, capsys):
    def fail():
        raise error

    assert cli.guarded(fail) == code
    captured = capsys.readouterr()
    assert captured.err == f"error: {' '.join(str(error).split())}\n" and captured.out == ""


def test_exit_codes_pass_through_a_path_is_the_user_s_and_a_bug_keeps_its_traceback(tmp_path, capsys):
    assert [cli.guarded(lambda c=c: c) for c in (None, 0, 75)] == [0, 0, 75]
    assert cli.guarded(lambda: sys.exit(3)) == 3
    assert cli.guarded(lambda: open(tmp_path / "none" / "x")) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none' / 'x'}: no such file or directory\n"
    with pytest.raises(ZeroDivisionError):
        cli.guarded(lambda: 1 / 0)


def test_an_old_torch_is_told_in_one_line():
    with pytest.raises(
        UserError, match=r"torch 2\.9\.1\+cpu is too old: earlyfusion needs torch 2\.11 or newer"
    ):
        check_versions("2.9.1+cpu")
    check_versions("2.11.0.dev2026+cu130")


def test_an_unknown_kernel_backend_is_the_user_s_error(monkeypatch):
    monkeypatch.setenv("EF_KERNELS", "tritn")
    with pytest.raises(UserError, match="triton"):
        check_versions()


@pytest.mark.parametrize("verb", ["", *sorted(cli.VERBS)])
def test_every_verb_is_listed_and_has_help_with_exit_0_that_fits_the_terminal(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*verb.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"earlyfusion {verb}" in out
    assert not [line for line in out.splitlines() if len(line) > 80]
    assert verb or all(f"\n  {each} " in out for each in cli.VERBS)
    assert cli.main([]) == 2


# For every verb what a user gets wrong. FILE is a file that exists, NONE a path that does not.
WRONG = """
pretrain nosuch
pretrain --optim.lr fast
pretrain --out FILE --dry-run
pretrain NONE.toml
pretrain --lr 1
sft
sft --init-from NONE
sft FILE.toml
rl --reward.name nosuch:score --dry-run
rl --reward.name taks --dry-run
rl --out FILE
measure
measure --model NONE --tasks counting
measure --model embedded:skils --tasks counting
rollouts
rollouts NONE
rollouts FILE
watch
watch NONE
watch FILE --port 0
watch FILE --port 99999
long2short
long2short average NONE NONE --out FILE
study nosuch
study transfer --seeds x
website demo nowhere.mp4
website demo ../file --model nowhere
website eval --model nowhere
website score ../file ../file
website record ../file out.mp4
website pages --html nowhere
website pages --pages -1
website serve --model nowhere
swarm nosuch
swarm run question --docs NONE --model NONE
swarm run question --docs . --model NONE
swarm run question --docs . --model embedded:orchestratr
swarm measure NONE
swarm measure reader --kinds wid
swarm collection FILE
generate
generate --model NONE --prompt x
generate --model embedded:skills
generate --model embedded:skills --image NONE
generate --model embedded:skills --image FILE
init
init NONE
init shapes
init shapes --from NONE
init shapes --from FILE
prepare
prepare NONE --out FILE
prepare FILE --out FILE/below
data nosuch
data inspect
data inspect NONE
data examples
data examples FILE
chat
chat --model NONE
chat --model FILE
chat --model embedded:skills --image NONE
serve
serve --model NONE
serve --model embedded:skills --port 99999
serve --port x
eval
eval --tasks countng --model embedded:skills
eval --tasks counting --model NONE
eval --tasks mmlu_pro --model embedded:skills
compare
compare NONE NONE
compare FILE FILE
bench nosuch
bench train --steps x
plan
plan nosuch
plan nano --model.hidden_size seven
doctor --device tpu
import
import NONE
import FILE --to FILE
import NONE --to FILE
export
export NONE
export FILE --to FILE
export NONE --to FILE
"""


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_whatever_a_user_gets_wrong_is_one_line_and_exit_code_2(verb, capsys, tmp_path, monkeypatch):
    """An exception that passes `guarded` would be a traceback, and fails this test."""
    # Away from runs/ of this checkout: what is there would not be a mistake.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("neither a model nor a picture\n")
    (tmp_path / "file.toml").write_text("= not toml")
    lines = [line for line in WRONG.split("\n") if line.split(" ")[0] == verb]
    assert lines
    for line in (*lines, f"{verb} --nosuch-option 1"):
        filled = line.replace("FILE", str(tmp_path / "file")).replace("NONE", str(tmp_path / "none"))
        given = filled.split()[1:]
        code = cli.main([verb, *given])
        said = capsys.readouterr().err
        assert code == 2, (given, code, said)
        assert said.startswith("error: ") and said.count("\n") == 1, (given, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file", "file.toml"]
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_reader_that_goes_away_ends_a_verb_without_a_word():
    """`earlyfusion pretrain --help | head`."""
    for words in (["--help"], ["pretrain", "--help"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "earlyfusion.pipeline.cli", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
        os.close(write)
        assert done.returncode == cli.EXIT_PIPE and done.stderr == ""
