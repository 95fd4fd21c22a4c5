"""The one table of requests: their state and samples on the host, who waits, who has slots and pages, what is
read next, and how a sample ends.

Requests are admitted in order of arrival when all their samples have a slot and all pages they can ever need
are free or can be freed from the prefix cache: an admitted request never has to give way. A prompt is read in
chunks whose borders depend on positions alone (multiples of the chunk, and the prefix cache's borders), so
that what is computed for a request does not depend on its neighbours.

Shapes: n tokens of a prompt, V vocabulary, L sparse layers, J chosen experts, M image features.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from earlyfusion.model.cache import Pools, PrefixCache
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.engine.requests import (
    Completion,
    Event,
    FinishReason,
    Handle,
    PausedSample,
    Prompt,
    Request,
    RequestError,
    Token,
    sequence_key,
)
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

REPLACEMENT = "\ufffd"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
STOPS = 8
"""Stop ids of a sample that the device knows."""
LONGEST_CHARACTER = 4
"""Tokens that may be waited for when a character's bytes are not complete (UTF-8 has at most four)."""
WRITTEN = ("ids", "logprobs", "logprobs1", "versions")
"""What a sample, a paused sample and a completion all know of the generated tokens."""


@dataclass(frozen=True)
class TokenRules:
    """Which tokens end a text and which are never drawn, for every request to a model.

    stop_ids: end of text and of a message. banned_ids: tokens that only stand in inputs, and rows of the
    embedding that the tokenizer does not know.
    """

    config: FusionConfig
    tokenizer: Any
    stop_ids: frozenset[int]
    banned_ids: frozenset[int]


