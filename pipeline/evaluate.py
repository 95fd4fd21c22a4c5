"""Evaluation during and after training, and what a finished run leaves: results, samples, model directory,
report.

Tasks of `eval.tasks`: easy_vqa (official test split, with the image-blind control) and bpb (held-out topics
of the Python reference, beside gzip). Every other task of `earlyfusion eval` can be named as well
("mmlu_pro:mcf", "counting"; files through eval.data). eval.limits hold always, eval.limits_during until the
schedule has ended. Every rank asks its share of the questions, and measures its share of the sources; rank 0
writes.

Besides, every source is measured on what it holds out (eval.heldout: loss, blind loss, bits per byte;
eval/heldout.py) and asked for answers (eval.samples). The sources are built anew for it, so that nothing of
the training data moves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources.base import Source, SourceConfig, build_source, kind_of
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.benchmarks.base import BaseTask, build_task, known_benchmarks
from earlyfusion.eval.benchmarks.bpb import BitsPerByte
from earlyfusion.eval.benchmarks.easy_vqa import questions_of
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.heldout import Getter, Loss, Room, heldout_batches, heldout_getters, measure, summary
from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.eval.protocol import Interrupted, TaskOptions
from earlyfusion.eval.samples import (
    answer_samples,
    attnres_weights,
    first_picture,
    has_media,
    prompted,
    save_result,
    save_samples,
)
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline.adapter import FOLDER, adapted, merged, save_adapter
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.report.page import write_report
from earlyfusion.pipeline.runtime import Runtime

Found = TypeVar("Found")
TASKS = ("easy_vqa", "bpb")
FINAL = 4
"""How many times more of its held-out samples a source is measured on in the last evaluation."""


class Evaluator:
    """Runs the recipe's tasks on the weights in memory."""

    own_tasks: tuple[str, ...] = TASKS
    """Tasks that are methods of this class: (step, limit) -> headline numbers; every other is a benchmark of
    eval."""
    chat = False
    """Whether the other tasks put their prompts as the user's message."""

    def __init__(
        self, config: RunConfig, fusion: NativeFusion, tokens: Tokenizer, runtime: Runtime, out: Path
    ) -> None:
        self.check(config)
        self.config, self.fusion, self.tokens, self.runtime, self.out = config, fusion, tokens, runtime, out
        self._sources: dict[str, Source] = {}
        self._shown: list[Sample] | None = None
        self._busy: Any = lambda *_: None

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """What only the first evaluation would notice. Raises UserError, or EvalError for a form or data of a
        task."""
        known = (*cls.own_tasks, *known_benchmarks())
        for task in config.eval.tasks:
            if task.partition(":")[0] not in known:
                raise UserError(f"eval.tasks: unknown task {task!r}; {did_you_mean(task, known)}")
            # Its files are read and its form is built now, not after an hour of training.
            if task not in cls.own_tasks:
                build_task(task, data=config.eval.data).data_hash()

    @property
    def idle(self) -> bool:
        """Whether the recipe asks for no measurement that needs the weights."""
        section = self.config.eval
        return not (section.tasks or section.heldout or section.samples)

    def run(self, step: int, tracker: Any, *, final: bool, loader: Any = None) -> Record:
        """Evaluate after `step` updates; writes eval/*.json and samples/, returns the headline numbers.

        loader: the stage's data loader; at the end its held-out documents show the AttnRes weights. Raises
        Interrupted, on every rank, where a signal came before all was asked.
        """
        headline: Record = {}
        tracker.busy("evaluating held-out samples")
        headline |= self.heldout(step, final)
        tasks = self.config.eval.tasks
        for number, task in enumerate(tasks, 1):
            self._busy = partial(tracker.busy, f"evaluating {task} ({number}/{len(tasks)})")
            self._busy()
            limit = self._limit(task, step)
            if task in self.own_tasks:
                headline |= getattr(self, task)(step, limit)
            else:
                headline |= self._benchmark(task, step, limit)
        tracker.busy("answering samples")
        self._samples(step)
        if self.runtime.is_main:
            # (Without weights, where nothing was asked for of a sharded model, there is nothing to look at.)
            if final and loader is not None and self.fusion.device.type != "meta":
                self._attnres(step)
            if headline:
                tracker.event(step, "eval", **headline, message=headline_line(headline))
        self.runtime.barrier()
        return headline

    def heldout(self, step: int, final: bool) -> dict[str, float]:
        """Every source's loss on what it holds out, and that of all pictures and all texts together.

        A source is read up to eval.heldout samples or one micro-batch of tokens, at the end FINAL times as
        far.
        """
        # The last numbers are the ones that are quoted.
        times = FINAL if final else 1
        limit = times * self.config.eval.heldout
        most = times * max(stage.tokens for stage in self.config.stages)
        # Sources are added up by tokens: a small one does not count as much as a large one.
        # (The mean of means would weigh a source of ten pictures like one of a million.)
        whole, sources = Loss(), {}
        names = [source.name for source in self.config.data.sources if limit]
        measured = self.shared(
            names, lambda name: self.measure(heldout_getters(self.source(name), limit), most)
        )
        for name in names:
            if (numbers := summary(measured[name])) is not None:
                sources[name] = numbers
                for result in measured[name]:
                    if isinstance(result, Loss):
                        whole.add(result)
        if not sources:
            return {}
        self.save("heldout", step, {"sources": sources, "all": whole.numbers()})
        return heldout_headline(sources, whole.numbers())

    def shared(self, names: Sequence[str], work: Callable[[str], Found]) -> dict[str, Found]:
        """`work` of every name, dealt over the ranks; the same on all of them. One name is one rank's, so
        that the numbers do not depend on how many there are. Raises Interrupted, on all, after a signal."""
        own: dict[str, Found] = {}
        for name in names[self.runtime.rank :: self.runtime.world]:
            if self.runtime.stop.received is None:
                own[name] = work(name)
        found: dict[str, Found] = {}
        for part in self.runtime.gather(own):
            found |= part
        if len(found) < len(names):
            raise Interrupted
        return found

    def save(self, name: str, step: int, payload: Record) -> None:
        """Write a result, on rank 0."""
        if self.runtime.is_main:
            save_result(self.out, name, step, payload)

    def measure(
        self, samples: Iterable[Getter], most_tokens: int | None = None, *, blind: bool = True
    ) -> list[Loss | BadSample]:
        """The losses of samples of a source, cut and packed as in the stage with the longest documents."""
        return measure(self.fusion, self.tokens, samples, self._room(), most_tokens=most_tokens, blind=blind)

    def _room(self) -> Room:
        # As the model will be used: with the longest documents that it was trained on.
        stage, data = max(self.config.stages, key=lambda stage: stage.length), self.config.data
        return Room(stage.tokens, stage.max_patches, stage.length, data.overlong, data.decode)

    def _limit(self, task: str, step: int) -> int | None:
        """Most examples of a task after `step` updates; None for all."""
        # A short run of a long schedule (run.steps) is still on its course.
        given = [self.config.eval.limits.get(task)]
        if step < sum(stage.steps for stage in self.config.stages):
            given.append(self.config.eval.limits_during.get(task))
        return min((limit for limit in given if limit is not None), default=None)

    def easy_vqa(self, step: int, limit: int | None) -> dict[str, float]:
        """The benchmark, asked as pretraining puts questions whatever the model's chat form."""
        # Results keep the names that reports and comparisons of older runs have.
        _, found = self._asked("easy_vqa", limit)
        result = _accuracies(found) | {"majority_accuracy": found["majority"]}
        result["questions_total"] = len(questions_of("test"))
        result["by_kind"] = {kind: _accuracies(entry) for kind, entry in found["by_category"].items()}
        self.save("easy_vqa", step, result)
        return {"easy_vqa": found["score"], "easy_vqa_blind": found["blind_score"]}

    def bpb(self, step: int, limit: int | None) -> dict[str, float]:
        samples = self.source("pydoc").heldout_samples(limit)
        texts = BitsPerByte(TaskOptions(), [(sample.key, sample.text) for sample in samples])
        # A longer window would measure extrapolation in place of the language.
        window = max(stage.length for stage in self.config.stages)  # no longer context than in training
        _, found = self._asked(texts, None, batch_tokens=window)
        self.save("bpb", step, found)
        return {name: found[name] for name in ("bits_per_byte", "gzip_bits_per_byte")}

    def _asked(self, task: str | BaseTask, limit: int | None, **settings: Any) -> tuple[str, Record]:
        """(label, metrics) of one benchmark on the weights in memory."""
        if isinstance(task, str):
            task = build_task(task, data=self.config.eval.data)
        # A new engine each time: the weights have changed since the last one.
        model = EngineModel(self.fusion, self.tokens, **settings)
        summary = run_task(
            model,
            task,
            limit=limit,
            progress=self._busy,
            share=(self.runtime.rank, self.runtime.world),
            gather=self.runtime.gather,
            stopping=lambda: self.runtime.stop.received is not None,
        )
        return task.label, summary["metrics"]

    def _benchmark(self, task: str, step: int, limit: int | None) -> dict[str, float]:
        name, metrics = self._asked(task, limit, chat=self.chat)
        self.save(name, step, metrics)
        shown = {"score": name, "blind_score": f"{name}_blind"}
        return {label: float(metrics[key]) for key, label in shown.items() if key in metrics}

    def _samples(self, step: int) -> None:
        if self._shown is None:
            # Chosen once: the same pictures at every evaluation, so that answers can be followed.
            self._shown = self._choose(self.config.eval.samples)
        if not self._shown:
            return
        rank, world = self.runtime.rank, self.runtime.world
        own = self._shown[rank::world]
        answered = answer_samples(self.fusion, self.tokens, own) if own else []
        # Pictures are large, and rank 0 has them.
        shares = self.runtime.gather([{**record, "picture": None} for record in answered])
        if self.runtime.is_main:
            records = [shares[i % world][i // world] for i in range(len(self._shown))]
            for record, sample in zip(records, self._shown, strict=True):
                record["picture"] = first_picture(sample)
            save_samples(self.out, step, records)

    def _choose(self, wanted: int) -> list[Sample]:
        """`wanted` held-out samples with pictures, one source after the other, round robin, at least one of
        each; then one of each source of text alone."""
        turns: list[tuple[int, Sample]] = []
        texts: list[Sample] = []
        for source in self.config.data.sources if wanted else ():
            for turn, sample in enumerate(self._prompts(source.name, wanted)):
                if has_media(sample):
                    turns.append((turn, sample))
                elif turn == 0:
                    texts.append(sample)  # shown once; pictures as often as there is room
        turns.sort(key=itemgetter(0))
        most = max(wanted, sum(turn == 0 for turn, _ in turns))
        return [sample for _, sample in turns[:most]] + texts

    def _prompts(self, name: str, wanted: int) -> list[Sample]:
        """Held-out samples of a source that can be read and end in something to answer with."""
        source, most = self.source(name), max(stage.tokens for stage in self.config.stages)
        usable: list[Sample] = []
        for index in range(min(source.heldout_len(), 4 * wanted)):
            with suppress(BadSample):
                sample = prompted(source.heldout(index))
                if sample is not None and len(encode(sample, self.tokens, self.config.vision)) <= most:
                    usable.append(sample)
        return sorted(usable, key=lambda sample: not has_media(sample))[:wanted]  # pictures first

    def _attnres(self, step: int) -> None:
        # Residual weights differ by modality, so a row with pictures is the one to look at.
        pictures = [source.name for source in self.config.data.sources if source.has_pictures]
        for name in pictures[:1]:
            samples = heldout_getters(self.source(name))
            for batch in islice(heldout_batches(self.fusion, self.tokens, samples, self._room(), []), 1):
                weights = attnres_weights(self.fusion, batch.to(self.runtime.device))
                if weights is not None:
                    save_result(self.out, "attnres", step, weights)

    def source(self, name: str) -> Source:
        """A source of the recipe; `pydoc` also when the recipe has none, for bits per byte."""
        if name not in self._sources:
            data: DataConfig = self.config.data
            # Sources are built anew: reading here must not move a cursor of the training.
            known = {source.name: source for source in data.sources} | {s.kind: s for s in data.sources}
            chosen = known.get(name) or SourceConfig(name=name, kind=name)
            self._sources[name] = build_source(chosen, seed=data.seed, val_fraction=data.val_fraction)
        return self._sources[name]


def _accuracies(found: Record) -> Record:
    """easy-VQA's scores under the names that results of it have."""
    return {
        "questions": found["n"],
        "accuracy": found["score"],
        "blind_accuracy": found["blind_score"],
    }


def heldout_headline(sources: dict[str, Record], overall: dict[str, float]) -> dict[str, float]:
    """Held-out losses by modality (all sources together) and by source, as metrics.jsonl and trackers name
    them.

    heldout/image, heldout/image_blind, heldout/text; heldout/source/<name>, heldout/blind/<name> (of the
    tokens beside a picture; heldout/seen/<name> is theirs with it, where the source has others as well),
    heldout/bits_per_byte/<name>.
    """
    names = {"seen_loss": "image", "blind_loss": "image_blind", "text_loss": "text"}
    headline = {f"heldout/{label}": overall[key] for key, label in names.items() if key in overall}
    parts = {"loss": "source", "seen_loss": "seen", "blind_loss": "blind", "bits_per_byte": "bits_per_byte"}
    for name, found in sources.items():
        for key, label in parts.items():
            # Where every token stands beside a picture, "seen" would be the loss once more.
            if key in found and (key != "seen_loss" or "text_loss" in found):
                headline[f"heldout/{label}/{name}"] = found[key]
    return headline


def headline_line(headline: Mapping[str, float]) -> str:
    """A headline as one line for the terminal."""
    scores, losses = [], []
    for key, value in headline.items():
        kind, _, name = key.rpartition("/")
        if kind == "heldout/source":
            blind = headline.get(f"heldout/blind/{name}")
            losses.append(f"{name} {value:.3f}" + ("" if blind is None else f" (blind {blind:.3f})"))
        elif not key.startswith("heldout/") and value is not None:
            scores.append(f"{key} {value:.3f}")
    if losses:
        losses[0] = f"held-out loss: {losses[0]}"
    return "; ".join(", ".join(part) for part in (scores, losses) if part)


def source_facts(config: RunConfig, shares: Mapping[str, float]) -> dict[str, Record]:
    """What the model card says of the sources of a run."""
    facts = {}
    for source in config.data.sources:
        kind = kind_of(source.kind)
        facts[source.name] = {"share": shares.get(source.name), "licence": kind.licence, "note": kind.note}
    return facts


def write_outputs(
    out: Path,
    fusion: NativeFusion,
    tokens: Any,
    facts: Record,
    read: Callable[[str], Tensor] | None = None,
) -> Sequence[str]:
    """The model directory and the report; returns lines to show. tokens: what `save_model` saves as
    tokenizer; read: see there."""
    lines = []
    if adapted(fusion):
        lines = [f"adapter: {save_adapter(out / FOLDER, fusion, str(facts.get('base', '')))}"]
        fusion, read = merged(fusion, read)
    directory = save_model(fusion, tokens, out / "model", facts, read=read)
    shown = {key: facts[key] for key in ("name", "steps", "tokens", "seconds", "device", "precision", "seed")}
    write_json(out / "facts.json", shown)
    report = write_report(out)
    return [*lines, f"model directory: {directory}", f"report: {report}"]
