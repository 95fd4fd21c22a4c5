"""Evaluation during and after training, and what a finished run leaves: results, samples, model directory, report.

Tasks of `eval.tasks`: easy_vqa (official test split, with the image-blind control) and bpb (held-out topics of the
Python reference, beside gzip): their limits hold during training only, the last evaluation uses everything. Every other
task of `earlyfusion eval` can be named as well ("mmlu_pro:mcf", "counting"; files through eval.data); its limit holds
always. Rank 0 works, the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from earlyfusion.data.config import DataConfig, SourceConfig
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources import Source, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.attnres_probe import attnres_weights
from earlyfusion.eval.bpb import bits_per_byte
from earlyfusion.eval.easy_vqa import evaluate_easy_vqa
from earlyfusion.eval.harness import evaluate_in_memory
from earlyfusion.eval.protocol import TASKS as BENCHMARKS
from earlyfusion.eval.results import save_result, write_json
from earlyfusion.eval.samples import answer_samples, save_samples
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub import save_model
from earlyfusion.pipeline.config import RunConfig
from earlyfusion.pipeline.errors import UserError, did_you_mean
from earlyfusion.pipeline.report import write_report
from earlyfusion.pipeline.runtime import Runtime

TASKS = ("easy_vqa", "bpb")
LICENCES = {
    "easy_vqa": ("MIT", "pictures and questions of the PyPI package easy-vqa"),
    "pydoc": ("PSF-2.0", "topics of the installed Python's reference manual"),
    "stdlib_code": ("PSF-2.0", "sources of the installed Python's standard library"),
}


class Evaluator:
    """Runs the recipe's tasks on the weights in memory."""

    own_tasks: tuple[str, ...] = TASKS
    """Tasks that are methods of this class, by their name after an underscore."""
    chat = False
    """Whether the other tasks put their prompts as the user's message."""

    def __init__(self, config: RunConfig, fusion: NativeFusion, tokens: Tokenizer, runtime: Runtime, out: Path) -> None:
        for task in config.eval.tasks:
            known = (*self.own_tasks, *BENCHMARKS)
            if task.partition(":")[0] not in known:
                raise UserError(f"eval.tasks: unknown task {task!r}; {did_you_mean(task, known)}")
        self.config, self.fusion, self.tokens, self.runtime, self.out = config, fusion, tokens, runtime, out
        self._sources: dict[str, Source] = {}

    def run(self, step: int, tracker: Any, *, final: bool, loader: Any = None) -> dict[str, Any]:
        """Evaluate after `step` updates; writes eval/*.json and samples/, returns the headline numbers.

        loader: the stage's data loader; at the end its held-out documents show the AttnRes weights.
        """
        headline: dict[str, Any] = {}
        if self.runtime.is_main:
            for task in self.config.eval.tasks:
                limit = self.config.eval.limits.get(task)
                if task in self.own_tasks:
                    headline |= getattr(self, f"_{task}")(step, None if final else limit)
                else:
                    headline |= self._benchmark(task, step, limit)
            self._samples(step)
            if final and loader is not None:
                self._attnres(step, loader)
            if headline:
                shown = ", ".join(f"{key} {value:.3f}" for key, value in headline.items() if value is not None)
                tracker.event(step, "eval", **headline, message=shown)
        self.runtime.barrier()
        return headline

    def _easy_vqa(self, step: int, limit: int | None) -> dict[str, float | None]:
        result = evaluate_easy_vqa(self.fusion, self.tokens, limit=limit)
        save_result(self.out, "easy_vqa", step, result.to_dict())
        return {"easy_vqa": result.accuracy, "easy_vqa_blind": result.blind_accuracy}

    def _bpb(self, step: int, limit: int | None) -> dict[str, float]:
        texts = [sample.text for sample in self._source("pydoc").heldout_samples(limit)]
        length = max(stage.length for stage in self.config.stages)
        result = bits_per_byte(self.fusion, self.tokens, texts, max_length=length)
        save_result(self.out, "bpb", step, result.to_dict())
        return {"bits_per_byte": result.bits_per_byte, "gzip_bits_per_byte": result.gzip_bits_per_byte}

    def _benchmark(self, task: str, step: int, limit: int | None) -> dict[str, float]:
        results = evaluate_in_memory(
            self.fusion, self.tokens, [task], limit, data=self.config.eval.data, chat=self.chat
        )
        for name, metrics in results.items():
            save_result(self.out, name, step, metrics)
        shown = ("score", "blind_score")
        return {
            name if key == "score" else f"{name}_blind": float(metrics[key])
            for name, metrics in results.items()
            for key in shown
            if key in metrics
        }

    def _samples(self, step: int) -> None:
        samples = list(islice(self._pictures(), self.config.eval.samples))
        if samples:
            save_samples(self.out, step, answer_samples(self.fusion, self.tokens, samples))

    def _pictures(self) -> Any:
        """Held-out samples that end in an answer, one source with pictures after the other, round robin."""
        names = [s.name for s in self.config.data.sources if s.kind == "easy_vqa" or s.kind.startswith("synth_")]
        streams = [iter(self._source(name).heldout_samples(self.config.eval.samples)) for name in names]
        while streams:
            for stream in list(streams):
                sample = next(stream, None)
                if sample is None:
                    streams.remove(stream)
                elif _asks(sample):
                    yield sample

    def _attnres(self, step: int, loader: Any) -> None:
        pictures = [s.name for s in self.config.data.sources if s.kind == "easy_vqa" or s.kind.startswith("synth_")]
        for name in pictures[:1]:
            for batch in loader.heldout_batches(name, 1):
                weights = attnres_weights(self.fusion, batch.to(self.runtime.device))
                if weights is not None:
                    save_result(self.out, "attnres", step, weights)

    def _source(self, name: str) -> Source:
        """A source of the recipe; `pydoc` also when the recipe has none, for bits per byte."""
        if name not in self._sources:
            data: DataConfig = self.config.data
            known = {source.name: source for source in data.sources} | {s.kind: s for s in data.sources}
            chosen = known.get(name) or SourceConfig(name=name, kind=name)
            self._sources[name] = build_source(chosen, seed=data.seed, val_fraction=data.val_fraction)
        return self._sources[name]


