"""The task `heldout`: how well a model knows samples of the user's own, told by their loss, and what it says
of them.

    earlyfusion eval --model RUN/model --tasks heldout --data SHARDS --out evals/own

--data names what `earlyfusion prepare` writes or reads: shards, a folder, .jsonl, .json, .csv, .parquet. All
samples are measured as training counts them (eval/heldout.py). Options (--set KEY=VALUE): see HeldoutOptions.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import Field, ValidationError

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats import BUILDERS, Group, build
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.order import Permutation
from earlyfusion.data.prepare.read import InputOptions, open_input
from earlyfusion.data.prepare.write import key_of
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources.base import Options, explain_options
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.eval.benchmarks.base import BaseTask, benchmark, summarize
from earlyfusion.eval.heldout import Loss, summary
from earlyfusion.eval.protocol import EvalError, LossRequest, Model, Question, Request
from earlyfusion.eval.samples import prompted
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record


class HeldoutOptions(Options):
    shown: int = Field(8, ge=0)
    """Samples whose answer is generated."""
    length: int = Field(4096, ge=2)
    """Longer documents are cut to this many tokens."""
    format: str = "auto"
    """As that of `prepare`, and so the five below."""
    image_field: str | None = None
    text_field: str | None = None
    question_field: str | None = None
    answer_field: str | None = None
    split: str | None = None


class Samples:
    """Everything that `prepare` can read at a path, by number: the name of a sample without reading it, and
    the sample (BadSample where it cannot be read)."""

    def __init__(self, path: str, form: str = "auto", **fields: str | None) -> None:
        self.given = given = open_input(path, InputOptions(**fields))
        self.shards = ShardsOptions.model_validate({"format": form if form != "auto" else given.form})

    def key(self, number: int) -> str:
        return key_of(number, self.given.origin(number))

    def read(self, number: int) -> Sample:
        members = self.given.members(number)
        sizes = {name: len(data) for name, data in members.items()}
        # Read through the same door as training data, so that the loss is the one of training.
        group = Group(self.key(number), self.given.origin(number), sizes, members.__getitem__)
        return Sample(build(group, self.shards), "heldout", self.key(number))


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

        fields = given.model_dump(exclude={"shown", "length", "format"})
        self.samples = Samples(str(self.data_path()), given.format, **fields)

    def data_hash(self) -> str:
        """Of names, sizes and times of what is read (of the shards' checksums where they have them)."""
        return self.samples.given.fingerprint()

    def prepare(self, model: Model) -> None:
        """How the model reads a prompt; one that it cannot read is not asked."""
        # Only models of ours have the capability "loss".
        own: Any = model
        self.encode = lambda sample: encode(sample, own.tokenizer, own.model.config.vision)

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """One question a sample, or `limit` of them spread over the data; nothing is read yet."""
        count = self.samples.given.count
        if count == 0 or (limit is not None and limit < 1):
            raise EvalError(f"heldout: {self.options.data} has no sample to ask (with this --limit)")
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
        return record

    def aggregate(self, records: Sequence[Record]) -> Record:
        """Means over all tokens together: loss, seen_loss and blind_loss beside pictures, text_loss,
        bits_per_byte."""
        results: list[Loss | BadSample] = []
        for record in records:
            known = "sums" in record
            results.append(Loss(**record["sums"]) if known else BadSample("", record["left_out"]))
        if (numbers := summary(results)) is None:
            raise EvalError(f"heldout: no sample of {self.options.data} can be measured; see records.jsonl")

        # Over all tokens together: a mean of means would make short samples weigh more.
        used = [{**record, "target": None} for record in records if "sums" in record]
        left_out = numbers.pop("left_out", {})
        result = summarize(used) | numbers
        result |= {f"left out: {why}": count for why, count in left_out.items()}
        result["score"] = -result["loss"]
        if "seen_loss" in result:
            result["seeing"] = result["blind_loss"] - result["seen_loss"]
        return result
