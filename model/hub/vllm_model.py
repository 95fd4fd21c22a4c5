"""Our model as vLLM's Kimi K3: `vllm_plugin.py` says what it is for, and what was not tested."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.kimi_k25_vit import MoonViT3dPretrainedModel
from vllm.models.kimi_k3 import KimiK3ForConditionalGeneration
from vllm.models.kimi_k3.common.mm_preprocess import (
    KimiK3DummyInputsBuilder,
    KimiK3MultiModalProcessor,
    KimiK3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdate

from earlyfusion.model.hub.outward import HEAD, IMAGE

EMBEDDING = "language_model.model.embed_tokens.weight"
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


class DummyInputs(KimiK3DummyInputsBuilder):
    """What vLLM measures its memory with."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE * mm_counts.get("image", 0)


class Processor(KimiK3MultiModalProcessor):
    """Prompts as in training: a picture is its <|media_pad|> as often as it has tokens, and K3's words about
    its size are not written."""

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        def pads(index: int) -> list[int]:
            image = mm_items.get_items("image", ImageProcessorItems).get(index)
            tokens = self.info.media_tokens_calculator({"type": "image", "image": image})
            return [self.info.media_token_id] * tokens

        return [PromptReplacement(modality="image", target=[self.info.media_token_id], replacement=pads)]


@MULTIMODAL_REGISTRY.register_processor(Processor, info=KimiK3ProcessingInfo, dummy_inputs=DummyInputs)
class EarlyFusionForConditionalGeneration(KimiK3ForConditionalGeneration):
    """vLLM's Kimi K3 with the epsilons of our configuration, where that class has fixed ones."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality != "image":
            raise ValueError(f"modality {modality!r}: this model is served with pictures and text alone")
        return IMAGE

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.ours = vllm_config.model_config.hf_config.ours
        text, vision = self.ours["text"], self.ours["vision"]
        for name, module in self.named_modules():
            if name.endswith(LATENT_NORMS):
                module.variance_epsilon = text["kv_norm_eps"]
            elif name.endswith(".o_norm"):
                module.eps = text["rms_norm_eps"]
            elif isinstance(module, MoonViT3dPretrainedModel):
                for norm in module.modules():
                    if isinstance(norm, nn.RMSNorm):
                        norm.eps = vision["norm_eps"]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A head that is the embedding has no tensor of its own in the file."""

        def with_head() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                yield name, tensor
                if name == EMBEDDING and self.ours["text"]["tie_word_embeddings"]:
                    yield HEAD, tensor

        return super().load_weights(with_head())
