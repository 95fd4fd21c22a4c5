"""Generated pictures of every kind as one type: drawn, and told in words with everything a question may ask for.

scene   "picture 64 x 48, white background" and one line an object: "small red circle [12, 30, 24, 42]"
board   "board of 2 rows and 3 columns" and "a red square at row 1, column 2", one line a cell
chart   "bar chart with 3 values" and "A has the value 4", one line a value
sign    the text in quotes, its colour and ground
clip    one line a frame: its time and where every object is
"""

from __future__ import annotations

from earlyfusion.data.sample import Image, Video
from earlyfusion.data.synth import describe
from earlyfusion.data.synth.charts import Chart, draw_chart
from earlyfusion.data.synth.clips import Clip, draw_clip
from earlyfusion.data.synth.grid import Board, draw_board
from earlyfusion.data.synth.scene import Scene, draw_scene
from earlyfusion.data.synth.words import Sign, draw_sign

Graph = Scene | Board | Chart | Sign | Clip


def twin(graph: Graph) -> str:
    """The graph in words. Raises TypeError for anything that is no graph of data/synth."""
    if isinstance(graph, Scene):
        return describe.twin(graph)  # the form that training uses in a picture's place
    for kind, tell in ((Board, _board), (Chart, _chart), (Sign, _sign), (Clip, _clip)):
        if isinstance(graph, kind):
            return tell(graph)  # type: ignore[arg-type]
    raise TypeError(f"{type(graph).__name__} has no text twin; expected Scene, Board, Chart, Sign or Clip")


def render(graph: Graph) -> Image | Video:
    """The graph drawn."""
    if isinstance(graph, Clip):
        return Video(draw_clip(graph), graph.timestamps)
    if isinstance(graph, Scene):
        return Image(draw_scene(graph))
    if isinstance(graph, Chart):
        return Image(draw_chart(graph))
    if isinstance(graph, Sign):
        return Image(draw_sign(graph))
    if isinstance(graph, Board):
        return Image(draw_board(graph))
    raise TypeError(f"{type(graph).__name__} cannot be drawn; expected Scene, Board, Chart, Sign or Clip")


def _board(board: Board) -> str:
    lines = [f"board of {board.rows} rows and {board.columns} columns"]
    for r, row in enumerate(board.cells):
        lines += [
            f"{describe.article(colour)} square at row {r + 1}, column {c + 1}"
            for c, colour in enumerate(row)
        ]
    return "\n".join(lines)


def _chart(chart: Chart) -> str:
    lines = [f"{chart.kind} chart with {len(chart.values)} values"]
    return "\n".join(
        lines + [f"{label} has the value {value}" for label, value in zip(chart.labels, chart.values)]
    )


def _sign(sign: Sign) -> str:
    return (
        f'the text "{sign.text}" in {sign.colour} letters on {describe.article(sign.background)} background'
    )


def _clip(clip: Clip) -> str:
    lines = [f"clip {clip.width} x {clip.height}, {clip.background} background"]
    standing = ""
    if clip.standing is not None and clip.standing_box is not None:
        standing = f"; {' '.join(clip.standing)} {describe.pixels(clip.standing_box)}"
    for time, box in zip(clip.timestamps, clip.boxes):
        lines.append(f"{time:.1f} s: {clip.name} {describe.pixels(box)}{standing}")
    return "\n".join(lines)
