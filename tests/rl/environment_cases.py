"""Environments for tests: a walk shown in pictures, and some that do what none should."""

import asyncio
import os
import time

import numpy as np
from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Text
from earlyfusion.rl.environments.base import Environment, Step


def frame(seed, place):
    """A picture of its own for every walk and place."""
    pixels = np.random.default_rng([seed, place]).integers(0, 256, (28, 28 + 14 * (place % 2), 3))
    return PILImage.fromarray(pixels.astype(np.uint8))


class Walk(Environment):
    """ "go" goes one place on and is paid, "end" ends, anything else is told so. After `length` places it is
    over."""

    def __init__(self, length=3, wait_s=0.0):
        self.length, self.wait_s = length, wait_s

    def reset(self, problem):
        self.seed, self.place = problem.meta["seed"], 0
        return [Message("system", (Text("walk"),)), self.shown("here")]

    def step(self, message):
        if self.wait_s:
            # Of its own for every walk: the order of the replies is not that of the questions.
            time.sleep(self.wait_s * (1 + self.seed % 3))
        if message.text not in ("go", "end"):
            return "go or end", None, False
        self.place += message.text == "go"
        done = message.text == "end" or self.place == self.length
        return self.shown(str(self.place)), 0.5 if message.text == "go" else None, done

    def shown(self, text):
        return Message("user", (Image(frame(self.seed, self.place)), Text(text)))


class Plain:
    """Neither a subclass nor a thread: coroutines, text alone, nothing paid."""

    async def reset(self, problem):
        await asyncio.sleep(0)
        return ["again?"]

    async def step(self, message):
        await asyncio.sleep(0.001)
        return ["again?"], None, message.text == "no"


class Faulty(Walk):
    """Does `what` in its second step, in every second episode."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, message):
        if self.place == 1 and self.seed % 4 == 0:
            if self.what == "hang":
                time.sleep(60)
            if self.what == "die":
                os._exit(3)
            if self.what == "exit":
                raise SystemExit(3)
            if self.what == "silent":
                return [], None, False
            if self.what == "nan":
                return [], float("nan"), False
            if self.what == "shape":
                return "what?", True
            raise ValueError("the walk is flooded")
        return super().step(message)


class Long(Walk):
    """Makes no sense in less than three turns."""

    least_turns = 3


class Restless(Walk):
    """Begins every time elsewhere."""

    begun = 0

    def reset(self, problem):
        Restless.begun += 1
        self.seed, self.place = Restless.begun, 0
        return [self.shown("here")]


class Thousand(Environment):
    """Four turns of 100 ms each."""

    def __init__(self):
        self.turns = 0

    def reset(self, problem):
        return [Message("user", (Text("?"),))]

    async def step(self, message):
        await asyncio.sleep(0.1)
        self.turns += 1
        return Step((Message("user", (Text("more"),)),), 0.25, self.turns == 4)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    What stands here is not shown.
    """
    return a + b


async def draw(colour: str) -> PILImage.Image:
    """A picture of a colour."""
    await asyncio.sleep(0)
    return PILImage.new("RGB", (28, 28), colour)


def fail(why: str) -> str:
    raise OSError(why)


def untyped(a):
    return a
