"""Puzzles and calculation; the answer follows from what is shown, and each has its own held-out side.

odd_one_out   a board of shapes, all alike in some way but one. Held out: (colour, shape) pairs
maze          cells with walls, a start and a goal; the answer is a way as moves. Held out: walls, whatever
              the start. A maze and its seven mirrored and turned forms are one combination, so no test
              maze is a turned training maze
jigsaw        square tiles whose touching edges have the same colour, shuffled; gray edges are the frame.
              The puzzle has one solution (boards with a second one are thrown away), so the tiles alone
              give the answer: for every place in reading order, the number of the tile that belongs
              there. Held out: solved boards
arithmetic, geometry   whole numbers; geometry is drawn to scale with the given lengths and angles beside
              it, its twin tells them in words. Held out: the numbers with their kind, in either order
text_math     word problems from JSON lines, GSM8K (openai/grade-school-math) and any file like it: text in,
              a number out. A row has a question (or problem, prompt) and an answer (or solution, target)
              that is a number or ends with "#### number"
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product
from math import radians, tan
from operator import eq
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS, SHAPES, Pair, font, paint, pair_key, pairs
from earlyfusion.data.synth.panels import INK, PAPER, board_words, render_text
from earlyfusion.data.tasks import scoring
from earlyfusion.data.tasks.problem import Problem, Task, TaskError, task


def draw_things(things: list[Pair], columns: int, side: int, background: str) -> Image.Image:
    """The board in reading order, RGB: one shape in the middle of each cell of `side` pixels."""
    size = columns * side, len(things) // columns * side
    picture = Image.new("RGB", size, BACKGROUNDS[background])
    pen = ImageDraw.Draw(picture)
    # Shapes of neighbouring cells must not touch.
    inset = max(1, side // 6)
    for index, (colour, shape) in enumerate(things):
        # A rectangle is flatter than a square, or the two could not be part apart.
        flat = side // 4 if shape == "rectangle" else inset
        x, y = index % columns * side, index // columns * side
        paint(pen, shape, (x + inset, y + flat, x + side - inset, y + side - flat), COLOURS[colour])
    return picture


@task("odd_one_out")
class OddOneOut(Task):
    """Which cell is not like the others; the answer is its row and column, and nothing else earns a reward.

    Knobs: rows, columns, differ (colour, shape), vary (the other property takes two values at random, each at
    least twice, so that only one property tells), side of a cell in pixels.
    """

    levels = (
        {"rows": 2, "columns": 2, "differ": ("colour",), "vary": False, "side": 24},
        {"rows": 3, "columns": 3, "differ": ("colour", "shape"), "vary": False, "side": 20},
        {"rows": 3, "columns": 3, "differ": ("colour", "shape"), "vary": True, "side": 20},
        {"rows": 4, "columns": 4, "differ": ("colour", "shape"), "vary": True, "side": 20},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns, differ = knobs["rows"], knobs["columns"], rng.choice(knobs["differ"])
        # The odd one carries the combination; the others are always of training.
        odd = rng.choice(pairs(heldout))

        # The others share another value of what differs; in the other property, odd's own value is one.
        part = ("colour", "shape").index(differ)
        values = tuple(COLOURS), SHAPES
        common = rng.choice([value for value in values[part] if value != odd[part]])
        free = [value for value in values[1 - part] if value != odd[1 - part]]
        free = [odd[1 - part], *rng.sample(free, 1 if knobs["vary"] else 0)]
        others = [(common, value) if part == 0 else (value, common) for value in free]
        if not set(others) <= set(pairs(False)):
            return None
        # Any place, so that no corner is the better guess.
        place = rng.randrange(rows * columns)
        things = [rng.choice(others) for _ in range(rows * columns)]
        things[place] = odd

        # Exactly one stands out by what differs, and none by the other property.
        if knobs["vary"] and min(Counter(thing[1 - part] for thing in things).values()) < 2:
            return None

        # The twin lists all cells: it does not say which one is odd.
        words = board_words([" ".join(thing) for thing in things], columns)
        answer = [place // columns + 1, place % columns + 1]
        picture = draw_things(things, columns, knobs["side"], rng.choice(tuple(BACKGROUNDS)))
        target = f"row {answer[0]}, column {answer[1]}"
        return Problem("which one is the odd one out?", picture, words, answer, target, pair_key(odd), differ)

    def score(self, problem, answer):
        """1 for exactly the two numbers, row first, with nothing behind them."""
        return float(scoring.integers(answer) == problem.answer)


Cell = tuple[int, int]
"""(row, column) from 0."""
Doors = Collection[tuple[Cell, Cell]]
"""Neighbours without a wall between them, the smaller of a pair first."""
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
# U, D, L, R: the short form of an answer.
LETTERS = {name[0].upper(): name for name in MOVES}
# A run of capitals that stands alone: the L of "Left" is none.
_RUN = re.compile(r"(?<![A-Za-z])[UDLR](?:[ ,;>-]{0,3}[UDLR])*(?![A-Za-z])")
LONGEST = 4
"""A way of more than this many moves for every cell earns nothing."""


def door(a: Cell, b: Cell) -> tuple[Cell, Cell]:
    """The door between two neighbours."""
    return min(a, b), max(a, b)


def ways(doors: Doors, cell: Cell) -> dict[str, Cell]:
    """Moves that no wall stops, with the cell that each leads to."""
    every = {move: (cell[0] + down, cell[1] + right) for move, (down, right) in MOVES.items()}
    return {move: there for move, there in every.items() if door(cell, there) in doors}


def carve(rng: Random, rows: int, columns: int, extra: float) -> frozenset[tuple[Cell, Cell]]:
    """Doors of a maze in which every cell can be reached; `extra` is the share of the other walls that is
    opened."""
    # Every wall between two cells is a door that may be opened.
    every = {((r, c), (r, c + 1)) for r, c in product(range(rows), range(columns - 1))}
    every |= {((r, c), (r + 1, c)) for r, c in product(range(rows - 1), range(columns))}

    # A walk without plan that goes back where it is stuck: it ends when every cell has been seen.
    path = [(rng.randrange(rows), rng.randrange(columns))]
    seen, doors = set(path), set()
    while path:
        free = [cell for cell in ways(every, path[-1]).values() if cell not in seen]
        if not free:
            path.pop()
            continue
        there = rng.choice(free)
        doors.add(door(path[-1], there))
        seen.add(there)
        path.append(there)
    # Walls opened afterwards make rings, so that a way is not the only one.
    # Sorted: a set has another order in every process, and the draw depends on it.
    closed = sorted(every - doors)
    return frozenset(doors.union(rng.sample(closed, round(extra * len(closed)))))


def distances(doors: Doors, goal: Cell) -> dict[Cell, int]:
    """Fewest moves from every cell to the goal, breadth first."""
    found, line = {goal: 0}, [goal]
    # The list grows while it is gone through.
    for here in line:
        for there in ways(doors, here).values():
            if there not in found:
                found[there] = found[here] + 1
                line.append(there)
    return found


def shortest(doors: Doors, start: Cell, goal: Cell) -> list[str]:
    """One shortest way as moves, the first in the order up, down, left, right where there are several."""
    left, here, moves = distances(doors, goal), start, []
    while here != goal:
        # Every step goes down by one on the table of distances; the first of equals is taken.
        move, here = min(ways(doors, here).items(), key=lambda way: left[way[1]])
        moves.append(move)
    return moves


def canonical(doors: Doors, rows: int, columns: int) -> str:
    """One name for a maze and its seven turned and mirrored forms."""
    names = []
    # Two mirrors in turn, one along the diagonal: after eight steps every form has come.
    for number in range(8):
        if number % 2:
            doors = [door((rows - 1 - a[0], a[1]), (rows - 1 - b[0], b[1])) for a, b in doors]
        else:
            doors = [door(a[::-1], b[::-1]) for a, b in doors]
            rows, columns = columns, rows
        listed = [f"{a[0]},{a[1]}-{b[0]},{b[1]}" for a, b in sorted(doors)]
        names.append(f"{rows}x{columns}/{';'.join(listed)}")
    return min(names)


def draw_maze(doors: Doors, rows: int, columns: int, ends: dict[str, Cell], side: int) -> Image.Image:
    """The picture, RGB: black walls, coloured cells; cells of `side` pixels."""
    picture = Image.new("RGB", (columns * side + 2, rows * side + 2), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    # The squares leave the walls of their cells free.
    inset = max(2, side // 4)
    for colour, (r, c) in ends.items():
        x, y, far = c * side + 1 + inset, r * side + 1 + inset, side - 2 * inset - 1
        pen.rectangle((x, y, x + far, y + far), fill=COLOURS[colour])

    # A wall above and at the left of every cell without a door there, and around the whole.
    for r, c in product(range(rows + 1), range(columns + 1)):
        x, y = c * side, r * side
        if c < columns and ((r - 1, c), (r, c)) not in doors:
            pen.rectangle((x, y, x + side + 1, y + 1), fill=COLOURS["black"])
        if r < rows and ((r, c - 1), (r, c)) not in doors:
            pen.rectangle((x, y, x + 1, y + side + 1), fill=COLOURS["black"])
    return picture


def maze_map(doors: Doors, rows: int, columns: int, ends: dict[str, Cell]) -> list[str]:
    """The maze in characters: a wall is #, a cell or a door is a dot, an end its letter."""
    table = [["#"] * (2 * columns + 1) for _ in range(2 * rows + 1)]
    for r, c in product(range(rows), range(columns)):
        table[2 * r + 1][2 * c + 1] = "."
    for (r, c), (below, right) in doors:
        table[r + below + 1][c + right + 1] = "."
    for letter, (r, c) in ends.items():
        table[2 * r + 1][2 * c + 1] = letter
    return ["".join(row) for row in table]


