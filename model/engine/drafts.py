"""Speculative decoding from siblings: what the answers of a group have in common is proposed, and checked by
the model several tokens at a time (grouped speculation of Seer, arXiv 2511.14617, section 3.4).

Answers to one prompt repeat each other. Their tokens, and those of the prompt, lie in one suffix automaton
per request; where the end of an answer has occurred before, what followed it most often is drafted. A step
reads the drafts behind the last token as rows of one sequence, chooses at every row as it would have chosen
there alone, and keeps choices up to the first that differs from its draft. The noise of a choice depends on
the sample and the position (`requests.choose`), so what is written is the same to the bit with and without
drafts: greedy or drawn, the acceptance is that of exact rejection with a draft of one point.

A draft is as long as it pays: seconds of a step as a line over its rows, and the odds that such a draft was
right, are measured as the engine runs. Where the drafts of a while did not pay for themselves, the engine
goes without them, longer every time.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Sequence

from earlyfusion.model.engine.scheduler import RequestState, Sample

MOST = 15
"""Draft tokens of a sample in one step."""
WINDOW = 128
"""Tokens of the prompt, and of what was written while nobody drafted, that are looked at."""
CHAIN = 32
"""Endings of a text that learn of an occurrence. Of a text that repeats itself there are as many as
tokens."""
MARGIN = 1.1
"""A draft token must earn this much more than it costs."""
CHECK = 24
"""Steps after which drafts have to have paid."""
LONGEST_REST = 2048
CONTEXTS, SHARES = (2, 3, 5, 8, 16), (0.35, 0.6, 0.85, 0.999)
"""Borders between drafts whose odds are learned apart: length of the ending that occurred before, and how
often it was followed by the token that is drafted."""


class SuffixAutomaton:
    """Every substring of texts that grow at their ends, with the number of its occurrences.

    State 0 is the empty string. A state stands for strings with the same occurrences; `longest` is the length
    of the longest, `link` leads to the longest ending of it that also occurs elsewhere. Linear in the texts'
    length.
    """

    def __init__(self) -> None:
        self.follows: list[dict[int, int]] = [{}]
        self.link, self.longest, self.count = [-1], [0], [0]

    def _state(self, follows: dict[int, int], link: int, longest: int, count: int) -> int:
        self.follows.append(follows)
        self.link.append(link)
        self.longest.append(longest)
        self.count.append(count)
        return len(self.link) - 1

    def _split(self, before: int, token: int) -> int:
        """The state of exactly the strings of `before` with the token: split off where longer ones share
        it."""
        state, longest = self.follows[before][token], self.longest[before] + 1
        if self.longest[state] == longest:
            return state
        clone = self._state(dict(self.follows[state]), self.link[state], longest, self.count[state])
        self.link[state] = clone
        while before >= 0 and self.follows[before].get(token) == state:
            self.follows[before][token] = clone
            before = self.link[before]
        return clone

    def extend(self, end: int, token: int) -> int:
        """The text that ends in state `end` (0: it begins) goes on with a token: its new end."""
        if token in self.follows[end]:
            new = self._split(end, token)
        else:
            # Endings that nothing followed with this token get it now, up to one that knows it.
            new = self._state({}, 0, self.longest[end] + 1, 0)
            while end >= 0 and token not in self.follows[end]:
                self.follows[end][token] = new
                end = self.link[end]
            if end >= 0:
                self.link[new] = self._split(end, token)
        # Every ending of the text has occurred once more.
        state = new
        for _ in range(CHAIN):
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]
        return new

    def known(self, state: int) -> int:
        """The longest ending of the state's text that something followed (0: none did)."""
        while state and not self.follows[state]:
            state = self.link[state]
        return state


class Odds:
    """How often drafts of a kind were right."""

    def __init__(self) -> None:
        kinds = (len(CONTEXTS) + 1) * (len(SHARES) + 1)
        self.right, self.tried = [0.0] * kinds, [0.0] * kinds

    def kind(self, context: int, share: float) -> int:
        return bisect(CONTEXTS, context) * (len(SHARES) + 1) + bisect(SHARES, share)

    def of(self, kind: int, context: int, share: float) -> float:
        # Until it is known better, as much as eight tries: a long ending says more than a short one.
        return (self.right[kind] + 8 * share * context / (context + 1)) / (self.tried[kind] + 8)

    def learn(self, kind: int, right: bool) -> None:
        self.right[kind] += right
        self.tried[kind] += 1
        if self.tried[kind] > 256:  # the model is trained on: what was learned grows old
            self.right[kind] /= 2
            self.tried[kind] /= 2


