"""Any transformers causal language model as a Model: a folder, a hub name, or a GGUF file.

Sequences of one session share a key/value cache in which every row's tokens stand side by side; the padding
of new tokens is never stored. Models whose cache cannot be copied row by row (recurrent or sliding-window
states) are read without a cache: every context whole, right-padded. A prefix that many prompts share is read
once and its keys copied; a context is read once for all its continuations.

In fp32 on a CPU an answer is the same, bit for bit, in any batch: widths are whole multiples of WIDTH,
one-token steps have at least ROWS rows (products of one to three rows are summed in another order than larger
ones), and what is masked stands behind a row's own keys, which are seen in whole blocks of KEYS, as torch's
attention takes them: a shorter last block would be summed in other parts.

Shapes: N sequences, W new tokens (padded), L cached slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from earlyfusion.eval.models.tokens import (
    Context,
    Opening,
    Piece,
    Scored,
    TokenModel,
    cut_at,
    files_hash,
    tensors_hash,
)
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Generation

WIDTH, ROWS, KEYS = 16, 8, 512
POSITIONS = 1024
"""Positions whose logits over the vocabulary are held at once."""
KEPT_PREFIXES = 2
PLAIN_LAYERS = {"full_attention", "attention"}


class RowCache(transformers.DynamicCache):
    """Keys and values, every row's tokens side by side from slot 0, whatever the padding was.

    So no hole ever stands between a row's tokens: sums over keys have the same terms in the same order for
    every batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    def expect(self, real_NW: Tensor, places_NW: Tensor, slots: int) -> None:
        """Announce a call: which of its tokens are real, their places in their rows, how many slots it
        sees."""
        self.real_NW, self.places_NW, self.slots = real_NW, places_NW, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the real tokens [N, heads, W, width]; returns everything visible [N, heads, slots, width]."""
        # Only real tokens are stored, each at its own place of its row.
        rows_NW = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        at = rows_NW.expand_as(self.places_NW)[self.real_NW], self.places_NW[self.real_NW]
        stored = []
        for new, old in zip((key_states, value_states), self.keys_values.get(layer_idx, (None, None))):
            # Room grows by a quarter at least, so that a long answer does not copy the cache at every token.
            if old is None or old.shape[1] < self.slots:
                grown = self.slots if old is None else max(self.slots, old.shape[1] * 5 // 4)
                wider = new.new_zeros(new.shape[0], grown, new.shape[1], new.shape[3])
                if old is not None:
                    wider[:, : old.shape[1]] = old
                old = wider
            old[at] = new.transpose(1, 2)[self.real_NW]
            stored.append(old)

        self.keys_values[layer_idx] = (stored[0], stored[1])
        keys, values = (part[:, : self.slots].transpose(1, 2) for part in stored)
        return keys, values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Tokens before those of this call, in the longest row."""
        return 0 if not self.keys_values else int(self.places_NW[:, 0].max())

    def select(self, index: Tensor) -> RowCache:
        """Copies of these rows."""
        copied = RowCache()
        for layer, (keys, values) in self.keys_values.items():
            copied.keys_values[layer] = keys.index_select(0, index), values.index_select(0, index)
        return copied