def parse_moves(text: str) -> list[str]:
    """The moves of a text: the words up, down, left, right, or else its longest run of the capitals U, D, L,
    R. None where something follows the last move."""
    text = scoring.tame(text)
    # A policy that goes on after its way has not ended its answer.
    last = (re.findall(r"\w+", text) or [""])[-1]
    if last.lower() not in MOVES and not set(last) <= set(LETTERS):
        return []
    words = re.findall(r"\b(?:up|down|left|right)\b", text.lower())
    runs = [re.sub(r"[^UDLR]", "", run) for run in _RUN.findall(text)]
    return words or [LETTERS[letter] for letter in max(runs, key=len, default="")]


@task("maze")
class Maze(Task):
    """See the file's head. Reward of a way that hits no wall and reaches the goal: half, and half times
    shortest / its length. Else 0.3 times the share of the distance to the goal that is gone where it ends or
    hits a wall.

    compact: the words are a map of characters, a line a row, in place of a line for every cell. blind:
    pictures of the ends without the walls. Knobs: rows, columns, extra (share of walls opened), least (moves
    of the shortest way), side of a cell in pixels.
    """

    levels = (
        {"rows": 3, "columns": 3, "extra": 0.25, "least": 2, "side": 16},
        {"rows": 4, "columns": 4, "extra": 0.15, "least": 3, "side": 16},
        {"rows": 5, "columns": 5, "extra": 0.1, "least": 5, "side": 16},
        {"rows": 7, "columns": 7, "extra": 0.05, "least": 8, "side": 14},
    )

    def __init__(self, compact: bool = False, blind: bool = False) -> None:
        self.compact, self.blind = compact, blind

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        doors = carve(rng, rows, columns, knobs["extra"])
        key = f"maze/{canonical(doors, rows, columns)}"
        # Asked here already: what comes next is the dear part.
        if self.heldout(key) != heldout:
            return None
        cells = list(product(range(rows), range(columns)))
        # Not part of the combination: another start is the same maze.
        start, goal = rng.sample(cells, 2)
        way = shortest(doors, start, goal)
        if len(way) < knobs["least"]:
            return None

        lines = [f"maze of {rows} rows and {columns} columns"]
        for r, c in cells:
            lines.append(f"row {r + 1}, column {c + 1}: open {', '.join(ways(doors, (r, c)))}")
        for name, (r, c) in (("green start", start), ("red goal", goal)):
            lines.append(f"{name} at row {r + 1}, column {c + 1}")

        if self.compact:
            lines = maze_map(doors, rows, columns, {"g": start, "r": goal})
        shown = {door(a, b) for a, b in product(cells, cells)} if self.blind else doors
        picture = draw_maze(shown, rows, columns, {"green": start, "red": goal}, knobs["side"])
        meta = {"doors": doors, "start": start, "goal": goal}
        question, category = "which moves lead from green to red?", f"{rows}x{columns}"
        return Problem(question, picture, "\n".join(lines), way, " ".join(way), key, category, meta)

    def score(self, problem, answer):
        """See the class."""
        moves, meta = parse_moves(answer), problem.meta
        here, left = meta["start"], distances(meta["doors"], meta["goal"])
        # A walk at random long enough reaches every goal.
        if not 0 < len(moves) <= LONGEST * len(left):
            return 0.0
        far = left[here]
        for move in moves:
            # The walk ends at the first wall, and at the goal whatever follows.
            there = ways(meta["doors"], here).get(move)
            if here == meta["goal"] or there is None:
                break
            here = there
        if here == meta["goal"]:
            return 0.5 + 0.5 * len(problem.answer) / len(moves)
        return 0.3 * max(0.0, 1.0 - left[here] / far)


