"""Configuration of an exported earlyfusion model for transformers: text_config and vision_config as
earlyfusion wrote them, key for key, so that what is saved again is what was read."""

from typing import Any

from transformers import PretrainedConfig


class PartConfig(PretrainedConfig):
    """One part of the model; every key of config.json is an attribute."""

    def __init__(self, **values: Any) -> None:
        values = {key: value for key, value in values.items() if key != "model_type"}
        self.given = sorted(values)
        super().__init__(**values)
        for key, value in values.items():
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        # No key of transformers' own but the one that it takes out: earlyfusion refuses others.
        own = {key: getattr(self, key) for key in self.given}
        return {"model_type": self.model_type, "transformers_version": None, **own}


class EarlyFusionTextConfig(PartConfig):
    model_type = "kimi_linear"

    # Without one of its own transformers would make another.
    def __init__(self, **values: Any) -> None:
        PartConfig.__init__(self, **values)

    def is_mla(self, index: int) -> bool:
        """Whether the 0-based layer looks back at all tokens; the others are KDA."""
        kda, full = (self.linear_attn_config.get(key) for key in ("kda_layers", "full_attn_layers"))
        layer = index + 1
        if kda is not None:
            return layer not in kda
        if full is not None:
            return layer in full
        return layer % 4 == 0 or layer == self.num_hidden_layers

    def is_moe(self, index: int) -> bool:
        """Whether the 0-based layer's feed-forward is a mixture of experts."""
        sparse = index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0
        return self.num_experts > 0 and sparse


class EarlyFusionVisionConfig(PartConfig):
    model_type = "moonvit"

    def __init__(self, **values: Any) -> None:
        PartConfig.__init__(self, **values)


class EarlyFusionConfig(PretrainedConfig):
    model_type = "earlyfusion"
    sub_configs = {"text_config": EarlyFusionTextConfig, "vision_config": EarlyFusionVisionConfig}

    def __init__(self, text_config: Any = None, vision_config: Any = None, **values: Any) -> None:
        text, vision = (
            part if isinstance(part, PretrainedConfig) else kind(**(part or {}))
            for part, kind in zip((text_config, vision_config), self.sub_configs.values())
        )
        # Before the base class, which looks into them.
        self.text_config, self.vision_config = text, vision
        self.media_placeholder_token_id = values.pop("media_placeholder_token_id", None)
        self.image_token_id = self.media_placeholder_token_id
        super().__init__(**values)


EarlyFusionConfig.register_for_auto_class()
