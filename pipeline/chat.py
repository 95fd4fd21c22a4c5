"""`earlyfusion chat`: talk to a model directory in the terminal.

    > /image cat.png
    > what is on the picture?

A line beginning with / is a command (/help lists them); a message may also name a picture as @path. The
answer is printed while it is generated; Ctrl-C gives up an answer or a line, Ctrl-D ends the chat. At a
terminal the arrow keys edit a line and bring back earlier ones. Lines can be piped in as well.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from earlyfusion.data.chat.template import Message, Template, template_of
from earlyfusion.data.chat.tokens import Channel, ChatStream, encode_chat, parse_assistant
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Segment, Text, VideoFile
from earlyfusion.data.sources.folder import PICTURES
from earlyfusion.data.tokenizer import Tokenizer, write_atomically
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.eval.tool_turns import answer_calls, picture_files
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.request import Event, Request, RequestError, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.pipeline.runtime import keep_freed_memory

HELP = """\
/image PATH    attach a picture to the next message (or write @PATH inside it)
/video PATH    attach a video
/system TEXT   set the system message and begin anew
/reset         forget the conversation
/save FILE     write the conversation as text
/help          this list
/quit          leave"""


TOOL_ROUNDS = 4
"""Messages of the model for one of the user, the answers of tools in between."""


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion chat", description=__doc__, formatter_class=BenchFormatter
    )
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="model directory, or embedded:NAME")
    add("--image", metavar="FILE", action="append", default=[], help="picture for the first message")
    add("--system", default="", help="system message")
    add(
        "--template",
        choices=("auto", "chat", "qa"),
        default="auto",
        help="form of the messages; auto: as trained",
    )
    add(
        "--tools",
        action="store_true",
        help="run the model's Python calls in the sandbox (pictures: image.png, ...)",
    )
    add(
        "--sandbox.allow_weaker",
        dest="allow_weaker",
        action="store_true",
        help="run them although walls of the sandbox are missing here",
    )
    add("--max-new-tokens", type=int, default=256, help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest mass")
    add("--seed", type=int, default=0, help="seed of the sampling")
    add("--context", type=int, default=8192, help="longest conversation, in tokens")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return parser


class Printer:
    """Writes an answer as it comes; what the model thinks, and its calls, stand on lines of their own."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.channel = out, ""

    def write(self, channel: str, text: str) -> None:
        """A piece of one channel of the message."""
        if channel != self.channel:
            mark = "" if channel == "content" else f"({channel}) "
            self.out.write(("\n" if self.channel else "") + mark)
            self.channel = channel
        self.out.write(text)
        self.out.flush()


def _pieces(event: Event, stream: ChatStream | None) -> list[tuple[Channel, str]]:
    """The text of one event by channel; without a stream (the qa form) all of it is content."""
    if stream is None:
        return [("content", event.text)]
    return [piece for token in event.tokens for piece in stream.push(token.id)]


