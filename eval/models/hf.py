"""Any transformers causal language model as a Model: a folder, a hub name, or a GGUF file.

Sequences of one session share a key/value cache in which every row's tokens stand side by side; padding of
the new tokens, left or right, is never stored. Models whose cache cannot be copied row by row (recurrent or
sliding-window states) are read without a cache: every context whole, right-padded.

In fp32 on a CPU an answer is the same, bit for bit, in any batch and with padding on either side: widths are
whole multiples of WIDTH, one-token steps have at least ROWS rows (products of one to three rows are summed in
another order than larger ones), and what is masked stands behind a row's own keys, which are seen in whole
blocks of KEYS, as torch's attention takes them: a shorter last block would be summed in other parts.

Shapes: N sequences, W new tokens (padded), L cached slots, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyfusion.eval.models.batch import Piece, TokenModel
from earlyfusion.eval.models.own import POSITIONS, files_hash, tensors_hash
from earlyfusion.eval.protocol import EvalError

WIDTH, ROWS, KEYS = 16, 8, 512
PLAIN_LAYERS = {"full_attention", "attention"}


class HfSession:
    """Sequences in one key/value cache (or none, for models that are read without)."""

    def __init__(self, owner: HfModel, sequences: int) -> None:
        self.owner = owner
        self.cache = _row_cache(sequences) if owner.cached else None
        self.lengths = [0] * sequences
        self.history: list[list[int]] = [[] for _ in range(sequences)]

    def fork(self, index: Sequence[int]) -> HfSession:
        """See Session."""
        made = HfSession(self.owner, len(index))
        made.lengths = [self.lengths[i] for i in index]
        made.history = [list(self.history[i]) for i in index]
        if self.cache is not None:
            made.cache = self.cache.select(torch.tensor(list(index), device=self.owner.device))
        return made

    def extend(self, pieces: Sequence[Piece], step: bool = False) -> Tensor:
        """See Session."""
        hidden_NWD, last_N = self._read([list(piece.ids) for piece in pieces], step)
        rows = torch.arange(len(pieces), device=hidden_NWD.device)
        h_ND = hidden_NWD[rows, last_N[: len(pieces)]]
        return self.owner.head(_padded(h_ND, ROWS))[: len(pieces)].float()

    def extend_scored(
        self, pieces: Sequence[Piece], targets: Sequence[Sequence[int]]
    ) -> list[tuple[list[float], bool]]:
        """See Session."""
        hidden_NWD, last_N = self._read([list(piece.ids) for piece in pieces])
        found = []
        for hidden_WD, last, wanted in zip(hidden_NWD, last_N.tolist(), targets):
            own = hidden_WD[last + 1 - len(wanted) : last + 1]
            values: list[float] = []
            right = True
            for h, ids in zip(
                own.split(POSITIONS), torch.tensor(list(wanted), device=own.device).split(POSITIONS)
            ):
                logits = self.owner.head(_padded(h, WIDTH))[: len(ids)].float()
                values += logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1).tolist()
                right &= bool((logits.argmax(-1) == ids).all())
            found.append((values, right))
        return found

    def _read(self, rows: list[list[int]], step: bool = False) -> tuple[Tensor, Tensor]:
        """Hidden states [N, W, D] of the new tokens and the place of the last one of each row."""
        if self.cache is None:
            self.history = [past + row for past, row in zip(self.history, rows)]
            return self._forward(self.history, [0] * len(rows))
        if (
            step and self.owner.exact and len(rows) < ROWS
        ):  # from now on the session carries rows that only fill up
            if len(self.lengths) < ROWS:
                index = [*range(len(rows)), *[0] * (ROWS - len(rows))]
                self.cache = self.cache.select(torch.tensor(index, device=self.owner.device))
                self.lengths = [self.lengths[i] for i in index]
        rows = rows + [rows[0]] * (len(self.lengths) - len(rows))
        found = self._forward(rows, self.lengths, step)
        self.lengths = [past + len(row) for past, row in zip(self.lengths, rows)]
        return found

    def _forward(self, rows: list[list[int]], past: list[int], step: bool = False) -> tuple[Tensor, Tensor]:
        owner, device = self.owner, self.owner.device
        width = max(map(len, rows))
        width = 1 if step else -(-width // WIDTH) * WIDTH
        left = owner.padding == "left" and self.cache is not None
        new_N = torch.tensor([len(row) for row in rows])
        offset_NW = torch.arange(width).expand(len(rows), width) - ((width - new_N)[:, None] if left else 0)
        real_NW = (offset_NW >= 0) & (offset_NW < new_N[:, None])
        ids_NW = torch.full((len(rows), width), owner.pad_id)
        ids_NW[real_NW] = torch.tensor([token for row in rows for token in row])
        places_NW = torch.tensor(past)[:, None] + offset_NW.clamp(min=0).minimum(new_N[:, None] - 1)
        arguments: dict[str, Any] = {"position_ids": places_NW.to(device)}
        if self.cache is None:
            arguments |= {"attention_mask": real_NW.long().to(device), "use_cache": False}
        else:
            slots = -(-int((torch.tensor(past) + new_N).max()) // owner.key_block) * owner.key_block
            self.cache.expect(real_NW.to(device), places_NW.to(device), slots)
            hidden_NWL = torch.arange(slots) > places_NW[:, :, None]
            mask_N1WL = torch.zeros(hidden_NWL.shape, dtype=owner.model.dtype)
            mask_N1WL = mask_N1WL.masked_fill(hidden_NWL, torch.finfo(owner.model.dtype).min)[:, None]
            arguments |= {
                "attention_mask": mask_N1WL.to(device),
                "past_key_values": self.cache,
                "use_cache": True,
            }
        out = owner.body(ids_NW.to(device), **arguments)
        last_N = torch.full((len(rows),), width - 1) if left else new_N - 1
        return out.last_hidden_state, last_N.to(device)


def _row_cache(sequences: int) -> Any:
    """A transformers cache that keeps every row's tokens side by side from slot 0, whatever the padding was.

    So no hole ever stands between a row's tokens: sums over keys have the same terms in the same order for
    every batch.
    """
    from transformers import DynamicCache

    class RowCache(DynamicCache):
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
            """Store the real tokens [N, heads, W, width]; returns everything visible [N, heads, slots,
            width]."""
            rows_NW = torch.arange(key_states.shape[0], device=key_states.device)[:, None].expand_as(
                self.places_NW
            )
            at = rows_NW[self.real_NW], self.places_NW[self.real_NW]
            stored = []
            for new, old in zip((key_states, value_states), self.keys_values.get(layer_idx, (None, None))):
                if old is None or old.shape[1] < self.slots:
                    grown = self.slots if old is None else max(self.slots, old.shape[1] * 5 // 4)
                    wider = new.new_zeros(new.shape[0], grown, new.shape[1], new.shape[3])
                    if old is not None:
                        wider[:, : old.shape[1]] = old
                    old = wider
                old[at] = new.transpose(1, 2)[self.real_NW]
                stored.append(old)
            self.keys_values[layer_idx] = (stored[0], stored[1])
            return tuple(part[:, : self.slots].transpose(1, 2) for part in stored)  # type: ignore[return-value]

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return 0 if not self.keys_values else int(self.places_NW[:, 0].max())

        def select(self, index: Tensor) -> RowCache:
            """Copies of these rows."""
            made = RowCache()
            made.keys_values = {
                layer: (keys.index_select(0, index), values.index_select(0, index))
                for layer, (keys, values) in self.keys_values.items()
            }
            return made

    return RowCache()


def _padded(rows_ND: Tensor, multiple: int) -> Tensor:
    """Zero rows added to a whole multiple."""
    missing = -rows_ND.shape[0] % multiple
    return torch.cat([rows_ND, rows_ND.new_zeros(missing, rows_ND.shape[1])]) if missing else rows_ND


class HfModel(TokenModel):
    """A transformers causal LM and its tokenizer. padding: "right" or "left" of the new tokens."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        path: Path | None = None,
        padding: str = "right",
        chat: bool = False,
        batch_size: int = 16,
        batch_tokens: int = 4096,
    ) -> None:
        super().__init__(batch_size, batch_tokens)
        if padding not in ("left", "right"):
            raise ValueError(f"padding={padding!r}: must be 'left' or 'right'")
        self.model, self.tokenizer, self.name, self.path = model.eval(), tokenizer, name, path
        self.padding, self.chat = padding, chat
        self.body, self.head = model.base_model, model.get_output_embeddings()
        self.device = next(model.parameters()).device
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.max_length = getattr(config, "max_position_embeddings", None) or getattr(
            config, "n_positions", None
        )
        self.cached = _copyable(model, config)
        self.prefix_cache = self.cached
        self.exact = self.device.type == "cpu" and model.dtype == torch.float32
        self.key_block = KEYS if self.exact else WIDTH
        eos = getattr(model.generation_config, "eos_token_id", None)
        ends = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
        self._stops = frozenset(int(token) for token in ends if token is not None)
        self.pad_id = next(
            (int(t) for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0
        )

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

    def _prefix(self, prompt: Any, shared: int, context: Piece) -> tuple[int, ...]:
        return () if self.chat else super()._prefix(prompt, shared, context)

    def decode(self, ids: Sequence[int]) -> str:
        """See TokenModel."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def fresh(self, sequences: int) -> HfSession:
        """See TokenModel."""
        return HfSession(self, sequences)

    @property
    def begin_id(self) -> int:
        """The beginning token, or the end token where there is none (as lm-evaluation-harness)."""
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, 0)
        return int(next(token for token in ids if token is not None))

    @property
    def stop_ids(self) -> frozenset[int]:
        """End tokens of the tokenizer and of the generation config."""
        return self._stops

    def identity(self) -> dict[str, Any]:
        """Path, sha256 of the weights, class, dtype, size, versions."""
        import transformers

        digest = None
        if self.path is not None and self.path.is_dir():
            digest = files_hash(self.path)
        return {
            "kind": "transformers",
            "path": str(self.path or self.name),
            "weights_sha256": digest or tensors_hash(self.model),
            "class": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "chat": self.chat,
            "transformers": transformers.__version__,
        }


def _copyable(model: Any, config: Any) -> bool:
    """Whether every layer keeps plain keys and values of all tokens."""
    if getattr(model, "_is_stateful", False) or getattr(config, "sliding_window", None):
        return False
    layers = getattr(config, "layer_types", None)
    return layers is None or set(layers) <= PLAIN_LAYERS


def load_hf(
    given: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    padding: str = "right",
    chat: bool = False,
    **batch: int,
) -> HfModel:
    """Read a folder, a .gguf file, or a hub name with transformers (no code of the checkpoint is run).

    Raises EvalError when it cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(given)
    where: dict[str, Any] = {}
    place = given
    if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").is_file() and _gguf(path)):
        file = path if path.suffix == ".gguf" else _gguf(path)[0]
        if not file.is_file():
            raise EvalError(f"--model hf:{given}: no such file")
        place, where = str(file.parent), {"gguf_file": file.name}
        _need("gguf", given)
    elif not path.exists() and (given.startswith((".", "/")) or os.environ.get("HF_HUB_OFFLINE") == "1"):
        raise EvalError(f"--model hf:{given}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
        wanted = dtype or (torch.float32 if where else "auto")
        model = AutoModelForCausalLM.from_pretrained(place, dtype=wanted, **where)
    except Exception as error:  # also UnpicklingError, and what safetensors and tokenizers raise
        what = str(error).splitlines()[:1] or [type(error).__name__]
        raise EvalError(f"--model hf:{given}: transformers cannot read it ({what[0]})") from None
    known = Path(place) if Path(place).is_dir() and not where else None
    model.to(device)  # type: ignore[arg-type]
    return HfModel(model, tokenizer, name=path.stem or given, path=known, padding=padding, chat=chat, **batch)


def _gguf(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def _need(package: str, given: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise EvalError(f"--model hf:{given}: GGUF files need {package}; pip install {package} accelerate")
