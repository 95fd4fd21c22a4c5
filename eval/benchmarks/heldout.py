"""The task `heldout`: how well a model knows samples of the user's own, told by their loss, and what it says
of them.

    earlyfusion eval --model RUN/model --tasks heldout --data SHARDS --out evals/own

--data names what `earlyfusion prepare` writes or reads: shards, a folder, .jsonl, .json, .csv, .parquet. All
samples are measured as training counts them (eval/heldout.py). Options (--set KEY=VALUE): see HeldoutOptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.build import BUILDERS, build
from earlyfusion.data.formats.group import Group
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.order import Permutation, digest64
from earlyfusion.data.prepare.read import InputOptions, open_input
from earlyfusion.data.prepare.write import key_of
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources.base import Options, SourceConfig, build_source, explain_options
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.data.sources.text_files import guess_kind
from earlyfusion.eval.benchmarks.base import BaseTask, benchmark, summarize
from earlyfusion.eval.heldout import Loss
from earlyfusion.eval.protocol import EvalError, LossRequest, Model, Question, Record, Request
from earlyfusion.eval.samples import first_picture, prompted, thumbnail
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import write_json


class HeldoutOptions(Options):
    val_fraction: float | None = Field(None, gt=0, lt=1)
    """Only the samples that a recipe with this data.val_fraction holds out of the same data."""
    shown: int = Field(8, ge=0)
    """Samples whose answer is generated and shown."""
    length: int = Field(4096, ge=2)
    """Longer documents are cut to this many tokens."""
    format: str = "auto"
    """As that of `prepare`, and so the five below."""
    image_field: str | None = None
    text_field: str | None = None
    question_field: str | None = None
    answer_field: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Samples:
    """Samples by number: how many, the name of one without reading it, one (BadSample where it cannot be
    read), and what tells these data from others."""

    count: int
    key: Callable[[int], str]
    read: Callable[[int], Sample]
    fingerprint: Callable[[], object]


def every_sample(path: str, form: str, options: InputOptions) -> Samples:
    """Everything that `prepare` can read at a path."""
    given = open_input(path, options)
    shards = ShardsOptions.model_validate({"format": form if form != "auto" else given.form})

    def key(number: int) -> str:
        return key_of(number, given.origin(number))

    def read(number: int) -> Sample:
        members = given.members(number)
        sizes = {name: len(data) for name, data in members.items()}
        # Read through the same door as training data, so that the loss is the one of training.
        group = Group(key(number), given.origin(number), sizes, members.__getitem__)
        return Sample(build(group, shards), "heldout", key(number))

    return Samples(len(given), key, read, given.fingerprint)


def held_out(path: str, form: str, fraction: float) -> Samples:
    """What a source of a recipe holds out of the data at a path."""
    kind = guess_kind(path, Path(path) if Path(path).exists() else None)
    # Only shards hold several formats; every other kind knows its own.
    options = {"format": form} if kind == "webdataset" else {}
    config = SourceConfig(name="heldout", kind=kind, path=path, options=options)
    source = build_source(config, val_fraction=fraction)
    return Samples(source.heldout_len(), "{:09d}".format, source.heldout, source.fingerprint)


@benchmark("heldout", "loss and answers on own samples: shards, folder, jsonl, ...")
class HeldoutTask(BaseTask):
    """See the module. score: minus the loss in nats a learned token (higher is better)."""

    name = "heldout"
    kind = "loss"
    needs = frozenset({"loss"})

    def setup(self) -> None:
        try:
            self.given = given = HeldoutOptions.model_validate(self.options.extra)
        except ValidationError as error:
            raise EvalError(f"heldout: {explain_options(error, HeldoutOptions)}") from None
        if given.format not in ("auto", *BUILDERS):
            raise EvalError(f"heldout: format {given.format!r}; {did_you_mean(given.format, BUILDERS)}")

        path = str(self.data_path())
        if given.val_fraction is None:
            fields = given.model_dump(exclude={"val_fraction", "shown", "length", "format"})
            self.samples = every_sample(path, given.format, InputOptions(**fields))
        else:
            self.samples = held_out(path, given.format, given.val_fraction)

    def data_hash(self) -> str:
        """Of names, sizes and times of what is read (of the shards' checksums where they have them)."""
        held = self.given.val_fraction is not None
        return f"{digest64(self.samples.fingerprint(), held):016x}"

    def prepare(self, model: Model) -> None:
        """How the model reads a prompt; one that it cannot read is not asked."""
        # Only models of ours have the capability "loss".
        own: Any = model
        self.encode = lambda sample: encode(sample, own.tokenizer, own.model.config.vision)

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """One question a sample, or `limit` of them spread over the data; nothing is read yet."""
        count = self.samples.count
        if count == 0 or (limit is not None and limit < 1):
            raise EvalError(
                f"heldout: {self.options.data} has no sample to ask (with this val_fraction and --limit)"
            )
        # A fixed order in which any first part is spread over all of the data.
        order = Permutation(count, "heldout")
        for place in range(min(limit or count, count)):
            number = order[place]
            meta = {"number": number, "shown": place < self.given.shown}
            yield Question(self.samples.key(number), "", None, meta=meta)

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """The loss of the sample; of those shown also an answer. Nothing for a sample that cannot be read."""
        meta = question.meta
        try:
            sample = self.samples.read(meta["number"])
        except BadSample as error:
            meta["left_out"] = error.reason
            return []
        asked: list[Request] = [LossRequest(sample, self.given.length)]
        if meta["shown"] and (cut := prompted(sample)) is not None:
            with suppress(BadSample):
                self.encode(cut)
                meta["asked"] = cut
                asked.append(self.generation(cut.segments[:-1], question.id, repeat))
        return asked

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """The sums of one sample (heldout.Loss), or why it is left out (then its score is 0 and counts
        nowhere)."""
        loss, meta = outputs[0] if outputs else None, question.meta
        if isinstance(loss, BadSample):
            meta["left_out"] = loss.reason
        if not isinstance(loss, Loss) or not loss.tokens:
            return {"extracted": None, "score": 0.0, "left_out": meta.get("left_out", "nothing learned")}

        nats = loss.nats / loss.tokens
        record: Record = {"extracted": round(nats, 6), "score": -nats, "sums": asdict(loss)}
        if "asked" in meta:
            *prompt, reference = meta["asked"].segments
            record |= {"prompt": Sample(prompt, "", "").text.strip(), "target": reference.text.strip()}
            record["number"] = meta["number"]
        return record

    def aggregate(self, records: Sequence[Record]) -> Record:
        """Means over all tokens together: loss, seen_loss and blind_loss beside pictures, text_loss,
        bits_per_byte."""
        total, used, left_out = Loss(), [], Counter[str]()
        for record in records:
            if "sums" in record:
                total.add(Loss(**record["sums"]))
                used.append({**record, "target": None})
            else:
                left_out[record["left_out"]] += 1
        if not used:
            raise EvalError(f"heldout: no sample of {self.options.data} can be measured ({dict(left_out)})")

        # Over all tokens together: a mean of means would make short samples weigh more.
        result = summarize(used) | total.numbers()
        result["score"] = -result["loss"]
        if "seen_loss" in result:
            result["seeing"] = result["blind_loss"] - result["seen_loss"]
        if left_out:
            result["left_out"] = dict(left_out)
        return result

    def explain(self, metrics: Record) -> list[str]:
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
        if "left_out" in metrics:
            reasons = ", ".join(f"{count} {why}" for why, count in metrics["left_out"].items())
            lines.append(f"left out: {reasons}")
        if self.given.val_fraction is None:
            lines.append(
                "every sample of the data was measured; if a recipe trained on it, --set val_fraction=X (its "
                "data.val_fraction, 0.1 by default) measures only what it held out"
            )
        return lines

    def write_shown(self, folder: Path, records: Sequence[Record], summary: Record) -> None:
        """shown.json and pictures beside the records: what pipeline/report/evaluation.py draws a page of."""
        samples = []
        for record in records:
            if "number" not in record:
                continue
            # Pictures are drawn again from the data: records hold no pixels.
            image = None
            picture = first_picture(self.samples.read(record["number"]))
            if picture is not None:
                image = f"shown/{record['number']}.png"
                (folder / image).parent.mkdir(exist_ok=True)
                thumbnail(picture).save(folder / image)
            shown = {"image": image, "prompt": record["prompt"], "reference": record["target"]}
            samples.append({**shown, "answer": record.get("output"), **Loss(**record["sums"]).numbers()})
        about = {"data": str(self.options.data), "explained": summary.get("explained", [])}
        write_json(folder / "shown.json", {**about, "samples": samples})