class Conversation:
    """A conversation with one model: messages so far, attachments for the next one, and an engine that
    remembers."""

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        template: Template,
        context: int,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.tokenizer, self.params, self.template, self.sandbox = tokenizer, params, template, sandbox
        self.vision = model.config.vision
        page = 64
        self.engine = Engine(
            model, tokenizer, max_slots=1, page_size=page, max_pages=2 * -(-context // page), prefix_cache=4
        )
        self.system = ""
        self.messages: list[Message] = []
        self.attached: list[Segment] = []
        self.confirm: Callable[[str], object] = lambda text: None
        """Told what was attached."""
        self._turn = 0

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [Message("system", (Text(self.system),))] if self.system else []
        self.attached = []

    def attach(self, path: str, kind: str = "image") -> None:
        """Attach a picture or video to the next message. Raises UserError when it cannot be read."""
        file = Path(path.strip()).expanduser()
        if not file.is_file():
            raise UserError(f"{kind} {path.strip()!r}: no such file")
        if kind == "video":
            self.attached.append(VideoFile(file.read_bytes(), suffix=file.suffix))
            self.confirm(f"attached {file.name}")
            return
        picture = Image(file.read_bytes())
        try:
            opened = picture.open()
        except DataError as error:
            raise UserError(f"image {str(file)!r}: {error}") from None
        self.attached.append(picture)
        self.confirm(f"attached {file.name} ({opened.width} x {opened.height})")

    def say(self, text: str, out: TextIO) -> str:
        """Send a message; the answer is written to `out` as it comes, and returned. A failed turn leaves no
        trace.

        With a sandbox, programs that the model calls for are run and answered, and the model goes on.
        """
        words = re.sub(r"(^|\s)@(\S+)", self._take_path, text)
        said = [Message("user", (*self.attached, Text(words.strip())))]
        for _ in range(TOOL_ROUNDS):
            said.append(self._answer([*self.messages, *said], out))
            if self.sandbox is None or not said[-1].calls:
                break
            answers, _ = answer_calls(said[-1], self.sandbox, picture_files([*self.messages, *said]))
            for answer in answers:
                out.write(f"[{answer.tool}] {answer.text}\n")
            said += answers
        self.messages += said
        self.attached = []
        return said[-1].text

    def _answer(self, messages: Sequence[Message], out: TextIO) -> Message:
        """One message of the model, written as it comes."""
        prompt = encode_chat(messages, self.tokenizer, self.vision, template=self.template)
        self._turn += 1
        request = Request(f"turn-{self._turn}", prompt, self.params)
        self.engine.submit(request)
        stream = ChatStream(self.tokenizer) if self.template == "chat" else None
        printer, ids, answer = Printer(out), list[int](), ""
        try:
            while self.engine.has_work:
                for event in self.engine.step():
                    answer += event.text
                    ids += [token.id for token in event.tokens]
                    for channel, text in _pieces(event, stream):
                        printer.write(channel, text)
        except KeyboardInterrupt:
            self.engine.cancel(request.id)
            while self.engine.has_work:
                self.engine.step()
            out.write(" …")
        out.write("\n")
        return (
            Message("assistant", (Text(answer),))
            if stream is None
            else parse_assistant(ids, self.tokenizer).message
        )

    def _take_path(self, found: re.Match[str]) -> str:
        path = found.group(2)
        if Path(path).suffix.lower() not in PICTURES:
            return found.group(0)
        self.attach(path)
        return found.group(1)

    def transcript(self) -> str:
        """The conversation as text."""
        lines = []
        for message in self.messages:
            media = "".join(
                f"[{type(s).__name__.lower()}] " for s in message.content if not isinstance(s, Text)
            )
            lines.append(f"{message.role}: {media}{message.text.strip()}")
        return "\n".join(lines) + "\n"


def obey(line: str, chat: Conversation, out: TextIO) -> bool:
    """Carry out a command line; False when the chat is over. Raises UserError for what cannot be done."""
    command, _, argument = line[1:].partition(" ")
    argument = argument.strip()
    if command in ("image", "video", "save") and not argument:
        raise UserError(f"/{command} needs a path")
    match command:
        case "image" | "video":
            chat.attach(argument, command)
        case "reset":
            chat.reset()
        case "system":
            chat.system = argument
            chat.reset()
        case "save":
            write_atomically(Path(argument).expanduser(), chat.transcript())
        case "help":
            out.write(HELP + "\n")
        case "quit" | "exit":
            return False
        case _:
            raise UserError(f"unknown command /{command}; /help lists the commands")
    return True


def converse(chat: Conversation, read: Callable[[], str], out: TextIO, *, typed: bool) -> None:
    """Take lines from `read` until it gives "" or /quit; mistakes are told and the chat goes on.

    typed: by a person, whose Ctrl-C gives up a line or an answer; elsewhere it ends the chat.
    """
    while True:
        try:
            line = read()
            if not line:
                return
            line = line.strip()
            if line.startswith("/"):
                if not obey(line, chat, out):
                    return
            elif line:
                chat.say(line, out)
        except (UserError, DataError, RequestError, OSError) as error:
            out.write(f"error: {error}\n")
        except KeyboardInterrupt:
            if not typed:
                raise
            out.write("\n")


def read_typed() -> str:
    """A line from the terminal, edited and remembered by readline; "" at its end."""
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code."""
    options = build_parser().parse_args(argv)
    try:
        params = SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        )
    except RequestError as error:
        raise UserError(str(error)) from None
    keep_freed_memory()
    options.model = model_folder(options.model)
    model = load_model(options.model, device=device_of(options.device)).eval()
    template = template_of(options.model) if options.template == "auto" else options.template
    sandbox = Sandbox(allow_weaker=options.allow_weaker) if options.tools else None
    if sandbox is not None:
        sandbox.check()
    chat = Conversation(
        model,
        Tokenizer.load(options.model),
        params,
        template=template,
        context=options.context,
        sandbox=sandbox,
    )
    chat.system = options.system
    chat.reset()
    for path in options.image:
        chat.attach(path)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() edits lines by it)

        chat.confirm = print
        print("/help lists the commands, Ctrl-D leaves")
    typed = sys.stdin.isatty()
    try:
        converse(chat, read_typed if typed else sys.stdin.readline, sys.stdout, typed=typed)
    finally:
        if sandbox is not None:
            sandbox.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
