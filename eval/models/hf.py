"""Any transformers causal language model as a Model: a folder, a hub name, or a GGUF file.

Sequences read together share a key/value cache in which every row's tokens stand side by side; the padding of
new tokens is never stored. Models whose cache cannot be copied row by row (recurrent or sliding-window
states) are read without a cache: every context whole, right-padded. A prefix that many prompts share is read
once and its keys copied; a context is read once for all its continuations.

In fp32 on a CPU an answer is the same, bit for bit, in any batch: widths are whole multiples of WIDTH,
one-token steps have at least ROWS rows (products of one to three rows are summed in another order than larger
ones), and what is masked stands behind a row's own keys, which are seen in whole blocks of KEYS, as torch's
attention takes them: a shorter last block would be summed in other parts.

Shapes: N sequences, W new tokens (padded), L cached slots, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

from earlyfusion.eval.models.tokens import Context, Ids, Piece, TokenModel, cut_at, weights_of
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Generation, LogProb
from earlyfusion.model.engine.requests import Controls, Needs, SamplingParams, choose, sequence_key

WIDTH, ROWS, KEYS = 16, 8, 512
POSITIONS = 1024
"""Positions whose logits over the vocabulary are held at once."""
KEPT_PREFIXES = 2
CPU_TOKENS = 512
"""Tokens of prompts that keep a CPU busy: larger batches only add padding."""
PLAIN_LAYERS = {"full_attention", "attention"}


class Rows(transformers.DynamicCache):
    """Sequences that were read up to some token; copies of them can be read on.

    Every row's keys and values stand side by side from slot 0, whatever the padding was: no hole ever stands
    between a row's tokens, so sums over keys have the same terms in the same order for every batch.
    """

    def __init__(self, owner: HfModel, ids: Sequence[Ids]) -> None:
        super().__init__()
        self.owner, self.ids = owner, list(ids)
        self.stored: dict[tuple[int, int], Tensor] = {}

    def select(self, index: Sequence[int]) -> Rows:
        """Sequence i of the result continues this one's sequence index[i]. This one stays usable."""
        rows = Rows(self.owner, [self.ids[i] for i in index])
        at = torch.tensor(index, device=self.owner.device)
        rows.stored = {name: tensor.index_select(0, at) for name, tensor in self.stored.items()}
        return rows

    def read(self, new: Sequence[Ids], step: bool = False) -> list[Tensor]:
        """Read one or more tokens a sequence -> states [tokens, D] after each of them. step: one token
        each."""
        owner, past = self.owner, torch.tensor([len(ids) for ids in self.ids])
        self.ids = [ids + row for ids, row in zip(self.ids, new)]
        rows = new
        if not owner.cached:  # the whole of every row is read again
            rows, past = self.ids, torch.zeros_like(past)

        # Rows are padded on the right; padding repeats the place of the last token and is masked.
        new_N = torch.tensor([len(row) for row in rows])
        width = 1 if step and owner.cached else _rounded(int(new_N.max()), WIDTH)
        offset_NW = torch.arange(width).expand(len(rows), width)
        real_NW = offset_NW < new_N[:, None]
        ids_NW = torch.full((len(rows), width), owner.pad_id)
        ids_NW[real_NW] = torch.tensor(list(chain(*rows)))
        places_NW = past[:, None] + offset_NW.minimum(new_N[:, None] - 1)

        seen, cache = real_NW.long(), None
        if owner.cached:
            cache, self.real_NW, self.places_NW = self, real_NW.to(owner.device), places_NW.to(owner.device)
            self.slots = _rounded(int((past + new_N).max()), owner.key_block)
            # A token sees the slots up to its own, which are all filled by its row.
            hidden_NWL = torch.arange(self.slots) > places_NW[:, :, None]
            mask_NWL = torch.zeros(hidden_NWL.shape, dtype=owner.model.dtype)
            seen = mask_NWL.masked_fill_(hidden_NWL, torch.finfo(owner.model.dtype).min)[:, None]
        hidden_NWD = owner.model.base_model(
            ids_NW.to(owner.device),
            attention_mask=seen.to(owner.device),
            position_ids=places_NW.to(owner.device),
            past_key_values=cache,
            use_cache=owner.cached,
        ).last_hidden_state
        return [h[len(row) - len(own) : len(row)] for h, row, own in zip(hidden_NWD, rows, new)]

    # what transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the real tokens [N, heads, W, width]; returns everything visible [N, heads, slots, width]."""
        rows_N1 = torch.arange(len(self.ids), device=key_states.device)[:, None]
        at = rows_N1.expand_as(self.places_NW)[self.real_NW], self.places_NW[self.real_NW]
        visible = []
        for part, states in enumerate((key_states, value_states)):
            fresh = states.transpose(1, 2)
            kept = self.stored.get((layer_idx, part), fresh[:, :0])
            # Room grows by a quarter at once: neither a long answer nor the tail behind a prefix that was
            # copied has to copy the cache again at every call.
            if kept.shape[1] < self.slots:
                more = self.slots * 5 // 4 - kept.shape[1]
                kept = self.stored[layer_idx, part] = functional.pad(kept, (0, 0, 0, 0, 0, more))
            kept[at] = fresh[self.real_NW]  # each token at its own place of its row
            visible.append(kept[:, : self.slots].transpose(1, 2))
        return visible[0], visible[1]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Tokens before those of this call, in the longest row."""
        return int(self.places_NW[:, 0].max())


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class HfModel(TokenModel):
    """A transformers causal LM and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, **about: Any) -> None:
        super().__init__(model.eval(), tokenizer, **about)
        self.device = model.device
        # A model of several parts keeps the language model's settings in a part of its own.
        config = model.config.get_text_config()
        self.max_length = getattr(config, "max_position_embeddings", None)
        # Only plain keys and values of all tokens can be copied row by row.
        windowed = getattr(model, "_is_stateful", False) or getattr(config, "sliding_window", None)
        layers = getattr(config, "layer_types", None) or PLAIN_LAYERS
        self.cached = not windowed and set(layers) <= PLAIN_LAYERS
        exact = self.device.type == "cpu" and model.dtype == torch.float32
        self.key_block = KEYS if exact else WIDTH

        # Every token that ends an answer, of the tokenizer and of the generation config.
        ends = model.generation_config.eos_token_id
        self.stop_ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # The beginning token, or the end token where there is none (as lm-evaluation-harness).
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        self.begin_id = next(token for token in special if token is not None)
        self.pad_id = tokenizer.pad_token_id or 0
        self.prefix = lru_cache(KEPT_PREFIXES)(self._read_prefix)

    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """See TokenModel; `begin` leaves it to the tokenizer which special tokens it adds."""
        return self.tokenizer.encode(text, **({} if begin else {"add_special_tokens": False}))

    def encode_prompt(self, prompt: Any, shared: int = 0) -> Piece:
        """A prompt to continue; with `chat` it is put as the user's message."""
        if self.chat and isinstance(prompt, str):
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return Piece(tuple(self.encode(text, False)))
        return super().encode_prompt(prompt, shared)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def identity(self) -> dict[str, Any]:
        """Path, sha256 of the weights, class, dtype, size, versions."""
        return {
            "kind": "transformers",
            "path": str(self.directory or self.name),
            **weights_of(self.model),
            "class": type(self.model).__name__,
            "chat": self.chat,
            "transformers": transformers.__version__,
        }

    # batches

    def _fill(self, rows: Sequence[Any], lengths: Sequence[int], tokens: int) -> Iterator[list[Any]]:
        """Batches of rows, longest first: at most batch_size of them, at most `tokens` when padded to the
        longest. Rows of about the same length are read together: less of a batch is padding."""
        order = sorted(range(len(rows)), key=lambda place: -lengths[place])
        while order:
            # What is padded counts as read: the first row, the longest, sets the width of all.
            most = min(self.batch_size, max(1, tokens // max(1, lengths[order[0]])))
            yield [rows[place] for place in order[:most]]
            del order[:most]

    def _batches(
        self, pieces: Sequence[Piece], tokens: int
    ) -> Iterator[tuple[list[int], Rows, list[Tensor]]]:
        """(places of pieces, they as rows that were read, the states after what follows their prefix)."""
        # Only rows that begin with the same prefix can start from copies of one state.
        groups: dict[Ids, list[int]] = {}
        for place, piece in enumerate(pieces):
            groups.setdefault(piece.ids[: piece.shared if self.cached else 0], []).append(place)
        for prefix, places in groups.items():
            start = self.prefix(prefix)
            lengths = [len(pieces[place].ids) - len(prefix) for place in places]
            for batch in self._fill(places, lengths, tokens):
                rows = start.select([0] * len(batch))
                yield batch, rows, rows.read([pieces[place].ids[len(prefix) :] for place in batch])

    def _read_prefix(self, prefix: Ids) -> Rows:
        rows = Rows(self, [()])
        # A long prefix is read in pieces: its activations would not fit.
        for start in range(0, len(prefix), self.batch_tokens):
            rows.read([prefix[start : start + self.batch_tokens]])
        return rows

    def forget(self) -> None:
        """Drop the cached prefixes."""
        self.prefix.cache_clear()

    # scoring

    @torch.no_grad()
    def score(self, contexts: Sequence[Context]) -> list[list[LogProb]]:
        """See TokenModel."""
        results: dict[int, list[LogProb]] = {}
        tokens = min(self.batch_tokens, CPU_TOKENS if self.device.type == "cpu" else self.batch_tokens)
        for places, rows, states in self._batches([context.piece for context in contexts], tokens):
            # The state after a context knows the first token of all its continuations.
            logp_NV = self._logits(torch.stack([own[-1] for own in states]), ROWS).log_softmax(-1)
            longer: list[tuple[int, int, int]] = []
            for n, (place, best) in enumerate(zip(places, logp_NV.argmax(-1).tolist())):
                continuations = contexts[place].continuations
                values = logp_NV[n, [ids[0] for ids in continuations]].tolist()
                results[place] = [LogProb(v, 1, ids[0] == best) for v, ids in zip(values, continuations)]
                longer += [(n, place, c) for c, ids in enumerate(continuations) if len(ids) > 1]

            # Longer ones are read on from copies of it.
            lengths = [len(contexts[place].continuations[c]) for _, place, c in longer]
            for chunk in self._fill(longer, lengths, tokens):
                own_ids = [contexts[place].continuations[c] for _, place, c in chunk]
                read = rows.select([n for n, _, _ in chunk]).read([ids[:-1] for ids in own_ids])
                for (_, place, c), ids, states_TD in zip(chunk, own_ids, read):
                    results[place][c] += self._score_tokens(states_TD, torch.tensor(ids[1:]))
        return [results[place] for place in range(len(contexts))]

    def _score_tokens(self, states_TD: Tensor, ids_T: Tensor) -> LogProb:
        """Each token after the state that chooses it."""
        found = LogProb()
        for part_TD, part_T in zip(states_TD.split(POSITIONS), ids_T.to(self.device).split(POSITIONS)):
            logp_TV = self._logits(part_TD, WIDTH).log_softmax(-1)
            values = logp_TV.gather(1, part_T[:, None]).squeeze(1).tolist()
            found += LogProb(sum(values), len(values), bool((logp_TV.argmax(-1) == part_T).all()))
        return found

    def _logits(self, h_ND: Tensor, multiple: int) -> Tensor:
        """[N, V] fp32, computed with zero rows up to a whole multiple."""
        rows = h_ND.shape[0]
        # Zero rows change no sum of the others and give every product one shape.
        padded_ND = functional.pad(h_ND, (0, 0, 0, -rows % multiple))
        return self.model.get_output_embeddings()(padded_ND)[:rows].float()

    # decoding

    @torch.no_grad()
    def write(self, pieces: Sequence[Piece], requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See TokenModel."""
        for one in requests:  # options out of range are refused as for a model of ours
            SamplingParams(one.max_new_tokens, one.temperature, one.top_p, stop=one.stop)
        written: list[list[int]] = [[] for _ in pieces]
        answers: dict[int, Generation] = {}
        for alive, rows, states in self._batches(pieces, self.batch_tokens):
            # The states at hand choose a token; what goes on reads it, finished answers leave at once.
            while True:
                logits_NV = self._logits(torch.stack([own[-1] for own in states]), ROWS)
                chosen = self._chosen([(requests[i], len(written[i])) for i in alive], logits_NV)
                kept = []
                for slot, (place, token) in enumerate(zip(alive, chosen)):
                    written[place].append(token)
                    if (answer := self._ended(written[place], requests[place])) is None:
                        kept.append(slot)
                    else:
                        answers[place] = answer
                if not kept:
                    break
                # Rows that only fill up keep a step's products of one shape.
                filled = kept + [kept[0]] * (ROWS - len(kept))
                if filled != list(range(len(rows.ids))):
                    rows = rows.select(filled)
                last = [(chosen[slot],) for slot in filled]
                states = rows.read(last, step=True)[: len(kept)]
                alive = [alive[slot] for slot in kept]
        return [answers[place] for place in range(len(pieces))]

    def _ended(self, ids: list[int], asked: GenerateRequest) -> Generation | None:
        """The answer, once its last token has completed it."""
        if ids[-1] in self.stop_ids:
            return Generation(self.decode(ids[:-1]), len(ids) - 1, "stop")
        full = len(ids) >= asked.max_new_tokens
        # A stop string of c characters ends within the last 4 c bytes: as many tokens, plus one cut.
        tail = ids[-4 * max(map(len, asked.stop), default=0) - 4 :]
        if not full and not (asked.stop and cut_at(self.decode(tail), asked.stop)[1]):
            return None
        text, cut = cut_at(self.decode(ids), asked.stop)
        return Generation(text, len(ids), "stop" if cut else "length") if cut or full else None

    def _chosen(self, asked: Sequence[tuple[GenerateRequest, int]], logits_NV: Tensor) -> list[int]:
        """The next token of every (request, tokens so far), with the noise that the engine draws."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        # Keys and places decide the noise: neither the batch nor the row is among them.
        keys = column([sequence_key(one.seed, "answer", 0) for one, _ in asked], torch.int64)
        places = column([count for _, count in asked], torch.int64)
        heat = column([one.temperature for one, _ in asked])
        mass = column([one.top_p for one, _ in asked])
        needs = Needs(bool(heat.any()), bool((mass < 1).any()), min_p=False, logprobs=False)
        controls = Controls(keys, places, heat, mass, torch.zeros_like(mass), needs)
        return choose(logits_NV, controls, column([], torch.int64))[0].long().tolist()


def load_hf(
    given: str, *, device: str = "cpu", dtype: torch.dtype | None = None, chat: bool = False, **batch: int
) -> HfModel:
    """Read a folder, a .gguf file, or a hub name with transformers (no code of the checkpoint is run).

    Raises EvalError when it cannot be read.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(given)
    if path.is_dir() and not (path / "config.json").is_file():
        path = next(path.glob("*.gguf"), path)
    place, where = given, {}
    if path.suffix == ".gguf":
        # GGUF weights are unpacked to float32; others keep the precision in which they are stored.
        place, where, dtype = str(path.parent), {"gguf_file": path.name}, dtype or torch.float32

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype or "auto", **where)
    except Exception as error:  # also UnpicklingError, and what safetensors and tokenizers raise
        what = str(error).splitlines()[:1] or [type(error).__name__]
        raise EvalError(f"--model hf:{given}: transformers cannot read it ({what[0]})") from None
    known = path if path.is_dir() else None
    model.to(device)  # type: ignore[arg-type]
    return HfModel(model, tokenizer, name=path.stem or given, directory=known, chat=chat, **batch)
