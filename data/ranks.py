"""Vocabularies in tiktoken's form, as Kimi releases have them: `tiktoken.model`, a line for each token with
its bytes in base64 and its rank, which is its id; special tokens stand behind, by the ids that
tokenizer_config.json names or as reserved ones.

transformers' converter finds the merges that give these ranks; the pattern that texts are cut by first is
that of Kimi's tokenization_kimi.py (`pat_str`). `tokenizers` cuts by Oniguruma and not by Rust's fancy-regex:
the two are compared in tests/data/test_ranks.py.
"""

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.files import Record

FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"
RESERVED = 256
_HAN_FREE = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_HAN_FREE}*[\p{{Ll}}{_HAN_FREE}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_HAN_FREE}+[\p{{Ll}}{_HAN_FREE}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of every token -> its rank. Raises DataError for a line of another form, or ranks with gaps."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        token, _, rank = line.partition(b" ")
        if not line:
            continue
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise DataError(f"{path}: line {number} is {line[:40]!r}, expected base64 and a rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise DataError(f"{path}: {len(ranks)} ranks that are not 0, 1, 2, ... from 256 bytes on")
    return ranks


def from_ranks(folder: Path, config: Record) -> tuple[Backend, Record]:
    """The tokenizer of a folder with FILE, and its tokenizer_config.json without the class that read it
    there. Raises DataError for a folder of another family: its pattern is not known."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if config.get("tokenizer_class") != CLASS:
        raise DataError(
            f"{folder / FILE}: tokenizer_class {config.get('tokenizer_class')!r} in tokenizer_config.json,"
            f" expected {CLASS!r} (Kimi); convert it to a tokenizer.json with the library that made it"
        )
    ranks = read_ranks(folder / FILE)

    class Converter(TikTokenConverter):
        # Its own reader wants the package tiktoken.
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    backend = Converter(str(folder / FILE), pattern=PATTERN).converted()
    named = {int(i): token["content"] for i, token in (config.get("added_tokens_decoder") or {}).items()}
    last = max([*named, len(ranks) + RESERVED - 1])
    # In the order of their ids, which tokenizers deals out from the end of the vocabulary on.
    special = [named.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), last + 1)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrong = [token for i, token in named.items() if backend.token_to_id(token) != i]
    if wrong:
        raise DataError(f"{folder}: special tokens {wrong[:4]} do not get the ids of tokenizer_config.json")
    gone = ("tokenizer_class", "auto_map", "added_tokens_decoder", "additional_special_tokens")
    return backend, {key: value for key, value in config.items() if key not in gone}
