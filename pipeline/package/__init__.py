"""earlyfusion from Python.

    >>> import earlyfusion
    >>> model = earlyfusion.load("embedded:skills")
    >>> model.chat([picture, "how many objects are there?"])
    '2'

`load` gives a model to ask, to score with and to train; the parts stand beside it by their own names, and the
rooms (earlyfusion.model, earlyfusion.data, ...) hold the rest. docs/python.md shows all of it.

Installed as the package `earlyfusion` itself. Importing it imports nothing else: a name brings its module
with it when it is first asked for, so that `earlyfusion --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

# What a type checker reads; PLACES says the same to Python.
if TYPE_CHECKING:
    from earlyfusion.data.chat.template import Message
    from earlyfusion.data.loading.encode import Encoded, PackedBatch, assemble, encode
    from earlyfusion.data.sample import Image, Sample, Text, Video, VideoFile
    from earlyfusion.data.tokenizer import Tokenizer
    from earlyfusion.kernels.attnres.naive import mix as attention_residual
    from earlyfusion.kernels.segments import Segments
    from earlyfusion.model.config import FusionConfig, ModelConfig
    from earlyfusion.model.decoder import Decoder
    from earlyfusion.model.engine.engine import Engine
    from earlyfusion.model.engine.requests import Request, SamplingParams
    from earlyfusion.model.fusion import NativeFusion
    from earlyfusion.model.layers import MixtureOfExperts, update_router_biases
    from earlyfusion.model.mixers import KimiDeltaAttention, MultiHeadLatentAttention
    from earlyfusion.pipeline.load import LoadedModel, load
    from earlyfusion.pipeline.optim.muonclip import MuonClip
    from earlyfusion.pipeline.optim.routing import build_param_groups
    from earlyfusion.vision.config import VisionConfig
    from earlyfusion.vision.encoder import Projector, VisionGrid, VisionTower

PLACES = {
    "Decoder": "earlyfusion.model.decoder:Decoder",
    "Encoded": "earlyfusion.data.loading.encode:Encoded",
    "Engine": "earlyfusion.model.engine.engine:Engine",
    "FusionConfig": "earlyfusion.model.config:FusionConfig",
    "Image": "earlyfusion.data.sample:Image",
    "KimiDeltaAttention": "earlyfusion.model.mixers:KimiDeltaAttention",
    "LoadedModel": "earlyfusion.pipeline.load:LoadedModel",
    "Message": "earlyfusion.data.chat.template:Message",
    "MixtureOfExperts": "earlyfusion.model.layers:MixtureOfExperts",
    "ModelConfig": "earlyfusion.model.config:ModelConfig",
    "MultiHeadLatentAttention": "earlyfusion.model.mixers:MultiHeadLatentAttention",
    "MuonClip": "earlyfusion.pipeline.optim.muonclip:MuonClip",
    "NativeFusion": "earlyfusion.model.fusion:NativeFusion",
    "PackedBatch": "earlyfusion.data.loading.encode:PackedBatch",
    "Projector": "earlyfusion.vision.encoder:Projector",
    "Request": "earlyfusion.model.engine.requests:Request",
    "Sample": "earlyfusion.data.sample:Sample",
    "SamplingParams": "earlyfusion.model.engine.requests:SamplingParams",
    "Segments": "earlyfusion.kernels.segments:Segments",
    "Text": "earlyfusion.data.sample:Text",
    "Tokenizer": "earlyfusion.data.tokenizer:Tokenizer",
    "Video": "earlyfusion.data.sample:Video",
    "VideoFile": "earlyfusion.data.sample:VideoFile",
    "VisionConfig": "earlyfusion.vision.config:VisionConfig",
    "VisionGrid": "earlyfusion.vision.encoder:VisionGrid",
    "VisionTower": "earlyfusion.vision.encoder:VisionTower",
    "assemble": "earlyfusion.data.loading.encode:assemble",
    "attention_residual": "earlyfusion.kernels.attnres.naive:mix",
    "build_param_groups": "earlyfusion.pipeline.optim.routing:build_param_groups",
    "encode": "earlyfusion.data.loading.encode:encode",
    "load": "earlyfusion.pipeline.load:load",
    "update_router_biases": "earlyfusion.model.layers:update_router_biases",
}
"""Public name -> where it is defined."""

__all__ = [
    "Decoder",
    "Encoded",
    "Engine",
    "FusionConfig",
    "Image",
    "KimiDeltaAttention",
    "LoadedModel",
    "Message",
    "MixtureOfExperts",
    "ModelConfig",
    "MultiHeadLatentAttention",
    "MuonClip",
    "NativeFusion",
    "PackedBatch",
    "Projector",
    "Request",
    "Sample",
    "SamplingParams",
    "Segments",
    "Text",
    "Tokenizer",
    "VERB_MODULES",
    "Video",
    "VideoFile",
    "VisionConfig",
    "VisionGrid",
    "VisionTower",
    "__version__",
    "assemble",
    "attention_residual",
    "build_param_groups",
    "encode",
    "load",
    "update_router_biases",
]

VERB_MODULES = ("earlyfusion.rl.verbs",)
"""Modules of higher floors that add verbs to the command line (pipeline/verbs.py) when they are imported."""

try:
    __version__ = version("earlyfusion")
except PackageNotFoundError:
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """The object of a public name, imported when it is first asked for. Raises AttributeError for others."""
    if name not in PLACES:
        raise AttributeError(f"module 'earlyfusion' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = PLACES[name].partition(":")
    found = getattr(import_module(module), attribute)
    # Kept, so that the next use is a plain look-up.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What tab completion shows: the names that are not imported yet included."""
    return sorted({*globals(), *__all__})