FRAME = "gray"
# All but gray and black: gray is the frame, black is hard to tell from the numbers.
INNER = ("red", "green", "blue", "yellow", "purple", "orange", "teal", "brown")
ASK = "lay the tiles so that touching edges match and gray is outside: which tile is at each place?"
SIDES = ("top", "right", "bottom", "left")
Tile = tuple[str, str, str, str]
"""Colours of the top, right, bottom and left edge."""


def solved_board(rng: Random, rows: int, columns: int, colours: int) -> list[Tile]:
    """The tiles of a random board in reading order, inner edges of the first `colours` colours."""
    chosen = rng.sample(INNER, colours)
    # Edges are drawn once each, so that the two tiles that share one agree.
    down = {place: rng.choice(chosen) for place in product(range(1, rows), range(columns))}
    across = {place: rng.choice(chosen) for place in product(range(rows), range(1, columns))}

    tiles = []
    for r, c in product(range(rows), range(columns)):
        top, bottom = down.get((r, c), FRAME), down.get((r + 1, c), FRAME)
        left, right = across.get((r, c), FRAME), across.get((r, c + 1), FRAME)
        tiles.append((top, right, bottom, left))
    return tiles


def solutions(tiles: Sequence[Tile], columns: int, placed: tuple[int, ...] = ()) -> int:
    """In how many ways the tiles that are left can be laid without turning them, after those `placed` (in
    reading order); no more than two are told apart."""
    place = len(placed)
    if place == len(tiles):
        return 1
    r, c = divmod(place, columns)
    # Only two neighbours are laid already in reading order: the one above and the one before.
    above = tiles[placed[-columns]][2] if r else FRAME
    before = tiles[placed[-1]][1] if c else FRAME

    count = 0
    for index, (top, right, bottom, left) in enumerate(tiles):
        # The frame is where the board ends, and nowhere else; more than one solution is all that is asked.
        ends = (right == FRAME, bottom == FRAME) == (c == columns - 1, place + columns >= len(tiles))
        if count < 2 and index not in placed and (top, left) == (above, before) and ends:
            count += solutions(tiles, columns, (*placed, index))
    return count