class Session:
    """N sequences that can be copied and read on."""

    def __init__(self, owner: HfModel, sequences: int) -> None:
        self.owner = owner
        self.cache = RowCache() if owner.cached else None
        self.lengths = [0] * sequences
        self.history: list[tuple[int, ...]] = [()] * sequences  # where there is no cache

    def fork(self, index: Sequence[int]) -> Session:
        """Sequence i of the new session continues this one's sequence index[i]. This one stays usable."""
        copied = Session(self.owner, len(index))
        copied.lengths = [self.lengths[i] for i in index]
        copied.history = [self.history[i] for i in index]
        if self.cache is not None:
            copied.cache = self.cache.select(torch.tensor(list(index), device=self.owner.device))
        return copied

    def read(self, rows: Sequence[tuple[int, ...]], step: bool = False) -> list[Tensor]:
        """Read one or more tokens a sequence -> states [tokens, D] after each of them. step: one token
        each."""
        count = len(rows)
        # Without a cache the whole of every row is read again.
        if self.cache is None:
            self.history = [past + tuple(row) for past, row in zip(self.history, rows)]
            hidden_NWD = self._forward(self.history, [0] * count)
            return [
                hidden_WD[len(past) - len(row) : len(past)]
                for hidden_WD, past, row in zip(hidden_NWD, self.history, rows)
            ]

        if step and self.owner.exact and len(self.lengths) < ROWS:
            # from now on the session carries rows that only fill up
            filled = self.fork([*range(count), *[0] * (ROWS - count)])
            self.cache, self.lengths = filled.cache, filled.lengths
        rows = [*rows, *[rows[0]] * (len(self.lengths) - count)]
        hidden_NWD = self._forward(rows, self.lengths, step)
        self.lengths = [past + len(row) for past, row in zip(self.lengths, rows)]
        return [hidden_NWD[n, : len(rows[n])] for n in range(count)]

    def _forward(self, rows: Sequence[tuple[int, ...]], past: list[int], step: bool = False) -> Tensor:
        """States [N, W, D] of new tokens that stand behind `past` tokens of their rows."""
        owner, device = self.owner, self.owner.device
        width = 1 if step else -(-max(map(len, rows)) // WIDTH) * WIDTH
        new_N = torch.tensor([len(row) for row in rows])
        offset_NW = torch.arange(width).expand(len(rows), width)
        real_NW = offset_NW < new_N[:, None]
        # Rows are padded on the right; padding repeats the place of the last token and is masked.
        ids_NW = torch.full((len(rows), width), owner.pad_id)
        ids_NW[real_NW] = torch.tensor([token for row in rows for token in row])
        places_NW = torch.tensor(past)[:, None] + offset_NW.minimum(new_N[:, None] - 1)

        arguments: dict[str, Any] = {"position_ids": places_NW.to(device)}
        if self.cache is None:
            arguments |= {"attention_mask": real_NW.long().to(device), "use_cache": False}
        else:
            slots = -(-int((torch.tensor(past) + new_N).max()) // owner.key_block) * owner.key_block
            self.cache.expect(real_NW.to(device), places_NW.to(device), slots)
            # A token sees the slots up to its own, which are all filled by its row.
            hidden_NWL = torch.arange(slots) > places_NW[:, :, None]
            mask_N1WL = torch.zeros(hidden_NWL.shape, dtype=owner.model.dtype)
            mask_N1WL = mask_N1WL.masked_fill(hidden_NWL, torch.finfo(owner.model.dtype).min)[:, None]
            arguments |= {"attention_mask": mask_N1WL.to(device), "past_key_values": self.cache}
            arguments["use_cache"] = True
        return owner.body(ids_NW.to(device), **arguments).last_hidden_state


class Draw:
    """Greedy for temperature 0; otherwise softmax(logits / temperature) restricted to the smallest set of
    likeliest tokens with mass >= top_p, by inverting its distribution function at uniform numbers from the
    answer's own seed.

    Raises EvalError unless temperature >= 0 and 0 < top_p <= 1.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        if not temperature >= 0:
            raise EvalError(f"temperature {temperature}: must be at least 0 (0 is greedy)")
        if not 0 < top_p <= 1:
            raise EvalError(f"top-p {top_p}: must lie in (0, 1]")
        self.temperature, self.top_p = temperature, top_p
        self._uniform = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The next token's id."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        # A stable order: equal logits are drawn alike on every machine.
        ordered_V, ids_V = (logits_V / self.temperature).sort(descending=True, stable=True)
        p_V = ordered_V.double().softmax(-1)
        before_V = p_V.cumsum(-1) - p_V  # mass of the likelier tokens; 0 for the first, so it always stays
        mass_V = p_V.masked_fill(before_V >= self.top_p, 0.0).cumsum(-1)
        uniform = torch.rand((), generator=self._uniform, dtype=torch.float64).to(mass_V.device)
        rank = int(torch.searchsorted(mass_V, uniform * mass_V[-1], right=True))
        last = int((before_V < self.top_p).sum()) - 1  # rounding may point past the last that may be drawn
        return int(ids_V[min(rank, last)])


class Answer:
    """An answer being written."""

    def __init__(self, request: GenerateRequest, room: int) -> None:
        self.stop, self.room = request.stop, room
        self.ids: list[int] = []
        self.draw = Draw(request.temperature, request.top_p, request.seed)
        # a stop string of c characters ends within the last 4 c bytes, so within as many tokens, plus one cut
        self.tail = 4 * max(map(len, request.stop), default=0) + 4
        self.result: Generation | None = None

    def take(self, logits_V: Tensor, model: HfModel) -> None:
        """Choose and add a token; the result is there when the answer is complete."""
        token = self.draw(logits_V)
        if token in model.stop_ids:
            self.result = Generation(model.decode(self.ids), len(self.ids), "stop")
            return

        self.ids.append(token)
        if any(stop in model.decode(self.ids[-self.tail :]) for stop in self.stop):
            text, cut = cut_at(model.decode(self.ids), self.stop)
            if cut:
                self.result = Generation(text, len(self.ids), "stop")
                return
        if len(self.ids) >= self.room:
            self.result = Generation(model.decode(self.ids), len(self.ids), "length")


class HfModel(TokenModel):
    """A transformers causal LM and its tokenizer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        path: Path | None = None,
        chat: bool = False,
        batch_size: int = 16,
        batch_tokens: int = 4096,
    ) -> None:
        super().__init__(batch_size, batch_tokens)
        self.model, self.tokenizer, self.name, self.path = model.eval(), tokenizer, name, path
        self.chat = chat
        self.body, self.head = model.base_model, model.get_output_embeddings()
        self.device = next(model.parameters()).device
        # A model of several parts keeps the language model's settings in a part of its own.
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        longest = getattr(config, "max_position_embeddings", None)
        self.max_length = longest or getattr(config, "n_positions", None)
        self.cached = _copyable(model, config)
        self.exact = self.device.type == "cpu" and model.dtype == torch.float32
        self.key_block = KEYS if self.exact else WIDTH

        # Every token that ends an answer, of the tokenizer and of the generation config.
        eos = getattr(model.generation_config, "eos_token_id", None)
        ends = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
        self._stops = frozenset(int(token) for token in ends if token is not None)
        self.pad_id = _first(tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._prefixes: OrderedDict[tuple[int, ...], Session] = OrderedDict()

    def encode(self, text: str, begin: bool) -> Sequence[int]:
        """See TokenModel; `begin` leaves it to the tokenizer which special tokens it adds."""
        if begin:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

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

    @property
    def begin_id(self) -> int:
        """The beginning token, or the end token where there is none (as lm-evaluation-harness)."""
        return _first(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, 0)

    @property
    def stop_ids(self) -> frozenset[int]:
        """End tokens of the tokenizer and of the generation config."""
        return self._stops

    def identity(self) -> dict[str, Any]:
        """Path, sha256 of the weights, class, dtype, size, versions."""
        known = self.path if self.path is not None and self.path.is_dir() else None
        return {
            "kind": "transformers",
            "path": str(self.path or self.name),
            "weights_sha256": files_hash(known) if known else tensors_hash(self.model),
            "class": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "chat": self.chat,
            "transformers": transformers.__version__,
        }

    # batches

    def _fill(self, rows: Sequence[Any], lengths: Sequence[int]) -> Iterator[list[Any]]:
        """Batches of consecutive rows, longest first: at most batch_size of them, at most batch_tokens when
        padded to the longest."""
        batch: list[Any] = []
        longest = 0
        for row, length in zip(rows, lengths):
            full = len(batch) == (1 if self.one_by_one else self.batch_size)
            if batch and (full or longest * (len(batch) + 1) > self.batch_tokens):
                yield batch
                batch, longest = [], 0
            batch.append(row)
            longest = max(longest, length)
        if batch:
            yield batch

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """(prefix, places of pieces that begin with it), each as many as may be read at once."""
        # Only rows that begin with the same prefix can start from copies of one state.
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, piece in enumerate(pieces):
            groups.setdefault(piece.ids[: piece.shared if self.cached else 0], []).append(place)
        for prefix, places in groups.items():
            # Rows of about the same length are read together: less of a batch is padding.
            places.sort(key=lambda place: -len(pieces[place].ids))
            lengths = [len(pieces[place].ids) - len(prefix) for place in places]
            for batch in self._fill(places, lengths):
                yield prefix, batch

    def _start(self, prefix: tuple[int, ...], rows: Sequence[Piece]) -> tuple[Session, list[Tensor]]:
        """A session that has read these pieces, which begin with the prefix, and the states after the
        rest."""
        if not prefix:
            session = Session(self, len(rows))
        else:
            if prefix not in self._prefixes:
                first = Session(self, 1)
                # A long prefix is read in pieces: its activations would not fit.
                for start in range(0, len(prefix), self.batch_tokens):
                    first.read([prefix[start : start + self.batch_tokens]])
                self._prefixes[prefix] = first
                if len(self._prefixes) > KEPT_PREFIXES:
                    self._prefixes.popitem(last=False)

            self._prefixes.move_to_end(prefix)
            session = self._prefixes[prefix].fork([0] * len(rows))
        return session, session.read([piece.ids[len(prefix) :] for piece in rows])

    def forget(self) -> None:
        """Drop the cached prefixes."""
        self._prefixes.clear()

    # scoring

    def score(self, contexts: Sequence[Context]) -> list[list[Scored]]:
        """See TokenModel."""
        results: list[list[Scored]] = [[] for _ in contexts]
        for prefix, places in self._batches([context.piece for context in contexts]):
            with torch.no_grad():
                scored = self._score(prefix, [contexts[place] for place in places])
            for place, one in zip(places, scored):
                results[place] = one
        return results

    def _score(self, prefix: tuple[int, ...], batch: Sequence[Context]) -> list[list[Scored]]:
        # The state after a context knows the first token of all its continuations.
        session, states = self._start(prefix, [context.piece for context in batch])
        logp_NV = self._logits(torch.stack([own[-1] for own in states]), ROWS).log_softmax(-1)
        found: list[list[Scored]] = []
        for logp_V, best, context in zip(logp_NV, logp_NV.argmax(-1).tolist(), batch):
            firsts = [ids[0] for ids in context.continuations]
            values = logp_V[torch.tensor(firsts, device=logp_V.device)].tolist()
            found.append([Scored((value,), best == first) for value, first in zip(values, firsts)])

        # Longer ones are read on from copies of it.
        rows = [(n, c, ids) for n, context in enumerate(batch) for c, ids in enumerate(context.continuations)]
        longer = sorted((row for row in rows if len(row[2]) > 1), key=lambda row: -len(row[2]))
        for chunk in self._fill(longer, [len(ids) for _, _, ids in longer]):
            fork = session.fork([n for n, _, _ in chunk])
            for (n, c, ids), own in zip(chunk, fork.read([ids[:-1] for _, _, ids in chunk])):
                rest = self._score_tokens(own, ids[1:])
                first = found[n][c]
                found[n][c] = Scored([*first.values, *rest.values], first.greedy and rest.greedy)
        return found

    def _score_tokens(self, states_TD: Tensor, ids: Sequence[int]) -> Scored:
        """Each token after the state that chooses it."""
        values: list[float] = []
        greedy = True
        ids_T = torch.tensor(list(ids), device=states_TD.device)
        for part_TD, part_T in zip(states_TD.split(POSITIONS), ids_T.split(POSITIONS)):
            logits = self._logits(part_TD, WIDTH)
            values += logits.log_softmax(-1).gather(1, part_T[:, None]).squeeze(1).tolist()
            greedy &= bool((logits.argmax(-1) == part_T).all())
        return Scored(values, greedy)

    def _logits(self, h_ND: Tensor, multiple: int) -> Tensor:
        """[N, V] fp32, computed with zero rows up to a whole multiple."""
        rows = h_ND.shape[0]
        return self.head(torch.nn.functional.pad(h_ND, (0, 0, 0, -rows % multiple)))[:rows].float()

    # decoding

    def write(self, openings: Sequence[Opening]) -> list[Generation]:
        """See TokenModel."""
        answers = [Answer(opening.request, opening.room) for opening in openings]
        for prefix, places in self._batches([opening.piece for opening in openings]):
            with torch.no_grad():
                session, states = self._start(prefix, [openings[place].piece for place in places])
                self._decode(session, states, [answers[place] for place in places])
        return [answer.result for answer in answers]  # type: ignore[misc]

    def _decode(self, session: Session, states: list[Tensor], alive: list[Answer]) -> None:
        """Token by token; finished answers leave the batch at once."""
        # The states at hand choose a token; what goes on reads it.
        while True:
            logits_NV = self._logits(torch.stack([own[-1] for own in states]), ROWS)
            for answer, logits_V in zip(alive, logits_NV):
                answer.take(logits_V, self)
            kept = [slot for slot, answer in enumerate(alive) if answer.result is None]
            if not kept:
                return
            if len(kept) < len(alive):
                session, alive = session.fork(kept), [alive[slot] for slot in kept]
            states = session.read([(answer.ids[-1],) for answer in alive], step=True)


def _first(*ids: int | None) -> int:
    """The first that there is."""
    return int(next(token for token in ids if token is not None))


def _copyable(model: Any, config: Any) -> bool:
    """Whether every layer keeps plain keys and values of all tokens."""
    if getattr(model, "_is_stateful", False) or getattr(config, "sliding_window", None):
        return False
    layers = getattr(config, "layer_types", None)
    return layers is None or set(layers) <= PLAIN_LAYERS


def load_hf(
    given: str, *, device: str = "cpu", dtype: torch.dtype | None = None, chat: bool = False, **batch: int
) -> HfModel:
    """Read a folder, a .gguf file, or a hub name with transformers (no code of the checkpoint is run).

    Raises EvalError when it cannot be read.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # A folder or file is told apart from a hub name before anything is fetched.
    path = Path(given)
    where: dict[str, Any] = {}
    place = given
    gguf = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    if path.suffix == ".gguf" or gguf:
        file = gguf[0] if gguf else path
        if not file.is_file():
            raise EvalError(f"--model hf:{given}: no such file")
        if importlib.util.find_spec("gguf") is None:
            raise EvalError(f"--model hf:{given}: GGUF files need gguf; pip install gguf accelerate")
        place, where = str(file.parent), {"gguf_file": file.name}
    elif not path.exists() and (given.startswith((".", "/")) or os.environ.get("HF_HUB_OFFLINE") == "1"):
        raise EvalError(f"--model hf:{given}: no such folder")

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **where)
        stored = dtype or (torch.float32 if where else "auto")
        # GGUF weights are unpacked to float32; others keep the precision in which they are stored.
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=stored, **where)
    except Exception as error:  # also UnpicklingError, and what safetensors and tokenizers raise
        what = str(error).splitlines()[:1] or [type(error).__name__]
        raise EvalError(f"--model hf:{given}: transformers cannot read it ({what[0]})") from None

    known = Path(place) if Path(place).is_dir() and not where else None
    model.to(device)  # type: ignore[arg-type]
    return HfModel(model, tokenizer, name=path.stem or given, path=known, chat=chat, **batch)
