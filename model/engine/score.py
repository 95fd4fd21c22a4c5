"""Given continuations of given prompts: how likely the model finds every token of them.

It takes the ways of generation: a prompt is read in chunks into a slot and pages, and forked for each of its
continuations, which are read in turn, like a sample that comes back with tokens it had already. Only where a
token is to be judged are hidden states turned into logits. A beginning that requests share is left in the
prefix cache by the first of them; chunk borders depend on the request alone, and so do its results.

Shapes: R judged rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from earlyfusion.model.engine.batch import Part
from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams, Score, ScoreRequest
from earlyfusion.model.engine.state import RequestState, Sample, TokenRules, new_state
from earlyfusion.model.engine.table import RequestTable

ROWS_AT_ONCE = 1024
"""Rows whose logits over the vocabulary are held at once."""


@dataclass(eq=False)
class _Job:
    """A request on its way. tails: the continuation that each sample of the state reads on with."""

    state: RequestState
    continuations: list[list[int]]
    tails: list[int]
    scores: list[Score]

    def expected(self, sample: Sample, position: int) -> Iterator[tuple[Score, int]]:
        """Tokens, each with the score it belongs to, that the state after the token at `position` chooses."""
        ahead = position + 1 - len(self.state.ids)
        if ahead == 0:
            for score, ids in zip(self.scores, self.continuations):
                if ids:
                    yield score, ids[0]
        elif ahead > 0:
            tail = self.tails[sample.index]
            yield self.scores[tail], self.continuations[tail][ahead]


class Scorer:
    """One call of `Engine.score`; see there."""

    def __init__(
        self,
        table: RequestTable,
        rules: TokenRules,
        keep_states: bool,
        banned_ids: Sequence[int],
    ) -> None:
        self.scheduler, self.prefix, self.runner = table.scheduler, table.prefix, table.runner
        self.counts, self.rules, self.keep_states = table.counts, rules, keep_states
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=self.runner.device)
        self.jobs: dict[RequestState, _Job] = {}

    def score(
        self,
        requests: Sequence[ScoreRequest],
        begin: Callable[[list[RequestState]], None],
    ) -> list[list[Score]]:
        """begin: called with the states that were just admitted, to encode their pictures."""
        scores: list[list[Score]] = []
        alone: list[RequestState] = []
        sharing: dict[bytes, list[RequestState]] = {}
        for number, request in enumerate(requests):
            scores.append([Score() for _ in request.continuations])
            for state in self._states(f"score {number}", request, scores[-1]):
                self.scheduler.check(state)
                if state.shared:
                    sharing.setdefault(state.key_ids[: state.shared].tobytes(), []).append(state)
                else:
                    alone.append(state)

        # The first of a group leaves the common beginning behind; as many groups at once as can be kept.
        waves = [alone]
        groups = iter(sharing.values())
        while some := list(islice(groups, max(1, self.prefix.limit))):
            waves.append([group[0] for group in some])
            waves.append([state for group in some for state in group[1:]])
        for wave in waves:
            self._run(wave, begin)
        return scores

    def _states(self, name: str, request: ScoreRequest, scores: list[Score]) -> Iterator[RequestState]:
        """The request as states: several where more continuations are to be read than there are slots."""
        continuations = [[int(i) for i in ids] for ids in request.continuations]
        for ids in continuations:
            if ids and (min(ids) < 0 or max(ids) >= self.rules.vocab_size):
                raise RequestError(
                    f"{name}: continuation ids must lie in 0..{self.rules.vocab_size - 1}, got"
                    f" {min(ids)}..{max(ids)}"
                )

        # A continuation of one token needs nothing but the state at the prompt's end.
        longer = [c for c, ids in enumerate(continuations) if len(ids) > 1]
        most = self.scheduler.max_slots
        for start in range(0, max(1, len(longer)), most):
            tails = longer[start : start + most]
            longest = max((len(continuations[c]) - 1 for c in tails), default=0)
            params = SamplingParams(longest, n=max(1, len(tails)))
            state = new_state(Request(f"{name}, {start}", request.prompt, params), self.rules)
            for sample, tail in zip(state.samples, tails):
                sample.ids = continuations[tail][:-1]  # the last token is judged, never read

            size = self.scheduler.pools.page_size
            most_shared = min(request.shared, len(state.ids) - 1) if self.prefix.limit else 0
            state.shared = max(0, most_shared) // size * size
            judged = [
                ids if c in tails or (len(ids) == 1 and start == 0) else []
                for c, ids in enumerate(continuations)
            ]
            self.jobs[state] = _Job(state, judged, tails, scores)
            yield state

    def _run(self, states: list[RequestState], begin: Callable[[list[RequestState]], None]) -> None:
        """Read all of them; longest first, so that those of a pass have about the same length."""
        scheduler = self.scheduler
        scheduler.waiting.extend(sorted(states, key=lambda each: (each.shared or 0) - each.longest))
        try:
            while scheduler.waiting or scheduler.reading:
                begin(scheduler.admit())
                self._read(scheduler.next_parts())
        except BaseException:  # an interrupt leaves an idle engine behind
            scheduler.waiting.clear()
            for sample in list(scheduler.reading):
                scheduler.release(sample)
            raise

    def _read(self, parts: list[Part]) -> None:
        """One pass: read the parts, judge what they choose, pass on or release the samples they complete."""
        rows: list[int] = []
        places: list[int] = []
        expected: list[tuple[Score, int]] = []
        start = 0
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
            job = self.jobs[part.sample.parent]
            first = max(part.start, len(job.state.ids) - 1)
            for position in range(first, part.stop):
                tokens = list(job.expected(part.sample, position))
                places += [len(rows)] * len(tokens)
                expected += tokens
                rows.append(start + position - part.start)
            start += part.stop - part.start

        hidden_RD = self.runner.read(parts, rows)
        self._judge(hidden_RD, places, expected)
        for part in parts:
            self._go_on(part)

    def _judge(self, hidden_RD: Tensor, places: list[int], expected: list[tuple[Score, int]]) -> None:
        """expected[i]: token chosen by hidden row places[i], and its score."""
        wanted = torch.tensor([token for _, token in expected], dtype=torch.long, device=hidden_RD.device)
        places_K = torch.tensor(places, dtype=torch.long, device=hidden_RD.device)
        logprobs, likeliest = [], []
        for first in range(0, hidden_RD.shape[0], ROWS_AT_ONCE):
            logits_RV = self.runner.logits(hidden_RD[first : first + ROWS_AT_ONCE]).float()
            here = slice(bisect_left(places, first), bisect_left(places, first + len(logits_RV)))
            rows_K, ids_K = places_K[here] - first, wanted[here]
            logprobs += logits_RV.log_softmax(-1)[rows_K, ids_K].tolist()
            best_R = logits_RV.index_fill(1, self.banned, float("-inf")).argmax(-1)
            likeliest += (best_R[rows_K] == ids_K).tolist()

        chosen_by: dict[Score, list[int]] = {}
        for (score, _), logprob, best, place in zip(expected, logprobs, likeliest, places):
            score.logprobs.append(logprob)
            score.likeliest.append(best)
            chosen_by.setdefault(score, []).append(place)
        if self.keep_states:
            for score, rows in chosen_by.items():
                before = [] if score.states is None else [score.states]
                score.states = torch.cat([*before, hidden_RD[rows]])

    def _go_on(self, part: Part) -> None:
        """After a part was read: keep a shared beginning, fork at the end of a prompt, release what is
        done."""
        sample, state = part.sample, part.sample.parent
        sample.length = part.stop
        self.counts["read_tokens"] += part.stop - part.start
        if part.stop == state.shared:
            self.prefix.insert(state.key_ids, part.stop, sample.slot, sample.pages)
        if not part.completes:
            return
        self.scheduler.reading.remove(sample)
        for each in self.scheduler.fork(sample):
            if each.length < each.context:
                self.scheduler.reading.append(each)
            else:
                self.scheduler.release(each)
