"""Questions over a collection of documents and pictures that a seed makes: pages about people, logs of many
parts, pictures that pages point to. The answer is a set of items, and none stands in the question.

    wide       where do Marlo, Tevin and Oskar live?         one page each
    pictures   how many objects are in the pictures of ...?  a page, and the picture that it names
    long       which guests does logs/lyon.md name?          every part of one document
    report     write a list of where ... live                the same as wide with twice as many
    deep       where does the best friend of Marlo live?     a chain: the first answer has the second question

An answer is text, a claim a line: an item is found where one line names the person and the value, and a line
that names all values claims all of them (`item_f1`). Held out: collections and names of their own.

problem.meta: `docs`, the folder; `plan`, groups of questions for one reader each, of which those of a group
can be asked side by side: what an oracle would assign; `items` asked for, the `values` that lines are read
for, and items `on_the_way` to them.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from earlyfusion.data.shards.fetch import cache_root
from earlyfusion.data.synth.graph import on_side
from earlyfusion.data.tasks.pictures import Counting
from earlyfusion.data.tasks.problem import Knobs, Problem, Split, Task, TaskError, task
from earlyfusion.kernels.errors import did_you_mean

PART = 1500
"""Characters of one part of a document, about."""
PEOPLE, LOGS, PARTS, GUESTS = 48, 4, (3, 5), 3
"""Of one collection: people, logs, parts of a log (least, most), guests in a part at most."""
HELDOUT_WORLD = 1_000_000
"""Seeds of held-out collections begin here."""
_FORMAT = 1
"""Part of a cached folder's name: raise it when what is written changes."""
_STARTS = "Ba Bru Cla Do Dri Fe Fra Ga Gle Ka Li Ma No Pe Ri So Sti Ta Vi Zo".split()
_ENDS = "lan mir rok ven del sa tin ra bo nel gus wen".split()
NAMES = ["".join(parts) for parts in product(_STARTS, ("", "lo", "ne", "ri", "ma", "du"), _ENDS)]
TOWNS = (
    "Lyon Oslo Porto Turin Graz Bergen Cork Delft Ghent Lucca Malaga Nantes Odense Pisa Riga Split Tartu"
    " Utrecht Vigo Zadar"
).split()
TRADES = (
    "baker carpenter clockmaker dyer fisher gardener glazier mason miller painter potter printer saddler"
    " tailor"
).split()
YEARS = [str(year) for year in range(1920, 1990)]
COUNTS = ["0", "1", "2", "3", "4"]


class Fact(NamedTuple):
    """What can be asked of a person: of many, of one, how a page says it, the values there are."""

    many: tuple[str, ...]
    one: str
    told: str
    values: Sequence[str]


FACTS = {
    "home": Fact(
        ("Where do {} live?", "In which towns do {} live?"), "Where does {} live?", "{} lives in {}.", TOWNS
    ),
    "trade": Fact(
        ("What do {} work as?", "Which trades do {} work in?"),
        "What does {} work as?",
        "{} works as a {}.",
        TRADES,
    ),
    "birth": Fact(
        ("When were {} born?", "In which years were {} born?"),
        "When was {} born?",
        "{} was born in {}.",
        YEARS,
    ),
    "picture": Fact(
        ("How many objects are in the pictures of {}?",),
        "How many objects are in the picture of {}?",
        "The picture of {} is {}.",
        COUNTS,
    ),
}
FRIEND = Fact((), "Who is the best friend of {}?", "The best friend of {} is {}.", ())
KINDS = ("wide", "pictures", "long", "report", "deep")
_FILLERS = (
    "The garden behind the house has {n} apple trees.",
    "In the summer of {n} the roof was mended.",
    "{other} came to visit for a week and left a letter.",
    "The dog is {n} years old and afraid of storms.",
    "On market days there is no time for anything else.",
    "A clock from {town} hangs in the hall.",
)
_DAYS = (
    "wind from the north, the shop stayed closed.",
    "rain until noon, then a walk along the river.",
    "the bridge was painted, all went by boat.",
    "nothing to report but a lost umbrella.",
)


def parts_of(text: str) -> list[str]:
    """The text in parts of about PART characters, cut at line ends where there are any."""
    parts, part = [], ""
    for line in text.splitlines(keepends=True):
        if part and len(part) + len(line) > PART:
            parts.append(part)
            part = ""
        # A line without end is cut as it comes.
        while len(line) > PART:
            parts.append(line[:PART])
            line = line[PART:]
        part += line
    return [*parts, part] if part.strip() else parts


