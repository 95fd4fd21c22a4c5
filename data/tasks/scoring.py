"""Scores of free answers against a gold answer: metrics of text, published ways to read, rewards.

Metrics of text. Nothing here guesses: an answer that cannot be read is wrong and counts as unextracted.
    counting   the number said, as digits or as a word; exact, absolute error, within one
    reading    CER = Levenshtein distance / length of gold; ANLS = 1 - distance / longer length, 0 from half
               wrong on (threshold 0.5, ST-VQA); containment as OCRBench has it (inflates long answers: look
               at CER beside it)
    charts     relaxed accuracy of ChartQA: numbers within 5 %, all else equal without case; as published, so
               "12" is wrong for "12%" (a percent sign divides by 100) and a gold 0 is compared as text

Published answers; None: there is nothing to read. MMLU-Pro: the three levels of the official script
(TIGER-AI-Lab/MMLU-Pro, evaluate_from_local.py). GPQA: simple-evals' line "Answer: X" and
lm-evaluation-harness' "(X)". GSM8K: the number after "####" or the last number. MMMU: key phrases, numbers,
containment.

Rewards of free text against a gold answer. Every function takes any text and returns a number in [0, 1].

    counting      max(0, 1 - |n - gold| / max(gold, 1)); exactly one whole number must be said, as digits or
                  as a word
    value         the same for numbers with a fraction (chart values: relative error)
    number        1 for the number itself, 0 for any other
    words         1 for the words themselves without case, article and closing punctuation (normalise)
    boxes         F1 with soft matches: 2 * sum of IoU over the best matching / (boxes said + boxes in gold)
    points        the same with exp(-d^2 / 2 sigma^2), sigma relative to the object
    polygon       IoU of two masks, a pixel being inside when its centre is (even-odd rule)

What was asked ends the answer. Behind a number, a place or a list of places only closing punctuation may
stand, behind a number also words of the question ("3 red circles."): "row 1, column 2wsslonment for" says the
right place and is no answer. A scorer that read the beginning alone would pay a policy for not ending its
answers.

Degenerate cases. Nothing said, or nothing that can be read: 0. No object in gold: 1 for saying so ("none",
"[]"), 0 for anything else, silence included. Saying several different numbers, or more boxes than MAX_ITEMS,
is no answer: 0. Numbers that are no numbers (nan, inf) or beyond ten times the picture match nothing. Forms:
Kimi K2.5 report, section 4.4.2.

Forms that `parse_boxes` reads (x from the left, y from the top; right and bottom are outside):
    [12, 30, 40, 58]      four numbers in brackets or parentheses, also "x1=12 y1=30 x2=40 y2=58" and JSON
                          "bbox_2d"
    (12,30),(40,58)       two corners, as Qwen-VL writes them
    {"label": ..., "box": [...], "box01": [...]}   data/formats.py, as Kimi K3: box01 (shares of the
                                                   sides) is read if there
    <loc0123>...          four PaliGemma location tokens, order y0 x0 y1 x1, in 1/1024 of the sides

Units are never guessed from the size of the numbers: `units` is "pixels" or "relative" (0..1).
"""

import math
import random
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty"
).split()
# "none" and "no circles" count to 0.
_WORD_VALUE = {**{word: value for value, word in enumerate(NUMBER_WORDS)}, "none": 0, "no": 0}
# Twelve digits at most: Python refuses to read a number of thousands of them.
_COUNT = re.compile(rf"(?<![\w.])(-?\d{{1,12}})(?![\w]|\.\d)|\b({'|'.join(_WORD_VALUE)})\b", re.IGNORECASE)
# ST-VQA: worse than that is another word, not a misread one.
ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05


def squeeze(text: str) -> str:
    """Runs of blanks become one blank, those around go."""
    return " ".join(text.split())


def tame(text: str) -> str:
    """Squeezed, decimals after the sixth go, and runs of more than 12 digits become an x, so that no
    expression of ours backtracks for long over a hostile text."""
    return re.sub(r"\d{13,}", "x", re.sub(r"(\.\d{6})\d+", r"\1", squeeze(text)))


