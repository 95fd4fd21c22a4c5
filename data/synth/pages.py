"""Web pages from a seed, in a compact language and in HTML; each compiles to the other without loss.

    page sand serif roomy
    nav end plain| Harbor| Home| Shop| Contact
    hero left accent| Bright garden| A quiet place to work and rest.| Join now
    footer center dark| Harbor 2026| Terms| Help

The first line has palette, font and density; every other line is a section: kind, variant, tone, then its
texts. What the texts of a kind are stands in FORMS. In HTML a section is an element whose first three classes
are those words, with every text in an element of its own; all looks come from one style sheet, which has no
script and fetches nothing. A page is seen at WIDTH pixels.

The split: a template is the kinds of a page in order, a combination two kinds that follow one another. A
share of the templates and of the combinations is held out, by the hash of their names (data/synth/graph.py).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import NamedTuple

from earlyfusion.data.errors import BadSample
from earlyfusion.data.synth.graph import on_side

WIDTH = 240
"""Pixels across, as a page is rendered, recorded and shown to a model."""
MOST_SECTIONS, MOST_TEXTS, MOST_CHARS = 24, 24, 400
"""Limits of what is read: sections of a page, texts of a section, characters of a text."""

PALETTES = {  # paper, ink, soft, accent, ink on accent
    "sand": ("#fbf6ec", "#3b2f20", "#eeddbb", "#b5651d", "#ffffff"),
    "ocean": ("#f2f8fc", "#12304a", "#cfe5f3", "#1769aa", "#ffffff"),
    "forest": ("#f3f8f1", "#1d3320", "#d2e6cc", "#2f7d32", "#ffffff"),
    "rose": ("#fdf3f6", "#43182a", "#f6d3de", "#c2185b", "#ffffff"),
    "night": ("#161a26", "#e8eaf2", "#2a3145", "#7aa2ff", "#101420"),
    "lime": ("#fbfdf0", "#2c3310", "#e6f0b4", "#8aa80c", "#10140a"),
    "plum": ("#f8f4fb", "#2f1b40", "#e2d3ee", "#7b3fa0", "#ffffff"),
    "slate": ("#ffffff", "#20262e", "#dfe4ea", "#455a64", "#ffffff"),
}
FONTS = {"sans": "DejaVu Sans", "serif": "DejaVu Serif", "mono": "DejaVu Sans Mono"}
DENSITIES = {"snug": 12, "roomy": 24}
"""Pixels around what a section holds."""
TONES = ("plain", "soft", "accent", "dark")


class Form(NamedTuple):
    """What a kind holds: elements at the beginning, elements that repeat and what is around one round of
    them, elements at the end; the variants."""

    lead: tuple[str, ...]
    repeated: tuple[str, ...]
    around: str
    tail: tuple[str, ...]
    variants: tuple[str, ...]


FORMS = {
    "nav": Form(("b",), ("a",), "", (), ("start", "end")),
    "hero": Form(("h1", "p", "button"), (), "", (), ("left", "center")),
    "text": Form(("h2", "p"), (), "", (), ("left", "center")),
    "split": Form(("h2", "p"), (), "", (), ("left", "right")),
    "cards": Form((), ("h3", "p"), "div", (), ("two", "three")),
    "form": Form(("h2",), ("label",), "", ("button",), ("stack", "row")),
    "table": Form((), ("td",), "", (), ("two", "three")),
    "tabs": Form((), ("label", "p"), "", (), ("line", "box")),
    "accordion": Form((), ("summary", "p"), "details", (), ("line", "box")),
    "footer": Form(("p",), ("a",), "", (), ("start", "center")),
}
"""Kind -> its form. The variant of a table is its number of columns; its first row is the head."""
COLUMNS = {"two": 2, "three": 3}
INNER = tuple(kind for kind in FORMS if kind not in ("nav", "footer"))
FIELDS = frozenset(tag for form in FORMS.values() for tag in form.lead + form.repeated + form.tail) | {"th"}


class Section(NamedTuple):
    """One section; texts in the order of its form."""

    kind: str
    variant: str
    tone: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page. palette, font, density: names of PALETTES, FONTS, DENSITIES."""

    palette: str
    font: str
    density: str
    sections: tuple[Section, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The template: kinds between navigation and footer, in order."""
        return tuple(section.kind for section in self.sections if section.kind in INNER)

    def hidden(self) -> list[str]:
        """What is clicked, in turn, to see all that the page holds: tabs but the first, questions."""
        found: list[str] = []
        for section in self.sections:
            if section.kind in ("tabs", "accordion"):
                found += section.texts[2 if section.kind == "tabs" else 0 :: 2]
        return [text for text in found if text.strip()]

    def texts(self) -> list[str]:
        """All texts from top to bottom."""
        return [text for section in self.sections for text in section.texts]


# ---- the split


def side(kinds: Sequence[str]) -> str:
    """Where a template belongs: "train", or held out as a "combination" or as a "template"."""
    if any(on_side(f"page/pair/{one}/{two}", heldout=True) for one, two in pairwise(kinds)):
        return "combination"
    return "template" if on_side(f"page/{'/'.join(kinds)}", heldout=True) else "train"


@cache
def templates(of: str) -> list[tuple[str, ...]]:
    """Every template of two and three kinds on one side, in a fixed order; those of one kind are all for
    training."""
    found = [kinds for count in (2, 3) for kinds in permutations(INNER, count) if side(kinds) == of]
    return [(kind,) for kind in INNER] + found if of == "train" else found


# ---- pages from a seed

_BRANDS = "Harbor Lumen Maple Nordic Orbit Pebble Quartz Saffron Tandem Willow".split()
_LINKS = "Home Shop Blog Team News Help Prices Contact".split()
_FIRST = "Bright Calm Early Fresh Golden Hidden Quiet Simple".split()
_SECOND = "bridge coffee forest garden letter market mountain window".split()
_BUTTONS = "Join now|Read more|Try it|Buy today|Sign up".split("|")
_LABELS = "Name|Email|City|Phone|Message".split("|")
_TABS = "Story Sizes Terms Rates Crew".split()
_HEADS = "Plan|Price|Seats|Day|Place".split("|")
_CELLS = "Basic|Plus|Team|Monday|Friday|Oslo|Lima|Cairo|12|48|96|free".split("|")
_QUESTIONS = "How does it work?|What does it cost?|Where are you?|Can I cancel?|Who is it for?".split("|")
_SENTENCES = (
    "A quiet place to work and rest.",
    "We ship every order within two days.",
    "Made by hand in a small town by the sea.",
    "Write to us and we answer the same day.",
    "Our guides know every path and river here.",
    "Pay once and keep it for the rest of your life.",
    "Nothing is stored and nobody is tracked.",
    "Bring your friends and stay for dinner.",
    "The first month costs nothing at all.",
    "Open every morning from seven to noon.",
)


def draw(rng: Random, of: str = "train") -> Page:
    """A page of one side of the split; a "part" is one section alone, to learn to read from. Raises
    ValueError for an unknown side."""
    if of not in ("train", "part", "template", "combination"):
        raise ValueError(f"side {of!r} of the pages; expected train, part, template or combination")
    kinds: tuple[str, ...] = (rng.choice([*FORMS]),)
    if of != "part":
        count = rng.choice((1, 2, 3) if of == "train" else (2, 3))
        kinds = ("nav", *rng.choice([kinds for kinds in templates(of) if len(kinds) == count]), "footer")
    title = lambda: f"{rng.choice(_FIRST)} {rng.choice(_SECOND)}"
    brand = rng.choice(_BRANDS)
    makers = {
        "nav": lambda _: (brand, *rng.sample(_LINKS, rng.randint(2, 3))),
        "hero": lambda _: (title(), rng.choice(_SENTENCES), rng.choice(_BUTTONS)),
        "text": lambda _: (title(), rng.choice(_SENTENCES)),
        "split": lambda _: (title(), rng.choice(_SENTENCES)),
        "cards": lambda v: sum(((title(), rng.choice(_SENTENCES)) for _ in range(COLUMNS[v])), ()),
        "form": lambda _: (title(), *rng.sample(_LABELS, 2), rng.choice(_BUTTONS)),
        "table": lambda v: (*rng.sample(_HEADS, COLUMNS[v]), *rng.choices(_CELLS, k=2 * COLUMNS[v])),
        "tabs": lambda _: sum(((word, rng.choice(_SENTENCES)) for word in rng.sample(_TABS, 2)), ()),
        "accordion": lambda _: sum(((q, rng.choice(_SENTENCES)) for q in rng.sample(_QUESTIONS, 2)), ()),
        "footer": lambda _: (f"{brand} {rng.randint(2020, 2029)}", *rng.sample(_LINKS, rng.randint(1, 2))),
    }
    sections = []
    for kind in kinds:
        variant = rng.choice(FORMS[kind].variants)
        sections.append(Section(kind, variant, rng.choice(TONES), tuple(makers[kind](variant))))
    return Page(rng.choice([*PALETTES]), rng.choice([*FONTS]), rng.choice([*DENSITIES]), tuple(sections))


def damaged(page: Page, rng: Random) -> Page:
    """The page with one to three mistakes: another look, variant, tone or text, a section that is missing or
    at the place of another. Never equal to it."""
    made = page
    for _ in range(rng.randint(1, 3)):
        sections = [*made.sections]
        place = rng.randrange(len(sections))
        one = sections[place]
        match rng.randrange(6):
            case 0:
                made = replace(made, palette=rng.choice([*PALETTES]), density=rng.choice([*DENSITIES]))
                continue
            case 1:
                sections[place] = one._replace(tone=rng.choice(TONES))
            case 2 if one.kind not in ("table", "cards"):
                sections[place] = one._replace(variant=rng.choice(FORMS[one.kind].variants))
            case 3 if len(sections) > 1:
                del sections[place]
            case 4:
                other = rng.randrange(len(sections))
                sections[place], sections[other] = sections[other], one
            case _:
                texts, words = [*one.texts], page.texts()
                texts[rng.randrange(len(texts))] = rng.choice(words)
                sections[place] = one._replace(texts=tuple(texts))
        made = replace(made, sections=tuple(sections))
    return made if made != page else damaged(page, rng)


# ---- the compact language

_ESCAPES = {"\\": "\\\\", "|": "\\p", "\n": "\\n"}
_BACK = {two: one for one, two in _ESCAPES.items()}


def to_dsl(page: Page) -> str:
    """The page in the compact language; a line a section."""
    lines = [f"page {page.palette} {page.font} {page.density}"]
    for section in page.sections:
        told = ("".join(_ESCAPES.get(c, c) for c in text) for text in section.texts)
        lines.append("| ".join([f"{section.kind} {section.variant} {section.tone}", *told]))
    return "\n".join(lines)


def parse_dsl(text: str) -> tuple[Page, list[str]]:
    """The page that a text says, repaired where it must be, and one line for every repair.

    Raises BadSample (bad_page) where no section can be read.
    """
    repairs: list[str] = []

    def known(word: str, names: Sequence[str], what: str) -> str:
        if word in names:
            return word
        nearest = (get_close_matches(word, names, 1, 0.5) or [names[0]])[0]
        repairs.append(f"{what} {word!r:.40} read as {nearest!r}")
        return nearest

    looks, sections = ["", "", ""], []
    for line in text.strip("\n").split("\n"):
        head, *texts = line.split("|")
        words = head.split()
        if words[:1] == ["page"]:
            looks = [*words[1:4], "", "", ""][:3]
        elif words and (words[0] in FORMS or get_close_matches(words[0], FORMS, 1, 0.7)):
            kind = known(words[0], [*FORMS], "section")
            variant, tone = [*words[1:3], "", ""][:2]
            variant = known(variant, FORMS[kind].variants, f"variant of {kind}")
            told = tuple(re.sub(r"\\[\\pn]", lambda m: _BACK[m[0]], one.removeprefix(" ")) for one in texts)
            sections.append(Section(kind, variant, known(tone, TONES, f"tone of {kind}"), told))
        elif line.strip():
            repairs.append(f"left out: {line!r:.60}")
    if not sections:
        raise BadSample(f"no section of a page in {text!r:.80}: expected lines like {SAMPLE!r}", "bad_page")

    names: tuple[list[str], ...] = ([*PALETTES], [*FONTS], [*DENSITIES])
    palette, font, density = (known(word, every, "look") for word, every in zip(looks, names))
    page = Page(palette, font, density, tuple(sections[:MOST_SECTIONS]))
    return _whole(page, repairs), repairs


SAMPLE = "hero left accent| Bright garden| Open every morning.| Join now"


def _whole(page: Page, repairs: list[str]) -> Page:
    """Every section with as many texts as its form takes."""
    whole = []
    for section in page.sections:
        form, texts = FORMS[section.kind], [one[:MOST_CHARS] for one in section.texts]
        fixed, step = len(form.lead) + len(form.tail), len(form.repeated)
        if section.kind == "table":
            step = COLUMNS[section.variant]
        # At least one round of what repeats; a last round that is not whole is filled up.
        rounds = max(1, -(-(len(texts) - fixed) // step)) if step else 0
        wanted = fixed + min(rounds, (MOST_TEXTS - fixed) // step) * step if step else fixed
        if len(texts) != wanted:
            repairs.append(f"{section.kind}: {len(texts)} texts, {wanted} taken")
            texts = [*texts, *[""] * wanted][:wanted]
        whole.append(section._replace(texts=tuple(texts)))
    return Page(page.palette, page.font, page.density, tuple(whole))


# ---- HTML


def style_of(page: Page) -> str:
    """The style sheet of a page."""
    names = ("PAPER", "INK", "SOFT", "ACCENT", "ON")
    told = dict(zip(names, PALETTES[page.palette])) | {"PAD": str(DENSITIES[page.density])}
    told["FAMILY"] = f'"{FONTS[page.font]}",{page.font.replace("mono", "monospace")}'
    return re.sub("|".join(told), lambda found: told[found[0]], _sheet())


@cache
def _sheet() -> str:
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8").partition("\n")[2]


def to_html(page: Page) -> str:
    """The page as one HTML document. Tabs and accordions open without a script."""
    parts = [_section(number, section) for number, section in enumerate(page.sections)]
    looks = f"{page.palette} {page.font} {page.density}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(next(iter(page.texts()), ''))}</title>\n<style>{style_of(page)}</style></head>\n"
        f'<body class="{looks}">\n' + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    """One section as an element."""
    form, texts = FORMS[section.kind], [*section.texts]
    element = lambda tag, text: f"<{tag}>{escape(text, quote=False)}</{tag}>"
    lead = [element(tag, texts.pop(0)) for tag in form.lead]
    tail = [element(tag, texts.pop(len(texts) - len(form.tail) + i)) for i, tag in enumerate(form.tail)]
    middle: list[str] = []
    step = len(form.repeated)
    for place in range(0, len(texts), step or 1):
        made = "".join(element(tag, text) for tag, text in zip(form.repeated, texts[place : place + step]))
        if section.kind == "table" and place < COLUMNS[section.variant]:
            made = made.replace("td>", "th>")
        if section.kind == "tabs":
            name, chosen = f"tab{number}", "" if place else " checked"
            made = f'<input type="radio" name="{name}" id="{name}-{place}"{chosen}>' + made
            made = made.replace("<label>", f'<label for="{name}-{place}">')
        middle.append(f"<{form.around}>{made}</{form.around}>" if form.around else made)
    if section.kind == "table":
        rows = range(0, len(middle), COLUMNS[section.variant])
        middle = [f"<tr>{''.join(middle[row : row + COLUMNS[section.variant]])}</tr>" for row in rows]
    tag = section.kind if section.kind in ("nav", "footer", "form", "table") else "section"
    inner = "".join([*lead, *middle, *tail])
    return f'<{tag} class="{section.kind} {section.variant} {section.tone}">{inner}</{tag}>'


class _Reader(HTMLParser):
    """Sections and their texts, by classes and elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.looks, self.sections = ["", "", ""], list[tuple[list[str], list[str]]]()
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A section begins, or a text."""
        classes = (dict(attrs).get("class") or "").split()
        if tag == "body":
            self.looks = [*classes, "", "", ""][:3]
        elif classes and classes[0] in FORMS:
            self.sections.append((classes, []))
        elif tag in FIELDS and self.sections:
            self.sections[-1][1].append("")
            self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        """A text ends."""
        if tag == self.inside:
            self.inside = ""

    def handle_data(self, data: str) -> None:
        """More of a text."""
        if self.inside:
            self.sections[-1][1][-1] += data


def from_html(html: str) -> tuple[Page, list[str]]:
    """The page of a document that `to_html` wrote, and repairs as of `parse_dsl`; other HTML gives what its
    classes say. Raises BadSample (bad_page) where it has no section."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    told = []
    for classes, texts in reader.sections:
        kind, variant, tone = [*classes, "", ""][:3]
        told.append(Section(kind, variant, tone, tuple(texts)))
    # The one way through repairs: names are checked there.
    looks = [*reader.looks]
    return parse_dsl(to_dsl(Page(looks[0], looks[1], looks[2], tuple(told))))
