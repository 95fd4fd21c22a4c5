"""Speculative decoding from siblings: what the answers of a group have in common is proposed, and checked by
the model several tokens at a time (grouped speculation of Seer, arXiv 2511.14617, section 3.4).

Answers to one prompt repeat each other. Their tokens, and those of the prompt, lie in one suffix automaton
per group (requests that share their noise are one); where the end of an answer has occurred before, what
followed it most often is drafted. Most is known where answers of a group do not begin together. A step
reads the drafts behind the last token as rows of one sequence, chooses at every row as it would have chosen
there alone, and keeps choices up to the first that differs from its draft. The noise of a choice depends on
the sample and the position (`requests.choose`), so what is written is the same to the bit with and without
drafts: greedy or drawn, the acceptance is that of exact rejection with a draft of one point.

A draft is as long as it pays: seconds of a step as a line over its rows, and the odds that such a draft was
right, are measured as the engine runs. So is whether drafts pay at all, in batches of every size: where they
do not, the engine goes without them but for a short look now and then.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Container, Sequence
from statistics import median

from earlyfusion.model.engine.scheduler import Sample

MOST = 15
"""Draft tokens of a sample in one step."""
BEGIN = 6
"""Tokens of an answer before anything is drafted for its group."""
WINDOW = 64
"""Tokens of the prompt, and of what was written while nobody drafted, that are looked at."""
KEPT = 50_000
"""States of automata of groups of which nothing is running, but more answers may come."""
CHAIN = 8
"""Endings of a text that learn of an occurrence. Of a text that repeats itself there are as many as
tokens."""
MARGIN = 1.1
"""A draft token must be expected to earn so many times what it costs."""
TRIAL = 64
"""Steps until it is said whether drafts pay; fewer where they clearly do not."""
LOOK, LOOK_AGAIN, SELDOM, BURST = 64, 512, 8192, 8
"""Where drafts pay, four of so many steps go without them, for comparison; where they do not, a burst of some
goes with them, after twice as many steps every time, up to SELDOM; soon again after one that paid."""
PAIRS = 17
"""Comparisons of steps with drafts and without that are remembered."""
WORTH = 0.95
"""Seconds a token with drafts, as a share of those without, from which on they do not pay."""
FIRST_ROW, EXTRA = 5.3, 1.5
"""What a step costs beside its rows, and drafts beside theirs, in rows, until it is known better."""
PRIOR = 10
"""Steps that this belief counts for."""
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
        follows, link, count = self.follows, self.link, self.count
        if token in follows[end]:
            new = self._split(end, token)
        else:
            # Endings that nothing followed with this token get it now, up to one that knows it.
            new = self._state({}, 0, self.longest[end] + 1, 0)
            while end >= 0 and token not in follows[end]:
                follows[end][token] = new
                end = link[end]
            if end >= 0:
                link[new] = self._split(end, token)
        # Every ending of the text has occurred once more.
        state = new
        for _ in range(CHAIN):
            if state <= 0:
                break
            count[state] += 1
            state = link[state]
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
    """Seconds of a step as `first + rows * each`: least squares with fading weights, drawn towards FIRST_ROW
    where steps have been of about one size."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # weights, rows, rows^2, seconds, rows * seconds

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        weight, _, _, total, _ = self.sums
        if weight > 4:  # somebody else had the processor
            seconds = min(seconds, 3 * total / weight)
        new = (1.0, rows, rows * rows, seconds, rows * seconds)
        self.sums = [0.99 * old + each for old, each in zip(self.sums, new)]

    def share(self, rows: int) -> float:
        """What one more row costs, as a part of a step of so many."""
        weight, x, xx, y, xy = self.sums
        if weight < 1:
            return 1 / (FIRST_ROW + rows)
        size, mean = x / weight, y / weight
        believed = mean / (FIRST_ROW + size)
        # As much as PRIOR steps of twice the size would say.
        spread, prior = xx / weight - size * size, PRIOR * size * size / weight
        each = (xy / weight - size * mean + prior * believed) / (spread + prior)
        each = min(max(each, 0.02 * mean / size), mean / size)
        return each / (mean + each * (rows - size))


class Worth:
    """Whether drafts pay, in batches of about one size: seconds a token of steps with them over those of the
    steps without that follow, since a machine's pace changes from second to second. timed: whether the step
    counts."""

    def __init__(self) -> None:
        self.steps = self.burst = 0
        self.rest, self.timed = LOOK_AGAIN, True
        self.ratios, self.ratio = deque[float](maxlen=PAIRS), 1.0
        self.sums = {True: [0.0, 0.0], False: [0.0, 0.0]}

    def asks(self) -> bool:
        """Whether the next step is to have drafts."""
        self.steps += 1
        self.timed = True
        lost = len(self.ratios) >= 4 and self.ratio * WORTH > 1
        if self.steps <= TRIAL and not lost:
            drafting = self.steps % 4 > 0
        elif self.ratio < WORTH:
            drafting, self.rest = self.steps % LOOK > 3, LOOK_AGAIN
        else:
            place = self.steps % self.rest
            # As many without beside the burst; for all the others the clock alone would cost a hundredth.
            drafting, self.timed = place < BURST, place < 2 * BURST
            if place == 2 * BURST:
                self._compare()
                self.rest = min(2 * self.rest, SELDOM) if self.ratios[-1] > WORTH else LOOK
        if drafting and not self.burst:
            self._compare()
        self.burst = self.burst + 1 if drafting else 0
        return drafting

    def learn(self, tokens: int, seconds: float) -> None:
        """What the step gave and took. The first of several with drafts reads what was written before."""
        if self.burst != 1:
            sums = self.sums[self.burst > 0]
            sums[0], sums[1] = sums[0] + seconds, sums[1] + tokens

    def _compare(self) -> None:
        """Steps with drafts, and those without behind them."""
        (with_s, with_tokens), (plain_s, plain_tokens) = self.sums[True], self.sums[False]
        if with_tokens and plain_tokens:
            self.ratios.append(with_s * plain_tokens / (plain_s * with_tokens))
            # One that somebody else's work fell into says nothing.
            self.ratio = median(self.ratios)
        self.sums = {True: [0.0, 0.0], False: [0.0, 0.0]}


