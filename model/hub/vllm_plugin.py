"""vLLM as a server of what `earlyfusion export` writes: pictures and text, every part that Kimi K3 has.

    vllm serve out/             where both packages are installed

vLLM finds `register` by the entry point `vllm.general_plugins`. A model is its Kimi K3 class, with our words
for the configuration, our prompts for pictures and our epsilons (vllm_model.py). Clips are not served.

UNTESTED ON A GPU: on a CPU it was built with vLLM 0.33.0 and its weights loaded (tests/pipeline/
test_vllm.py), but no token came out of it: vLLM's KDA kernels need a GPU.
Source: vLLM's plugin system and registry, docs/design/plugin_system.md of 0.33.0.
"""

from typing import Any

from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.transformers_utils.configs.kimi_k3 import KimiK3Config

from earlyfusion.model.hub.config import MODEL_TYPE, config_of
from earlyfusion.model.hub.outward import MODEL, kimi_k3_config


class EarlyFusionVllmConfig(KimiK3Config):
    """Our config.json in the words of Kimi K3; ours: as it was given.

    Raises ModelDirectoryError for a model that those cannot say (attn_res "full", towers but MoonViT-V2).
    """

    model_type = MODEL_TYPE

    def __init__(self, text_config: Any = None, vision_config: Any = None, **rest: Any) -> None:
        self.ours = None
        # transformers makes one of nothing to see the defaults, and one of its own words to copy it.
        if isinstance(text_config, dict) and "attn_res" in text_config:
            raw = {**rest, "text_config": text_config, "vision_config": vision_config}
            config = config_of(raw, "config.json")
            self.ours = config.model_dump(mode="json")
            said = kimi_k3_config(config, rest.get("dtype") or "float32")
            rest |= {name: said[name] for name in ("media_placeholder_token_id", "image_placeholder")}
            text_config, vision_config = said["text_config"], said["vision_config"]
            # There it is the text model's.
            del rest["vocab_size"]
        super().__init__(text_config, vision_config, **rest)


def register() -> None:
    """Entry of `vllm.general_plugins`; may be called more than once."""
    AutoConfig.register(MODEL_TYPE, EarlyFusionVllmConfig, exist_ok=True)
    # By name: what is imported here must not touch a GPU yet.
    name = MODEL.rpartition(".")[2]
    ModelRegistry.register_model(name, f"earlyfusion.model.hub.vllm_model:{name}")