def normalise(text: str) -> str:
    """Lower case, single spaces, without a leading article and closing punctuation: "The red circle." -> "red
    circle"."""
    return re.sub(r"^(a|an|the) ", "", squeeze(text.lower()).strip(" .,!?:;\"'"))


def first_line(text: str) -> str:
    """The first line with anything on it, without blanks around; "" when there is none."""
    return (text.strip().splitlines() or [""])[0].strip()


def parse_count(text: str) -> int | None:
    """The first whole number said: digits, or none ... twenty in words. None when there is none ("3.5" is
    none)."""
    found = _COUNT.search(text)
    if found is None:
        return None
    return int(found[1]) if found[1] else _WORD_VALUE[found[2].lower()]


def levenshtein(a: Sequence, b: Sequence) -> int:
    """Fewest insertions, deletions and substitutions that turn `a` into `b`. O(len(a) * len(b)) time, one
    row."""
    # One row of the table at a time.
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rate(said: Sequence, gold: Sequence) -> float:
    """Levenshtein distance over the length of gold: of characters for strings, of words for lists of them.

    May exceed 1. For an empty gold: 0 if said is empty, else 1.
    """
    return levenshtein(said, gold) / len(gold) if gold else float(bool(said))


def similarity(said: str, gold: str) -> float:
    """1 - distance / longer length, blanks squeezed; 1 when both are empty."""
    said, gold = squeeze(said), squeeze(gold)
    return 1.0 - levenshtein(said, gold) / max(len(said), len(gold), 1)


def anls(said: str, gold: str) -> float:
    """`similarity` of the lower-case texts; 0 for what is half wrong or worse."""
    share = similarity(said.lower(), gold.lower())
    return share if share > 1 - ANLS_THRESHOLD else 0.0


def contains(said: str, gold: str) -> bool:
    """Whether gold stands in the answer, both in lower case and with single spaces (OCRBench)."""
    return squeeze(gold.lower()) in squeeze(said.lower())


def exact_match(said: str, gold: str) -> bool:
    """Whether the first line of the answer is gold, after `normalise`."""
    return normalise(first_line(said)) == normalise(gold)


def relaxed_match(said: str, gold: str) -> bool:
    """ChartQA's relaxed correctness: both numbers and within 5 % of gold, else equal without case."""
    value, target = _as_float(said), _as_float(gold)
    # A gold 0 has no relative error: it is compared as text, as published.
    if value is not None and target:
        return abs(value - target) / abs(target) <= RELAXED_TOLERANCE
    return said.lower() == gold.lower()


def _as_float(text: str) -> float | None:
    """Published reading of a number: a closing "%" divides by 100; None for anything float() refuses."""
    try:
        value = float(text.rstrip("%"))
    except ValueError:
        return None
    return value / 100.0 if text.endswith("%") else value


LETTERS = string.ascii_uppercase

# The three of the official script, one for each level.
_ANSWER_IS = re.compile(r"answer is \(?([A-J])\)?")
_ANSWER_COLON = re.compile(r".*[aA]nswer:\s*([A-J])")
_ALONE = re.compile(r"\b([A-J])\b")
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*:[ \t]*\$?\(?([A-Z])\)?\$?(?![A-Za-z])")
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?\.\d+")
_ANNOUNCE = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def mmlu_pro_letter(text: str, levels: int = 3) -> tuple[str, int] | None:
    """(letter A-J, level that found it). Level 1: the first "answer is (X)"; 2: "answer: X", the last one of
    the first line that has one; 3: the last capital A-J that stands alone. `levels` = 1 or 2 stops earlier.
    """
    for level, pattern in enumerate((_ANSWER_IS, _ANSWER_COLON, _ALONE)[:levels], 1):
        # The first announcement counts, but the last letter that merely stands there.
        found = pattern.findall(text)
        if found:
            return found[-1 if pattern is _ALONE else 0], level
    return None


