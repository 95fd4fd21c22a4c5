"""The report of a run: one self-contained `report.html`, readable without a network.

    write_report(run_dir) -> Path        reads what is there, leaves out what is not, never needs the model

Every part of a folder is optional, other keys and files are ignored; run.html says what is shown:

`metrics.jsonl`   a JSON object a line, `{"step": int, "event": str, ...}`; broken lines are counted.
  event "train"   numbers: `loss` (nats a token), `loss/<modality>`, `loss/source/<source>`, `lr`,
                  `grad_norm`, `tokens` (seen so far), `tokens_per_s`, `patches_per_s`, `seconds` (since the
                  start); `data/share/<source>`, `data/vision_share`, `data/media_share`,
                  `data/epoch/<source>`, `data/skipped/<reason>` (of the stage so far); now and then the
                  tables `expert_load` {"<layer>": [share of routed tokens per expert, sums to 1]} and
                  `max_logit` {"<layer>": [largest attention logit per head]}
  event "guard"   `kind`, `action`, `message`
  other events    listed in the run's diary if they carry `message`
`eval/*.json`     files of `eval/samples.py`: easy_vqa, bpb, heldout, attnres; answer_loss and
                  tool_talks_<source> of a chat stage
`samples/*.json`  files of `eval/samples.py`; an image is a data URI or a path relative to the run folder
`recipe.toml`, `versions.json` (name -> version), `facts.json` (name -> value, for the head)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.data import Record, Series, read_run
from earlyfusion.pipeline.report.page import write_page


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises FileNotFoundError when there is no such
    folder."""
    run = read_run(run_dir, "Joint vision-text pretraining run")
    # Called inside the page: a table of another hand costs its own part, not the whole report.
    functions = {"expert_load": expert_load, "largest": largest}
    return write_page(run["folder"] / "report.html", "run.html", run | functions)


def expert_load(train: Sequence[Record]) -> dict[str, Any]:
    """The latest load of every expert relative to a fair share (matrix: layer by expert); {} without
    experts."""
    tables = [record for record in train if record.get("expert_load")]
    if not tables:
        return {}
    # The latest alone: a map over time would need a page of its own.
    latest = tables[-1]["expert_load"]
    rows = [[share * len(shares) for share in shares] for shares in latest.values()]
    # Layers may have different numbers of experts; the map is as wide as the widest.
    matrix = list(zip(*zip_longest(*rows)))
    return {"step": tables[-1]["step"], "layers": list(latest), "matrix": matrix}


def largest(train: Sequence[Record], key: str, relative: bool = False) -> dict[str, Series]:
    """The largest number of each layer's row in a table over steps (the busiest expert, the sharpest head).
    relative: to a fair share of the row."""
    found: dict[str, Series] = defaultdict(lambda: ([], []))
    for record in train:
        for layer, row in record.get(key, {}).items():
            # A damaged row is a gap in its curve.
            if row and all(map(is_finite, row)):
                steps, values = found[f"layer {layer}"]
                steps.append(record["step"])
                values.append(max(row) * (len(row) if relative else 1))
    return found
