"""`earlyfusion data examples FOLDER`: a few pictures with captions, to try the commands on.

shape.png is a picture of easy-VQA's test split, scene-00.png and on are rendered (data/synth, held-out
combinations).
"""

import shutil
from pathlib import Path
from random import Random

from earlyfusion.data.errors import DataError
from earlyfusion.data.sources.embedded import load_split
from earlyfusion.data.synth.graph import Scene

# With easy-VQA's one it makes a dozen.
SCENES = 11


def write_examples(folder: Path) -> int:
    """Write the pictures and a .txt with the caption beside each; returns how many. Raises DataError for a
    file."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    first = load_split("test")[0]
    shutil.copyfile(first.path, folder / "shape.png")
    # Its own questions describe the picture: no words of ours.
    answers = {answer for _, answer in first.questions if answer not in ("yes", "no")}
    words = sorted(
        answers, key=lambda answer: answer in ("circle", "rectangle", "triangle")
    )  # the colour, then the shape
    (folder / "shape.txt").write_text(f"a {' '.join(words)}\n", encoding="utf-8")
    for number in range(SCENES):
        rng = Random(f"examples/{number}")
        scene = Scene.make(rng, min_side=96, max_side=160, max_objects=4, heldout=True)
        scene.draw().save(folder / f"scene-{number:02d}.png")
        (folder / f"scene-{number:02d}.txt").write_text(scene.caption(rng) + "\n", encoding="utf-8")
    return SCENES + 1