def published_guess(options: int) -> int:
    """Index the official MMLU-Pro script draws for a question without an extracted answer: it seeds the
    generator anew for each one, so the guess depends on the number of options alone."""
    # The seed is the script's own, and the score is compared with published ones.
    return random.Random(12345).randint(0, options - 1)


def option_letter(text: str, worked: bool) -> str | None:
    """The last of A to D that GPQA's two published ways read: a worked answer ends with "Answer: X"
    (simple-evals; ** and $ are ignored), any other with "(X)" (lm-evaluation-harness, flexible)."""
    # The first line would pay a model for guessing early.
    if worked:
        letters = _ANSWER_LINE.findall(text.replace("**", "").upper())
    else:
        letters = re.findall(r"\(([A-Z])\)", text)
    return next((letter for letter in reversed(letters) if letter in LETTERS[:4]), None)


def gsm8k_number(text: str) -> str | None:
    """The number after "####"; without one, the last number of the text. Normalised."""
    if match := _HASHES.search(text):
        return normal_number(match[1])
    # The last of them: a solution ends with its result.
    values = [normal_number(found) for found in _NUMBER.findall(text)]
    return next((value for value in reversed(values) if value is not None), None)


def normal_number(text: str) -> str | None:
    """ "$1,200." -> "1200", "3.50" -> "3.5", "-0" -> "0"; None for what is no number."""
    # Commas between thousands and a dollar sign are how the number is written.
    cleaned = text.replace(",", "").replace("$", "").strip().rstrip(".")
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", cleaned):
        return None
    # Zero has no sign: "-0.0" and "0" are one answer.
    return f"{Decimal(cleaned).normalize() + 0:f}"


