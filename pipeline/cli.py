"""The console entry: `earlyfusion VERB ...`. A verb's module is imported only when the verb is called.

Exit codes: 0 done, 2 the user's input, 75 stopped by a signal with a checkpoint saved, 1 anything else. A
mistake of the user is one line on stderr; EF_DEBUG=1 shows the traceback as well. A reader that goes away (`|
head`) ends a verb without a word.
"""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import importlib.util
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic_core import ValidationError

from earlyfusion.kernels.errors import UserError, did_you_mean, one_line
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER, TrainingStopped, require_python

EXIT_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
PLACES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM)
"""Errors of a path that was given: not there, of another kind, not allowed."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""A disk that is full, over its quota, or not to be written: the user's to mend, wherever it shows."""

OF_RUN_CONFIG = ("pretrain", "sft", "plan")
"""Verbs whose help is made from pipeline/config/schema.py."""

# verb -> (module with main(argv) -> int | None, one line). A verb whose module is not installed is not
# offered.
VERBS: dict[str, tuple[str, str]] = {
    "pretrain": ("earlyfusion.pipeline.pretrain", "train from scratch, vision and text from step one"),
    "sft": ("earlyfusion.pipeline.sft", "fine-tune on chats: tools, thinking, zero-vision SFT"),
    "rl": ("earlyfusion.rl.train", "joint vision-text reinforcement learning with verifiable rewards"),
    "measure": (
        "earlyfusion.rl.measure.cmd",
        "held-out accuracy, p(correct), pass@k and calibration on the RL tasks",
    ),
    "rollouts": (
        "earlyfusion.rl.report.cmd",
        "the report of a reinforcement learning run, with its rollouts",
    ),
    "long2short": (
        "earlyfusion.rl.long2short.cmd",
        "shorter answers: merged weights, shortest right answers, DPO",
    ),
    "study": ("earlyfusion.rl.study.study_cmd", "studies with control arms: transfer from vision RL to text"),
    "generate": (
        "earlyfusion.pipeline.generate_cmd",
        "answer a prompt, with or without an image, from a model directory",
    ),
    "prepare": (
        "earlyfusion.data.prepare.cmd",
        "turn folders, jsonl, parquet, datasets or videos into indexed shards",
    ),
    "data": (
        "earlyfusion.data.inspect_cmd",
        "inspect a mix or shards: tree, counts, contact sheet; write example pictures",
    ),
    "chat": ("earlyfusion.pipeline.chat", "talk to a model in the terminal, images by path"),
    "serve": ("earlyfusion.pipeline.serve.cmd", "an OpenAI-compatible endpoint"),
    "eval": ("earlyfusion.eval.run", "benchmarks: MMLU-Pro, GPQA, vision tasks, any lm-eval task"),
    "compare": (
        "earlyfusion.eval.compare.cmd",
        "paired deltas between evaluated models, with honest statistics",
    ),
    "bench": ("earlyfusion.pipeline.bench.cmd", "measure speed and memory"),
    "plan": (
        "earlyfusion.pipeline.plan",
        "print a recipe's sizes, FLOPs, routing and stages without training",
    ),
    "doctor": ("earlyfusion.pipeline.doctor", "check versions, devices and kernels"),
}


def available() -> dict[str, tuple[str, str]]:
    """The verbs whose modules exist here."""
    return {verb: entry for verb, entry in VERBS.items() if _exists(entry[0])}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that is not there
        return False


def usage() -> str:
    lines = ["usage: earlyfusion VERB [options]", "", "verbs:"]
    for verb, (_, text) in available().items():
        lines += textwrap.wrap(text, 79, initial_indent=f"  {verb:<10} ", subsequent_indent=" " * 13)
    lines += ["", "earlyfusion VERB --help shows its options, earlyfusion --version the version."]
    return "\n".join(lines)


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("earlyfusion")
    except PackageNotFoundError:
        return "0 (not installed: run from a checkout)"


def wrapped(lines: Sequence[str]) -> str:
    """Help lines that fit the terminal (at most 120 columns): longer ones go on below, further in; no word is
    cut."""
    width = min(120, shutil.get_terminal_size().columns)
    fitted = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        fitted += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(fitted)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] not in ("-h", "--help", "help", "-V", "--version"):
        return run(arguments[0], arguments[1:])
    told = f"earlyfusion {version()}" if arguments and arguments[0] in ("-V", "--version") else usage()
    return guarded(lambda: print(told) or (EXIT_OK if arguments else EXIT_USER))


def run(verb: str, argv: Sequence[str]) -> int:
    """Import the verb's module and call its main(argv) under `guarded`."""

    def call() -> int | None:
        require_python()
        verbs = available()
        if verb not in verbs:
            raise UserError(
                f"unknown verb {verb!r}; {did_you_mean(verb, verbs)} (earlyfusion --help lists all)"
            )
        argparse.ArgumentParser.error = _refuse  # type: ignore[method-assign, assignment]  # one line, for all verbs alike
        if verb in OF_RUN_CONFIG and {"-h", "--help"} & set(argv):
            return _recipe_help(verb, verbs[verb][0])
        return importlib.import_module(verbs[verb][0]).main(list(argv))

    return guarded(call)


def _recipe_help(verb: str, module: str) -> int:
    """The help of a verb of RunConfig: read, not run, so that torch is not imported for it."""
    from earlyfusion.pipeline.config.arguments import help_text
    from earlyfusion.pipeline.config.schema import RunConfig

    found = importlib.util.find_spec(module)
    text = Path(str(found.origin)).read_text(encoding="utf-8") if found else ""
    print(help_text(RunConfig, verb=verb, about=ast.get_docstring(ast.parse(text)) or ""))
    return EXIT_OK


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise UserError(f"{message}; see {parser.prog} --help")


def guarded(call: object) -> int:
    """Call a verb; exceptions that are the user's to mend become one line and exit code 2, others pass.

    The user's are UserError (every room's errors derive from it), pydantic's ValidationError and what the
    system says of a path (PLACES).
    """
    try:
        code = _called(call)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes once more at its end
        return EXIT_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        found = exit_code_of(error)
        if found is None:
            raise
        if os.environ.get("EF_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error_line(error)}", file=sys.stderr)
        return found


def _called(call: object) -> int:
    """The exit code of a call, also where it left by SystemExit."""
    try:
        code = call()  # type: ignore[operator]
        return EXIT_OK if code is None else int(code)
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
            return EXIT_FAILURE
        return int(leave.code or 0)


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of an error that needs no traceback; None for every other error."""
    if isinstance(error, UserError | TrainingStopped):
        return error.exit_code
    if isinstance(error, ValidationError):
        return EXIT_USER
    if isinstance(error, OSError) and (error.errno in FULL or (error.errno in PLACES and error.filename)):
        return EXIT_USER
    return None


def error_line(error: BaseException) -> str:
    """The message on one line; of the system's errors the path and the reason, of a full disk what to do."""
    if not isinstance(error, OSError) or not error.strerror:
        return one_line(error, limit=4000)
    text = f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
    if error.errno in FULL:
        text += "; free disk space (or take another --out) and start the same command again"
    return one_line(text, limit=4000)


if __name__ == "__main__":
    sys.exit(main())
