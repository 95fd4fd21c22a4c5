"""Pages to write down again, from a picture or a clip of them: `earlyfusion website pages` renders some.

    tasks = { pages = 1 }, options = { pages = { path = "runs/pages" } }

A folder has pages.jsonl, a row a page: `page` in the compact language (data/synth/pages.py) or the `html` of
one from elsewhere, its `side` of the split, the `file` of its picture, and `opened`, that of the page with
everything opened, where it has tabs or an accordion; `texts`, each with its box; of some, a `draft` with
mistakes and the file of its picture (data/sources/page_talks.py). Level 0 is the whole page as one picture;
level 1 a clip in which it is scrolled through, and opened where that changes what is seen; level 2 either;
level 3 a part of a page; level 4 one text, cut out; half of both as clips, of texts up to three in a row.

The answer is the page in the compact language; with target = "html", and for pages from elsewhere, HTML,
of generated pages without the style sheet. Without a browser an answer earns the share of the words that are
right and in their place; the looks of a page are scored by eval/website.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image as PILImage
from PIL import ImageChops

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Image, Video, json_object
from earlyfusion.data.synth.pages import Page, from_html, parse_dsl, to_dsl, to_html
from earlyfusion.data.tasks.problem import Problem, Split, Task, TaskError, task
from earlyfusion.kernels.files import Record

ROWS = "pages.jsonl"
HEIGHT = 168
"""Pixels of a page that a frame shows: seven tokens of 24, nothing is padded."""
OVERLAP = 24
"""Pixels that are still seen after a scroll."""
HOLD_S, MOVE_S = 1.75, 0.25
"""Seconds that a place is looked at, and that the way to the next one takes: so short that frames taken
evenly out of a recorded clip (data/video.py), a little more than half a second apart, are all at rest."""
FPS = 2.0
"""Frames of a second that a model is shown."""
GRID = 12
"""Pixels of the grid that pages stand on, and cuttings of them."""
MOST_CUT = 3
"""Texts that a clip of cuttings shows."""
QUESTION, READ = "write this page", "read this"
REVISE = "This is how your page looks. Write it again, better."


def places_of(height: int) -> list[int]:
    """Offsets at which the window stands while a page of that height is scrolled through."""
    last = max(0, height - HEIGHT)
    return [*range(0, last, HEIGHT - OVERLAP), last] if last else [0]


def scroll(page: PILImage.Image, opened: PILImage.Image | None) -> Iterator[tuple[PILImage.Image, int, int]]:
    """Where a clip of a page stands still, from top to bottom: (picture of the page, offset from, offset to).

    Every place is held once as the page is, and once opened where that differs.
    """
    places = places_of(page.height)
    for here, there in zip(places, [*places[1:], places[-1]]):
        pictures = [page]
        if opened is not None and ImageChops.difference(window(page, here), window(opened, here)).getbbox():
            pictures.append(opened)
        for number, picture in enumerate(pictures):
            yield picture, here, there if number == len(pictures) - 1 else here


def window(page: PILImage.Image, top: int, height: int = HEIGHT) -> PILImage.Image:
    """What is seen of a page; its last colour where it is too short."""
    return on_ground(page.crop((0, top, page.width, min(page.height, top + height))), (page.width, height))


def on_ground(picture: PILImage.Image, size: tuple[int, int]) -> PILImage.Image:
    """A picture at the upper left of a larger one, which has the colour of its last row."""
    if picture.size == size:
        return picture
    ground: Any = picture.getpixel((0, picture.height - 1))
    whole = PILImage.new("RGB", size, ground)
    whole.paste(picture)
    return whole


def frames(
    page: PILImage.Image, opened: PILImage.Image | None, fps: float, height: int = HEIGHT
) -> list[PILImage.Image]:
    """Frames of a clip, `fps` a second, with an eased scroll between the places; height: theirs."""
    stops, period = [*scroll(page, opened)], HOLD_S + MOVE_S
    count = max(1, round(len(stops) * period * fps))
    made = []
    for number in range(count):
        at = number / fps
        picture, here, there = stops[min(int(at / period), len(stops) - 1)]
        part = max(0.0, (at % period - HOLD_S) / MOVE_S)
        eased = part * part * (3 - 2 * part)
        made.append(window(picture, round(here + (there - here) * eased), height))
    return made


def clip_of(seen: list[PILImage.Image]) -> Video:
    """Frames, FPS a second, as a model is shown them."""
    return Video(seen, [number / FPS for number in range(len(seen))])


@dataclass(frozen=True)
class Seen:
    """What a model is shown of a page, its whole picture or frames; html: the page itself; thought: its
    template."""

    html: str
    shown: Image | Video
    thought: str

    def media(self) -> Image | Video:
        """See Problem.media."""
        return self.shown


def document_of(answer: str) -> tuple[str, list[str]]:
    """The HTML document that an answer stands for, and its repairs. HTML that has no section of our own is
    taken as it is. Raises BadSample (bad_page) where there is neither."""
    if "<" not in answer.split("|")[0]:
        page, repairs = parse_dsl(answer)
        return to_html(page), repairs
    if "<style" in answer or "<!doctype" in answer[:100].lower():
        return answer, []
    page, repairs = from_html(answer)
    return to_html(page), repairs


def body_of(page: Page) -> str:
    """The HTML of a page without the style sheet, which is a function of its classes."""
    html = to_html(page)
    return html[html.index("<body") : html.index("</html>")].strip()


@task("pages")
class Pages(Task):
    """See the file's head. path: the folder. target: "dsl" or "html". Knobs: clip (True, False, None for
    either), of ("page", "part", "text"; of held-out pages always the page). Raises TaskError for a folder
    without pages and an unknown target."""

    levels = (
        {"clip": False},
        {"clip": True},
        {"clip": None},
        {"clip": None, "of": "part"},
        {"clip": None, "of": "text"},
    )
    answer_tokens = 512

    def __init__(self, path: str = "", target: str = "dsl") -> None:
        if target not in ("dsl", "html"):
            raise TaskError(f"pages: target {target!r}; expected dsl or html")
        self.folder, self.target = Path(path), target
        file = self.folder / ROWS
        if not path or not file.is_file():
            raise TaskError(
                f"pages: no {ROWS} in {path!r}; options.pages.path names a folder that"
                " `earlyfusion website pages --out DIR` wrote"
            )
        self.identity = str(file.stat().st_size)
        self.rows: dict[str, list[Record]] = {"train": [], "test": [], "part": []}
        self.read: list[Record] = []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                row = json_object(line, f"{file}, line {number}")
                side = row["side"] if row["side"] in self.rows else "test"
                self.rows[side].append(row)
                if side != "test" and row.get("texts"):
                    self.read.append(row)

    def sample(self, seed: int, split: Split = "train", difficulty: int = 0) -> Problem:
        """See Task."""
        if split not in ("train", "test") or difficulty not in range(len(self.levels)):
            raise TaskError(f"pages: split {split!r}, level {difficulty}; there are train and test, 0 to 4")
        key = f"pages/{split}/{difficulty}/{seed}"
        rng = Random(f"rl/{key}")
        level = self.levels[difficulty]
        of = level.get("of") if split == "train" else None
        # Of held-out pages the levels of cuttings show the whole page, as a picture.
        clip = level["clip"] if of or "of" not in level else False
        clip = rng.random() < 0.5 if clip is None else clip
        rows = self.read if of == "text" else self.rows["part" if of else split]
        # What is behind a tab cannot be read from one picture; a text that was cut out was seen.
        if not clip and of != "text":
            rows = [row for row in rows if "opened" not in row]
        if not rows:
            raise TaskError(f"pages: {self.folder} has no {split} page for level {difficulty}; render more")
        row = rng.choice(rows)
        return self.cutting(row, clip, rng, key) if of == "text" else self.problem(row, clip, key)

    def cutting(self, row: Record, clip: bool, rng: Random, key: str) -> Problem:
        """One text of a row, with at most one step of the grid around it; as a clip up to MOST_CUT of them,
        from top to bottom, each held for one item of the tower.

        What a clip asks for beyond a picture is learned here at little cost: where to go on in the next item.
        """
        picture, texts = self._picture(row["file"]), row["texts"]
        chosen = rng.sample(texts, min(len(texts), rng.randint(1, MOST_CUT) if clip else 1))
        chosen.sort(key=lambda text: (text[2], text[1]))
        cuts = []
        for _, left, top, width, height in chosen:
            begin = [int(one // GRID - rng.randint(0, 1)) * GRID for one in (left, top)]
            end = [int(-(-one // GRID) + rng.randint(0, 1)) * GRID for one in (left + width, top + height)]
            box = (
                max(0, begin[0]),
                max(0, begin[1]),
                min(picture.width, end[0]),
                min(picture.height, end[1]),
            )
            cuts.append(picture.crop(box))
        shown: Image | Video = Image(cuts[0])
        if clip:
            size = max(cut.width for cut in cuts), max(cut.height for cut in cuts)
            held = round((HOLD_S + MOVE_S) * FPS)
            shown = clip_of([on_ground(cut, size) for cut in cuts for _ in range(held)])
        text = "| ".join(one[0] for one in chosen)
        meta = {"graph": Seen(escape(text), shown, ""), "side": row["side"]}
        return Problem(READ, picture, text, text, text, "text", row["side"], meta, self.name, key)

    def problem(self, row: Record, clip: bool, key: str) -> Problem:
        """The problem of a row."""
        picture = self._picture(row["file"])
        if clip:
            opened = self._picture(row["opened"]) if "opened" in row else None
            # From the first moment, as `website record` does: the four frames of an item show one place.
            # A part alone fills its window.
            tallest = max(picture.height, opened.height if opened else 0)
            height = min(HEIGHT, tallest) if row["side"] == "part" else HEIGHT
            shown: Image | Video = clip_of(frames(picture, opened, FPS, height))
        else:
            shown = Image(picture)
        if "page" in row:
            page, _ = parse_dsl(row["page"])
            html, kinds, words = to_html(page), page.kinds, "\n".join(page.texts())
            target = row["page"] if self.target == "dsl" else body_of(page)
        else:
            html = target = row["html"]
            kinds, words = ("elsewhere",), ""
        meta = {"graph": Seen(html, shown, " ".join(kinds)), "side": row["side"]}
        if "draft" in row:
            meta |= {"draft": row["draft"], "drafted": self._picture(row["drafted"])}
        side = row["side"]
        return Problem(QUESTION, picture, words, target, target, "/".join(kinds), side, meta, self.name, key)

    def _picture(self, name: str) -> PILImage.Image:
        """A stored picture of a page."""
        try:
            return PILImage.open(self.folder / name).convert("RGB")
        except OSError as error:
            raise TaskError(f"pages: {self.folder / name}: {error}; render the pages again") from None

    def test_problems(self, count: int, seed: int, difficulty: int = 0) -> list[Problem]:
        """Up to `count` held-out pages, each once; both kinds of holding out in turn."""
        clip = self.levels[difficulty]["clip"]
        rows = [row for row in self.rows["test"] if clip is not False or "opened" not in row]
        rng = Random(f"pages/{seed}")
        rng.shuffle(rows)
        kinds = {side: [row for row in rows if row["side"] == side] for side in ("template", "combination")}
        taken = [row for pair in zip(*kinds.values()) for row in pair] or rows
        # What is behind a tab is never asked for from one picture.
        either = lambda row: rng.random() < 0.5 or "opened" in row
        return [
            self.problem(row, either(row) if clip is None else clip, f"pages/test/{difficulty}/{i}")
            for i, row in enumerate(taken[:count])
        ]

    def score(self, problem: Problem, answer: str) -> float:
        """Share of the words of both pages that agree in order, looks and kinds among them."""
        if problem.question == READ:
            return SequenceMatcher(None, answer.split(), problem.answer.split(), autojunk=False).ratio()
        try:
            words = document_of(answer)[0].split("<body", 1)[-1].split()
            wanted = document_of(problem.answer)[0].split("<body", 1)[-1].split()
        except BadSample:
            return 0.0
        return SequenceMatcher(None, words, wanted, autojunk=False).ratio()


def row_of(page: Page | str, side: str, **files: Any) -> Record:
    """A row of pages.jsonl; a page from elsewhere is its HTML. files: file, opened, texts; see the file's
    head."""
    told = {"html": page} if isinstance(page, str) else {"page": to_dsl(page)}
    return {**told, "side": side, **files}