class GroupText:
    """The automaton of one group, and how much of every answer it knows: by its key, which it keeps where it
    goes on as part of another request, its state and the tokens that were read."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.automaton, self.begin = SuffixAutomaton(), 0
        for token in prompt[-WINDOW:]:
            self.begin = self.automaton.extend(self.begin, token)
        self.known: dict[int, tuple[int, int]] = {}
        self.running: list[Sample] = []

    def catch_up(self, running: list[Sample]) -> None:
        """Read what these, and those that were running before, have written since the last time."""
        for sample in {sample.key: sample for sample in self.running + running}.values():
            ids, (end, start) = sample.ids, self.known.get(sample.key, (self.begin, 0))
            if start > len(ids):  # the same is asked again: its text begins anew
                end, start = self.begin, 0
            if len(ids) - start > WINDOW:
                start, end = len(ids) - WINDOW, 0
            for token in ids[start:]:
                end = self.automaton.extend(end, token)
            self.known[sample.key] = end, len(ids)
        self.running = running


def group_of(sample: Sample) -> str | None:
    """Parts of one group, each a request of its own, share their noise. None: nothing is drafted, since a
    stop string may end inside of a draft."""
    request = sample.parent.request
    return None if request.params.stop else request.noise or request.id


class Drafts:
    """Proposes tokens for running samples, and learns from what became of them.

    drafted, accepted: tokens since the start. worth: by the size of the batch, in powers of two.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupText] = {}
        self.odds, self.cost = Odds(), StepCost()
        self.worth: dict[int, Worth] = defaultdict(Worth)
        self.drafted = self.accepted = 0
        self.kinds: list[list[int]] = []

    def propose(self, running: Sequence[Sample]) -> list[list[int]] | None:
        """Draft tokens for every sample, [] where none would pay; None: nobody has any."""
        if not self.worth[len(running).bit_length()].asks():
            return None
        # A token is worth the share of a step that it spares; a row has to be likely enough for that.
        floor = MARGIN * len(running) * self.cost.share(len(running))
        # Where no draft could pay, nobody even reads: what was missed is read when fewer are running.
        if floor >= 1:
            return None
        names = [group_of(sample) for sample in running]
        members: dict[str, list[Sample]] = {}
        for name, sample in zip(names, running):
            if name is not None:
                members.setdefault(name, []).append(sample)
        for name, samples in members.items():
            # One that has written little has nothing to say; its prompt is read when it has.
            if name not in self.groups and max(len(sample.ids) for sample in samples) >= BEGIN:
                self._forget(members)
                self.groups[name] = GroupText(samples[0].parent.ids)
        if self.groups.keys().isdisjoint(members):
            return None
        for name, known in self.groups.items():
            if name in members or known.running:
                known.catch_up(members.get(name, []))
        drafts: list[list[int]] = []
        self.kinds = []
        earned = 0.0
        for name, sample in zip(names, running):
            ids, kinds = list[int](), list[int]()
            group = self.groups.get(name) if name is not None else None
            if group is not None:
                earned += self._draft(sample, group, floor, ids, kinds)
            drafts.append(ids)
            self.kinds.append(kinds)
        # Together they have to pay for what drafts cost beside their rows, too.
        return drafts if earned > EXTRA * floor else None

    def _forget(self, running: Container[str]) -> None:
        """Of groups of which nothing is running, the oldest go first."""
        idle = [name for name in self.groups if name not in running]
        states = sum(len(self.groups[name].automaton.link) for name in idle)
        for name in idle:
            if states <= KEPT:
                break
            states -= len(self.groups.pop(name).automaton.link)

    def _draft(
        self, sample: Sample, group: GroupText, floor: float, ids: list[int], kinds: list[int]
    ) -> float:
        """Fills in a sample's draft; tokens that it is expected to bring beyond what its rows cost."""
        text, stops = group.automaton, sample.parent.stop_ids
        count, most = text.count, min(MOST, sample.left - 1)
        state = text.known(group.known[sample.key][0])
        likely, context, earned = 1.0, text.longest[state], 0.0
        while state and len(ids) < most:
            follows, share = text.follows[state], 1.0
            if len(follows) == 1:
                ((token, after),) = follows.items()
            else:
                token, after = max(follows.items(), key=lambda each: count[each[1]])
                share = count[after] / max(1, sum(count[each] for each in follows.values()))
            kind = self.odds.kind(context, share)
            likely *= self.odds.of(kind, context, share)
            # An end is chosen by its row; nothing is drafted behind it.
            if likely < floor or token in stops:
                break
            ids.append(token)
            kinds.append(kind)
            earned += likely - floor
            state = text.known(after)
            context = context + 1 if state == after else text.longest[state]
        return earned

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

    def account(self, samples: int, rows: int, tokens: int, seconds: float) -> None:
        """What a step took, everything about drafts in it, for so many samples, rows and tokens."""
        worth = self.worth[samples.bit_length()]
        if worth.timed:
            self.cost.learn(rows, seconds)
            worth.learn(tokens, seconds)