def _asks(sample: Sample) -> bool:
    """Whether a sample shows a picture and ends in a text to answer with."""
    kinds = [type(segment).__name__ for segment in sample.segments]
    return len(kinds) > 1 and kinds[-1] == "Text" and kinds[0] != "Text"


def run_facts(config: RunConfig, step: int, meter: Any, headline: dict[str, Any], shares: dict[str, float]) -> dict:
    """Facts of the run for the model card and the head of the report."""
    sources = {
        source.name: {
            "share": shares.get(source.name),
            "licence": LICENCES.get(source.kind, ("", ""))[0],
            "note": LICENCES.get(source.kind, ("", "rendered by the project" if "synth" in source.kind else ""))[1],
        }
        for source in config.data.sources
    }
    return {
        "name": config.run.name,
        "recipe": config.run.name,
        "steps": step,
        "tokens": int(meter.totals["tokens"]),
        "seconds": round(meter.seconds, 1),
        "device": str(meter.runtime.device),
        "precision": config.train.mixed_precision,
        "seed": config.run.seed,
        "sources": sources,
        "evals": {key: round(value, 4) for key, value in headline.items()},
    }


def write_outputs(out: Path, fusion: NativeFusion, tokens: Any, facts: dict[str, Any]) -> Sequence[str]:
    """The model directory and the report; returns lines to show. tokens: what `save_model` saves as tokenizer."""
    directory = save_model(fusion, tokens, out / "model", facts)
    shown = {key: facts[key] for key in ("name", "steps", "tokens", "seconds", "device", "precision", "seed")}
    write_json(out / "facts.json", shown)
    report = write_report(out)
    return [f"model directory: {directory}", f"report: {report}"]