def best_choice(values: Sequence[float]) -> int:
    """Index of the largest value, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """The letter an answer means: "(B)", then " B ", then "B.", then the text of an option; of several the
    last said.

    None when there is none of these. Option texts count only in answers of more than five words, as
    published.
    """
    # Blanks around the answer let " B " match a letter that stands alone.
    answer = f" {text.strip().strip(',.!?;:' + chr(39))} "
    ways = [(form, [*LETTERS[: len(options)]], answer) for form in ("({})", " {} ", "{}.")]
    if len(answer.split()) > 5:
        ways.append(("{}", [option.lower() for option in options], answer.lower()))
    for form, words, said in ways:
        # Reversed: of two options that end at one place the first one stays.
        places = {
            said.rfind(form.format(words[i])): i for i in reversed(range(len(words))) if words[i].strip()
        }
        if max(places, default=-1) >= 0:
            return LETTERS[places[max(places)]]
    return None


def open_match(response: str, golds: Sequence[str]) -> bool:
    """Whether one of the accepted answers is said, as MMMU's published evaluation reads it.

    A gold string must stand in a candidate phrase, a gold number must equal one of the numbers there after
    rounding to two places.
    """
    phrases = candidates(response)
    # A number may be the phrase itself or stand in it.
    values = set()
    for phrase in phrases:
        values |= {as_number(found) for found in [phrase, *_DECIMAL.findall(phrase)]}
    for gold in golds:
        number = as_number(gold)
        if number is not None and number in values:
            return True
        if number is None and any(gold.strip().lower() in phrase for phrase in phrases):
            return True
    return False


def candidates(response: str) -> list[str]:
    """The phrases of a response that may be its answer, in lower case: what follows the last of the words
    that announce a result, in each sentence; the whole response when none is announced."""
    text = response.strip().strip(".").lower()
    sentences = [part for part in re.split(r"\.\s(?=[a-z])|\n", text) if part.strip()]
    found = []
    for index, sentence in enumerate(sentences):
        # Only at the end does an equals sign give the result; before, it is a step.
        words = (*_ANNOUNCE, "=") if index == len(sentences) - 1 else _ANNOUNCE
        # What follows the announcement that comes last is shortest.
        tails = [sentence.split(word)[-1].strip() for word in words if word in sentence]
        shortest = min(tails, key=len, default="")
        if shortest.strip(" ,.!?;:'"):
            found.append(shortest)
    return found or [text]


def as_number(text: str) -> float | None:
    """The whole text as a number, commas between thousands allowed, rounded to two places; None for anything
    else."""
    try:
        return round(float(text.strip().replace(",", "")), 2)
    except ValueError:
        return None


Point = tuple[float, float]
Box = tuple[float, float, float, float]
MAX_CHARS = 4096
"""Longest final answer that is read; a longer one earns nothing."""
MAX_ITEMS = 64
"""Most boxes, points or corners that are scored."""
# In sides of the picture: beyond it numbers only harm the arithmetic.
_REACH = 10.0
# What may be said where there is nothing to find.
_NONE = {"none", "nothing", "[]", "no objects", "there are none", "there is none", "no object", "no"}
_ANNOUNCED = re.compile(r"(?:final answer|answer)(?: is)?\s?[:=]|\banswer is\b", re.IGNORECASE)
_BOXED = "\\boxed{"
# Numbers with their fraction as one word: the 3 of 3.5 is no count.
_WORD = re.compile(r"-?\d[\d,]*(?:\.\d+)?|[a-z]+", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_CLOSING = " \n\t.,;:!?\"'`*$)]}>"
"""What may follow the last word of an answer."""
_LABEL = re.compile(r',? ?"\w+" ?: ?"[^"]*"')
"""A field of words in the JSON form of places, wherever it stands."""
IOU_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)

# N in the forms below.
_FLOAT = r"([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)"
_FORMS = (
    r"[\[\(]\s*N\s*[,\s]\s*N\s*[,\s]\s*N\s*[,\s]\s*N\s*[\]\)]",
    r"[\(\[]\s*N\s*,\s*N\s*[\)\]]\s*,?\s*[\(\[]\s*N\s*,\s*N\s*[\)\]]",
    r"x_?(?:1|0|min)\W+N\W+y_?(?:1|0|min)\W+N\W+x_?(?:2|1|max)\W+N\W+y_?(?:2|1|max)\W+N",
    r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>",
)
# One expression for all: what one form has taken no other reads again.
_BOX = re.compile("|".join(_FORMS).replace("N", _FLOAT), re.IGNORECASE)
_BOX01 = re.compile(r'"box01"\s*:\s*\[\s*N\s*,\s*N\s*,\s*N\s*,\s*N\s*\]'.replace("N", _FLOAT))
_PAIR = re.compile(r"[\[(] ?N ?[, ] ?N ?[\])]".replace("N", _FLOAT))
_POINT01 = re.compile(r'"point01"\s*:\s*\[\s*N\s*,\s*N\s*\]'.replace("N", _FLOAT))
"""A point as training writes it, in shares of the sides."""


def final_answer(text: str) -> str:
    """What a response gives as its answer: the part after its thinking and after "answer:", the inside of the
    last \\boxed{}, or all of it. "" for thinking that never ends and for an answer of more than MAX_CHARS
    characters."""
    if not isinstance(text, str):
        return ""
    _, closed, answer = text.rpartition("</think>")
    # Cut off while thinking: what stands there last is no answer.
    if not closed and "<think>" in text:
        return ""

    _, boxed, inside = answer.rpartition(_BOXED)
    if boxed:
        answer = _balanced(inside)
        if re.search(r"\w", inside[len(answer) + 1 :]):  # what goes on behind its box has not ended
            return ""
    else:
        answer = _ANNOUNCED.split(answer)[-1]
    answer = answer.strip()
    return answer if len(answer) <= MAX_CHARS else ""


def _balanced(text: str) -> str:
    """Up to the brace that closes one opened before; "" when none does."""
    depth = 1
    for position, character in enumerate(text[: MAX_CHARS + 1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return ""


def ends(answer: str, question: str = "", spelled: bool = False) -> bool:
    """Whether an answer ends with its last number: what follows is punctuation, or words of the question.
    spelled: a number may also be a word."""
    # "3 red circles" ends with what was asked for.
    asked = set(re.findall(r"\w+", question.lower()))
    for word in reversed(re.findall(r"\w+", answer.lower())):
        if word[-1].isdigit() or (spelled and parse_count(word) is not None):
            return True
        if word not in asked:
            return False
    return False


def integers(answer: str) -> list[int]:
    """The whole numbers of an answer that ends with one; else none."""
    return [int(part) for part in re.findall(r"\d+", tame(answer))] if ends(answer) else []


# Numbers.


def sole_number(answer: str) -> Decimal | None:
    """The one number that is said, after the last "="; None for none or several different ones."""
    # "3 + 4 = 7" says 7, not three numbers.
    found = {normal_number(text) for text in _NUMBER.findall(tame(answer).rpartition("=")[2])}
    only = found.pop() if len(found) == 1 else None
    return None if only is None else Decimal(only)


def counting(answer: str, gold: int, question: str = "") -> float:
    """See the file's head."""
    found = set()
    for word in _WORD.findall(tame(answer)):
        count = parse_count(word.replace(",", ""))
        if count is not None or not word.isalpha():  # a fraction counts as a number that is none
            found.add(count)
    if len(found) != 1 or not ends(answer, question, spelled=True):
        return 0.0
    return _closeness(found.pop(), gold)


