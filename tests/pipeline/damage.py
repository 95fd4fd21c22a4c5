"""Damage, made from seeds: to bytes, and to what JSON holds."""

import copy
import json
import re

DEEP = "@deep@"

# What no writer of a file meant to say. 1e999 is read as infinity.
ODD = json.loads(r"""[
    null, true, -1, 0, 1000000000000, 1e308, 1e999, NaN, "", "\ud83d", "\u0000", "\u2028\u0085", "²",
    "../../../../etc/passwd", "/etc/passwd", "$\\x$", "<script>alert(1)</script>",
    [], {}, [[]], [null], {"": null}, [1, "a"], "@deep@"
]""")
ODD += [10**400, "x" * 5000]


ENTRIES = json.loads("""[
    {"caption": "a cup", "boxes": [[1, 2, 10, 12]], "labels": ["cup"], "coordinates": "absolute",
     "box_format": "xyxy"},
    {"regions": [{"label": "cup", "box": [1, 2, 10, 12]}, {"label": "dot", "point": [3, 4]}]},
    {"ocr": [{"text": "words", "box": [1, 2, 10, 12]}]},
    {"conversations": [{"from": "human", "value": "<image>how?"}, {"from": "gpt", "value": "so"}],
     "image": "a.png"},
    {"texts": ["a", null, "b"], "images": [null, "a.png", null]},
    {"text_list": ["a", "b"], "image_info": [{"matched_text_index": 0, "image_name": "a.png"}]},
    {"questions": [{"question": "how many?", "answer": ["3", "three"]}]}
]""")
"""Rows of every kind that a folder or shard may hold."""


def damage(rng, data):
    """Bytes flipped, cut, taken out, put in, zeroed or doubled; numbers made huge. A third have one bit
    flipped."""
    made = bytearray(data)
    if made and rng.random() < 0.33:
        made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        return bytes(made)

    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(made) + 1), rng.randint(1, max(1, len(made) // 8))
        piece = made[at : at + length]
        match rng.randrange(7):
            case 0:
                for _ in range(min(len(made), rng.randint(1, 16))):
                    made[rng.randrange(len(made))] = rng.randrange(256)
            case 1:
                del made[at:]
            case 2:
                del made[at : at + length]
            case 3:
                made[at:at] = rng.randbytes(length % 300)
            case 4:
                made[at : at + length] = bytes(len(piece))
            case 5:
                made[at:at] = piece
            case _:
                huge = rng.choice((b"-7", b"9" * 30, b"1e999"))
                made = bytearray(re.sub(rb"\d+", huge, bytes(made), count=1))
    return bytes(made)


def places(tree):
    """(container, key) of everything in a tree."""
    found = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list) else ())
    for key, value in items:
        found += [(tree, key), *places(value)]
    return found


def odd(rng, tree):
    """The tree as a line of JSON with one to three values replaced or taken out; now and then its bytes are
    damaged, too."""
    tree = copy.deepcopy(tree)
    if rng.random() < 0.1:
        tree = rng.choice(ODD)
    for _ in range(rng.randint(1, 3)):
        if not (found := places(tree)):
            break
        container, key = rng.choice(found)
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    text = json.dumps(tree).replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()
    return damage(rng, text).replace(b"\n", b" ") if rng.random() < 0.15 else text


def odd_rows(rng, tree, count):
    return [odd(rng, tree) for _ in range(count)]


def put(path, *lines):
    """A file of these lines, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines))
    return path


def spoil(rng, path):
    """The file with its bytes damaged."""
    return put(path, damage(rng, path.read_bytes()))
