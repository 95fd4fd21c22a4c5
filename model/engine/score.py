"""Given continuations of given prompts: how likely the model finds every token of them.

It takes the ways of generation: a prompt is read in chunks into a slot and pages, and forked for each of its
continuations, which are read in turn, like a sample that comes back with tokens it had already. Only where a
token is to be judged are hidden states turned into logits. A beginning that requests share is left in the
prefix cache by the first of them; chunk borders depend on the request alone, and so do its results.

Shapes: R judged rows, D hidden, V vocabulary, K judged tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams, Score, ScoreRequest
from earlyfusion.model.engine.runner import Runner
from earlyfusion.model.engine.scheduler import Part, Scheduler
from earlyfusion.model.engine.state import RequestState, TokenRules, new_state

ROWS_AT_ONCE = 1024
"""Rows whose logits over the vocabulary are held at once."""
Judged = tuple[Score, list[int]]
"""A continuation and what becomes known of it."""


class Scorer:
    """One call of `Engine.score`; see there. begin: admits what waits."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        rules: TokenRules,
        begin: Callable[[], None],
        keep_states: bool,
        banned_ids: Sequence[int],
    ) -> None:
        self.scheduler, self.runner, self.rules = scheduler, runner, rules
        self.begin, self.keep_states = begin, keep_states
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=runner.device)
        # Of every request on its way: what it judges, those first that its samples read on with.
        self.judged: dict[RequestState, list[Judged]] = {}

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[Score]]:
        scores: list[list[Score]] = []
        groups: dict[bytes, list[RequestState]] = defaultdict(list)
        for number, request in enumerate(requests):
            scores.append([Score() for _ in request.continuations])
            for state in self._states(f"score {number}", request, scores[-1]):
                self.scheduler.check(state)
                # By the beginning they share; "" where there is none.
                groups[state.key_ids[: sum(state.borders)].tobytes()].append(state)

        # The first of a group leaves the common beginning behind; as many groups at once as can be kept.
        self._run(groups.pop(b"", []))
        sharing, most = list(groups.values()), max(1, self.scheduler.prefix.limit)
        for start in range(0, len(sharing), most):
            some = sharing[start : start + most]
            self._run([group[0] for group in some])
            self._run([state for group in some for state in group[1:]])
        return scores

    def _states(self, name: str, request: ScoreRequest, scores: list[Score]) -> Iterator[RequestState]:
        """The request as states: several where more continuations are to be read than there are slots."""
        judged = [(score, [int(id) for id in ids]) for score, ids in zip(scores, request.continuations)]
        known = self.rules.config.text.vocab_size
        for _, ids in judged:
            if ids and not 0 <= min(ids) <= max(ids) < known:
                raise RequestError(
                    f"{name}: continuation ids must lie in 0..{known - 1}, got {min(ids)}..{max(ids)}"
                )

        # A continuation of one token needs nothing but the state at the prompt's end.
        longer = [(score, ids) for score, ids in judged if len(ids) > 1]
        single = [(score, ids) for score, ids in judged if len(ids) == 1]
        most, size = self.scheduler.max_slots, self.scheduler.pools.page_size
        for start in range(0, max(1, len(longer)), most):
            read = longer[start : start + most]
            # Pages are promised for the longest of them; the prompt's are shared.
            longest = max((len(ids) - 1 for _, ids in read), default=0)
            params = SamplingParams(longest, n=max(1, len(read)))
            state = new_state(Request(f"{name}, {start}", request.prompt, params), self.rules)
            for sample, (_, ids) in zip(state.samples, read):
                sample.ids = ids[:-1]  # the last token is judged, never read
            self.judged[state], single = read + single, []

            # A hit of any other length would move the chunk borders, and with them the last bits.
            shared = min(request.shared, len(state.ids) - 1) // size * size
            state.hits = range(0)
            if shared > 0 and self.scheduler.prefix.limit:
                state.borders, state.hits = [shared], range(shared, shared + 1)
            yield state

    def _run(self, states: list[RequestState]) -> None:
        """Read all of them; longest first, so that those of a pass have about the same length."""
        scheduler = self.scheduler
        scheduler.waiting.extend(sorted(states, key=lambda each: sum(each.borders) - each.longest))
        try:
            while scheduler.waiting or scheduler.reading:
                self.begin()
                self._read(scheduler.next_parts())
        finally:  # an interrupt leaves an idle engine behind
            for state in states:
                scheduler.withdraw(state)

    def _read(self, parts: list[Part]) -> None:
        """One pass: read the parts, judge what they choose, release the samples they complete."""
        # Rows of other positions are computed for the state alone and never projected to the vocabulary.
        rows: list[int] = []
        tokens: list[tuple[int, Score, int]] = []  # place in `rows`, whose token, the token
        offset = 0
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
            state = part.sample.parent
            last = len(state.ids) - 1
            for position in range(max(part.start, last), part.stop):
                # The prompt's end chooses first tokens for all; later ones belong to the sample's own.
                judged, at = self.judged[state], position - last
                for score, ids in judged if at == 0 else [judged[part.sample.index]]:
                    tokens.append((len(rows), score, ids[at]))
                rows.append(offset + position - part.start)
            offset += part.stop - part.start

        self._judge(self.runner.read(parts, rows), tokens)
        for part in parts:
            for sample in self.scheduler.advance(part):
                self.scheduler.release(sample)

    def _judge(self, hidden_RD: Tensor, tokens: list[tuple[int, Score, int]]) -> None:
        """Log-probability of every token under the logits of its row, some rows at a time."""
        numbers = torch.tensor([(row, token) for row, _, token in tokens], device=hidden_RD.device)
        rows_K, ids_K = numbers.view(-1, 2).long().T
        logprobs, likeliest = [], []
        for first in range(0, len(hidden_RD), ROWS_AT_ONCE):
            logits_RV = self.runner.logits(hidden_RD[first : first + ROWS_AT_ONCE]).float()
            here = (rows_K >= first) & (rows_K < first + ROWS_AT_ONCE)
            at, ids = rows_K[here] - first, ids_K[here]
            logprobs += logits_RV.log_softmax(-1)[at, ids].tolist()
            best_R = logits_RV.index_fill(1, self.banned, float("-inf")).argmax(-1)
            likeliest += (best_R[at] == ids).tolist()

        # Of every continuation the rows of this pass, joined once.
        rows: dict[Score, list[int]] = defaultdict(list)
        for (row, score, _), logprob, best in zip(tokens, logprobs, likeliest):
            score.logprobs.append(logprob)
            score.likeliest.append(best)
            rows[score].append(row)
        for score, places in rows.items() if self.keep_states else ():
            before = hidden_RD[:0] if score.states is None else score.states
            score.states = torch.cat([before, hidden_RD[places]])
