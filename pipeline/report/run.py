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
`eval/*.json`     files of `eval/results.py`: easy_vqa, bpb, heldout, attnres; answer_loss and
                  tool_talks_<source> of a chat stage
`samples/*.json`  files of `eval/samples.py`; an image is a data URI or a path relative to the run folder
`recipe.toml`, `versions.json` (name -> version), `facts.json` (name -> value, for the head)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.data import Record, Series, layers, read_run
from earlyfusion.pipeline.report.page import write_page


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises FileNotFoundError when there is no such
    folder."""
    run = read_run(run_dir, "Joint vision-text pretraining run")
    functions = {"what_it_read": what_it_read, "expert_load": expert_load, "max_logits": max_logits}
    return write_page(run["folder"] / "report.html", "run.html", run | functions)


def what_it_read(train: Sequence[Record]) -> dict[str, list[tuple[Any, ...]]]:
    """At the end of every stage: (stage, source, share of the tokens, passes) and (stage, reason, samples
    left out)."""
    shares, skipped = [], []
    # The last record of a stage counts the whole of it.
    for stage, record in {str(record.get("stage", "")): record for record in train}.items():
        for key, value in record.items():
            if key.startswith("data/share/"):
                name = key.removeprefix("data/share/")
                shares.append((stage, name, value, record.get(f"data/epoch/{name}")))
            elif key.startswith("data/skipped/"):
                skipped.append((stage, key.removeprefix("data/skipped/"), value))
    return {"shares": shares, "skipped": skipped}


def expert_load(train: Sequence[Record]) -> dict[str, Any]:
    """The latest load of every expert relative to a fair share (matrix: layer by expert), the busiest over
    steps."""
    tables = layers(train, "expert_load")
    if not tables:
        return {}
    # Layers may have different numbers of experts; the map is as wide as the widest.
    step, latest = tables[-1]
    width = max(map(len, latest.values()))
    matrix, busiest = [], {}
    for layer, shares in latest.items():
        matrix.append([share * len(shares) for share in shares] + [None] * (width - len(shares)))
        # A layer that is missing from a record has a gap there.
        held = [(at, table[layer]) for at, table in tables if layer in table]
        peaks = [max(row) * len(row) for _, row in held]
        busiest[f"layer {layer}"] = ([at for at, _ in held], peaks)
    return {"step": step, "layers": list(latest), "width": width, "matrix": matrix, "busiest": busiest}


def max_logits(train: Sequence[Record]) -> dict[str, Series]:
    """The largest attention logit over steps, of each head; of a layer with more than four heads the
    largest."""
    found: dict[str, Series] = defaultdict(lambda: ([], []))
    for step, table in layers(train, "max_logit"):
        for layer, heads in table.items():
            named = {f"layer {layer}, head {head}": value for head, value in enumerate(heads)}
            # More curves than can be told apart.
            if len(heads) > 4:
                named = {f"layer {layer}, largest": max(heads)}
            for name, value in named.items():
                found[name][0].append(step)
                found[name][1].append(value)
    return found