def token_rules(model: NativeFusion, tokenizer: Any) -> TokenRules:
    """Raises ValueError for a tokenizer that knows more ids than the model embeds."""
    text = model.config.text
    # Without a tokenizer only what the configuration names is known.
    stop, banned = {text.eos_token_id}, {model.config.media_token_id}
    if tokenizer is not None:
        # Ids beyond the embedding would be looked up outside its rows.
        special = tokenizer.special_ids
        largest = max([tokenizer.vocab_size - 1, *special.values()])
        if largest >= text.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {largest}, the model embeds vocab_size={text.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        stop.add(special.get(END_OF_MSG, text.eos_token_id))
        banned |= {text.bos_token_id, text.pad_token_id, *range(tokenizer.vocab_size, text.vocab_size)}
        banned |= {special[name] for name in MEDIA_TOKENS if name in special}
    return TokenRules(model.config, tokenizer, frozenset(stop), frozenset(banned - stop))


class TextStream:
    """Text of a growing list of tokens, given out piece by piece.

    A piece is held back while it could still change: bytes of an unfinished character, and an ending that may
    be the beginning of a stop string. `stopped` turns True when a stop string appears; the text ends before
    it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.text, self.ids = "", list[int]()
        self._shown = 0  # characters of `text` that were given out
        self._settled = 0  # ids whose text is in `text`
        self._context = 0  # ids decoded together with new ones, so that joining rules of the tokenizer apply

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Take more tokens; returns the text that became certain, all of it when no token will follow."""
        self.ids += tokens
        if self.tokenizer is None:
            return ""

        # Decode the new ids after some old ones, and take what comes beyond the text of the old ones.
        before = self.tokenizer.decode(self.ids[self._context : self._settled], skip_special=True)
        now = self.tokenizer.decode(self.ids[self._context :], skip_special=True)
        unfinished = now.endswith(REPLACEMENT) and len(self.ids) - self._settled < LONGEST_CHARACTER
        if final or not unfinished:
            self.text += now[len(before) :]
            self._context, self._settled = self._settled, len(self.ids)
            starts = [self.text.find(stop, max(0, self._shown - len(stop))) for stop in self.stop]
            matches = [start for start in starts if start >= 0]
            if matches and not self.stopped:
                self.text, self.stopped = self.text[: min(matches)], True

        # Show what no later token can take back.
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((_overlap(self.text, stop) for stop in self.stop), default=0)
        piece = self.text[self._shown : end]
        self._shown += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return max(size for size in range(len(stop)) if text.endswith(stop[:size]))


@dataclass(eq=False)
class RequestState:
    """A request on its way.

    key_ids: the prompt with pictures' content in place of their placeholders, for the prefix cache. stop_ids,
    banned_V: of this request (banned_V None: the engine's usual set). borders: positions of the prompt where
    reading stops to leave a checkpoint. hits: lengths that a known beginning may have. foreseen: whether the
    device can tell by itself where a sample ends, by its length or at one of up to STOPS ids.
    """

    # Facts of the prompt, checked once; samples add what they write.
    request: Request
    handle: Handle
    ids: list[int]
    key_ids: np.ndarray
    media_positions: list[int]
    pictures: list[Picture]
    stop_ids: frozenset[int]
    banned_V: Tensor | None
    foreseen: bool
    hits: range
    borders: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    features: Tensor | None = None
    cached_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens a sample can reach."""
        return len(self.ids) + self.request.params.max_new_tokens

    @property
    def alive(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.finished]


@dataclass(eq=False)
class Sample:
    """One continuation of `parent`. length: tokens whose effect is in slot and pages. reserved: pages
    promised and not taken. siblings: samples to be forked from this one when its prompt has been read.
    saved: state to be put back."""

    # Host side only: tensors of a sample lie in the slot and the pages named here.
    parent: RequestState
    index: int
    stream: TextStream
    key: int
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reserved: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs1: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    siblings: list[Sample] = field(default_factory=list)
    saved: dict[str, Tensor] | None = None
    routing: list[np.ndarray] = field(default_factory=list)
    finished: bool = False

    @property
    def context(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.parent.ids) + len(self.ids)

    @property
    def target(self) -> int:
        """Where reading stops: the end of the prompt while siblings wait to be forked from there, else all
        that is known."""
        # A fork copies the state at the prompt's end, so the lead must not read past it.
        return len(self.parent.ids) if self.siblings else self.context

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.parent.request.params.max_new_tokens - len(self.ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens start .. stop - 1."""
        prompt = len(self.parent.ids)
        if start >= prompt:  # a decode step asks this of every sample, and prompts are long
            return self.ids[start - prompt : stop - prompt]
        return self.parent.ids[start:stop] + self.ids[: max(0, stop - prompt)]

    def written(self) -> dict[str, Any]:
        """Copies of what WRITTEN names."""
        return {name: list(getattr(self, name)) for name in WRITTEN}

    def paused(self, state: dict[str, Tensor]) -> PausedSample:
        """What leaves the engine of it."""
        paused = PausedSample(self.index, **self.written(), length=0)
        # Only with a state: what is read again is recorded again.
        if state:
            paused.state, paused.length = state, self.length
            paused.routing = np.concatenate(self.routing) if self.routing else None
        return paused


def new_state(request: Request, rules: TokenRules) -> RequestState:
    """Check a request and lay out its samples.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or pictures that do not fit the text.
    """
    prompt, params, name = request.prompt, request.params, f"request {request.id!r}"
    vocabulary, media = rules.config.text.vocab_size, rules.config.media_token_id
    ids = torch.as_tensor(prompt.ids).tolist()
    if not ids:
        raise RequestError(f"prompt {request.id} has no tokens; a prompt needs at least [BOS]")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise RequestError(f"{name}: token ids must lie in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")

    # Text and pictures encoded with different merge sizes would shift every later feature.
    positions, pictures = torch.as_tensor(prompt.media_positions).tolist(), pictures_of(prompt)
    counts = [num_tokens(each.grid, rules.config.vision.merge_kernel_size) for each in pictures]
    pads = [i for i, token in enumerate(ids) if token == media]
    if pads != sorted(positions) or len(pads) != sum(counts):
        raise RequestError(
            f"{name}: the pictures give {sum(counts)} features, the text holds {len(pads)}"
            f" <|media_pad|> and {len(positions)} media positions; encode text and pictures with the model's"
            " vision configuration"
        )

    # Another picture behind the same placeholders makes another key.
    key_ids, start = np.array(ids, dtype=np.int64), 0
    for picture, count in zip(pictures, counts):
        salt = int.from_bytes(picture.digest[:7], "little")
        key_ids[positions[start : start + count]] = -1 - (salt + np.arange(count))
        start += count

    # A stop id is always allowed: a text must be able to end. But the placeholder stays banned even so: it
    # stands for a picture that is not there.
    stop_ids = frozenset(params.stop_ids)
    if not params.ignore_eos:
        stop_ids |= rules.stop_ids
    banned, banned_V = ((rules.banned_ids | set(params.banned_ids)) - stop_ids) | {media}, None
    if banned != rules.banned_ids:
        banned_V = torch.zeros(vocabulary, dtype=torch.bool)
        banned_V[[i for i in banned if 0 <= i < vocabulary]] = True
        if banned_V.all():
            raise RequestError(f"{name}: every token is banned")

    state = RequestState(
        request,
        Handle(request.id, params.n),
        ids,
        key_ids,
        positions,
        pictures,
        stop_ids,
        banned_V,
        foreseen=not params.stop and banned_V is None and len(stop_ids) <= STOPS,
        hits=range(1, len(ids)),
    )
    for index in range(params.n):
        # Keyed by the request and not by a stream: neighbours and order change no draw.
        number = request.numbers[index] if request.numbers else index
        key = sequence_key(params.seed, request.noise or request.id, number)
        state.samples.append(Sample(state, index, TextStream(rules.tokenizer, params.stop), key))
    return state


# ---- pictures


class Picture(NamedTuple):
    """A picture of a prompt, with 16 bytes that tell its content."""

    digest: bytes
    grid: Grid
    patches: Tensor


def pictures_of(prompt: Prompt) -> list[Picture]:
    """Raises RequestError when patches and grids disagree."""
    counts = [num_patches(grid) for grid in prompt.grids]
    patches = torch.empty(0) if prompt.patches is None else prompt.patches
    if sum(counts) != len(patches):
        raise RequestError(
            f"the prompt's grids {list(prompt.grids)[:4]} need {sum(counts)} patches, {len(patches)} were"
            " given"
        )
    pictures = []
    for grid, part in zip(prompt.grids, patches.split(counts)):
        digest = hashlib.blake2b(repr(tuple(grid)).encode(), digest_size=16)
        # Content and not identity: the same picture in two requests is encoded once.
        digest.update(part.contiguous().cpu().numpy().tobytes())
        pictures.append(Picture(digest.digest(), grid, part))
    return pictures


# ---- the table


@dataclass(frozen=True)
class Part:
    """Tokens start .. stop - 1 of a sample, to be read in this step."""

    sample: Sample
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sample.target


class Scheduler:
    """Samples pass from `waiting` (whole requests) to `reading` to `running`.

    states: unfinished requests by id. events: what the next step reports. version: of the weights that choose
    now.
    """

    version = 0

    def __init__(self, pools: Pools, prefix: PrefixCache, max_slots: int, chunk: int) -> None:
        self.pools, self.prefix, self.max_slots, self.chunk = pools, prefix, max_slots, chunk
        self.states: dict[str, RequestState] = {}
        self.waiting: deque[RequestState] = deque()
        self.reading: list[Sample] = []
        self.running: list[Sample] = []
        self.events: list[Event] = []
        # Every way to end is told from the start: who watches a counter wants its zero.
        self.counts = Counter({f"finished_{reason}": 0 for reason in get_args(FinishReason)})

    @property
    def seated(self) -> list[Sample]:
        """Samples that hold a slot, and those that will be forked from them."""
        found: list[Sample] = []
        for sample in [*self.reading, *self.running]:
            found += [sample, *sample.siblings]
        return found

    # ---- admission

    def check(self, state: RequestState) -> None:
        """Raises RequestError if the request could never be admitted."""
        name, samples = f"request {state.request.id!r}", len(state.alive)
        if samples > self.max_slots:
            raise RequestError(f"{name}: {samples} samples, but the engine has {self.max_slots} slots")
        needed = sum(pages for _, pages in self._shares(state, 0))
        if needed > self.pools.num_pages:
            raise RequestError(
                f"{name}: {len(state.ids)} prompt tokens and up to {state.request.params.max_new_tokens}"
                f" new ones in {samples} samples need {needed} pages of {self.pools.page_size} tokens, the"
                f" engine has {self.pools.num_pages}; ask for fewer tokens or samples, or start the engine"
                " with more max_pages"
            )

    def submit(self, state: RequestState) -> None:
        """Take a request that could be admitted one day. Raises RequestError for another."""
        self.check(state)
        self.states[state.request.id] = state
        self.waiting.append(state)

    def _shares(self, state: RequestState, cached: int) -> Iterator[tuple[Sample, int]]:
        """Pages every sample may take when the first `cached` tokens are there already."""
        size, prompt = self.pools.page_size, len(state.ids)
        whole = self.pools.pages_for(state.longest)
        group = [sample for sample in state.alive if sample.saved is None]
        for sample in state.alive:
            if sample.saved is not None:
                yield sample, whole
            elif sample is group[0]:
                # whoever writes first into the shared last page of the prompt takes a copy
                yield sample, whole - cached // size + (len(group) > 1 and prompt % size > 0)
            else:
                yield sample, whole - prompt // size

    def admit(self) -> list[RequestState]:
        """Give slots and pages to as many waiting requests as fit, in order."""
        admitted: list[RequestState] = []
        while self.waiting and len(self.seated) + len(self.waiting[0].alive) <= self.max_slots:
            if not self._admit(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _admit(self, state: RequestState) -> bool:
        # The longest known beginning of its prompt, if any of its samples has to read.
        fresh = [sample for sample in state.alive if sample.saved is None]
        hit, cached = None, 0
        if fresh and state.hits and not state.request.capture_routing:  # routing of cached tokens is unknown
            hit = self.prefix.find(state.key_ids, state.hits)
        if hit is not None:
            cached = hit.length
            self.pools.share(hit.pages)  # pinned before anything is evicted

        # All pages it can ever need: free ones, or such as the prefix cache gives up. The hit itself stays:
        # its pages are in use by now, and its slot is still to be copied.
        shares = list(self._shares(state, cached))
        needed = self.reserved + sum(pages for _, pages in shares)
        while len(self.pools.free_pages) < needed and len(self.prefix.entries) > (hit is not None):
            self.prefix.evict_one()
        if len(self.pools.free_pages) < needed:
            self.pools.release(hit.pages if hit is not None else ())
            return False

        # One sample reads the prompt for all; the others are forked from it. Saved ones go on by themselves.
        for sample, pages in shares:
            sample.reserved = pages
            if sample.saved is None:
                continue
            sample.slot = self.pools.take_slot()
            self.make_room(sample, sample.length)
            self.pools.restore(sample.saved, sample.slot, sample.pages, sample.length)
            sample.saved = None
            if sample.length < sample.context - 1:  # a prompt that goes on where another sample stopped
                self.reading.append(sample)
            else:
                self.run(sample)
        if fresh:
            lead = fresh[0]
            lead.siblings, lead.slot = fresh[1:], self.pools.take_slot()
            if hit is not None:
                self.pools.copy_slot(hit.slot, [lead.slot])
                lead.pages, lead.length, state.cached_tokens = list(hit.pages), cached, cached
                self.counts["prefix_hits"] += 1
                self.counts["prefix_hit_tokens"] += cached
            self.reading.append(lead)
        return True

    @property
    def reserved(self) -> int:
        """Pages promised to admitted samples and not yet taken."""
        return sum(sample.reserved for sample in self.seated)

    # ---- slots and pages

    def make_room(self, sample: Sample, stop: int) -> bool:
        """See to it that positions length .. stop - 1 can be written by this sample alone; True if pages
        changed."""
        before, (last, offset) = sample.reserved, divmod(sample.length, self.pools.page_size)
        # A last page that is partly filled and shared is copied by the first writer.
        if offset and sample.pages:
            page = sample.pages[last]
            sample.pages[last] = self.pools.own_page(page)
            sample.reserved -= sample.pages[last] != page
        while len(sample.pages) < self.pools.pages_for(stop):
            sample.pages.append(self.pools.take_page())
            sample.reserved -= 1
        return sample.reserved != before

    def run(self, sample: Sample) -> None:
        """The sample decodes from now on. In slot order: neighbours in memory are neighbours in the batch."""
        insort(self.running, sample, key=lambda each: each.slot)

    def release(self, sample: Sample) -> None:
        """Take slot, pages and promises back; the sample stands nowhere afterwards. Siblings not forked go
        with it."""
        for line in (self.running, self.reading):
            if sample in line:
                line.remove(sample)
        self.pools.release(sample.pages)
        self.pools.free_slot(sample.slot)
        sample.siblings, sample.pages, sample.slot, sample.length, sample.reserved = [], [], 0, 0, 0

    def withdraw(self, state: RequestState) -> None:
        """Take a request's samples out of line, slots and pages."""
        if state in self.waiting:
            self.waiting.remove(state)
        for sample in state.alive:
            if sample in self.reading or sample in self.running:
                self.release(sample)

    # ---- reading

    def next_parts(self) -> list[Part]:
        """What to read in this step: at most `chunk` tokens (at least one part), all from the start or
        none."""
        parts: list[Part] = []
        budget = self.chunk
        for sample in self.reading:
            start, ends = sample.length, [*sample.parent.borders, len(sample.parent.ids)]
            if parts and (start == 0) != (parts[0].start == 0):
                continue
            next_chunk = (start // self.chunk + 1) * self.chunk
            stop = min(sample.target, next_chunk, *(end for end in ends if end > start))
            if parts and stop - start > budget:
                continue
            parts.append(Part(sample, start, stop))
            budget -= stop - start
        return parts

    def advance(self, part: Part) -> list[Sample]:
        """A part was read: keep it for others, fork at the end of a prompt. Samples that have read all they
        know, which stand nowhere now."""
        sample, state = part.sample, part.sample.parent
        completes, sample.length = part.completes, part.stop
        self.counts["read_tokens"] += part.stop - part.start
        if part.stop in state.borders:
            self.prefix.insert(state.key_ids, part.stop, sample.slot, sample.pages)
        if not completes:
            return []

        # The siblings get copies of the lead's state and shares in its pages.
        self.reading.remove(sample)
        siblings, sample.siblings = sample.siblings, []
        for each in siblings:
            each.slot = self.pools.take_slot()
            self.pools.share(sample.pages)
            each.pages, each.length, each.routing = list(sample.pages), sample.length, list(sample.routing)
        if siblings:
            self.pools.copy_slot(sample.slot, [each.slot for each in siblings])

        group = [sample, *siblings]
        self.reading += [each for each in group if each.length < each.context]
        return [each for each in group if each.length == each.context]

    # ---- what was chosen

    def accept(
        self, samples: Sequence[Sample], chosen_K3N: np.ndarray, fed: bool, counts: Sequence[int] | None
    ) -> None:
        """The next tokens of every sample, what comes after its end left out: ids, log-probabilities as drawn
        and at temperature 1, and the likeliest where somebody asks for them. fed: each token was chosen after
        feeding the one before it. counts: tokens of each sample; None: all K."""
        ids_NK, drawn_NK, plain_NK = (chosen_K3N[:, row].T.tolist() for row in range(3))
        for column, (sample, ids, drawn, plain) in enumerate(zip(samples, ids_NK, drawn_NK, plain_NK)):
            request, stream, text = sample.parent.request, sample.stream, ""
            reason: FinishReason | None = None
            # At most the tokens it may still get, up to the first that stops it.
            known = sample.left if counts is None else min(sample.left, counts[column])
            shown = ids = [int(token) for token in ids[:known]]
            for place, token in enumerate(ids):
                if token in sample.parent.stop_ids:
                    shown, ids, reason = ids[:place], ids[: place + 1], "stop"
                    break
            if reason is None and len(ids) == sample.left:
                reason = "length"

            # A stop string may end it earlier; without one, and without a reader, text can wait.
            if not request.pieces and not stream.stop:
                stream.ids += shown
                shown = []
            for place, token in enumerate(shown):
                text += stream.push([token])
                if stream.stopped:
                    ids, reason = ids[: place + 1], "stop"
                    break
            count = len(ids)
            versions = [self.version] * count
            if not request.params.logprobs:  # others of the batch may have asked for them
                drawn = plain = [float("nan")] * count

            # Written down, and told if somebody listens.
            sample.ids += ids
            sample.logprobs += drawn[:count]
            sample.logprobs1 += plain[:count]
            sample.versions += versions
            if fed:
                sample.length += count
                self.counts["decoded_tokens"] += count
            tokens: tuple[Token, ...] = ()
            if request.pieces:
                tokens = tuple(map(Token, ids, drawn, plain, versions))
            if tokens and request.params.top_logprobs:
                tops = tops_of(chosen_K3N[:count, 3:, column], request.params.top_logprobs)
                tokens = tuple(token._replace(top=top) for token, top in zip(tokens, tops))
            if reason is not None:
                self.finish(sample, reason, text, tokens)
            elif request.pieces:
                self.events.append(Event(request.id, sample.index, tokens, text))

    def finish(
        self, sample: Sample, reason: FinishReason, text: str = "", tokens: tuple[Token, ...] = ()
    ) -> None:
        """The sample's completion, with slot and pages given back if it was running."""
        state, request = sample.parent, sample.parent.request
        text += sample.stream.push([], final=True)
        if sample.stream.stopped and reason == "length":
            reason = "stop"

        # What a running sample leaves behind: its state for who goes on from it, a beginning for the cache.
        left = None
        if sample in self.running:
            kept = request.keep_state and reason != "cancelled"
            if kept and (request.keep_state != "cut" or reason == "length"):
                left = sample.paused(self.pools.export(sample.slot, sample.pages, sample.length))
            if reason != "cancelled":
                known = np.concatenate([state.key_ids, np.array(sample.ids, dtype=np.int64)])
                self.prefix.insert(known, sample.length, sample.slot, sample.pages)
            self.release(sample)

        routing = None
        if request.capture_routing and sample.routing:
            routing = np.concatenate(sample.routing)
        completion = Completion(
            request_id=request.id,
            index=sample.index,
            **sample.written(),
            text=sample.stream.text,
            finish_reason=reason,
            prompt_tokens=len(state.ids),
            cached_tokens=state.cached_tokens,
            routing=routing,
        )
        sample.finished = True
        insort(state.handle.completions, completion, key=lambda each: each.index)
        self.counts[f"finished_{reason}"] += 1
        self.events.append(Event(request.id, sample.index, tokens, text, completion, left))
        if not state.alive:
            del self.states[request.id]

    def stats(self) -> Counter[str]:
        """Counters since the start, and who holds what now."""
        stats = Counter(self.counts)
        stats.update(
            version=self.version,
            waiting=len(self.waiting),
            reading=len(self.reading),
            running=len(self.running),
            slots=self.pools.num_slots,
            free_slots=len(self.pools.free_slots),
            pages=self.pools.num_pages,
            free_pages=len(self.pools.free_pages),
            reserved_pages=self.reserved,
            prefix_checkpoints=len(self.prefix.entries),
            prefix_pages=len(self.prefix.pages),
            prefix_evictions=self.prefix.evictions,
        )
        return stats


def tops_of(rows_KR: np.ndarray, count: int) -> list[tuple[tuple[int, float], ...]]:
    """For each of K tokens the first `count` of its likeliest, from the rows of `requests.likeliest`."""
    ids_KR, values_KR = np.split(rows_KR, 2, axis=1)
    tops = []
    for ids, values in zip(ids_KR[:, :count], values_KR[:, :count]):
        tops.append(tuple(zip(map(int, ids), map(float, values))))
    return tops