def draw_tiles(tiles: Sequence[Tile], columns: int, side: int) -> Image.Image:
    """The tiles in reading order with their numbers, RGB: four triangles of `side` pixels each, white lines
    between."""
    rows, white = -(-len(tiles) // columns), (255, 255, 255)
    picture = Image.new("RGB", (columns * (side + 2) + 2, rows * (side + 2) + 2), white)
    pen = ImageDraw.Draw(picture)
    for index, tile in enumerate(tiles):
        r, c = divmod(index, columns)
        left, top = 2 + c * (side + 2), 2 + r * (side + 2)
        right, bottom = left + side - 1, top + side - 1
        x, y = left + side // 2, top + side // 2

        # Four triangles that meet in the middle, and the number on a white square.
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        for start, stop, colour in zip(corners, corners[1:], tile):
            pen.polygon([start, stop, (x, y)], fill=COLOURS[colour])
        size = max(8, side // 3)
        half = size // 2
        pen.rectangle((x - half, y - half, x + half, y + half), fill=white)
        pen.text((x, y), str(index + 1), fill=(10, 10, 10), font=font(size), anchor="mm")
    return picture


@task("jigsaw")
class Jigsaw(Task):
    """See the file's head. Reward: share of places with the right tile; 0 for anything that is no
    permutation.

    Knobs: rows, columns, colours (fewer are harder), side of a tile in pixels.
    """

    levels = (
        {"rows": 1, "columns": 3, "colours": 3, "side": 20},
        {"rows": 2, "columns": 2, "colours": 4, "side": 24},
        {"rows": 2, "columns": 3, "colours": 4, "side": 24},
        {"rows": 3, "columns": 3, "colours": 4, "side": 24},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        board = solved_board(rng, rows, columns, knobs["colours"])
        # Tiles are not turned, only mixed.
        order = list(range(len(board)))
        rng.shuffle(order)
        tiles = [board[index] for index in order]
        # Two equal tiles could be exchanged, and any second solution would be right as well.
        if len(set(board)) < len(board) or solutions(tiles, columns) != 1:
            return None

        # The answer: for every place the number of its tile.
        answer = [order.index(place) + 1 for place in range(len(board))]
        lines = [f"{len(tiles)} tiles for {rows} rows and {columns} columns"]
        for number, tile in enumerate(tiles, 1):
            edges = [f"{side} {colour}" for side, colour in zip(SIDES, tile)]
            lines.append(f"tile {number}: {', '.join(edges)}")

        size = f"{rows}x{columns}"
        key = "/".join(["jigsaw", size, *map("-".join, board)])
        picture, target = draw_tiles(tiles, columns, knobs["side"]), " ".join(map(str, answer))
        return Problem(ASK, picture, "\n".join(lines), answer, target, key, size)

    def score(self, problem, answer):
        """See the class."""
        numbers, gold = scoring.integers(answer), problem.answer
        # A list of one tile said nine times would be right somewhere.
        permutation = sorted(numbers) == sorted(gold)
        return permutation * sum(map(eq, numbers, gold)) / len(gold)


# Whole numbers on all three sides, so that the answer is a whole number too.
TRIPLES = "3-4-5 5-12-13 6-8-10 8-15-17 7-24-25 9-12-15 20-21-29 12-16-20 10-24-26 12-35-37 15-20-25 9-40-41"
TRIPLES += " 15-36-39 16-30-34 18-24-30"
LABEL = 10
Mark = tuple[float, float, object, str, int]
"""A label: x, y in pixels, what it says, Pillow's anchor, size of the font."""


@task("arithmetic")
class Arithmetic(Task):
    """The value of an expression, seen as a picture of it.

    Knobs: terms, largest (number), operations (of "+-*"), size of the font in pixels. "*" binds more than "+"
    and "-".
    """

    # "3 + 4 = 7" says 7.
    scorer = staticmethod(scoring.number)
    levels = (
        {"terms": 2, "largest": 9, "operations": "+", "size": 16},
        {"terms": 2, "largest": 20, "operations": "+-", "size": 16},
        {"terms": 3, "largest": 20, "operations": "+-", "size": 14},
        {"terms": 3, "largest": 30, "operations": "+-*", "size": 14},
        {"terms": 4, "largest": 99, "operations": "+-*", "size": 12},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        # From 1 on: a term of 0 would leave nothing to calculate.
        numbers = [rng.randint(1, knobs["largest"]) for _ in range(knobs["terms"])]
        signs = [rng.choice(knobs["operations"]) for _ in numbers[1:]]

        text = str(numbers[0])
        for sign, number in zip(signs, numbers[1:]):
            text += f" {sign} {number}"
        # Only numbers and signs of our own: Python's rules are those of school.
        result = eval(text)

        # Sorted, so that 3 + 4 and 4 + 3 stand on one side of the split.
        key = f"arithmetic/{''.join(sorted(signs))}/{','.join(map(str, sorted(numbers)))}"
        picture = render_text(text, size=knobs["size"])
        category = f"{knobs['terms']} terms"
        return Problem("what is the result?", picture, text, result, str(result), key, category)


@task("geometry")
class Geometry(Task):
    """Perimeter and area of rectangles, the missing angle of a triangle, the hypotenuse of a right triangle.

    Knobs: kinds, largest (side of a rectangle), side of the picture in pixels.
    """

    scorer = staticmethod(scoring.number)
    levels = (
        {"kinds": ("perimeter",), "largest": 9, "side": 64},
        {"kinds": ("perimeter", "area"), "largest": 12, "side": 64},
        {"kinds": ("perimeter", "area", "angle"), "largest": 20, "side": 80},
        {"kinds": ("area", "angle", "hypotenuse", "missing"), "largest": 40, "side": 96},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        kind, side = rng.choice(knobs["kinds"]), knobs["side"]
        if kind == "hypotenuse":
            a, b, answer = map(int, rng.choice(TRIPLES.split()).split("-"))
            # The longer leg may lie along either side.
            if rng.random() < 0.5:
                a, b = b, a
            words = f"right triangle with the legs {a} and {b} and the hypotenuse x"
            question, picture = "how long is x?", draw_right_triangle(a, b, side)
        elif kind == "angle":
            a, b = rng.randint(25, 90), rng.randint(25, 90)
            answer = 180 - a - b
            # A sharper angle at the top leaves no room for its label.
            if answer < 20:
                return None
            words = f"triangle with the angles {a}, {b} and x degrees"
            question, picture = "how large is x?", draw_triangle(a, b, side)
        else:
            a, b = rng.randint(1, knobs["largest"]), rng.randint(1, knobs["largest"])
            words, question = f"rectangle of width {a} and height {b}", f"what is the {kind}?"
            answer, beside, inside = 2 * (a + b), str(b), ""
            if kind == "area":
                answer = a * b
            elif kind == "missing":
                words, question = f"rectangle of width {a}, height x and area {a * b}", "how long is x?"
                answer, beside, inside = b, "x", str(a * b)
            picture = draw_rectangle(a, b, beside, inside, side)

        # Without order: a rectangle of 3 by 4 and one of 4 by 3 have one answer.
        key = f"geometry/{kind}/{min(a, b)}/{max(a, b)}"
        return Problem(question, picture, words, answer, str(answer), key, kind)


def figure(side: int, corners: list[tuple[float, float]], *marks: Mark) -> Image.Image:
    """A white square, RGB [side, side], with a closed blue line and labels."""
    picture = Image.new("RGB", (side, side), PAPER)
    pen = ImageDraw.Draw(picture)
    # A rectangle is told by two corners, all else by its outline.
    if len(corners) == 2:
        pen.rectangle(corners, outline=COLOURS["blue"], width=2)
    else:
        pen.polygon(corners, outline=COLOURS["blue"], width=2)
    for x, y, text, anchor, size in marks:
        pen.text((x, y), str(text), fill=INK, font=font(size), anchor=anchor)
    return picture


def draw_rectangle(width: int, height: int, beside: str, inside: str, side: int) -> Image.Image:
    """A rectangle to scale, its width under it, other labels at its right and inside."""
    scale = (side - 24) / max(width, height)
    # At least six pixels wide, or the lines of a thin one would meet.
    right, bottom = 4 + max(6, round(width * scale)), 4 + max(6, round(height * scale))
    return figure(
        side,
        [(4, 4), (right, bottom)],
        ((4 + right) // 2, bottom + 3, width, "ma", LABEL),
        (right + 3, (4 + bottom) // 2, beside, "lm", LABEL),
        (side // 2 - 4, side // 2 - 6, inside, "mm", LABEL),
    )


def draw_triangle(left: int, right: int, side: int) -> Image.Image:
    """A triangle with two angles (degrees) at its base written inside, "x" at the top."""
    # The base as wide as the picture, or as narrow as the height asks for.
    # The height over the base is shared as the slopes of the two sides are.
    a, b = (tan(radians(angle)) if angle < 90 else 1e6 for angle in (left, right))
    share, base = b / (a + b), side - 8.0
    height = min(share * base * a, 1e6)
    scale = min(1.0, (side - 20) / height)
    base, height = base * scale, height * scale

    x, y = (side - base) / 2, side - 5.0
    top = (x + share * base, y - height)
    return figure(
        side,
        [(x, y), (x + base, y), top],
        (x + 9, y - 4, left, "ls", 9),
        (x + base - 9, y - 4, right, "rs", 9),
        (top[0], top[1] - 2, "x", "ms", LABEL),
    )


def draw_right_triangle(a: int, b: int, side: int) -> Image.Image:
    """Legs `a` (along the bottom) and `b` (at the left) to scale with their lengths, "x" at the
    hypotenuse."""
    # What is left beside the labels of the two legs.
    scale = (side - 36) / max(a, b)
    x, y = 20, side - 16
    right, top = x + a * scale, y - b * scale
    return figure(
        side,
        [(x, y), (right, y), (x, top)],
        ((x + right) / 2, y + 3, a, "ma", LABEL),
        (x - 3, (y + top) / 2, b, "rm", LABEL),
        ((x + right) / 2 + 4, (y + top) / 2 - 3, "x", "ls", LABEL),
    )


QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "solution", "target")
ASK_NUMBER = "what is the answer, as a number?"


@task("text_math")
class TextMath(Task):
    """A folder with train.jsonl and test.jsonl, or one file, which is split by the hash of the text.

    Reward: 1 when the last number of the response (after "####" if it is there) is the gold one.

    The picture form is the text itself; the rendered form shows the problem as pixels. Knob: longest
    (characters of a problem). Raises TaskError for a missing file, an empty split and rows without a question
    or a number.
    """

    # Longer problems have more steps; there is no better measure at hand.
    levels = ({"longest": 160}, {"longest": 300}, {"longest": 4096})

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            train, test = self._rows(self.path / "train.jsonl"), self._rows(self.path / "test.jsonl")
            # A test problem that training has as well tests nothing.
            test = {text: value for text, value in test.items() if text not in train}
        else:
            rows = self._rows(self.path)
            test = {text: rows[text] for text in rows if super(TextMath, self).heldout(f"text/{text}")}
            train = {text: rows[text] for text in rows if text not in test}
        self._sides = {False: train, True: test}

    def _rows(self, file: Path) -> dict[str, str]:
        """Question -> normalised number."""
        if not file.is_file():
            raise TaskError(
                f"{self.name}: {file}: no such file; expected JSON lines with a question and an answer"
            )
        found = {}
        for index, row in enumerate(read_rows(file), 1):
            # Data sets call the two fields by different names.
            text = next((str(row[name]).strip() for name in QUESTIONS if row.get(name)), "")
            value = next((scoring.gsm8k_number(str(row[name])) for name in ANSWERS if name in row), None)
            if not text or value is None:
                raise TaskError(
                    f"{self.name}: {file} row {index}: expected a question and an answer with a number"
                )
            found[text] = value
        return found

    def heldout(self, combination: str) -> bool:
        """By the file for a folder with two, by the hash of the text else."""
        return combination.removeprefix("text/") in self._sides[True]

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows = list(self._sides[heldout].items())
        if not rows:
            side = "test" if heldout else "train"
            raise TaskError(f"{self.name}: {self.path}: no problem on the {side} side")
        text, value = rng.choice(rows)
        # Drawn again, not cut: half a problem has no answer.
        if len(text) > knobs["longest"]:
            return None
        return Problem(ASK_NUMBER, None, text, value, f"#### {value}", f"text/{text}", "text")

    def reward(self, problem, response_text):
        """A worked answer may be long: only its end is read."""
        # Before `final_answer`, which takes a longer answer for none.
        return super().reward(problem, str(response_text)[-scoring.MAX_CHARS :])

    def score(self, problem, answer):
        """The number of the last line, which ends with it where it is marked by "####": a worked answer may
        say anything before, nothing after."""
        last = scoring.tame(answer.splitlines()[-1])
        # The last line alone: earlier ones hold the numbers of the steps.
        marked = "####" in last
        return float(scoring.gsm8k_number(last) == problem.answer and (not marked or scoring.ends(last)))
