"""Websites: render pages to learn from, record clips, write a page from a clip, score what was written.

    earlyfusion website pages --out runs/pages
    earlyfusion website record page.html clip.mp4
    earlyfusion website demo                             # a sample clip and the small model of the package
    earlyfusion website demo clip.mp4 --model runs/website-pretrain/model --page page.html
    earlyfusion website score written.html page.html --click "Prices"
    earlyfusion website eval --model runs/website-pretrain/model --pages runs/pages
    earlyfusion website serve

All but `serve` need Chromium; `earlyfusion doctor` says whether there is one.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from PIL import Image as PILImage
from pydantic import NonNegativeInt, PositiveInt
from rich.progress import Progress

from earlyfusion.data.chat.template import template_of
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.options import Options, verb
from earlyfusion.data.sample import Image, Video
from earlyfusion.data.synth.pages import WIDTH
from earlyfusion.data.tasks.pages import HEIGHT, QUESTION, Seen, document_of, window
from earlyfusion.data.tasks.problem import Form
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video import container_of, open_clip
from earlyfusion.eval.blind import parse_pictures
from earlyfusion.eval.measure import Question, ask
from earlyfusion.eval.stats import Estimate, mean_estimate
from earlyfusion.eval.website.browser import PageError, Renderer, View
from earlyfusion.eval.website.clean import clean
from earlyfusion.eval.website.record import CLIP_FPS, filmed, write_mp4, write_pages
from earlyfusion.eval.website.score import NOTHING, Score, close_pixels, difference, interaction, score
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_atomic, write_jsonl
from earlyfusion.model.engine.requests import SamplingParams
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline.chat import Conversation
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.generate_cmd import model_on
from earlyfusion.pipeline.report.page import data_uri, write_page
from earlyfusion.pipeline.serve.app import ServeOptions, serve
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import navit_size

MODEL = "embedded:website"
"""The model that travels with the package."""
SHOWN = 24
"""Pages of an evaluation in its report."""


def page_file(path: Path) -> str:
    """The page of a file: HTML, cleaned, or the compact language. Raises BadSample."""
    if path.suffix.lower() in (".html", ".htm"):
        html, left_out = clean(path)
        for what, count in left_out.items():
            print(f"{path.name}: left out {what}: {count}", file=sys.stderr)
        return html
    return document_of(path.read_text(encoding="utf-8"))[0]


# ---- pages and clips


class PagesOptions(Options):
    out: Path = Path("runs/pages")
    """folder for pages.jsonl and pictures"""
    pages: NonNegativeInt = 5000
    """generated pages, a fifth of them held out"""
    html: Path | None = None
    """folder of HTML files of your own to be rendered as well"""
    heldout: bool = False
    """hold all of them out, to measure a model on them"""
    seed: int = 0
    """seed of the pages"""


@verb
def pages(options: PagesOptions) -> None:
    """Render pages."""
    files = [] if options.html is None else sorted(options.html.rglob("*.htm*"))
    if options.html is not None and not files:
        raise UserError(f"--html {options.html}: no .html file below it")
    own = [clean(file)[0] for file in files]
    with Progress(transient=True) as bar:
        line = bar.add_task("pages", total=options.pages + len(own))
        told = lambda done: bar.update(line, completed=done)
        rows = asyncio.run(write_pages(options.out, options.pages, options.seed, own, told, options.heldout))
    print(f"{options.pages + len(own):,} pages: {rows}")


class RecordOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("page", "out")
    page: Path
    """HTML file, or a page in the compact language"""
    out: Path
    """clip to write, .mp4"""
    click: list[str] = []
    """text to click on, where that changes what is seen; may be given again"""
    scripts: bool = False
    """run the page's own scripts"""


@verb
def record(options: RecordOptions) -> None:
    """Record a clip of a page, scrolled from top to bottom."""
    html = options.page.read_text(encoding="utf-8") if options.scripts else page_file(options.page)
    made = asyncio.run(filmed(html, options.click, options.scripts))
    path = write_mp4(made, options.out)
    print(f"{len(made)} frames, {len(made) / CLIP_FPS:.1f} s: {path}")


