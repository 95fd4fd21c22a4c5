"""Patches in a row, and a file of letters that says what lies under each.

The picture shows where a colour is, and the file says which letter is there: neither is enough. A program
finds the letter once it is told the place, and no program finds the place. So an answer through a tool needs
eyes, which questions about a stored picture do not: there one program is right for every picture.

Held out: the colours in their order.
"""

from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.kernels.files import Record

FILE = "letters.txt"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIDE = 24
"""Of a patch's place, in pixels."""


@task("shelf")
class Shelf(Task):
    """See the file's head. blind: pictures without their patches. Knobs: places (least, most), letter (what
    is asked: the letter, else the place, from 0)."""

    levels = ({"places": (3, 4), "letter": True}, {"places": (3, 4), "letter": False})

    def __init__(self, blind: bool = False) -> None:
        self.blind = blind

    def draw(self, rng: Random, heldout, knobs):
        """See Task."""
        colours = rng.sample(tuple(COLOURS), rng.randint(*knobs["places"]))
        place = rng.randrange(len(colours))
        picture = Image.new("RGB", (SIDE * len(colours), SIDE), BACKGROUNDS[rng.choice(tuple(BACKGROUNDS))])
        pen = ImageDraw.Draw(picture)
        for number, colour in enumerate(colours):
            left, top = number * SIDE + rng.randint(2, 5), rng.randint(2, 5)
            far = rng.randint(13, 16)
            if not self.blind:
                pen.rectangle((left, top, left + far, top + far), fill=COLOURS[colour])
        letters = rng.sample(LETTERS, len(colours))
        words = ", ".join(colours)
        key = f"shelf/{words}"
        meta: Record = {"thought": words}
        if not knobs["letter"]:
            asked = f"at which place is {colours[place]}?"
            return Problem(asked, picture, words, str(place), str(place), key, "place", meta)
        meta |= {
            "thought": f"place {place}",
            "files": {FILE: " ".join(letters) + "\n"},
            "program": f'open("{FILE}").read().split()[{place}]',
        }
        asked = f"at which place is {colours[place]}? Say the letter of that place in {FILE}."
        return Problem(asked, picture, words, letters[place], letters[place], key, "letter", meta)
