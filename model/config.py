"""Shape of the model: the text decoder (ModelConfig) and the whole multimodal model (FusionConfig).

Field names are those of the public Kimi-Linear and Kimi K3 `config.json` where one exists; the defaults of
ModelConfig are the published Kimi-Linear-48B-A3B configuration, so `ModelConfig()` is that model.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from earlyfusion.vision.config import VisionConfig

MOST_EXPERTS = 1 << 18
"""Experts of all layers together; with the limits of the fields, what a configuration may ask for before it
is built on the meta device. Each is several times what the largest public models have."""
LayerKind = Literal["kda", "mla"]
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Heads = Annotated[int, Field(ge=1, le=4096)]
HeadDim = Annotated[int, Field(ge=1, le=1 << 14)]
Rank = Annotated[int, Field(ge=1, le=1 << 16)]


class LinearAttnConfig(BaseModel):
    """Kimi Delta Attention. Layer numbers are 1-based, as in the public config.json."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    num_heads: Heads = 32
    """heads of KDA"""
    head_dim: HeadDim = 128
    """key and value width of one head"""
    short_conv_kernel_size: int = Field(4, ge=2, le=256)
    """tokens that the causal convolution over q, k and v sees"""
    kda_layers: list[int] | None = None
    """1-based; None: three KDA, one MLA, and the last is MLA"""
    full_attn_layers: list[int] | None = None
    """1-based MLA layers; None: those kda_layers leaves"""
    gate_lower_bound: float | None = Field(None, lt=0)
    """None: softplus gate; -5.0: K3's bounded gate"""
    full_rank_output_gate: bool = False
    """one g_proj (K3) instead of g_a_proj, g_b_proj"""