def clip_frames(path: Path) -> list[PILImage.Image]:
    """All frames of a video file. Raises BadSample."""
    with path.open("rb") as file:
        container = container_of(file.read(4096))
    if container is None:
        raise BadSample(f"{path}: not a video", "corrupt_video")
    backend = "pillow" if container in ("gif", "webp", "png") else "pyav"
    clip = open_clip(path, backend, container, str(path), DecodeConfig())
    return [PILImage.fromarray(pixels) for pixels, _ in clip.read(range(len(clip.seconds)))]


# ---- scores


async def looked_at(documents: Sequence[str | None]) -> list[View | None]:
    """Views of pages; None for what is none or cannot be rendered."""
    async with Renderer(timeout_s=20) as renderer:

        async def one(html: str | None) -> View | None:
            try:
                return None if html is None else await renderer.render(html)
            except PageError:
                return None

        return list(await asyncio.gather(*map(one, documents)))


def text_alone(view: View) -> str:
    """The texts of a page from top to bottom and nothing else: what layout and colours are worth."""
    return "".join(f"<p>{escape(block.text)}</p>" for block in view.blocks)


def compared(seen: View | None, wanted: View | None) -> Score:
    """The score of a page that may be missing."""
    return NOTHING if seen is None or wanted is None else score(seen, wanted)


class ScoreOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("written", "wanted")
    written: Path
    """page that was written: HTML or the compact language"""
    wanted: Path
    """page that it should look like"""
    click: list[str] = []
    """text to click on in both, one after the other, to score what happens; may be given again"""
    out: Path | None = None
    """picture of the difference to write"""


async def acted(documents: Sequence[str], clicks: Sequence[str]) -> float:
    """The interaction score of the first of two pages. Raises PageError."""
    async with Renderer(timeout_s=20) as renderer:
        steps = [[text] for text in clicks]
        seen, wanted = await asyncio.gather(*(renderer.steps(html, steps) for html in documents))
        return interaction(seen, wanted)


@verb
def score_pages(options: ScoreOptions) -> None:
    """Score a page, beside the floors."""
    written, wanted = asyncio.run(looked_at([page_file(options.written), page_file(options.wanted)]))
    if wanted is None:
        raise UserError(f"{options.wanted}: cannot be rendered")
    (plain,) = asyncio.run(looked_at([text_alone(wanted)]))
    found = {"written": compared(written, wanted), "its text alone": compared(plain, wanted)}
    rows = {name: {"score": one.mean} | one.terms for name, one in found.items()}
    if options.click:
        documents = [page_file(options.written), page_file(options.wanted)]
        rows["written"]["interaction"] = asyncio.run(acted(documents, options.click))
    show("score", rows)
    if options.out and written and written.picture and wanted.picture:
        difference(written.picture, wanted.picture).save(options.out)
        print(f"written: {options.out}")


# ---- a model's pages


def warn_if_shrunk(vision: VisionConfig) -> None:
    """Say so where a model is shown less than what a frame holds: letters of six pixels do not survive it."""
    size = navit_size(WIDTH, HEIGHT, vision, patch_limit=vision.in_patch_limit_each_frame)
    if (size.new_w, size.new_h) != (WIDTH, HEIGHT):
        told = f"frames of {WIDTH} x {HEIGHT} are shrunk to {size.new_w} x {size.new_h}"
        print(f"warning: {told}; train with a larger vision.in_patch_limit_each_frame", file=sys.stderr)


@dataclass(frozen=True)
class PageEntry:
    """The task `pages` as an entry of eval/measure.py."""

    options: Record
    difficulty: int
    chat: bool
    name: str = "pages"
    form: Form = "picture"
    thought: bool = False
    tools: bool = False

    @property
    def label(self) -> str:
        """Of tables."""
        return f"{self.name}/{self.difficulty}"