def value(answer: str, gold: float, question: str = "") -> float:
    """See the file's head."""
    return _closeness(sole_number(answer), gold) if ends(answer, question) else 0.0


def _closeness(said: Decimal | int | None, gold: float) -> float:
    return 0.0 if said is None else max(0.0, 1.0 - abs(float(said) - gold) / max(abs(gold), 1.0))


def number(answer: str, gold: int | float | str, question: str = "") -> float:
    """See the file's head; gold as a number or as its text."""
    return float(sole_number(answer) == Decimal(str(gold)) and ends(answer, question))


def words(answer: str, gold: str, question: str = "") -> float:
    """See the file's head."""
    return float(normalise(answer) == normalise(gold))


# Places.


def parse_boxes(text: str, width: float, height: float, units: str = "pixels") -> list[Box]:
    """All boxes of a text in pixels of a width x height picture, in reading order, corners put in order.

    Boxes that are no numbers (nan, infinity) are left out; boxes outside the picture stay as they are.
    """
    text = tame(text)
    # A region says its place twice, in pixels of the picture as the model saw it and in shares: those count.
    shares = list(_BOX01.finditer(text))
    found = []
    for match in shares or _BOX.finditer(text):
        a, b, c, d = map(float, filter(None, match.groups()))
        x, y = (width, height) if shares or units == "relative" else (1.0, 1.0)
        # PaliGemma's tokens name y before x.
        if match[0].startswith("<"):
            a, b, c, d, x, y = b, a, d, c, width / 1024, height / 1024
        box = min(a, c) * x, min(b, d) * y, max(a, c) * x, max(b, d) * y
        if all(map(math.isfinite, box)):
            found.append(box)
    return found


def centre(box: Box) -> tuple[float, float]:
    """The middle of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Box) -> float:
    """Width times height, 0 for a box turned inside out."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 when both are empty."""
    # Apart, the common box is turned inside out and has no area.
    shared = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def grounding_scores(said: Box | None, gold: Box) -> dict[str, float]:
    """iou, acc@0.1 ... acc@0.9 and centre_in_box of one answer; all 0 for None (no box was said)."""
    # What was not said lies where no picture is.
    said = said or (-1.0, -1.0, -1.0, -1.0)
    x, y = centre(said)
    overlap = iou(said, gold)
    scores = {"iou": overlap, "centre_in_box": float(gold[0] <= x < gold[2] and gold[1] <= y < gold[3])}
    return {**scores, **{f"acc@{least}": float(overlap >= least) for least in IOU_THRESHOLDS}}