class ModelConfig(BaseModel):
    """Text decoder: hybrid KDA + NoPE MLA, dense or MoE feed-forward, optional Attention Residuals.

    Raises pydantic's ValidationError (a ValueError) for a contradictory shape, naming the field to change.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    vocab_size: int = Field(163840, ge=1, le=1 << 22)
    """rows of the embedding; the tokenizer decides it"""
    hidden_size: Width = 2304
    """width of the residual stream"""
    num_hidden_layers: int = Field(27, ge=1, le=256)
    """layers, each a token mixer and a feed-forward"""
    intermediate_size: Width = 9216
    """width of the dense feed-forward layers"""
    rms_norm_eps: PositiveFloat = 1e-5
    """epsilon of every RMSNorm that names none of its own"""
    hidden_act: Literal["silu", "situ"] = "silu"
    """activation of every feed-forward: SwiGLU, or K3's bounded SiTU"""
    activation_situ_beta: PositiveFloat = 4.0
    """SiTU: bound of the gate"""
    activation_situ_linear_beta: PositiveFloat | None = 25.0
    """SiTU: bound of the other factor; null: none"""
    initializer_range: PositiveFloat = 0.02
    """standard deviation of fresh weights"""
    tie_word_embeddings: bool = False
    """one table for embedding and head"""
    bos_token_id: int = 163584
    """id before a document; the tokenizer decides it"""
    eos_token_id: int = 163586
    """id behind a document; the tokenizer decides it"""
    pad_token_id: int = 163839
    """id of filler; the tokenizer decides it"""

    # multi-head latent attention, without positions (NoPE): the "rope" part exists but is never rotated
    num_attention_heads: Heads = 32
    """heads of MLA"""
    q_lora_rank: Rank | None = None
    """width of the compressed queries; null: not compressed"""
    kv_lora_rank: Rank = 512
    """width of the compressed keys and values, which are what the cache holds"""
    qk_nope_head_dim: HeadDim = 128
    """query and key width of one head, made from the compressed ones"""
    qk_rope_head_dim: int = Field(64, ge=0, le=1 << 14)
    """further width of the keys that all heads share"""
    v_head_dim: HeadDim = 128
    """value width of one head"""
    kv_norm_eps: PositiveFloat = 1e-6
    """q_a_layernorm and kv_a_layernorm; transformers uses 1e-6"""
    mla_output_gate: bool = False
    """K3: o_proj reads attention * sigmoid(g_proj(x))"""

    linear_attn_config: LinearAttnConfig = Field(default_factory=LinearAttnConfig)

    # mixture of experts
    num_experts: int = Field(256, ge=0, le=1 << 14)
    """0: every feed-forward layer is dense"""
    num_experts_per_token: PositiveInt = 8
    """experts that a token passes (top-k)"""
    num_shared_experts: int = Field(1, ge=0, le=1024)
    """experts that every token passes as well"""
    moe_intermediate_size: Width = 1024
    """width of one expert"""
    routed_expert_hidden_size: Width | None = None
    """K3: experts work on a latent of this width, projected down and up; null: on the whole width"""
    latent_moe_use_norm: bool = True
    """K3: RMSNorm of the experts' sum before it is projected up"""
    first_k_dense_replace: NonNegativeInt = 1
    """first layers whose feed-forward is dense"""
    moe_layer_freq: PositiveInt = 1
    """every how many layers there are experts, behind the dense ones"""
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    """how router logits become scores"""
    moe_renormalize: bool = True
    """scores of the chosen experts sum to one"""
    routed_scaling_factor: PositiveFloat = 2.446
    """factor on what the chosen experts add"""
    router_balance: Literal["sign", "quantile", "none"] = "sign"
    """how the bias of the choice is moved: by the sign of the load, by a quantile of the scores, not"""
    router_bias_update_rate: NonNegativeFloat = 1e-3
    """gamma of the sign rule"""

    # attention residuals
    attn_res: Literal["none", "full", "block"] = "none"
    """none: a plain residual stream; full: over every sub-layer; block: over blocks of layers"""
    attn_res_block_size: PositiveInt = 3
    """TRANSFORMER layers per block (K3's unit)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = list(range(1, self.num_hidden_layers + 1))
        kda, full = self.linear_attn_config.kda_layers, self.linear_attn_config.full_attn_layers
        named = [*(kda or []), *(full or [])]
        # Both lists are in public checkpoints; one that contradicts the other is a damaged file.
        damaged = kda is not None and full is not None and sorted(named) != layers
        if damaged or not set(named) <= set(layers):
            raise ValueError(
                f"linear_attn_config.kda_layers {kda} and full_attn_layers {full} must share out the layers"
                f" 1..{len(layers)} (num_hidden_layers); give only one to let the other follow"
            )
        # Each expert is tensors on the meta device: a hostile configuration must fail before they are made.
        if self.num_experts * self.num_hidden_layers > MOST_EXPERTS:
            raise ValueError(
                f"num_experts={self.num_experts} in num_hidden_layers={self.num_hidden_layers} layers are"
                f" more than {MOST_EXPERTS:,} experts; lower one of them"
            )
        if self.num_experts and self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds num_experts={self.num_experts};"
                f" nearest: {self._nearest_experts()}"
            )
        # The rule looks at the (k+1)-th score, which there must be.
        if self.router_balance == "quantile" and self.num_experts_per_token == self.num_experts:
            raise ValueError(
                f"router_balance='quantile' needs num_experts_per_token ({self.num_experts_per_token}) below"
                f" num_experts ({self.num_experts}); nearest: {self._nearest_experts()}, or"
                " router_balance='none' when every expert is always chosen"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} lies outside the vocabulary of {self.vocab_size}; "
                    f"set {name} from the tokenizer or raise vocab_size"
                )
        return self

    def _nearest_experts(self) -> str:
        """The nearest numbers of experts that go together, for an error."""
        spare = 1 if self.router_balance == "quantile" else 0
        fewer, more = self.num_experts - spare, self.num_experts_per_token + spare
        lower = f"num_experts_per_token={fewer} or " if fewer else ""
        return f"{lower}num_experts={more}"

    def plan(self) -> tuple[LayerKind, ...]:
        """Token mixer of every layer, first to last: "kda" or "mla"."""
        kda, full = self.linear_attn_config.kda_layers, self.linear_attn_config.full_attn_layers
        count = self.num_hidden_layers
        if kda is not None:
            mla = set(range(1, count + 1)) - set(kda)
        elif full is not None:
            mla = set(full)
        else:
            # The published pattern, and a last layer that looks back at all tokens whatever the depth.
            mla = set(range(4, count + 1, 4)) | {count}
        return tuple("mla" if layer in mla else "kda" for layer in range(1, count + 1))

    def is_moe(self, layer_index: int) -> bool:
        """Whether the feed-forward of the 0-based layer is a mixture of experts."""
        return (
            self.num_experts > 0
            and layer_index >= self.first_k_dense_replace
            and layer_index % self.moe_layer_freq == 0
        )

    def sublayers_per_block(self) -> int:
        """Sub-layers (attention or feed-forward) per AttnRes block; full AttnRes is blocks of one
        sub-layer."""
        return 1 if self.attn_res == "full" else 2 * self.attn_res_block_size

    @property
    def situ(self) -> tuple[float, float | None] | None:
        """(bound of the gate, of the other factor) of SiTU; None for SwiGLU."""
        if self.hidden_act == "silu":
            return None
        return self.activation_situ_beta, self.activation_situ_linear_beta

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class FusionConfig(BaseModel):
    """The natively multimodal model: one decoder over text embeddings and projected image patches."""

    model_config = ConfigDict(extra="forbid")

    text: ModelConfig
    vision: VisionConfig
    media_token_id: NonNegativeInt
    """id of <|media_pad|>, whose embeddings the image features replace"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # An id outside would only show as an index error deep in the first batch.
        if self.media_token_id >= self.text.vocab_size:
            raise ValueError(
                f"media_token_id={self.media_token_id} lies outside the vocabulary of {self.text.vocab_size};"
                " take it from the tokenizer's <|media_pad|>"
            )
        return self
