"""Parts of a preparation that several machines share, and what the merge reads of them.

Where a shard ends and what is a duplicate depends on every item before it. So a part stores what became of
its items and cuts no shards; the merge gives that to the one writer (ShardSet) in the order of the items, and
the bytes are those of a run in one piece. Below --out:

    .prepare-parts/3-of-8/part.json                    what all parts must agree on
    .prepare-parts/3-of-8/000000250-000000282.items    items 250 to 281, written whole: of each a line of
                                                       JSON, then the bytes of its members
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from earlyfusion.data.errors import DataError
from earlyfusion.data.prepare.write import Outcome, digest_of
from earlyfusion.kernels.files import Record, json_object, replacing, write_json

PARTS = ".prepare-parts"
_FOLDER = re.compile(r"(\d+)-of-(\d+)")
_ITEMS = re.compile(r"(\d+)-(\d+)\.items")


def part_numbers(text: str) -> tuple[int, int]:
    """(i, n) of "i/n"; raises DataError unless 1 <= i <= n."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= parts:
        raise DataError(f"--part {text}: expected i/n with i from 1 to n, as 3/8")
    return number, parts


class Part:
    """One part: the items from `start` to before `stop`.

    Args:
        out: the folder that all parts share. plan: what all parts agree on: the identity of source and
        options, the number of items, the limits of a
            shard, what index.json says about the source.

    It is filled as a ShardSet is: `add` takes the outcomes in order, from `next_item` on. A file is held in
    memory until it has the size of a shard, so that a kill costs no more than it would cost a run in one
    piece.
    """

    def __init__(self, out: Path, number: int, parts: int, plan: Record) -> None:
        self.folder, self.plan = out / PARTS / f"{number}-of-{parts}", plan
        self.number, self.parts = number, parts
        self.start, self.stop = (plan["items"] * n // parts for n in (number - 1, number))
        self.next_item = self.start
        self.entries: list[Path] = []
        self._held: list[bytes] = []
        self._count = self._bytes = 0
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        after = {
            int(found[1]): (int(found[2]), path) for path in files if (found := _ITEMS.fullmatch(path.name))
        }
        while self.next_item in after:
            self.next_item, path = after[self.next_item]
            self.entries.append(path)

    @property
    def finished(self) -> bool:
        """Whether every item of the part is stored."""
        return self.next_item == self.stop

    def begin(self) -> None:
        """Say what the part is of, and delete what a killed run left half-written."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink()
        write_json(self.folder / "part.json", self.plan)

    def add(self, outcome: Outcome) -> bool:
        """Enter the next item; returns whether it can be used."""
        sizes = {name: len(data) for name, data in outcome.members.items()}
        if self._held and (
            self._count == self.plan["max_samples"]
            or self._bytes + outcome.content_bytes > self.plan["max_bytes"]
        ):
            self.close(outcome.number)
        self._held += [
            json.dumps({**asdict(outcome), "members": sizes}).encode() + b"\n",
            *outcome.members.values(),
        ]
        self._count, self._bytes = self._count + 1, self._bytes + outcome.content_bytes
        return not outcome.reason

    def close(self, stop: int) -> None:
        """Write what is held: the items before `stop`."""
        path = self.folder / f"{self.next_item:09d}-{stop:09d}.items"
        if self._held:
            with replacing(path) as temporary, temporary.open("wb") as file:
                file.writelines(self._held)
            self.entries.append(path)
        self.next_item, self._held, self._count, self._bytes = stop, [], 0, 0

    def outcomes(self, start: int) -> Iterator[Outcome]:
        """The stored items from `start` on; raises DataError for a damaged file."""
        for path in self.entries:
            number, stop = map(int, path.stem.split("-"))
            if stop <= start:
                continue
            try:
                with path.open("rb") as file:
                    while line := file.readline():
                        known = json.loads(line)
                        members = {name: file.read(size) for name, size in known["members"].items()}
                        outcome = Outcome(**{**known, "members": members})
                        # Files came over a network: the digest that finds duplicates also tells damage.
                        if outcome.number != number or not (
                            outcome.reason or digest_of(members) == outcome.digest
                        ):
                            raise ValueError(f"item {number} is not as written")
                        number += 1
                        if outcome.number >= start:
                            yield outcome
                if number != stop:
                    raise ValueError(f"it ends before item {number}")
            except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
                raise DataError(
                    f"{path}: damaged ({error}); delete it, run --part {self.number}/{self.parts}"
                    " again, then --merge"
                ) from None


def open_parts(out: Path, parts: int = 0, plan: Record | None = None) -> list[Part]:
    """The parts that were begun in `out`; raises DataError when they do not belong together, or are not of
    `parts` and of `plan` where these are given."""
    found: list[Part] = []
    for folder in sorted((out / PARTS).glob("*-of-*")):
        names, told = _FOLDER.fullmatch(folder.name), folder / "part.json"
        read = json_object(told.read_bytes()) if told.is_file() else None
        if names is None or read is None:
            continue  # just begun
        parts, plan = parts or int(names[2]), plan or read
        if (int(names[2]), read) != (parts, plan):
            why = (
                "another source or other options"
                if int(names[2]) == parts
                else f"a cut into {names[2]}, not {parts}"
            )
            raise DataError(
                f"{out} holds part {names[1]} of {why}; give every part the same, delete {out / PARTS}"
                " or take another folder"
            )
        found.append(Part(out, int(names[1]), parts, read))
    return sorted(found, key=lambda part: part.number)


def whole(out: Path, parts: Sequence[Part]) -> None:
    """Raises DataError, naming what is missing, unless every part is there and finished."""
    if not parts:
        raise DataError(f"{out} holds no parts; run prepare SRC --out {out} --part i/n for every i first")
    count = parts[0].parts
    done = {part.number for part in parts if part.finished}
    missing = [str(number) for number in range(1, count + 1) if number not in done]
    if missing:
        raise DataError(
            f"{out}: {len(missing)} of {count} parts missing or unfinished: {','.join(missing)}; run --part"
            f" i/{count} for these, then --merge"
        )
