"""What every model with token-level access shares: grouping of requests, cached prefixes, scoring and
decoding.

A backend brings a `Session` (the states of N sequences that can be copied and extended) and its tokenizer;
this file turns requests into few, full calls:

    prefix      read once, its state copied for every question that begins with it (kept between calls)
    context     read once for all its continuations; one-token continuations need nothing more
    generation  finished sequences leave the batch at once

Shapes: N sequences, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from earlyfusion.data.sample import Segment, Text
from earlyfusion.eval.models.sampler import Draw
from earlyfusion.eval.models.text import QuickEncoder, split_pair
from earlyfusion.eval.protocol import (
    GenerateRequest,
    Generation,
    LogProb,
    Prompt,
    RollingRequest,
    ScoreRequest,
)

SHORTEST_PREFIX = 64
PREFIX_STEP = (
    64  # prefixes end where chunks of the recurrent kernels do, so results differ least from unshared reading
)
KEPT_PREFIXES = 2


@dataclass(frozen=True)
class Piece:
    """Tokens to read; `media` is what the backend needs to fill image placeholders among them (None for plain
    text)."""

    ids: tuple[int, ...]
    media: Any = None


class Session(Protocol):
    """The states of N sequences."""

    def fork(self, index: Sequence[int]) -> Session:
        """A new session of copies: its sequence i continues this one's sequence index[i]. This one stays
        usable."""
        ...

    def extend(self, pieces: Sequence[Piece], step: bool = False) -> Tensor:
        """Read one piece per sequence (each at least one token); -> logits fp32 [N, V] after the last tokens.
        step: a step of decoding, one token each."""
        ...

    def extend_scored(
        self, pieces: Sequence[Piece], targets: Sequence[Sequence[int]]
    ) -> list[tuple[list[float], bool]]:
        """Read; targets[n][i] is to be predicted after piece n's token i -> (ln p of each, all are the
        argmax)."""
        ...


@dataclass
class _Job:
    """One context with the continuations asked of it and the places of their results."""

    context: Piece
    prefix: tuple[int, ...]
    continuations: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, continuation: tuple[int, ...], size: int, owner: int) -> None:
        """One more continuation: its ids, its bytes, the place of its result."""
        self.continuations.append(continuation)
        self.sizes.append(size)
        self.owners.append(owner)

    @property
    def rest(self) -> Piece:
        """The context beyond the prefix."""
        return Piece(self.context.ids[len(self.prefix) :], self.context.media)


class TokenModel(ABC):
    """A Model (eval/protocol.py) on top of sessions. batch_size: most sequences at once; batch_tokens: most
    new tokens read at once (a single longer sequence still goes through). one_by_one: never more than one
    sequence in a call."""

    name = ""
    max_length: int | None = None
    capabilities = frozenset({"text", "score", "generate"})
    prefix_cache = True

    one_by_one = False

    def __init__(self, batch_size: int = 16, batch_tokens: int = 4096) -> None:
        if batch_size < 1 or batch_tokens < 1:
            raise ValueError(f"batch_size={batch_size}, batch_tokens={batch_tokens}: give at least 1")
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.quick = QuickEncoder(self.encode)
        self._prefixes: OrderedDict[tuple[int, ...], Session] = OrderedDict()

    # what a backend brings

    @abstractmethod
    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """Ids of a text; begin: with the tokens the model wants at the beginning of a document."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""

    @abstractmethod
    def fresh(self, sequences: int) -> Session:
        """A session that has read nothing."""

    @property
    @abstractmethod
    def begin_id(self) -> int:
        """The token an empty context stands for."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def silent_ids(self) -> Sequence[int]:
        """Tokens that are never generated."""
        return ()

    def encode_media(self, segments: Sequence[Segment]) -> Piece:
        """Ids and pictures of a prompt with media. Raises ValueError where the model reads text alone."""
        raise ValueError(f"{self.name} reads text alone; this prompt holds pictures or videos")

    def identity(self) -> dict[str, Any]:
        """See Model."""
        return {"name": self.name}

    # what it gets

    def count_tokens(self, text: str) -> int:
        """See Model."""
        return len(self.quick(text))

    def encode_prompt(self, prompt: Prompt, shared: int = 0) -> Piece:
        """Ids of a prompt (never none: an empty prompt is the beginning token)."""
        text = _plain(prompt)
        if text is None:
            return self.encode_media(prompt)  # type: ignore[arg-type]
        return Piece(self.quick(text, shared) or (self.begin_id,))

    def loglikelihood(self, requests: Sequence[ScoreRequest]) -> list[LogProb]:
        """See Model."""
        results: list[LogProb | None] = [None] * len(requests)
        for batch in self._batches(self._jobs(requests)):
            self._score(batch, results)
        return results  # type: ignore[return-value]

    def loglikelihood_ids(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LogProb]:
        """ln p of continuations given as ids after contexts given as ids (each at least one token); bytes are
        0."""
        results: list[LogProb | None] = [None] * len(pairs)
        jobs: dict[tuple[int, ...], _Job] = {}
        for owner, (context, continuation) in enumerate(pairs):
            ids = tuple(context)
            if self.max_length is not None:
                ids = ids[max(len(ids) + len(continuation) - (self.max_length + 1), 0) :]
            jobs.setdefault(ids, _Job(Piece(ids), ())).add(tuple(continuation), 0, owner)
        for batch in self._batches(list(jobs.values())):
            self._score(batch, results)
        return results  # type: ignore[return-value]

    def rolling(self, requests: Sequence[RollingRequest]) -> list[LogProb]:
        """See Model."""
        window = min(self.max_length or self.batch_tokens, self.batch_tokens)
        rows: list[tuple[int, list[int], list[int]]] = []
        for owner, request in enumerate(requests):
            ids = list(self.encode(request.text, False))
            for start in range(0, len(ids), window):
                targets = ids[start : start + window]
                rows.append((owner, [self.begin_id, *targets[:-1]], targets))
        sums, greedy, counts = [0.0] * len(requests), [True] * len(requests), [0] * len(requests)
        for batch in self._fill(sorted(rows, key=lambda row: -len(row[1])), [len(row[1]) for row in rows]):
            pieces = [Piece(tuple(inputs)) for _, inputs, _ in batch]
            with torch.no_grad():
                scored = self.fresh(len(batch)).extend_scored(pieces, [targets for _, _, targets in batch])
            for (owner, inputs, _), (values, best) in zip(batch, scored):
                sums[owner] += float(torch.tensor(values, dtype=torch.float64).sum())
                greedy[owner] &= best
                counts[owner] += len(inputs)
        sizes = [len(request.text.encode("utf-8")) for request in requests]
        return [LogProb(*values) for values in zip(sums, counts, sizes, greedy)]

    # scoring

    def _jobs(self, requests: Sequence[ScoreRequest]) -> list[_Job]:
        jobs: dict[Any, _Job] = {}
        for owner, request in enumerate(requests):
            context, continuation = self._encode_pair(request)
            if self.max_length is not None:
                excess = len(context.ids) + len(continuation) - (self.max_length + 1)
                context = Piece(context.ids[max(excess, 0) :], context.media)
            key = context.ids if context.media is None else id(request.context)
            if key not in jobs:
                jobs[key] = _Job(context, self._prefix(request.context, request.shared, context))
            jobs[key].add(continuation, len(request.continuation.encode("utf-8")), owner)
        return list(jobs.values())

    def _encode_pair(self, request: ScoreRequest) -> tuple[Piece, tuple[int, ...]]:
        text = _plain(request.context)
        if text == "":
            ids = tuple(self.encode(request.continuation, False))
            if ids[:1] == (self.begin_id,):
                return Piece(ids[:1]), ids[1:]
            return Piece((self.begin_id,)), ids
        if text is not None:
            context, continuation = split_pair(self.quick, text, request.continuation, request.shared)
            return Piece(tuple(context)), tuple(continuation)
        return self.encode_media(request.context), tuple(self.encode(request.continuation, False))  # type: ignore[arg-type]

    def _prefix(self, prompt: Prompt, shared: int, context: Piece) -> tuple[int, ...]:
        """The beginning of the context whose state is worth keeping: whole steps of the shared text's ids."""
        if not self.prefix_cache or context.media is not None or not isinstance(prompt, str) or shared <= 0:
            return ()
        ids = self.quick.remembered(prompt[:shared])
        # the last ids of the shared text may join with what follows, and a context keeps one token to read
        length = min(len(ids) - 2, len(context.ids) - 1) // PREFIX_STEP * PREFIX_STEP
        if length < SHORTEST_PREFIX or context.ids[:length] != ids[:length]:
            return ()
        return ids[:length]

    def _start(self, prefix: tuple[int, ...], sequences: int) -> Session:
        """A session of `sequences` that have read the prefix."""
        if not prefix:
            return self.fresh(sequences)
        if prefix not in self._prefixes:
            session = self.fresh(1)
            for start in range(0, len(prefix), self.batch_tokens):
                session.extend([Piece(prefix[start : start + self.batch_tokens])])
            self._prefixes[prefix] = session
            if len(self._prefixes) > KEPT_PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(prefix)
        return self._prefixes[prefix].fork([0] * sequences)

    def forget(self) -> None:
        """Drop the cached prefixes (call after the weights have changed)."""
        self._prefixes.clear()

    def _batches(self, jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
        by_prefix: dict[tuple[int, ...], list[_Job]] = {}
        for job in jobs:
            by_prefix.setdefault(job.prefix, []).append(job)
        for group in by_prefix.values():
            group.sort(key=lambda job: -len(job.rest.ids))
            yield from self._fill(group, [len(job.rest.ids) for job in group])

    def _fill(self, rows: Sequence[Any], lengths: Sequence[int]) -> Iterator[list[Any]]:
        """Batches of consecutive rows: at most batch_size of them, at most batch_tokens when padded to the
        longest."""
        batch: list[Any] = []
        longest = 0
        for row, length in zip(rows, sorted(lengths, reverse=True)):
            longest = max(longest, length)
            if batch and (
                self.one_by_one
                or len(batch) == self.batch_size
                or longest * (len(batch) + 1) > self.batch_tokens
            ):
                yield batch
                batch, longest = [], length
            batch.append(row)
        if batch:
            yield batch

    def _score(self, jobs: Sequence[_Job], results: list[LogProb | None]) -> None:
        with torch.no_grad():
            session = self._start(jobs[0].prefix, len(jobs))
            logp_NV = session.extend([job.rest for job in jobs]).log_softmax(-1)
            best_N = logp_NV.argmax(-1).tolist()
            firsts = [[ids[0] if ids else 0 for ids in job.continuations] for job in jobs]
            first_N = [
                logp_NV[n, torch.tensor(ids, device=logp_NV.device)].tolist() for n, ids in enumerate(firsts)
            ]
            longer = [
                (n, c)
                for n, job in enumerate(jobs)
                for c, ids in enumerate(job.continuations)
                if len(ids) > 1
            ]
            tails = self._tails(session, jobs, longer)
        for n, job in enumerate(jobs):
            for c, (ids, size, owner) in enumerate(zip(job.continuations, job.sizes, job.owners)):
                values, greedy = tails.get((n, c), ([], True))
                total = sum([first_N[n][c], *values]) if ids else 0.0
                results[owner] = LogProb(total, len(ids), size, greedy and (not ids or best_N[n] == ids[0]))

    def _tails(
        self, session: Session, jobs: Sequence[_Job], longer: list[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[list[float], bool]]:
        """ln p of the tokens after the first, for continuations of two tokens and more."""
        found: dict[tuple[int, int], tuple[list[float], bool]] = {}
        longer = sorted(longer, key=lambda place: -len(jobs[place[0]].continuations[place[1]]))
        lengths = [len(jobs[n].continuations[c]) for n, c in longer]
        for batch in self._fill(longer, lengths):
            rows = [jobs[n].continuations[c] for n, c in batch]
            fork = session.fork([n for n, _ in batch])
            scored = fork.extend_scored([Piece(row[:-1]) for row in rows], [row[1:] for row in rows])
            found.update(zip(batch, scored))
        return found

    # decoding

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See Model."""
        results: list[Generation | None] = [None] * len(requests)
        groups: dict[tuple[int, ...], list[tuple[int, Piece, int]]] = {}
        for owner, request in enumerate(requests):
            piece = self.encode_prompt(request.prompt, request.shared)
            room = request.max_new_tokens
            if self.max_length is not None:
                room = min(room, self.max_length - len(piece.ids))
            if room <= 0:
                results[owner] = Generation("", 0, "refused" if request.max_new_tokens > 0 else "length")
                continue
            prefix = self._prefix(request.prompt, request.shared, piece)
            groups.setdefault(prefix, []).append((owner, Piece(piece.ids[len(prefix) :], piece.media), room))
        for prefix, rows in groups.items():
            rows.sort(key=lambda row: (-len(row[1].ids), row[0]))
            for batch in self._fill(rows, [len(piece.ids) for _, piece, _ in rows]):
                with torch.no_grad():
                    self._decode(prefix, batch, requests, results)
        return results  # type: ignore[return-value]

    def _decode(
        self,
        prefix: tuple[int, ...],
        batch: Sequence[tuple[int, Piece, int]],
        requests: Sequence[GenerateRequest],
        results: list[Generation | None],
    ) -> None:
        session = self._start(prefix, len(batch))
        logits_NV = session.extend([piece for _, piece, _ in batch])
        alive = [_Answer(owner, requests[owner], room) for owner, _, room in batch]
        silent = torch.tensor(list(self.silent_ids), dtype=torch.long, device=logits_NV.device)
        while True:
            logits_NV = logits_NV.index_fill(1, silent, float("-inf"))
            kept = []
            for slot, (answer, token) in enumerate(zip(alive, _choose(logits_NV, alive))):
                if not answer.take(token, self):
                    kept.append(slot)
                else:
                    results[answer.owner] = answer.result
            if not kept:
                return
            if len(kept) < len(alive):
                session = session.fork(kept)
                alive = [alive[slot] for slot in kept]
            logits_NV = session.extend([Piece((answer.ids[-1],)) for answer in alive], step=True)


class _Answer:
    """An answer being written."""

    def __init__(self, owner: int, request: GenerateRequest, room: int) -> None:
        self.owner, self.request, self.room = owner, request, room
        self.ids: list[int] = []
        self.draw = Draw(request.temperature, request.top_p, request.seed)
        # a stop string of c characters ends within the last 4 c bytes, so within as many tokens, plus one cut
        # short
        self.tail = 4 * max(map(len, request.stop), default=0) + 4
        self.result: Generation | None = None

    def take(self, token: int, model: TokenModel) -> bool:
        """Add a token; True when the answer is complete."""
        if token in model.stop_ids:
            return self._end(model.decode(self.ids), "stop")
        self.ids.append(token)
        if self.request.stop and any(
            stop in model.decode(self.ids[-self.tail :]) for stop in self.request.stop
        ):
            text = model.decode(self.ids)
            cuts = [place for stop in self.request.stop if (place := text.find(stop)) >= 0]
            if cuts:
                return self._end(text[: min(cuts)], "stop")
        return len(self.ids) >= self.room and self._end(model.decode(self.ids), "length")

    def _end(self, text: str, finish: str) -> bool:
        self.result = Generation(text, len(self.ids), finish)
        return True


def _choose(logits_NV: Tensor, alive: Sequence[_Answer]) -> list[int]:
    """The next token of every answer; each draws from its own generator."""
    best = logits_NV.argmax(-1).tolist()
    for slot, answer in enumerate(alive):
        if answer.request.temperature > 0:
            best[slot] = answer.draw(logits_NV[slot])
    return best


def _plain(prompt: Prompt) -> str | None:
    """The text of a prompt without media, else None."""
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(segment, Text) for segment in prompt):
        return "".join(segment.text for segment in prompt if isinstance(segment, Text))
    return None
