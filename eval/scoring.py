"""Scoring of given answers: would the model have said this, and how likely was it?

Questions about the same picture share its features: every picture goes through the vision tower once, and
every question is a short document of its own in packed rows. Nothing is generated; all tokens of an answer
are judged in one pass (teacher forcing), which gives the same verdict as greedy decoding: the answer is said
exactly when each of its tokens is the argmax after the tokens before it.

Shapes: T tokens, D hidden, V vocabulary, M image tokens, A answer tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating

Picture = tuple[Tensor, list[tuple[int, int, int]]]  # uint8 patches [P, 3, p, p], grids


@dataclass(frozen=True)
class Asked:
    """A document that ends just before its answer, the answer's ids, and the picture its placeholders stand
    for."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    media_positions: tuple[int, ...] = ()
    picture: Hashable | None = None


@dataclass(frozen=True)
class Score:
    """said: every answer token is the argmax over the vocabulary. log_likelihood: sum of ln p, nats.
    best: index of the likeliest candidate as first answer token (None without candidates)."""

    said: bool
    log_likelihood: float
    best: int | None


def score_answers(
    model: NativeFusion,
    asked: Sequence[Asked],
    pictures: Mapping[Hashable, Picture],
    *,
    candidates: Sequence[int] = (),
    silent_ids: Sequence[int] = (),
    tokens_per_batch: int = 8192,
    patches_per_batch: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """A Score for every question, in order.

    candidates: token ids compared at the first answer position. silent_ids: ids that cannot be produced and
    so do not compete in the argmax (they keep their share of the likelihood). progress: told (questions
    scored, all) after every row. Raises KeyError for a picture that is not given.
    """
    scores: list[Score] = []
    with evaluating(model):
        features, start_of = _encode(model, pictures, patches_per_batch)
        judge = _Judge(model, features, start_of, candidates, silent_ids)
        row: list[Asked] = []
        size = 0
        for question in asked:
            length = len(question.ids) + len(question.answer) - 1
            if row and size + length > tokens_per_batch:
                scores += judge(row)
                row, size = [], 0
                if progress is not None:
                    progress(len(scores), len(asked))
            row.append(question)
            size += length
        return scores + (judge(row) if row else [])


def _encode(
    model: NativeFusion, pictures: Mapping[Hashable, Picture], patches_per_batch: int
) -> tuple[Tensor, dict[Hashable, int]]:
    """Features of all pictures [M, D] and the first row of each."""
    device = model.decoder.embed_tokens.weight.device
    start_of: dict[Hashable, int] = {}
    parts: list[Tensor] = []
    batch: list[Picture] = []

    def flush() -> None:
        patches = torch.cat([patches for patches, _ in batch]).to(device)
        parts.append(model.encode_images(patches, [grid for _, grids in batch for grid in grids]))
        batch.clear()

    merge_h, merge_w = model.config.vision.merge_kernel_size
    rows = 0
    for key, picture in pictures.items():
        if batch and sum(p.shape[0] for p, _ in batch) + picture[0].shape[0] > patches_per_batch:
            flush()
        batch.append(picture)
        start_of[key] = rows
        rows += sum((h // merge_h) * (w // merge_w) for _, h, w in picture[1])
    if batch:
        flush()
    weight = model.decoder.embed_tokens.weight
    return torch.cat(parts) if parts else weight.new_zeros(0, weight.shape[1]), start_of


class _Judge:
    """Runs one packed row of questions and reads off the scores."""

    def __init__(
        self,
        model: NativeFusion,
        features_MD: Tensor,
        start_of: Mapping[Hashable, int],
        candidates: Sequence[int],
        silent_ids: Sequence[int],
    ) -> None:
        self.model, self.features_MD, self.start_of = model, features_MD, start_of
        device = features_MD.device
        self.candidates = torch.tensor(list(candidates), dtype=torch.long, device=device)
        silent = sorted({*silent_ids, model.config.media_token_id})
        self.silent = torch.tensor(silent, dtype=torch.long, device=device)

    def __call__(self, row: Sequence[Asked]) -> list[Score]:
        ids, places, rows, judged, targets, counts = [], [], [], [], [], []  # type: ignore[var-annotated]
        for question in row:
            start = len(ids)
            ids += [*question.ids, *question.answer[:-1]]
            places += [start + position for position in question.media_positions]
            if question.media_positions:
                first = self.start_of[question.picture]
                rows += range(first, first + len(question.media_positions))
            first_answer = start + len(question.ids) - 1
            judged += range(first_answer, first_answer + len(question.answer))
            targets += question.answer
            counts.append(len(question.answer))
        device = self.features_MD.device
        segments = Segments.from_lengths([len(q.ids) + len(q.answer) - 1 for q in row])
        x_TD = self.model.decoder.embed_tokens(torch.tensor(ids, device=device))
        at, taken = (
            torch.tensor(places, dtype=torch.long, device=device),
            torch.tensor(rows, dtype=torch.long, device=device),
        )
        x_TD = x_TD.index_copy(0, at, self.features_MD[taken].to(x_TD.dtype))
        h_AD = self.model.decoder(x_TD, segments)[torch.tensor(judged, device=device)]
        logits_AV = self.model.logits(h_AD).float()
        return self._read(logits_AV, torch.tensor(targets, device=device), counts)

    def _read(self, logits_AV: Tensor, targets_A: Tensor, counts: list[int]) -> list[Score]:
        gold_A = logits_AV.gather(1, targets_A[:, None]).squeeze(1)
        likelihood_A = (gold_A - logits_AV.logsumexp(-1)).double().cpu()
        first_A = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        best: list[int | None] = [None] * len(counts)
        if len(self.candidates):
            best = logits_AV[first_A.to(logits_AV.device)][:, self.candidates].argmax(-1).tolist()
        said_A = (logits_AV.index_fill(1, self.silent, float("-inf")).argmax(-1) == targets_A).cpu()
        scores = []
        for said, likelihood, choice in zip(said_A.split(counts), likelihood_A.split(counts), best):
            scores.append(Score(bool(said.all()), float(likelihood.sum()), choice))
        return scores
