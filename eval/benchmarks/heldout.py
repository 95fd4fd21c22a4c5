"""The task `heldout`: how well a model knows samples of the user's own, told by their loss, and what it says
of them.

    earlyfusion eval --model RUN/model --tasks heldout --data SHARDS --out evals/own

--data names what `earlyfusion prepare` writes or reads: shards, a folder, .jsonl, .json, .csv, .parquet. All
samples are measured as training counts them (eval/heldout.py). Options (--set KEY=VALUE):

    val_fraction   only the samples that a recipe with this data.val_fraction holds out of the same data
    shown          samples whose answer is generated and shown (8)
    length         longer documents are cut to this many tokens (4096)
    format, image_field, text_field, question_field, answer_field, split     as those of prepare
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.build import BUILDERS, build
from earlyfusion.data.formats.group import Group
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.order import Permutation, digest64
from earlyfusion.data.prepare.inputs import InputOptions, open_input
from earlyfusion.data.prepare.work import key_of
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.sources.guess import guess_kind
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.eval.benchmarks.base import BaseTask, summarize
from earlyfusion.eval.benchmarks.visual import generate_request
from earlyfusion.eval.heldout import Loss
from earlyfusion.eval.protocol import EvalError, LossRequest, Model, Question, Record, Request, TaskOptions
from earlyfusion.eval.registry import benchmark
from earlyfusion.eval.samples import first_picture, has_media, prompted, thumbnail
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import write_json

_INPUT = tuple(item.name for item in fields(InputOptions))
KNOWN = ("val_fraction", "shown", "length", "format", *_INPUT)
SHOWN = "shown.json"


class Samples(Protocol):
    """Numbered samples; `key` without reading it."""

    def __len__(self) -> int: ...
    def read(self, number: int) -> Sample: ...
    def key(self, number: int) -> str: ...
    def identity(self) -> str: ...


class All:
    """Everything that `prepare` can read at a path."""

    def __init__(self, path: str, form: str, options: InputOptions) -> None:
        self.input = open_input(path, options)
        self.options = ShardsOptions.model_validate({"format": form if form != "auto" else self.input.form})

    def __len__(self) -> int:
        return len(self.input)

    def key(self, number: int) -> str:
        return key_of(number, self.input.origin(number))

    def read(self, number: int) -> Sample:
        members = self.input.members(number)
        sizes = {name: len(data) for name, data in members.items()}
        group = Group(self.key(number), self.input.origin(number), sizes, members.__getitem__)
        return Sample(build(group, self.options), "heldout", self.key(number))

    def identity(self) -> str:
        return self.input.fingerprint()


class HeldOut:
    """What a source of a recipe holds out of the data at a path."""

    def __init__(self, path: str, form: str, fraction: float) -> None:
        local = Path(path)
        kind = guess_kind(path, local if local.exists() else None)
        options = {"format": form} if kind == "webdataset" else {}
        config = SourceConfig(name="heldout", kind=kind, path=path, options=options)
        self.source = build_source(config, val_fraction=fraction)

    def __len__(self) -> int:
        return self.source.heldout_len()

    def key(self, number: int) -> str:
        return f"{number:09d}"

    def read(self, number: int) -> Sample:
        return self.source.heldout(number)

    def identity(self) -> str:
        return self.source.fingerprint()


@benchmark("heldout", "loss and answers on own samples: shards, folder, jsonl, ...")
class HeldoutTask(BaseTask):
    """See the module. score: minus the loss in nats a learned token (higher is better)."""

    name = "heldout"
    kind = "loss"
    needs = frozenset({"loss"})

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        extra = options.extra
        for key in extra:
            if key not in KNOWN:
                raise EvalError(f"heldout: unknown option {key!r}; {did_you_mean(key, KNOWN)}")
        self.shown = _number(extra.get("shown", 8), "shown", 0)
        self.length = _number(extra.get("length", 4096), "length", 2)
        form = str(extra.get("format", "auto"))
        if form not in ("auto", *BUILDERS):
            raise EvalError(f"heldout: format {form!r}; {did_you_mean(form, ('auto', *BUILDERS))}")
        if options.data is None:
            raise EvalError(
                "heldout: no data given; pass --data PATH: shards, a folder, .jsonl, .json, .csv or .parquet"
            )
        path, fraction = str(options.data), extra.get("val_fraction")
        given = InputOptions(**{key: str(extra[key]) for key in _INPUT if key in extra})
        self.held = fraction is not None
        self.samples: Samples = HeldOut(path, form, _share(fraction)) if self.held else All(path, form, given)

    def data_hash(self) -> str:
        """Of names, sizes and times of what is read (of the shards' checksums where they have them)."""
        return f"{digest64(self.samples.identity(), self.held):016x}"

    def prepare(self, model: Model) -> None:
        """How the model reads a prompt; one that it cannot read is not asked."""
        own: Any = model
        self._encode = lambda sample: encode(sample, own.tokenizer, own.model.config.vision)

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """One question a sample, or `limit` of them spread over the data; nothing is read yet."""
        count = len(self.samples)
        if count == 0:
            raise EvalError(
                f"heldout: {self.options.data} has no sample (with this val_fraction); raise it or leave"
                " it out"
            )
        if limit is not None and limit < 1:
            raise EvalError(f"--limit {limit}: give at least 1")
        order = Permutation(count, "heldout")
        chosen = [order[place] for place in range(min(limit or count, count))]
        for place, number in enumerate(chosen):
            yield Question(
                self.samples.key(number), "", None, meta={"number": number, "shown": place < self.shown}
            )

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """The loss of the sample; of those shown also an answer. Nothing for a sample that cannot be read."""
        try:
            sample = self.samples.read(question.meta["number"])
        except BadSample:
            return []
        asked: list[Request] = [LossRequest(sample, self.length)]
        cut = prompted(sample) if question.meta["shown"] else None
        if cut is not None and self._reads(cut):
            tokens = self.options.max_new_tokens or 64
            asked.append(
                generate_request(cut.segments[:-1], self.options, question.id, repeat, tokens, stop=())
            )
        return asked

    def _reads(self, sample: Sample) -> bool:
        try:
            self._encode(sample)
        except BadSample:
            return False
        return True

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """The sums of one sample (heldout.Loss), or why it is left out (then its score is 0 and counts
        nowhere)."""
        loss = outputs[0] if outputs else None
        if not isinstance(loss, Loss) or not loss.tokens:
            reason = loss.reason if isinstance(loss, BadSample) else self._why(question)
            return {"extracted": None, "score": 0.0, "left_out": reason}
        record: Record = {"extracted": round(loss.nats / loss.tokens, 6), "score": -loss.nats / loss.tokens}
        record["sums"] = asdict(loss)
        if len(outputs) > 1 and (cut := prompted(self.samples.read(question.meta["number"]))) is not None:
            record["prompt"] = Sample(cut.segments[:-1], "", "").text.strip()
            record["target"] = cut.segments[-1].text.strip()  # type: ignore[union-attr]
            record["number"] = question.meta["number"]
        return record

    def _why(self, question: Question) -> str:
        try:
            self.samples.read(question.meta["number"])
        except BadSample as error:
            return error.reason
        return "nothing learned"

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Means over all tokens together: loss, seen_loss and blind_loss beside pictures, text_loss,
        bits_per_byte."""
        used = [record for record in records if "sums" in record]
        if not used:
            reasons = Counter(str(record["left_out"]) for record in records)
            raise EvalError(f"heldout: no sample of {self.options.data} can be measured ({dict(reasons)})")
        whole = Loss()
        for record in used:
            whole.add(Loss(**record["sums"]))
        numbers = whole.numbers()
        result = (
            summarize([{**record, "target": None} for record in used]) | {"score": -numbers["loss"]} | numbers
        )
        if "seen_loss" in numbers:
            result["seeing"] = numbers["blind_loss"] - numbers["seen_loss"]
        left_out = Counter(str(record["left_out"]) for record in records if "left_out" in record)
        return result | ({"left_out": dict(left_out)} if left_out else {})

    def explain(self, metrics: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
        """What was measured, and the blind row in words."""
        lines = [
            f"loss {metrics['loss']:.4f} nats a token over {metrics['tokens']:,} learned tokens of"
            f" {metrics['n']} samples"
        ]
        if "blind_loss" in metrics:
            lines.append(
                f"beside a picture {metrics['seen_loss']:.4f}, with a grey one {metrics['blind_loss']:.4f}: "
                f"seeing is worth {metrics['seeing']:+.4f}"
            )
        if metrics.get("left_out"):
            lines.append(
                f"left out: {', '.join(f'{count} {why}' for why, count in metrics['left_out'].items())}"
            )
        if not self.held:
            lines.append(
                "every sample of the data was measured; if a recipe trained on it, --set val_fraction=X (its "
                "data.val_fraction, 0.1 by default) measures only what it held out"
            )
        return lines

    def write_shown(self, folder: Path, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
        """shown.json and pictures beside the records: what pipeline/report/evaluation.py draws a page of."""
        samples = []
        for record in records:
            if "number" not in record:
                continue
            sample, image = self.samples.read(record["number"]), None
            if has_media(sample) and (picture := first_picture(sample)) is not None:
                image = f"shown/{record['number']}.png"
                (folder / image).parent.mkdir(exist_ok=True)
                thumbnail(picture).save(folder / image)
            numbers = Loss(**record["sums"]).numbers()
            shown = {
                "prompt": record["prompt"],
                "reference": record["target"],
                "answer": record.get("output"),
            }
            samples.append({"image": image, **shown, **numbers})
        told = {"data": str(self.options.data), "explained": summary.get("explained", [])}
        write_json(folder / SHOWN, {**told, "samples": samples})


def _number(given: Any, name: str, least: int) -> int:
    try:
        value = int(given)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        raise EvalError(f"heldout: {name}={given!r}; expected a whole number of at least {least}")
    return value


def _share(given: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < 1:
        raise EvalError(
            f"heldout: val_fraction={given!r}; expected a share between 0 and 1, as data.val_fraction of the"
            " recipe"
        )
    return value