@dataclass
class Written:
    """A page that a model wrote. shown: true, or what stood in the place of what there was to see."""

    shown: str
    side: str
    template: str
    answer: str
    wanted: str
    media: Image | Video
    score: Score = NOTHING
    views: list[View | None] = field(default_factory=list)

    def record(self) -> Record:
        """A line of written.jsonl."""
        return {
            "shown": self.shown,
            "side": self.side,
            "template": self.template,
            "score": self.score.mean,
            **self.score.terms,
            "answer": self.answer,
            "wanted": self.wanted,
        }

    def card(self) -> Record:
        """Its part of the report."""
        seen, wanted = (None if view is None else view.picture for view in self.views)
        media = self.media
        pictures = [Image(one) for one in media.frames] if isinstance(media, Video) else [media]
        clip = [data_uri(one.open().convert("RGB"), "jpeg") for one in pictures]
        both = difference(seen, wanted) if seen and wanted else None
        shown = [one and data_uri(one) for one in (wanted, seen, both)]
        about = {"template": self.template, "side": self.side, "score": self.score.mean}
        return about | {"terms": self.score.terms, "answer": self.answer, "clip": clip, "pictures": shown}


def written_by(question: Question, answer: str) -> Written:
    """What a model made of a problem."""
    seen = question.problem.meta["graph"]
    assert isinstance(seen, Seen)
    shown = question.suffix.removeprefix("/") or "true"
    problem = question.problem
    return Written(shown, problem.category, problem.combination, answer, seen.html, seen.shown)


def scored(written: Sequence[Written]) -> dict[str, list[Score]]:
    """Score all of them; returns the floors: another page, the page's text alone, nothing."""
    documents: list[str | None] = []
    for one in written:
        try:
            documents.append(document_of(one.answer)[0])
        except BadSample:
            documents.append(None)
    true = [one for one in written if one.shown == "true"]
    views = asyncio.run(looked_at([*documents, *(one.wanted for one in written)]))
    for one, seen, wanted in zip(written, views, views[len(written) :]):
        one.views, one.score = [seen, wanted], compared(seen, wanted)

    targets = [one.views[1] for one in true]
    plain = asyncio.run(looked_at([None if view is None else text_alone(view) for view in targets]))
    return {
        "another page": [compared(a, b) for a, b in zip(targets[1:] + targets[:1], targets)],
        "its text alone": [compared(a, b) for a, b in zip(plain, targets)],
        "a blank page": [NOTHING for _ in targets],
    }


def figures(found: Sequence[Score]) -> Record:
    """Mean score with its interval, and the means of the terms."""
    mean: Estimate = mean_estimate([one.mean for one in found])
    terms = {name: fmean(one.terms[name] for one in found) for name in NOTHING.terms}
    return {"score": mean.value, "from": mean.low, "to": mean.high, **terms, "pages": len(found)}


class EvalOptions(Options):
    model: str = MODEL
    """model directory, or embedded:NAME"""
    pages: Path = Path("runs/pages")
    """folder that `earlyfusion website pages` wrote"""
    problems: PositiveInt = 100
    """held-out pages"""
    difficulty: NonNegativeInt = 1
    """0: a picture of the page, 1: a clip, 2: either"""
    pictures: str = "true,grey,swapped"
    """what is shown, one after the other: the clip, grey, that of another page"""
    max_new_tokens: PositiveInt = 256
    """longest page, in tokens"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("runs/website-eval")
    """folder for written.jsonl and report.html"""


@verb
def evaluate(options: EvalOptions) -> None:
    """Score a model on held-out pages, beside its blind rows and the floors."""
    folder = model_folder(options.model)
    model, tokenizer = model_on(folder, options.device), Tokenizer.load(folder)
    warn_if_shrunk(model.config.vision)
    entry = PageEntry({"path": str(options.pages)}, options.difficulty, template_of(folder) == "chat")
    asked = ask(
        model.eval(),
        tokenizer,
        [entry],
        problems=options.problems,
        seed=0,
        max_new_tokens=options.max_new_tokens,
        slots=32,
        pictures=parse_pictures(options.pictures),
    )
    written = [written_by(q, a.answer) for q, a in zip(asked.questions, asked.measured())]
    floors = scored(written)

    rows: dict[str, Record] = {}
    for shown in dict.fromkeys(one.shown for one in written):
        some = [one for one in written if one.shown == shown]
        rows[shown] = figures([one.score for one in some])
        if shown == "true":
            for side in sorted({one.side for one in some}):
                rows[f"true, {side}"] = figures([one.score for one in some if one.side == side])
    rows |= {name: figures(found) for name, found in floors.items()}
    show("score of pages written", rows)

    write_jsonl(options.out / "written.jsonl", [one.record() for one in written])
    data = {"title": f"Pages written by {options.model}", "note": "Video to website", "rows": rows}
    true = [one for one in written if one.shown == "true"]
    templates = {
        name: figures([one.score for one in true if one.template == name])
        for name in sorted({one.template for one in true})
    }
    more = {"templates": templates, "cards": [one.card() for one in true[:SHOWN]]}
    page = write_page(options.out / "report.html", "website.html", data | more)
    print(f"written: {page}, {options.out / 'written.jsonl'}")


class DemoOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("clip",)
    clip: Path | None = None
    """clip (.mp4, .webm, .gif, ...) or screenshot of a page; left out: the first sample beside the model"""
    model: str = MODEL
    """model directory, or embedded:NAME"""
    page: Path | None = None
    """the page itself, to score what was written"""
    max_new_tokens: PositiveInt = 512
    """longest page, in tokens"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("runs/website")
    """folder for page.html and report.html"""


