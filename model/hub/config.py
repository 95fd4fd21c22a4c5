"""The JSON files of a model directory: what they say, and what makes them unreadable."""

import json
from pathlib import Path

from pydantic import ValidationError
from tokenizers import Tokenizer

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import FusionConfig

MODEL_TYPE = "earlyfusion"
ARCHITECTURE = "NativeFusion"
MEDIA_PAD = "<|media_pad|>"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

MOST_BYTES = 48 << 20
"""Most bytes of a JSON file of a model directory: the index of half a million tensors."""


class ModelDirectoryError(UserError, ValueError):
    """A model directory cannot be written or read; one line: what was found, what was expected, what to
    do."""


EMBEDDED = Path(__file__).parents[1] / "embedded"
"""Small pretrained model directories that travel with the package."""
PREFIX = "embedded:"


def model_folder(given: str | Path) -> Path:
    """The folder meant: a path as it is given, its `model` where that is a run's folder, or "embedded:NAME"
    for a model that travels with the package.

    Raises ModelDirectoryError for an unknown name.
    """
    if not str(given).startswith(PREFIX):
        # A run's folder is what users have at hand; its model is one level down.
        path = Path(given)
        is_run = not (path / "config.json").exists() and (path / "model" / "config.json").is_file()
        return path / "model" if is_run else path
    names = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
    name = str(given).removeprefix(PREFIX)
    if name not in names:
        raise ModelDirectoryError(f"{str(given)!r}: embedded models are {', '.join(names) or 'none'}")
    return EMBEDDED / name


def model_name(folder: str | Path) -> str:
    """What to call a model directory: its own name, or the run's for RUN/model."""
    path = Path(folder).resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def read_json(path: Path) -> Record:
    """The object in one of the JSON files. Raises ModelDirectoryError for anything else, however deep or
    large."""
    try:
        # Read up to the limit and one byte more: a larger file is refused without being held.
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        found = json.loads(raw.decode("utf-8")) if len(raw) <= MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path}: damaged ({error}); copy the directory again") from None
    if not isinstance(found, dict):
        raise ModelDirectoryError(
            f"{path}: damaged ({type(found).__name__}, expected an object of at most {MOST_BYTES >> 20}"
            " MiB); copy the directory again"
        )
    return found


def load_config(directory: str | Path) -> FusionConfig:
    """The configuration of a model directory. Raises ModelDirectoryError."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelDirectoryError(
            f"{directory}: not a model directory (no config.json); expected one written by training, such as"
            " RUN/model"
        )
    # Foreign directories have files of the same name; this key tells ours.
    raw = read_json(path)
    if raw.get("model_type") != MODEL_TYPE:
        raise ModelDirectoryError(
            f"{path}: model_type is {raw.get('model_type')!r}, expected {MODEL_TYPE!r}; "
            "only directories that training wrote are read (RUN/model); evaluate others as hf:DIR"
        )
    return config_of(raw, path)


def config_of(raw: Record, path: str | Path) -> FusionConfig:
    """The configuration in what a config.json says; path: for errors. Raises ModelDirectoryError."""
    try:
        # Unknown keys are errors: a misspelt option must not fall back to a default.
        parts: Record = {"media_token_id": raw["media_placeholder_token_id"]}
        for name in ("text", "vision"):
            parts[name] = {**raw[f"{name}_config"]}
            parts[name].pop("model_type", None)
        vision = parts["vision"]
        if "projector_ln_eps" not in vision and vision.get("projector") == "v2" and "norm_eps" in vision:
            # Directories from before this key: their projector was trained with the tower's eps.
            vision["projector_ln_eps"] = vision["norm_eps"]
        return FusionConfig(**parts)
    except ValidationError as error:
        raise ModelDirectoryError(f"{path}: {fault(error)}") from None
    except (KeyError, TypeError) as error:
        raise ModelDirectoryError(
            f"{path}: damaged ({type(error).__name__}: {error!s:.200}); copy the directory again"
        ) from None


def fault(error: ValidationError) -> str:
    """The first thing that is wrong with a configuration: where, what, and what was given."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']} (given {first['input']!r:.60})"


def json_files(config: FusionConfig, dtype: str) -> dict[str, Record]:
    """The JSON files of a model directory by name. dtype: name of the torch dtype of the embedding."""
    text, vision = config.text.model_dump(mode="json"), config.vision.model_dump(mode="json")
    ids = {name: text[name] for name in TOKEN_IDS}
    return {
        "config.json": {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "dtype": dtype,
            "media_placeholder_token_id": config.media_token_id,
            "vocab_size": text["vocab_size"],
            **ids,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {"model_type": "kimi_linear", **text},
            "vision_config": {"model_type": "moonvit", **vision},
        },
        # Kimi K2.5's media_proc_cfg with this model's limits.
        "preprocessor_config.json": {
            "media_proc_cfg": {
                "in_patch_limit": vision["in_patch_limit"],
                "patch_size": vision["patch_size"],
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "merge_kernel_size": vision["merge_kernel_size"][0],
                "fixed_output_tokens": None,
                "patch_limit_on_one_side": vision["max_patches_per_side"],
                "in_patch_limit_each_frame": vision["in_patch_limit_each_frame"],
                "in_patch_limit_video": None,
                "sample_fps": 2.0,
                "max_num_frames_each_video": None,
                "temporal_merge_kernel_size": vision["pos_emb_time"],
                "timestamp_mode": "hh:mm:ss.fff",
            }
        },
        # A placeholder that is sampled would stand for a picture that is not there.
        "generation_config.json": {**ids, "do_sample": False, "suppress_tokens": [config.media_token_id]},
    }


def check_vocabulary(folder: Path, config: FusionConfig) -> None:
    """The tokenizer's ids must lie inside the embedding, and its media placeholder be the model's."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelDirectoryError(
            f"{folder}: the tokenizer wrote no tokenizer.json; use a fast (tokenizers) tokenizer"
        )
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except BaseException as error:  # the Rust library raises bare Exception, and panics below BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelDirectoryError(f"{path}: not a tokenizers file ({error!s:.200}); copy it again") from None
    # Such an id would read outside the embedding, on some devices without an error.
    largest = max(vocabulary.values(), default=-1)
    if largest >= config.text.vocab_size:
        raise ModelDirectoryError(
            f"vocabulary mismatch: the tokenizer has ids up to {largest}, the model embeds vocab_size="
            f"{config.text.vocab_size}; use the tokenizer the model was trained with"
        )
    if vocabulary.get(MEDIA_PAD) != config.media_token_id:
        raise ModelDirectoryError(
            f"vocabulary mismatch: {MEDIA_PAD} is id {vocabulary.get(MEDIA_PAD)} in the tokenizer, the model"
            f" expects {config.media_token_id}; use the tokenizer the model was trained with"
        )
