"""`model.from`: a model that begins with weights of another checkpoint, ours or a foreign one, wherever they
fit.

    [model]
    from = "checkpoints/Kimi-Linear-48B-A3B-Base"
    attn_res = "block"                               # other keys lie over the checkpoint's shape

| checkpoint | what is taken |
|---|---|
| ours, Kimi-Linear | its shape; every tensor of the same name and shape |
| with a tower (ours, Kimi-VL, Kimi K2.5, SigLIP) | the tower, and the projector if the width is the same |
| Moonlight (deepseek_v3) | vocabulary, norms, MLA where the recipe has MLA, dense and sparse feed-forward |
| Llama and its likes | vocabulary, norms, feed-forward of dense layers |

Of the last two the recipe gives the shape, whose sizes must be theirs for a tensor to fit. What is nowhere is
made anew. Where the recipe only adds Attention Residuals, step 0 is the checkpoint's model but for the
epsilon of the norms: a query of zeros takes the mean of the n outputs so far, the residual stream is their
sum, and every reader norms what it reads, so that RMSNorm sees x / n in place of x, which is RMSNorm with eps
n^2 in place of eps. KDA in place of attention, and a new tower, change the function from the first step on.
"""

from collections import Counter
from pathlib import Path

import torch

from earlyfusion.data import ranks
from earlyfusion.data.errors import DataError
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import PublicTensor, public_tensors, some
from earlyfusion.model.hub.foreign import PROJECTOR, TEXT, TOWER, Foreign
from earlyfusion.pipeline.sft_start import VOCABULARY

TABLES = (f"{TEXT}model.embed_tokens.weight", f"{TEXT}lm_head.weight")


def parts_of(folder: str) -> Record:
    """The sections of a recipe that a checkpoint decides: `model` and `vision` where it has what our models
    compute, and `tokenizer`. Raises ModelDirectoryError."""
    found = Foreign(model_folder(folder), warm=True)
    parts: Record = {}
    if found.text is not None:
        # The size of the vocabulary and its ids come from the tokenizer.
        parts["model"] = found.text.model_dump(mode="json", exclude={*VOCABULARY})
    if found.vision is not None:
        parts["vision"] = found.vision.model_dump(mode="json")
    if any((found.folder / file).is_file() for file in ("tokenizer.json", ranks.FILE)):
        parts["tokenizer"] = {"path": str(found.folder)}
    return parts


def begin_with(model: NativeFusion, folder: str, tokens: Tokenizer) -> list[str]:
    """Put the weights of a checkpoint into a model where they fit, and say in lines what was taken, what is
    made anew and what is left. Raises UserError where nothing fits, ModelDirectoryError for no checkpoint."""
    source = Foreign(model_folder(folder), warm=True)
    own = model.state_dict()
    items = list(public_tensors(own.items()))
    names = {item.name for item in items}
    # Ids of another tokenizer mean other words.
    same_words = _same_words(source.folder, tokens)
    taken: Counter[str] = Counter()
    anew: list[str] = []
    with torch.no_grad():
        for item in items:
            wanted = item.view(own[item.ours])
            part = next(part for part in (TEXT, TOWER, PROJECTOR) if item.name.startswith(part))
            given = None
            if (item.name not in TABLES or same_words) and _same_mixer(source, item, names):
                given = _tensor(source, item, wanted)
            if given is None:
                anew.append(item.name)
                continue
            taken[part] += 1
            # The rows of a vocabulary that has grown stay as they were drawn.
            if item.name in TABLES:
                wanted[: len(given)].copy_(given)
            else:
                wanted.copy_(given.view(wanted.shape))
    if not taken:
        raise UserError(
            f"model.from {folder}: no tensor fits the recipe's model; give the sizes of the checkpoint"
            f" (hidden_size, intermediate_size, ...), which {source.folder / 'config.json'} names"
        )
    left = source.left([TEXT, TOWER, PROJECTOR])
    counts = ", ".join(f"{count} of {part}*" for part, count in taken.items())
    lines = [f"model.from {folder}: {taken.total()} of {len(items)} tensors taken ({counts})"]
    lines += [f"  {len(anew)} made anew: {some(anew)}"] if anew else []
    lines += [f"  {len(left)} of the checkpoint left: {some(left)}"] if left else []
    return lines


def _tensor(source: Foreign, item: PublicTensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """The checkpoint's values for a tensor of ours; None where it has none of that shape."""
    found = source.peek(item.name)
    if found is None and item.name == TABLES[1] and source.tied:
        found = source.peek(TABLES[0])
    if found is None:
        return None
    shape = source.shape(found)
    rows = item.name in TABLES and shape[0] <= len(wanted) and shape[1:] == list(wanted.shape[1:])
    plain = [size for size in shape if size != 1] == [size for size in wanted.shape if size != 1]
    if not rows and not plain:
        return None
    source.used.update(found.names)
    return source.tensor(found).to(wanted.dtype)


def _same_mixer(source: Foreign, item: PublicTensor, names: set[str]) -> bool:
    """Whether a tensor of a token mixer belongs to the same kind there: q_proj of KDA is none of MLA's."""
    layer, inside, _ = item.name.partition(".self_attn.")
    mark = f"{layer}.self_attn.kv_b_proj.weight"
    return not inside or (mark in names) == (source.peek(mark) is not None)


def _same_words(folder: Path, tokens: Tokenizer) -> bool:
    try:
        return Tokenizer.load(folder).hash == tokens.hash
    except DataError:
        return False
