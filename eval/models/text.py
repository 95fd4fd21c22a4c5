"""From strings to token ids, the way lm-evaluation-harness splits a context from its continuation, and
quickly.

Prompts of a benchmark share a long beginning and often all but a last word; encoding each of them whole costs
more than a small model's forward pass. `QuickEncoder` encodes the parts by themselves, and checks itself
against whole encodings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

Encode = Callable[[str, bool], Sequence[int]]
"""(text, with the model's beginning and end tokens as it adds them by default) -> ids"""

FIRST_CHECKS, THEN_EVERY = 16, 512
REMEMBERED = 64


class QuickEncoder:
    """encode(text, True), from parts that are cut after `shared` characters and after the last line end.

    Parts are cut only where a line feed stands before a character that is no blank: there pre-tokenizers
    split anyway. Every cut is compared with the whole encoding for the first texts and now and then
    afterwards; after one difference (a tokenizer that marks word starts, or joins over line ends) texts are
    encoded whole for ever.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._calls = 0
        self._parts: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self.splits = True

    def __call__(self, text: str, shared: int = 0) -> tuple[int, ...]:
        """Ids of the whole text, with the beginning token the tokenizer adds by default."""
        parts = self._cut(text, shared) if self.splits else [text]
        if len(parts) == 1:
            return tuple(self._encode(text, True))
        ids = self._part(parts[0], True) + sum((self._part(part, False) for part in parts[1:-1]), ())
        ids += tuple(self._encode(parts[-1], False))
        self._calls += 1
        if self._calls <= FIRST_CHECKS or self._calls % THEN_EVERY == 0:
            whole = tuple(self._encode(text, True))
            self.splits = whole == ids
            return whole
        return ids

    def remembered(self, text: str) -> tuple[int, ...]:
        """Ids of a text that will be asked for again (a shared beginning)."""
        return self._part(text, True)

    def _cut(self, text: str, shared: int) -> list[str]:
        places = [place for place in (shared, text.rfind("\n") + 1) if _splittable(text, place)]
        edges = [0, *sorted(set(places)), len(text)]
        return [text[a:b] for a, b in pairwise(edges)]

    def _part(self, text: str, begin: bool) -> tuple[int, ...]:
        key = (text, begin)
        ids = self._parts.get(key)
        if ids is None:
            ids = self._parts[key] = tuple(self._encode(text, begin))
            if len(self._parts) > REMEMBERED:
                self._parts.popitem(last=False)
        else:
            self._parts.move_to_end(key)
        return ids


def _splittable(text: str, place: int) -> bool:
    return 0 < place < len(text) and text[place - 1] == "\n" and not text[place].isspace()


def split_pair(
    encode: QuickEncoder, context: str, continuation: str, shared: int
) -> tuple[list[int], list[int]]:
    """(context ids, continuation ids) for a context that is not empty.

    Blanks at the end of the context are moved to the continuation; the continuation is what the whole has
    beyond as many ids as the context alone has (lm-evaluation-harness, TemplateLM._encode_pair).
    """
    bare = context.rstrip()
    if len(bare) < len(context):
        context, continuation = bare, context[len(bare) :] + continuation
    whole, alone = encode(context + continuation, shared), encode(context, shared)
    return list(alone), list(whole[len(alone) :])
