"""What is generated stays what it was: fingerprints of problems, samples and questions, taken once and kept.

A run, a benchmark's scores and a study's controls are comparable over time only while these hold. A generator
that must change gives its users a new version and this file a new fingerprint.
"""

import hashlib

import numpy as np
import pytest
from PIL import Image as PILImage

from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tasks.registry import EXAMS, PROCEDURAL, make_task

PROBLEMS = {
    "counting": "03159245c4a8f5b2",
    "colour_shape": "dcd1eda69aac396c",
    "relation": "effb4f75c6e53256",
    "grounding": "d0e4c110c2162130",
    "pointing": "8011008332f7950d",
    "polygon": "c65c1f068d701f0e",
    "ocr": "ad27c76fb2b0881e",
    "chart_value": "aaf2222113f41be1",
    "jigsaw": "9117d1e8c67a85d8",
    "maze": "441cf9d3763b5d78",
    "odd_one_out": "e5bffb4d33d401bf",
    "geometry": "50e49abca2f51f37",
    "arithmetic": "7671aefb70f631bb",
    "rule": "9ca7bfb0c9a10864",
}
SAMPLES = {
    "easy_vqa": "c53af80be33a6e88 906992ffb1c20cf7",
    "synth_scenes": "5c88f0a5beb3b033 7b89eab6eb7fea9b",
    "synth_charts": "4aea56fb33c3ae57 52510e556254d373",
    "synth_words": "db9ff62be59ac38d b2362fc1c0bac9e2",
    "synth_grid": "212fa84b25834a55 c33da429217c328c",
    "synth_clips": "957b0d77d4e21f73 4d8d85c7ba48f5da",
    "zero_vision": "3f3142aa39641a79 b80207113dec9dbd",
    "chat_scenes": "6ee5c3178c9497ff 1c06c6e85d2121a5",
    "problems": "213e2a2dabbc2b53 758a3b553d399c42",
}
QUESTIONS = {
    "counting": "d9584faac55a732e",
    "scene": "b0edd0a736512cb3",
    "grounding": "4da45ed56c041ffa",
    "ocr": "858865d944cf12e6",
    "chart": "6215ef28ee08f847",
    "board": "d46c182d32c7a53f",
    "video_qa": "8deff9de185d3470",
}
"""Hash over texts, answers and pixels; of samples also the source's own fingerprint."""
SKILLS = {
    "tasks": {"counting": 2, "relation": 1, "maze": 1},
    "forms": {"picture": 2, "twin": 1, "rendered": 1},
    "thought": 0.3,
    "difficulty": {"counting": 1},
}


def feed(digest, thing):
    if isinstance(thing, PILImage.Image):
        digest.update(f"{thing.mode}{thing.size}".encode() + thing.tobytes())
    elif isinstance(thing, np.ndarray):
        digest.update(f"{thing.shape}".encode() + thing.tobytes())
    elif isinstance(thing, list | tuple):
        for part in thing:
            feed(digest, part)
    elif hasattr(thing, "__dataclass_fields__"):
        digest.update(type(thing).__name__.encode())
        feed(digest, [getattr(thing, name) for name in thing.__dataclass_fields__])
    else:
        digest.update(repr(thing).encode() + b"\0")


def fingerprint(things):
    digest = hashlib.sha256()
    feed(digest, list(things))
    return digest.hexdigest()[:16]


def test_every_generator_has_a_fingerprint():
    assert set(PROBLEMS) == set(PROCEDURAL) and set(QUESTIONS) == set(EXAMS)


@pytest.mark.parametrize("name", PROBLEMS)
def test_400_problems_of_a_task(name):
    task = make_task(name)

    def content(number):
        level = (number // 2) % len(task.levels)
        made = task.sample(number, ("train", "test")[number % 2], level)
        asked = [made.key, made.question, made.picture, made.description, made.answer, made.target]
        return [*asked, made.combination, made.category]

    assert fingerprint(map(content, range(400))) == PROBLEMS[name]


@pytest.mark.parametrize("kind", SAMPLES)
def test_200_samples_of_a_source(kind):
    options = SKILLS if kind == "problems" else {}
    source = build_source(SourceConfig(name=kind, kind=kind, options=options), seed=3, val_fraction=0.1)
    trained = [source.get(number, number % 3) for number in range(100)]
    others = [source.heldout(number) for number in range(50)] + [source.texts(number) for number in range(50)]
    assert f"{fingerprint(trained + others)} {source.fingerprint()}" == SAMPLES[kind]


@pytest.mark.parametrize("name", QUESTIONS)
def test_400_questions_of_an_exam(name):
    def content(problem):
        media = problem.media()
        shown = media.image if hasattr(media, "image") else [media.frames, media.timestamps]
        return [problem.question, problem.answer, problem.category, shown, problem.description]

    assert fingerprint(map(content, make_task(name).exam(400, 0))) == QUESTIONS[name]