@verb
def demo(options: DemoOptions) -> None:
    """Write the page that a clip shows; tokens are printed as they come."""
    folder, clip, page = model_folder(options.model), options.clip, options.page
    if clip is None:
        clip = next(iter(sorted(folder.glob("*.mp4"))), None)
        if clip is None:
            raise UserError(f"{options.model} has no sample; name a clip: website demo CLIP.mp4")
        # The page of a sample lies beside it, where it is known.
        beside = clip.with_suffix(".txt")
        page = page or (beside if beside.is_file() else None)
    if not clip.is_file():
        raise UserError(f"{clip}: no such file")
    model, tokenizer = model_on(folder, options.device), Tokenizer.load(folder)
    warn_if_shrunk(model.config.vision)
    params = SamplingParams(options.max_new_tokens, 0.0)
    talk = Conversation(model.eval(), tokenizer, params, template=template_of(folder), context=4096)
    talk.begin()
    still = clip.suffix.lower() in (".png", ".jpg", ".jpeg")
    talk.attach(str(clip), "image" if still else "video")
    answer = talk.say(QUESTION, sys.stdout).strip()

    document, repairs = document_of(answer)
    for repair in repairs:
        print(f"repaired: {repair}", file=sys.stderr)
    print(f"written: {write_atomic(options.out / 'page.html', document)}")
    wanted = None if page is None else page_file(page)
    seen, target = asyncio.run(looked_at([document, wanted]))
    shown = [PILImage.open(clip)] if still else clip_frames(clip)
    media: Image | Video = Image(shown[0])
    if not still:
        media = Video(shown[:: 2 * CLIP_FPS], [2.0 * i for i in range(len(shown[:: 2 * CLIP_FPS]))])
    made = Written("true", "", "", answer, wanted or "", media, compared(seen, target), [seen, target])

    rows: dict[str, Record] = {}
    if seen is not None and seen.picture is not None:
        # What a clip shows first is the top of its page; a screenshot is all of it.
        top = seen.picture if still else window(seen.picture, 0)
        rows["screenshot" if still else "first frame"] = {"equal pixels": close_pixels(top, shown[0])}
    if target is not None:
        rows["page"] = {"score": made.score.mean, **made.score.terms}
    show("beside what was shown", rows)
    data: Record = {"title": clip.name, "note": f"Written by {options.model}", "rows": rows}
    print(
        f"report: {write_page(options.out / 'report.html', 'website.html', data | {'cards': [made.card()]})}"
    )


class SiteOptions(ServeOptions):
    model: str = MODEL
    """model directory, or embedded:NAME"""
    question: str = QUESTION
    """what is asked of a clip or a screenshot that comes alone"""


@verb
def serve_site(options: SiteOptions) -> int | None:
    """Drop a clip on a page in the browser, and see the page that the model writes."""
    return serve(**dict(options))
