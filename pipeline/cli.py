"""The console entry: `earlyfusion VERB ...`, one typer application; a verb is imported when it is called.

A verb is a function with typed arguments (its options, with their help in the signature) and one row of
VERBS. Verbs that take recipes take them, and `--section.key VALUE` for every key, as
pipeline/config/arguments.py reads them.

Exit codes: 0 done, 2 the user's input, 75 stopped by a signal with a checkpoint saved, 1 anything else. A
mistake of the user is one line on stderr; EF_DEBUG=1 shows the traceback as well. A reader that goes away (`|
head`) ends a verb without a word.
"""

import errno
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic_core import ValidationError
from typer.core import TyperCommand, TyperGroup

from earlyfusion.kernels.errors import UserError, did_you_mean, one_line
from earlyfusion.pipeline.config.arguments import SETTINGS, recipe_command
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.verbs import BENCHES, VERBS, WEBSITES, Verb

EXIT_INTERRUPT = 130  # 128 + SIGINT, as a shell reports it
EXIT_PIPE = 141  # 128 + SIGPIPE
PLACES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM)
"""Errors of a path that was given: not there, of another kind, not allowed."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""A disk that is full, over its quota, or not to be written: the user's to mend, wherever it shows."""


def load(path: str) -> Any:
    """What "package.module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Command(TyperCommand):
    """A command whose options of several values take them one after the other: --tasks A B."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The option is said again before each further value, which is the form the library reads.
        several = {name for parameter in self.params if parameter.multiple for name in parameter.opts}
        short = {*ctx.help_option_names, *(name for parameter in self.params for name in parameter.opts)}
        words: list[str] = []
        option = ""
        for word in args:
            # A negative number is a value; -h is none.
            if word.startswith("--") or word in short:
                option = word if word in several else ""
            elif option and words[-1] != option:
                words.append(option)  # a further value of it
            words.append(word)
        return super().parse_args(ctx, words)


def command_of(function: Callable[..., Any] | typer.Typer, name: str) -> TyperCommand | TyperGroup:
    """The command that a function with typed arguments, or an application of several, is on the command line.

    Its docstring is the help; a paragraph of commands (`earlyfusion ...`) stays as it is.
    """
    # A group of verbs comes as an application already.
    app = function
    if not isinstance(app, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        # A paragraph behind a line of one backspace is not wrapped again.
        text = re.sub(r"\n\n(?= *earlyfusion )", "\n\n\b\n", inspect.cleandoc(function.__doc__ or ""))
        app.command(name, cls=Command, help=text, context_settings=SETTINGS)(function)
    return typer.main.get_command(app)  # type: ignore[return-value]


def group_of(verbs: Mapping[str, Verb], callback: Callable[..., None]) -> typer.Typer:
    """An application of verbs whose modules are imported when one is called, and none for the list of them.

    callback: a function with the options of the group itself, and its help as docstring.
    """

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(verbs)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            # Our own words: the library's would not name the nearest.
            if cmd_name not in verbs:
                near = did_you_mean(cmd_name, verbs)
                raise UserError(f"unknown verb {cmd_name!r}; {near} ({ctx.command_path} --help lists all)")
            return _command(cmd_name, verbs[cmd_name])

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("verbs"):
                formatter.write_dl([(name, verb.text) for name, verb in verbs.items()])

    group = typer.Typer(add_completion=False, rich_markup_mode=None)
    group.callback(cls=Group, context_settings=SETTINGS, subcommand_metavar="VERB ...")(callback)
    return group


def _command(name: str, verb: Verb) -> TyperCommand | TyperGroup:
    if verb.schema:
        # Called later: the help of a verb of recipes needs its schema alone, not torch.
        own = (load(verb.options),) if verb.options else ()
        return recipe_command(
            name, verb.text, load(verb.schema), lambda parsed: load(verb.function)(parsed), verb.recipe, *own
        )
    return command_of(load(verb.function), name)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"earlyfusion {importlib.metadata.version('earlyfusion')}")
        raise typer.Exit


def earlyfusion(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train a natively multimodal model from step one. `earlyfusion VERB --help` shows a verb's options."""


def bench() -> None:
    """Measure speed and memory beside a peer in the same run; figures are printed and saved as JSON."""


def website() -> None:
    """From a clip of a page to the page."""


# The package itself stands above all floors and names what they add: this floor knows no higher one.
for floor in importlib.import_module("earlyfusion").VERB_MODULES:
    importlib.import_module(floor)
app = group_of(VERBS, earlyfusion)
benches, websites = group_of(BENCHES, bench), group_of(WEBSITES, website)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    code = guarded(lambda: invoke(command, words or ["--help"], "earlyfusion"))
    return code if words else EXIT_USER


def run_alone(function: Callable[..., Any], name: str, argv: Sequence[str] | None = None) -> int:
    """Run a function with typed arguments that is no verb (`python -m ...`); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: invoke(command_of(function, name), words, name))


def invoke(command: Any, words: Sequence[str], name: str) -> Any:
    """What a command returns for these words. Raises UserError for words that it does not take."""
    try:
        # In steps, not as a whole: errors and exit codes are ours to tell.
        with command.make_context(name, list(words)) as context:
            return command.invoke(context)
    except typer.TyperException as error:
        raise UserError(_usage_error(error, name)) from error


def _usage_error(error: Any, name: str) -> str:
    """typer's complaint as one line, with the nearest name for an unknown option and where to find help."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if context is not None and option is not None and text.startswith("No such option"):
        # Short options are too short to be near to anything.
        known = [word for parameter in context.command.params for word in parameter.opts]
        text = (
            f"no option {option}; {did_you_mean(option, [word for word in known if word.startswith('--')])}"
        )
    return f"{text}; see {context.command_path if context else name} --help"


def guarded(call: Callable[[], Any]) -> int:
    """Call a verb; exceptions that are the user's to mend become one line and exit code 2, others pass.

    The user's are UserError (every room's errors derive from it), pydantic's ValidationError and what the
    system says of a path (PLACES).
    """
    try:
        code = int(call() or EXIT_OK)
        sys.stdout.flush()
        return code
    except typer.Exit as leave:  # after a help
        return leave.exit_code
    except SystemExit as leave:
        return int(leave.code or 0)
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except Exception as error:
        code_of_error = exit_code_of(error)
        if code_of_error is None:
            raise
        if os.environ.get("EF_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error_line(error)}", file=sys.stderr)
        return code_of_error


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of an error that needs no traceback; None for every other error."""
    if isinstance(error, UserError):
        return error.exit_code
    of_path = isinstance(error, OSError) and error.errno in PLACES and error.filename
    full = isinstance(error, OSError) and error.errno in FULL
    return EXIT_USER if of_path or full or isinstance(error, ValidationError) else None


def error_line(error: BaseException) -> str:
    """The message on one line; of the system's errors the path and the reason, of a full disk what to do."""
    text = str(error)
    # The system's own text begins with a number that helps nobody.
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or ''}: {error.strerror.lower()}".removeprefix(": ")
        if error.errno in FULL:
            text += "; free disk space (or take another --out) and start the same command again"
    return one_line(text, limit=4000)


if __name__ == "__main__":
    sys.exit(main())
