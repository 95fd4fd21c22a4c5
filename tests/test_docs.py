"""The pages of docs hold what the code says: keys, recipes, error messages, versions."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from earlyfusion.data.sources.base import KINDS
from earlyfusion.pipeline.config.arguments import describe
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.study.plan import StudyConfig
from earlyfusion.rl.recipe import RLConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOMS = ("kernels", "vision", "model", "data", "eval", "pipeline", "rl")


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_key_has_a_meaning():
    for schema in (RunConfig, RLConfig, StudyConfig):
        rows = describe(schema)
        assert len(rows) > 20 and not [key for key, _, _, meaning in rows if not meaning]


def test_the_page_of_keys_is_what_the_code_says():
    """In a process of its own: other tests register kinds of sources."""
    code = "import sys; sys.path.insert(0, 'docs'); import reference; sys.stdout.write(reference.page())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == read("config.md"), "stale: python docs/reference.py"
    keys = re.findall(r"^\| `([^`]+)` \|", done.stdout, re.MULTILINE)
    assert {key for key, *_ in (*describe(RunConfig), *describe(RLConfig))} <= set(keys)
    assert {"model.preset", "model.scale", "vision.preset", "--max-new-tokens", "--port"} <= set(keys)
    told = {f"{kind.name}: {key}" for kind in KINDS.values() for key, *_ in describe(kind.options)}
    assert len(told) > 20 and told <= set(keys)


def messages():
    """Every string of the source, what is filled in written as <>."""
    found = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "<>" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.fixture(scope="module")
def written():
    return "\0".join(messages())


def quoted(page):
    """The messages that a page quotes, what is filled in written as <>."""
    lines = re.findall(r"^> `(.*)`$", page, re.MULTILINE)
    return [re.sub(r"<[a-z ]+>", "<>", line) for line in lines]


def test_every_message_of_the_questions_is_raised_by_the_code(written):
    found = quoted(read("faq.md"))
    assert len(found) >= 25 and len(set(found)) == len(found)
    assert not [message for message in found if message not in written]
    assert 15 <= len(re.findall(r"^\*\*.*\?\*\*", read("faq.md"), re.MULTILINE)) <= 30
    # The check itself: a word that the code does not write is seen.
    assert found[0].replace("shipped", "delivered") not in written


def test_every_recipe_that_ships_is_on_its_page_and_no_other():
    folders = ("pipeline/recipes", "rl/recipes")
    shipped = {path.stem for folder in folders for path in (ROOT / folder).glob("*.toml")}
    cells = re.findall(r"^\| (`[^|]*`) \|", read("recipes.md"), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(named) == sorted(shipped)


def test_the_figures_of_the_recipes_were_measured():
    """Each stands in measurements.md or log.md; counts of parameters are those of test_plan."""
    known = read("measurements.md") + read("log.md")
    rows = [line.split("|") for line in read("recipes.md").splitlines() if line.startswith("| `")]
    figures = [figure for row in rows for figure in re.findall(r"[−+]?\d*\.\d{2,}", row[5])]
    times = [row[4].split(",")[0].strip() for row in rows if re.search(r"\d", row[4])]
    assert len(figures) > 15 and len(times) > 7
    assert not [one for one in (*figures, *times) if one not in known]


def test_links_between_the_pages_exist():
    pages = [*DOCS.glob("*.md"), ROOT / "CHANGELOG.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if "://" in place:
                continue
            target = (page.parent / place) if place else page
            assert target.exists(), (page.name, place)
            if anchor:
                heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, (page.name, place, anchor)


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in DOCS.glob("*.md")} - {"kernels.md"}
    assert not [name for name in pages if f"](docs/{name})" not in readme]
    assert "](CHANGELOG.md)" in readme and len(readme.splitlines()) <= 150


def test_the_citation_is_of_this_version():
    """The keys of the format 1.2.0 that are required, and values as the package has them."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= cited.keys()
    assert cited["type"] == "software" and all(author.keys() == {"name"} for author in cited["authors"])
    assert (cited["title"], cited["version"]) == (project["name"], project["version"])
    assert cited["license"] == project["license"] and set(cited["keywords"]) <= set(project["keywords"])


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", head) for head in heads[1:])
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    found = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert found and set(found) <= set(kinds)
    # Its days are those of the diary.
    days = set(re.findall(r"\d{4}-\d\d-\d\d", text))
    assert days <= set(re.findall(r"^## (\d{4}-\d\d-\d\d)$", read("log.md"), re.MULTILINE))