class World:
    """One collection: facts of its people, guests of its logs. Seeds from HELDOUT_WORLD on have held-out
    names."""

    def __init__(self, seed: int) -> None:
        self.seed, self.heldout = seed, seed >= HELDOUT_WORLD
        rng = Random(f"collection/{seed}")
        self.people = rng.sample([name for name in NAMES if on_side(name, self.heldout)], PEOPLE)
        # Friends in one ring: a chain of any length meets nobody twice.
        ring = rng.sample(self.people, PEOPLE)
        self.friends = dict(zip(ring, [*ring[1:], ring[0]]))
        self.facts: dict[str, dict[str, str]] = {}
        for name in ("home", "trade", "birth"):
            self.facts[name] = {person: rng.choice(FACTS[name].values) for person in self.people}
        self.scenes: dict[str, Problem] = {}
        for number, person in enumerate(self.people):
            split: Split = "test" if self.heldout else "train"
            self.scenes[person] = _Objects().sample(PEOPLE * seed + number, split)
        self.facts["picture"] = {person: str(scene.answer) for person, scene in self.scenes.items()}
        self.logs = {f"logs/{town.lower()}.md": self._log(rng) for town in rng.sample(TOWNS, LOGS)}

    def picture(self, person: str) -> str:
        """The place of a person's picture."""
        return f"pictures/{self.people.index(person)}.png"

    def page(self, person: str) -> list[str]:
        """The sentences of a person's page, facts among what nobody asks for."""
        rng = Random(f"collection/{self.seed}/{person}")
        told = [
            FACTS[name].told.format(person, self.facts[name][person]) for name in ("home", "trade", "birth")
        ]
        told.append(FACTS["picture"].told.format(person, self.picture(person)))
        told.append(FRIEND.told.format(person, self.friends[person]))
        for filler in rng.sample(_FILLERS, 3):
            other, town = rng.choice(self.people), rng.choice(TOWNS)
            told.append(filler.format(n=rng.randint(2, 60), other=other, town=town))
        rng.shuffle(told)
        return told

    def _log(self, rng: Random) -> list[tuple[str, list[str]]]:
        """(text, guests) of every part of a log."""
        text, wanted, day = "", rng.randint(*PARTS), 0
        guests = {}
        while len(parts_of(text)) <= wanted:
            day += 1
            line = rng.choice(_DAYS)
            if rng.random() < GUESTS / 2 / (PART / 60):
                guests[day] = rng.choice(self.people)
                line = f"the guest was {guests[day]}."
            text += f"Day {day}: {line}\n"
        parts = parts_of(text)[:wanted]
        days = [[int(number) for number in re.findall(r"^Day (\d+):", part, re.M)] for part in parts]
        return [(part, [guests[day] for day in of if day in guests]) for part, of in zip(parts, days)]

    def write(self, folder: Path) -> None:
        """The collection as files: every second page is HTML."""
        for name in ("people", "logs", "pictures"):
            (folder / name).mkdir(parents=True)
        for number, person in enumerate(self.people):
            told = self.page(person)
            if number % 2:
                body = "".join(f"<p>{line}</p>" for line in told)
                text, ending = f"<html><h1>{person}</h1>{body}</html>\n", "html"
            else:
                text, ending = "\n".join([f"# {person}", "", *told, ""]), "md"
            (folder / f"people/{person.lower()}.{ending}").write_text(text)
            picture = self.scenes[person].picture
            assert picture is not None  # scenes are pictures
            picture.save(folder / self.picture(person))
        for place, parts in self.logs.items():
            (folder / place).write_text("".join(part for part, _ in parts))


class _Objects(Counting):
    """How many objects there are, one to three."""

    name = "counting"
    levels: ClassVar[tuple[Knobs, ...]] = ({**Counting.levels[0], "kinds": ("all",)},)  # type: ignore[assignment]


@cache
def world_of(seed: int) -> World:
    """The collection of a seed."""
    return World(seed)


@cache
def folder_of(seed: int) -> Path:
    """Its folder in the cache, written once."""
    target = cache_root() / f"collection/{_FORMAT}-{seed}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it and renamed: another process may be at it, too, and the first one stays.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as made:
            world_of(seed).write(Path(made) / "docs")
            with suppress(OSError):
                (Path(made) / "docs").rename(target)
    return target


