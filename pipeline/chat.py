"""`earlyfusion chat`: talk to a model directory in the terminal.

    > /image cat.png
    > what is on the picture?

A line beginning with / is a command (/help lists them); a message may also name a picture as @path. The
answer is printed while it is generated; Ctrl-C gives up an answer or a line, Ctrl-D ends the chat. At a
terminal the arrow keys edit a line and bring back earlier ones. Lines can be piped in as well.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TextIO

from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Message, Template, template_of
from earlyfusion.data.chat.tokens import ChatStream, encode_chat, parse_assistant
from earlyfusion.data.errors import DataError
from earlyfusion.data.options import SamplingOptions, verb
from earlyfusion.data.sample import Image, Segment, Text, VideoFile
from earlyfusion.data.sources.folder import PICTURES
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.eval.tool_talks import answer_calls, picture_files
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline.generate_cmd import model_on, params_of
from earlyfusion.pipeline.runtime import keep_freed_memory

HELP = """\
/image PATH    attach a picture to the next message (or write @PATH inside it)
/video PATH    attach a video
/system TEXT   set the system message and begin anew
/reset         forget the conversation
/save FILE     write the conversation as text
/help          this list
/quit          leave"""
PAGE = 64
"""Tokens of a page of the engine's memory."""
TOOL_ROUNDS = 4
"""Messages of the model for one of the user, the answers of tools in between."""


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
        # Room for the conversation and for the one before it, whose pages the prefix cache still holds.
        pages = 2 * -(-context // PAGE)
        self.engine = Engine(model, tokenizer, max_slots=1, page_size=PAGE, max_pages=pages, prefix_cache=4)
        self.system = ""
        self.messages: list[Message] = []
        self.attached: list[Segment] = []
        self._turn = 0

    def begin(self, system: str | None = None) -> None:
        """Begin anew, with another system message if one is given."""
        # A reset keeps the system message.
        self.system = self.system if system is None else system
        self.messages = [Message("system", (Text(self.system),))] if self.system else []
        self.attached = []

    def attach(self, path: str, kind: str = "image") -> None:
        """Attach a picture or video to the next message. Raises UserError when it cannot be read."""
        file = Path(path.strip()).expanduser()
        if not file.is_file():
            raise UserError(f"{kind} {path.strip()!r}: no such file")
        data, size = file.read_bytes(), ""
        if kind == "video":
            self.attached.append(VideoFile(data, suffix=file.suffix))
        else:
            # Decoded now: what is wrong with a picture is told before anything is asked of it.
            try:
                picture = Image(data).open()
            except DataError as error:
                raise UserError(f"image {str(file)!r}: {error}") from None
            self.attached.append(Image(data))
            size = f" ({picture.width} x {picture.height})"
        print(f"attached {file.name}{size}", file=sys.stderr)

    def say(self, text: str, out: TextIO) -> str:
        """Send a message; the answer is written to `out` as it comes, and returned. A failed turn leaves no
        trace.

        With a sandbox, programs that the model calls for are run and answered, and the model goes on.
        """
        # A path in the message attaches the picture and leaves the text.
        words = re.sub(r"(^|\s)@(\S+)", self._take_path, text)
        turn = [Message("user", (*self.attached, Text(words.strip())))]
        # A model that only ever calls tools must not go on for ever.
        for _ in range(TOOL_ROUNDS):
            turn.append(self._answer([*self.messages, *turn], out))
            if self.sandbox is None or not turn[-1].calls:
                break
            results, _ = answer_calls(turn[-1], self.sandbox, picture_files([*self.messages, *turn]))
            for result in results:
                out.write(f"[{result.tool}] {result.text}\n")
            turn += results

        # Only a whole turn is remembered: what failed leaves no trace.
        self.messages += turn
        self.attached = []
        return turn[-1].text

    def _answer(self, messages: Sequence[Message], out: TextIO) -> Message:
        """One message of the model, written as it comes: what it thinks, and its calls, on lines of their
        own."""
        prompt = encode_chat(messages, self.tokenizer, self.vision, template=self.template)
        self._turn += 1
        request = Request(f"turn-{self._turn}", prompt, self.params)
        self.engine.submit(request)
        stream, before, ids, answer = ChatStream(self.tokenizer), "", list[int](), ""

        try:
            while self.engine.has_work:
                for event in self.engine.step():
                    answer += event.text
                    ids += [token.id for token in event.tokens]
                    pieces = [("content", event.text)]
                    # The qa form has no channels.
                    if self.template == "chat":
                        pieces = [piece for token in event.tokens for piece in stream.push(token.id)]
                    for channel, text in pieces:
                        if channel != before:
                            out.write("\n" * bool(before) + f"({channel}) " * (channel != "content"))
                        out.write(text)
                        before = channel
                    out.flush()
        except KeyboardInterrupt:  # the answer is given up, what there is of it stays
            self.engine.cancel(request.id)
            while self.engine.has_work:
                self.engine.step()
            out.write(" …")
        out.write("\n")
        if self.template == "chat":
            return parse_assistant(ids, self.tokenizer).message
        return Message("assistant", (Text(answer),))

    def _take_path(self, found: re.Match[str]) -> str:
        path = found.group(2)
        # @name may also be said to somebody.
        if Path(path).suffix.lower() not in PICTURES:
            return found.group(0)
        self.attach(path)
        return found.group(1)

    def transcript(self) -> str:
        """The conversation as text."""
        lines = []
        for message in self.messages:
            media = [type(part).__name__.lower() for part in message.content if not isinstance(part, Text)]
            lines.append(f"{message.role}: {''.join(f'[{kind}] ' for kind in media)}{message.text.strip()}")
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
            chat.begin()
        case "system":
            chat.begin(argument)
        case "save":
            write_atomic(Path(argument).expanduser(), chat.transcript())
        case "help":
            out.write(HELP + "\n")
        case "quit" | "exit":
            return False
        case _:
            raise UserError(f"unknown command /{command}; /help lists the commands")
    return True


def converse(chat: Conversation, out: TextIO, *, typed: bool) -> None:
    """Take lines until their end or /quit; mistakes are told and the chat goes on.

    typed: by a person at a terminal, where lines can be edited, and whose Ctrl-C gives up a line or an
    answer; elsewhere it ends the chat.
    """
    while True:
        try:
            line = input("> " * typed).strip()
            if line.startswith("/"):
                if not obey(line, chat, out):
                    return
            elif line:
                chat.say(line, out)
        except EOFError:
            return
        # A chat is not thrown away for a mistyped path.
        except (UserError, OSError) as error:
            out.write(f"error: {error}\n")
        except KeyboardInterrupt:
            if not typed:
                raise
            out.write("\n")


class ChatOptions(SamplingOptions):
    system: str = ""
    """system message"""
    template: Literal["auto", "chat", "qa"] = "auto"
    """form of the messages; auto: as trained"""
    tools: bool = False
    """run the model's Python calls in the sandbox (pictures: image.png, ...)"""
    allow_weaker: bool = Field(False, serialization_alias="sandbox.allow_weaker")
    """run them although walls of the sandbox are missing here"""
    max_new_tokens: PositiveInt = 256
    """longest answer, in tokens"""
    context: int = 8192
    """longest conversation, in tokens"""


@verb
def chat(options: ChatOptions) -> None:
    """Talk to a model until the input ends."""
    # What is wrong with the options is told before the model is loaded.
    params = params_of(options)
    folder = model_folder(options.model)
    keep_freed_memory()
    model = model_on(folder, options.device)
    template = template_of(folder) if options.template == "auto" else options.template

    with ExitStack() as stack:
        sandbox = None
        if options.tools:
            sandbox = stack.enter_context(Sandbox(allow_weaker=options.allow_weaker))
            sandbox.check()
        talk = Conversation(
            model, Tokenizer.load(folder), params, template=template, context=options.context, sandbox=sandbox
        )
        talk.begin(options.system)
        # Attachments wait for the first message.
        for path in options.image:
            talk.attach(path)

        # Piped lines have no prompt and no editing.
        typed = sys.stdin.isatty()
        if typed:
            import readline  # noqa: F401  (input() edits lines by it)

            print("/help lists the commands, Ctrl-D leaves")
        converse(talk, sys.stdout, typed=typed)
