"""Tokenizer: any Hugging Face `tokenizer.json`, with the media and chat tokens of Kimi K3 added where they
are missing.

Text is always encoded with special tokens switched off: a document that contains the string `<|media_pad|>`
becomes ordinary bytes, never a media position. Special ids come only from `Tokenizer.bos_id`,
`media_begin_id`, ... .
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.ranks import FILE, from_ranks
from earlyfusion.data.sample import json_object
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record, write_atomic

BOS, EOS, PAD = "[BOS]", "[EOS]", "[PAD]"
OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    OPEN,
    CLOSE,
    SEP,
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
)

# The message form of Kimi K3. `content` is a string, or a list of {"type": "text" | "image" | "video", ...}
# parts; one <|media_pad|> stands for each picture until the processor repeats it as often as the picture has
# tokens. An assistant's message with `reasoning_content` or `tool_calls` is written in channels: think,
# response, tools (data/chat/template.py). `tools`, declarations, are a system message before all others.
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- if tools -%}{{- '<|open|>message role=\"system\"<|sep|># Tools' -}}{%- for tool in"
    " tools -%}{{- '\n' + tool|tojson -}}{%- endfor -%}{{- '<|close|>message<|sep|><|end_of_msg|>' -}}{%-"
    " endif -%}{%- for message in messages -%}{{- '<|open|>message role=\"' + message['role'] + '\"' -}}{%-"
    " if message['role'] == 'tool' and message['name'] -%}{{- ' tool=\"' + message['name'] + '\" index=\"' +"
    " (message['index'] or 1)|string + '\"' -}}{%- endif -%}{{- '<|sep|>' -}}{%- set channels ="
    " message['tool_calls'] or message['reasoning_content'] is string -%}{%- if message['reasoning_content']"
    " is string -%}{{- '<|open|>think<|sep|>' + message['reasoning_content'] + '<|close|>think<|sep|>' -}}{%-"
    " endif -%}{%- if channels -%}{{- '<|open|>response<|sep|>' -}}{%- endif -%}{%- if message['content'] is"
    " string -%}{{- message['content'] -}}{%- elif message['content'] -%}{%- for part in message['content']"
    " -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}{{- '<|media_begin|>' +"
    " part['type'] + '<|media_content|><|media_pad|><|media_end|>' -}}{%- endif -%}{%- endfor -%}{%- endif"
    " -%}{%- if channels -%}{{- '<|close|>response<|sep|>' -}}{%- endif -%}{%- if message['tool_calls']"
    " -%}{{- '<|open|>tools<|sep|>' -}}{%- for call in message['tool_calls'] -%}{%- set call ="
    " call['function'] or call -%}{{- '<|open|>call tool=\"' + call['name'] + '\" index=\"' +"
    " loop.index|string + '\"<|sep|>' -}}{%- for key, value in call['arguments'].items() -%}{%- set kind ="
    " 'string' if value is string else 'boolean' if value is boolean else 'number' if value is number else"
    " 'null' if value is none else 'object' if value is mapping else 'array' -%}{{- '<|open|>argument key=\"'"
    " + key + '\" type=\"' + kind + '\"<|sep|>' -}}{{- value if value is string else value|tojson -}}{{-"
    " '<|close|>argument<|sep|>' -}}{%- endfor -%}{{- '<|close|>call<|sep|>' -}}{%- endfor -%}{{-"
    " '<|close|>tools<|sep|>' -}}{%- endif -%}{{- '<|close|>message<|sep|><|end_of_msg|>' -}}{%- endfor"
    " -%}{%- if add_generation_prompt -%}{{- '<|open|>message role=\"assistant\"<|sep|>' -}}{%- endif -%}"
)

_CACHED_TEXT_CHARS, _CACHED_TEXTS = 160, 16384
"""Short texts (questions, answers, captions) repeat for ever; their ids are kept, of as many as strangers may
send to a server without harm."""


_MOST_BYTES, _MOST_IDS, _GROWTH = 40 << 20, 1 << 22, 4096.0
"""What a tokenizer.json may be and do: its size, its ids, and how much longer its replacements may make a
text."""
_NEEDED = "\n" + "".join(map(chr, range(33, 127)))
"""What questions, answers, chats and tool calls are written with."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with named special ids and a memory for short texts.

    `config` is the content of tokenizer_config.json; its bos, eos and pad tokens are used where present.
    """

    def __init__(self, backend: Backend, config: Record | None = None) -> None:
        self.config = dict(config or {})
        # A foreign tokenizer keeps its own names for these three.
        names = [self._named("bos_token", BOS), self._named("eos_token", EOS), self._named("pad_token", PAD)]
        missing = [name for name in (*names, *SPECIAL_TOKENS[3:]) if backend.token_to_id(name) is None]
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._memory: dict[str, tuple[int, ...]] = {}
        self.added = tuple(missing)
        """Special tokens that the given tokenizer lacked."""
        self.bos_id, self.eos_id, self.pad_id = (self.id_of(name) for name in names)
        self.bos_token, self.eos_token, self.pad_token = names
        self.open_id, self.close_id, self.sep_id = self.id_of(OPEN), self.id_of(CLOSE), self.id_of(SEP)
        self.end_of_msg_id = self.id_of(END_OF_MSG)
        self.media_begin_id, self.media_content_id = self.id_of(MEDIA_BEGIN), self.id_of(MEDIA_CONTENT)
        self.media_end_id, self.media_pad_id = self.id_of(MEDIA_END), self.id_of(MEDIA_PAD)

    def _named(self, role: str, default: str) -> str:
        # Hugging Face writes a string or an object with its content.
        value = self.config.get(role) or default
        name = value.get("content") if isinstance(value, dict) else value
        if not isinstance(name, str) or not name:
            raise DataError(f"{role} is {name!r:.60} in tokenizer_config.json, expected a string")
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._backend, self.config)

    @cached_property
    def vocab_size(self) -> int:
        """Rows an embedding table needs: the largest id + 1, special tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> dict[str, int]:
        """String -> id of every special token."""
        names = (self.bos_token, self.eos_token, self.pad_token, *SPECIAL_TOKENS[3:])
        return {name: self.id_of(name) for name in names}

    @property
    def chat_template(self) -> str:
        """The jinja chat template (the tokenizer's own, or CHAT_TEMPLATE)."""
        return str(self.config.get("chat_template") or CHAT_TEMPLATE)

    def id_of(self, token: str) -> int:
        """The id of one vocabulary entry; raises DataError when there is none."""
        index = self._backend.token_to_id(token)
        if index is None:
            raise DataError(f"tokenizer: {token!r} is not in the vocabulary")
        return index

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; no token is added and no special token is ever recognised in it.

        Raises BadSample (encoding) for half a character: JSON may hold "\\ud83d" alone.
        """
        # The library takes its lock for every text, however short.
        known = self._memory.get(text)
        if known is not None:
            return known
        try:
            ids = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):
            raise BadSample(
                "text holds surrogate code points; decode its bytes as UTF-8 first", "encoding"
            ) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # what the Rust library does with its own mistakes
                raise
            raise BadSample(f"the tokenizer panicked: {one_line(error)}", "unexpected") from None
        if len(text) <= _CACHED_TEXT_CHARS and len(self._memory) < _CACHED_TEXTS:
            self._memory[text] = ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids. Without special ids, decode(encode(x)) == x for every str a byte-level tokenizer is
        given."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @cached_property
    def ends_line(self) -> np.ndarray:
        """bool [vocab_size]: the text of the id ends with a line feed."""
        # Byte-level vocabularies write the byte 10 as the letter 266, others as it is or by its number.
        decoder = json.loads(self._backend.to_str()).get("decoder")
        line_feed = "\u010a" if "ByteLevel" in json.dumps(decoder) else "\n"
        found = np.zeros(self.vocab_size, dtype=bool)
        for entry, index in self._backend.get_vocab(with_added_tokens=True).items():
            found[index] = entry.endswith((line_feed, "\n", "<0x0A>"))
        return found

    def lost(self) -> str:
        """The characters among printable ASCII and the line feed that do not come back from their ids."""
        return "".join(c for c in _NEEDED if c not in self.decode(self.encode(f"a {c} a")).strip("a"))

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits over the whole tokenizer."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:16]

    def save(self, directory: str | Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them."""
        # Whole files only: a model directory may be read while it is written.
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1 << 20,
            "clean_up_tokenization_spaces": False,
            **self.config,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
            "chat_template": self.chat_template,
        }
        write_atomic(target / "tokenizer.json", self._backend.to_str(pretty=True))
        write_atomic(
            target / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        )
        return target

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face tokenizer directory, its tokenizer.json, or a file of that format by another
        name (which has no tokenizer_config.json); or a directory with Kimi's tiktoken.model. Raises DataError
        when it is none."""
        given = Path(path)
        alone = given.is_file() and given.name != "tokenizer.json"
        directory = given.parent if given.name == "tokenizer.json" else given
        source = given if alone else directory / "tokenizer.json"
        ranked = not source.is_file() and (directory / FILE).is_file()
        source = directory / FILE if ranked else source
        if not source.is_file():
            found = "no tokenizer.json in it" if directory.is_dir() else "no such file or directory"
            raise DataError(
                f"tokenizer {path}: {found}; give a file that `tokenizers` saved or a directory that holds"
                " tokenizer.json"
            )
        config_file, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        try:
            config = _object(config_file) if config_file.is_file() else {}
            if "chat_template" not in config and template.is_file():
                config["chat_template"] = template.read_text(encoding="utf-8")
            if ranked:
                made = cls(*from_ranks(directory, config))
            else:
                _refuse_growth(_object(source))
                made = cls(Backend.from_file(str(source)), config)
            made.encode("a")
        except (KeyboardInterrupt, SystemExit):
            raise
        # The Rust library raises bare Exception, and panics below BaseException.
        except BaseException as error:
            raise DataError(f"tokenizer {source}: not a tokenizers file ({one_line(error)})") from None
        if made.vocab_size > _MOST_IDS:
            raise DataError(
                f"tokenizer {source}: ids up to {made.vocab_size - 1}, expected fewer than {_MOST_IDS}"
            )
        return made


def _object(path: Path) -> Record:
    """The object in a JSON file; raises DataError in one line for anything else."""
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"expected at most {_MOST_BYTES >> 20} MiB")
    return json_object(path.read_bytes())


def _refuse_growth(found: Record) -> None:
    """Raise DataError when its replacements, one after the other, could make a text over _GROWTH times as
    long.

    Thirty that each write two letters for one make a gigabyte of one letter, inside the library where nothing
    stops it.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        # Steps of one part follow each other, so what they add multiplies.
        growth, waiting = 1.0, [found.get(part)]
        while waiting:
            step = waiting.pop()
            if isinstance(step, list):
                waiting += step
            elif isinstance(step, Mapping):
                waiting += step.values()
                content, pattern = step.get("content"), step.get("pattern")
                # Replace: a pattern that is no plain string may match one letter, or nothing.
                if isinstance(content, str):
                    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
                    replaced = len(literal) if isinstance(literal, str) else 0
                    growth *= max(1.0, len(content) / max(1, replaced))
                # Prepend: at most what it adds to a text of one letter.
                if isinstance(step.get("prepend"), str):
                    growth *= 1 + len(step["prepend"])
        if growth > _GROWTH:
            raise DataError(f"its {part} makes texts up to {growth:.3g} times as long; not used")