def listed(names: Sequence[str]) -> str:
    """ "A, B and C"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_UNREAD = re.compile(r"\[[^\]]*\]|\S+\.\w{2,4}(?:#\d+)?(?=\W|$)")
"""Places: what they are called says nothing."""


def claims_of(answer: str, subjects: Iterable[str], values: Iterable[str]) -> set[tuple[str, str]]:
    """(subject, value) pairs that some line of an answer names together; the subject "" stands in every
    line."""
    found = set()
    for line in answer.splitlines():
        words = set(re.findall(r"\w+", _UNREAD.sub(" ", line).lower()))
        named = [subject for subject in subjects if not subject or subject.lower() in words]
        found |= set(product(named, [value for value in values if value.lower() in words]))
    return found


def item_f1(answer: str, meta: Mapping[str, Any]) -> float:
    """F1 of the items that an answer claims, in [0, 1]."""
    gold = {(subject, value) for subject, value in meta["items"]}
    claimed = claims_of(answer, {subject for subject, _ in gold}, meta["values"])
    return 2 * len(gold & claimed) / (len(gold) + len(claimed))


@task("collection")
class Collection(Task):
    """See the file's head. kinds: of KINDS, alike often; worlds: collections, of the seeds 0, 1, ... Raises
    TaskError for another kind. Knobs: items (least, most) that a question asks for."""

    levels = ({"items": (2, 5)}, {"items": (6, 8)})

    def __init__(self, kinds: Sequence[str] = KINDS, worlds: int = 16) -> None:
        for kind in kinds:
            if kind not in KINDS:
                raise TaskError(f"collection: kind {kind!r}; {did_you_mean(kind, KINDS)}")
        if not kinds or worlds < 1:
            raise TaskError(
                f"collection: kinds {list(kinds)}, worlds {worlds}; expected at least one of each"
            )
        self.asked, self.worlds = tuple(kinds), worlds

    def heldout(self, combination: str) -> bool:
        """By the collection: the two sides share no name."""
        return int(combination) >= HELDOUT_WORLD

    def draw(self, rng: Random, heldout: bool, knobs: Any) -> Problem:
        """See Task."""
        seed = rng.randrange(self.worlds) + HELDOUT_WORLD * heldout
        return self.ask(seed, rng, rng.choice(self.asked), knobs)

    def ask(self, seed: int, rng: Random, kind: str, knobs: Any) -> Problem:
        """A question of a kind about the collection of a seed."""
        world = world_of(seed)
        people = rng.sample(world.people, rng.randint(*knobs["items"]) * (2 if kind == "report" else 1))
        name = "picture" if kind == "pictures" else rng.choice(("home", "trade", "birth"))
        fact, known = FACTS[name], world.facts[name]

        on_the_way: list[tuple[str, str]] = []
        if kind == "deep":
            way = [people[0]]
            for _ in range(rng.randint(1, 2)):
                way.append(world.friends[way[-1]])
            asked = fact.one.format("the best friend of " * (len(way) - 1) + way[0])
            plan = [[FRIEND.one.format(person)] for person in way[:-1]] + [[fact.one.format(way[-1])]]
            items, values = [("", known[way[-1]])], fact.values
            on_the_way = [("", person) for person in way[1:]]
        elif kind == "long":
            place, parts = rng.choice([*world.logs.items()])
            asked = f"Which guests does {place} name? It has {len(parts)} parts."
            plan = [[f"Which guest does {place}#{number} name?" for number in range(1, len(parts) + 1)]]
            # A log without any guest would have an empty answer.
            items = sorted({("", guest) for _, guests in parts for guest in guests})
            values = world.people
        else:
            asked = rng.choice(fact.many).format(listed(people))
            if kind == "report":
                asked = f"Write a list, a line each: {asked[0].lower()}{asked[1:]}"
            plan = [[fact.one.format(person) for person in people]]
            items, values = [(person, known[person]) for person in people], fact.values

        target = "\n".join(" ".join(filter(None, item)) for item in items)
        meta = {"docs": str(folder_of(seed)), "plan": plan, "items": items, "values": list(values)}
        meta["on_the_way"] = on_the_way
        return Problem(asked, None, "", [list(item) for item in items], target, str(seed), kind, meta)

    def reward(self, problem: Problem, response_text: str) -> float:
        """See Task; all lines count, not the last alone."""
        return item_f1(response_text, problem.meta)