def _near(place: Sequence[float], size: Point) -> bool:
    return max(map(abs, place)) <= _REACH * max(size)


def _readable(answer: str, count: int) -> bool:
    """Whether `count` places said are an answer at all: some, not too many, and nothing behind them."""
    # Labels are words of the form, not of the answer.
    bare = _LABEL.sub("", answer)
    kept = bare.rstrip(_CLOSING)
    # A list whose last bracket never came goes on.
    brackets = set(")]>")
    closed = brackets.isdisjoint(kept) or not brackets.isdisjoint(bare[len(kept) :])
    return 0 < count <= MAX_ITEMS and kept[-1:].isdigit() and closed


def _matched(
    answer: str, said: Sequence, gold: Sequence, size: Point, weight: Callable[[int, int], float]
) -> float:
    """F1 with soft matches over the best one-to-one matching; weight(i, j) of gold i and said j."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and only these rewards need it

    if not gold:
        return float(not said and normalise(answer) in _NONE)
    if not _readable(answer, len(said)):
        return 0.0
    # What is out of reach matches nothing and is one place said all the same.
    table = np.zeros((len(gold), len(said)))
    for i, j in np.ndindex(table.shape):
        if _near(said[j], size):
            table[i, j] = weight(i, j)
    return 2 * float(table[linear_sum_assignment(table, maximize=True)].sum()) / sum(table.shape)


def boxes(answer: str, gold: Sequence[Box], size: Point, units: str = "pixels") -> float:
    """See the file's head; gold in pixels, `units` as in boxes.parse_boxes, size: (width, height)."""
    said = parse_boxes(answer, *size, units)
    return _matched(answer, said, gold, size, lambda i, j: iou(gold[i], said[j]))


def points(answer: str, gold: Sequence[Point], sigmas: Sequence[float], size: Point) -> float:
    """See the file's head. Said: points as training writes them, else pairs "[x, y]"; and the centres of
    boxes. sigmas: one for every gold point, in pixels."""
    text = tame(answer)
    said = [(float(x) * size[0], float(y) * size[1]) for x, y in _POINT01.findall(text)] or pairs(text)
    # Two points in a row would be read as the corners of one box, so pairs are taken out first.
    said += map(centre, parse_boxes(_PAIR.sub(";", text), *size))

    def weight(i: int, j: int) -> float:
        return math.exp(-(math.dist(gold[i], said[j]) ** 2) / (2 * sigmas[i] ** 2))

    return _matched(answer, said, gold, size, weight)


def pairs(text: str) -> list[Point]:
    """Every "[x, y]" or "(x y)" of a tame text."""
    return [(float(x), float(y)) for x, y in _PAIR.findall(text)]


def polygon(answer: str, gold: Sequence[Point], size: tuple[int, int]) -> float:
    """See the file's head. Said: corners "[x, y]" in order, or one flat list of numbers."""
    text = tame(answer)
    corners = pairs(text)
    # Corners without brackets: x and y in turn.
    numbers = [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", text)]
    if not corners and len(numbers) % 2 == 0:
        corners = list(zip(numbers[::2], numbers[1::2]))
    if len(corners) < 3 or not _readable(answer, len(corners)):
        return 0.0
    if not all(_near(point, size) for point in corners):
        return 0.0
    return mask_iou(mask(corners, *size), mask(gold, *size))


def mask(polygon: Sequence[Point], width: int, height: int) -> NDArray[np.bool_]:
    """bool [height, width]: pixels whose centre lies in the polygon (even-odd rule)."""
    inside = np.zeros((height, width), bool)
    x, y = np.arange(width)[None, :] + 0.5, np.arange(height)[:, None] + 0.5
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]]):
        # A level edge is crossed by no ray to the right.
        if y0 != y1:
            inside ^= ((y0 <= y) != (y1 <= y)) & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
    return inside


def mask_iou(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union of two masks; 0 when both are empty."""
    return int((a & b).sum()) / max(1, int((a | b).sum()))