class StepCost:
    """Seconds of a step as `first + rows * each`, least squares with fading weights."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # weights, rows, rows^2, seconds, rows * seconds

    def learn(self, rows: int, seconds: float) -> None:
        weight, _, _, total, _ = self.sums
        if weight > 4:  # somebody else had the processor
            seconds = min(seconds, 3 * total / weight)
        new = (1.0, rows, rows * rows, seconds, rows * seconds)
        self.sums = [0.97 * old + each for old, each in zip(self.sums, new)]

    def share(self, rows: int) -> float:
        """What one more row costs, as a part of a step of so many."""
        weight, x, xx, y, xy = self.sums
        if weight < 1:
            return 0.3 / rows
        spread, mean = weight * xx - x * x, y / weight
        each = 0.3 * mean * weight / x  # until steps of different sizes were seen
        if spread > 0.05 * x * x:
            each = min(max((weight * xy - x * y) / spread, 0.02 * mean), mean)
        first = max(0.0, mean - each * x / weight)
        return each / (first + each * rows)


class GroupText:
    """The automaton of one request, and how much of every sample it knows."""

    def __init__(self, state: RequestState) -> None:
        self.automaton, self.samples = SuffixAutomaton(), state.samples
        self.ends, self.read = [0] * len(state.samples), [0] * len(state.samples)
        end = 0
        for token in state.ids[-WINDOW:]:
            end = self.automaton.extend(end, token)

    def catch_up(self) -> None:
        """Read what the samples have written since the last time."""
        for place, sample in enumerate(self.samples):
            ids, start = sample.ids, self.read[place]
            if start == len(ids):
                continue
            end = self.ends[place]
            if len(ids) - start > WINDOW:
                start, end = len(ids) - WINDOW, 0
            for token in ids[start:]:
                end = self.automaton.extend(end, token)
            self.ends[place], self.read[place] = end, len(ids)


class Drafts:
    """Proposes tokens for running samples, and learns from what became of them.

    drafted, accepted: tokens since the start. seconds: spent on proposing.
    """

    def __init__(self) -> None:
        self.groups: dict[RequestState, GroupText] = {}
        self.odds, self.cost = Odds(), StepCost()
        self.drafted = self.accepted = 0
        self.seconds = 0.0
        self.step = 0
        self.awake, self.rest, self.length = CHECK, 0, CHECK
        self.earned = 0.0
        self.kinds: list[list[int]] = []

    def propose(self, running: Sequence[Sample]) -> list[list[int]] | None:
        """Draft tokens for every sample, [] where none would pay; None: nobody has any."""
        if self.rest:
            self.rest -= 1
            if not self.rest:
                self.awake, self.earned = CHECK, 0.0
            return None
        start = time.perf_counter()
        # Groups that have ended are forgotten here.
        alive = {sample.parent: None for sample in running}
        self.groups = {
            state: self.groups.get(state) or GroupText(state)
            for state in alive
            if not state.request.params.stop
        }
        # A token is worth the share of a step that it spares; a row has to be likely enough for that.
        floor = MARGIN * len(running) * self.cost.share(len(running))
        # Where no draft could pay, nobody even reads: what was missed is read when fewer are running.
        drafts: list[list[int]] = []
        self.kinds = []
        for group in self.groups.values() if floor < 1 else ():
            group.catch_up()
        for sample in running:
            ids, kinds = list[int](), list[int]()
            if floor < 1 and sample.parent in self.groups:
                ids, kinds = self._draft(sample, floor)
            drafts.append(ids)
            self.kinds.append(kinds)
        spent = time.perf_counter() - start
        self.seconds += spent
        self._pay(len(running), spent)
        return drafts if any(drafts) else None

    def _draft(self, sample: Sample, floor: float) -> tuple[list[int], list[int]]:
        group = self.groups[sample.parent]
        text = group.automaton
        state = text.known(group.ends[sample.index])
        ids: list[int] = []
        kinds: list[int] = []
        likely, context = 1.0, text.longest[state]
        while state and len(ids) < min(MOST, sample.left - 1):
            follows, count = text.follows[state], text.count
            token = max(follows, key=lambda each: count[follows[each]])
            total = sum(count[each] for each in follows.values())
            share = count[follows[token]] / max(1, total)
            kind = self.odds.kind(context, share)
            likely *= self.odds.of(kind, context, share)
            # An end is chosen by its row; nothing is drafted behind it.
            if likely < floor or token in sample.parent.stop_ids:
                break
            ids.append(token)
            kinds.append(kind)
            after = follows[token]
            state = text.known(after)
            context = context + 1 if state == after else text.longest[state]
        return ids, kinds

    def learn(self, drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """So many tokens of every draft were right."""
        for ids, kinds, right in zip(drafts, self.kinds, accepted):
            # Of what comes behind the first mistake nothing is known.
            for kind in kinds[:right]:
                self.odds.learn(kind, True)
            if right < len(ids):
                self.odds.learn(kinds[right], False)
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(accepted)
        rows = len(drafts)
        self.earned += sum(accepted) - rows * self.cost.share(rows) * sum(map(len, drafts))

    def _pay(self, rows: int, spent: float) -> None:
        """Time spent on proposing, as the tokens that could have been written in it."""
        weight, _, _, seconds, _ = self.cost.sums
        if weight > 1:
            self.earned -= spent * weight / seconds * rows
        self.awake -= 1
        if self.awake > 0:
            return
        if self.earned < 0:
            self.rest, self.length = self.length, min(2 * self.length, LONGEST_REST)
            self.groups = {}
        else:
            self.length = CHECK
        self.awake, self.earned = CHECK, 0.0
