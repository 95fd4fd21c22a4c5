"""The tokenizer of a fresh checkout: byte-level BPE trained on text that is already here, kept in a cache.

The corpus is real English (the pydoc topics), real code (standard library), the easy-VQA questions and
captions of generated scenes; whatever a source holds out for evaluation is left out here as well.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from earlyfusion.data.errors import DataError
from earlyfusion.data.shards.fetch import cache_root
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import SPECIAL_TOKENS, Tokenizer

_FORMAT = 2
"""Part of the cache key: raise it when the training below changes."""


def embedded_corpus() -> Iterator[str]:
    """Training texts, always the same for one installation: about 2.5 MB."""
    # Training texts only: held-out words must cost what unseen words cost.
    for kind, count in (("pydoc", None), ("stdlib_code", 160), ("easy_vqa", None), ("synth_scenes", 1500)):
        source = build_source(SourceConfig(name=kind, kind=kind), seed=0, val_fraction=0.1)
        for index in range(len(source) if count is None else min(count, len(source))):
            yield from source.texts(index)
    yield from ("image", "video") * 2000  # they stand before every picture: each shall be one token


def embedded_tokenizer(vocab_size: int = 4096) -> Tokenizer:
    """The tokenizer for the embedded data, trained once per installation and size, then read from the
    cache."""
    texts = list(embedded_corpus())
    # Another Python has another manual, and so another tokenizer.
    digest = hashlib.sha256(f"{_FORMAT} {tokenizers.__version__} {vocab_size}".encode())
    for text in texts:
        digest.update(text.encode() + b"\0")
    target = cache_root() / f"tokenizer/bpe-{vocab_size}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it and renamed: another process may be at it, too, and the first one stays.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            made = train_bpe(texts, vocab_size).save(Path(folder) / "tokenizer")
            with contextlib.suppress(OSError):
                made.rename(target)
    return Tokenizer.load(target)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries: 11 special tokens, 256 bytes, merges; every digit stands alone.

    The same texts give the same tokenizer. Raises DataError when `vocab_size` cannot hold the bytes, or when
    the texts are too few for that many merges.
    """
    least = len(SPECIAL_TOKENS) + 256
    if vocab_size < least:
        raise DataError(f"vocab_size {vocab_size}: at least {least} is needed (special tokens and 256 bytes)")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        # Digit by digit: numbers are read and calculated in one way.
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(backend)
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"vocab_size {vocab_size}: the texts give only {tokenizer.vocab_size} entries; lower it or add"
            " text"
        )
    return tokenizer
