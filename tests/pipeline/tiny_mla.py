"""Small modules for optimizer tests: the attributes of the real ones, and nothing else."""

import torch
from torch import Tensor, nn


class TinyMLA(nn.Module):
    """Latent attention up to its logits. q [T, H, nope+rope]; keys from a latent and a shared positional
    part."""

    def __init__(self, hidden=24, heads=4, nope=8, rope=4, value=8, rank=12, low_rank_query=False):
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
            heads,
            nope,
            rope,
            value,
        )
        if low_rank_query:
            self.q_a_proj = nn.Linear(hidden, 10, bias=False)
            self.q_b_proj = nn.Linear(10, heads * (nope + rope), bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + rope, bias=False)
        self.kv_b_proj = nn.Linear(rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, hidden, bias=False)
        self.register_buffer("max_logit", torch.full((heads,), float("-inf")), persistent=False)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Scaled logits of visible (causal) pairs [H, pairs]."""
        nope, rope, heads = self.qk_nope_head_dim, self.qk_rope_head_dim, self.num_heads
        query = self.q_b_proj(self.q_a_proj(x_TD)) if hasattr(self, "q_b_proj") else self.q_proj(x_TD)
        q = query.view(-1, heads, nope + rope)
        latent, shared = self.kv_a_proj_with_mqa(x_TD).split([self.kv_b_proj.in_features, rope], dim=-1)
        k = self.kv_b_proj(latent).view(-1, heads, nope + self.v_head_dim)[..., :nope]
        k = torch.cat([k, shared[:, None].expand(-1, heads, -1)], dim=-1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (nope + rope) ** -0.5
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        return scores[:, visible]

    @torch.no_grad()
    def measure(self, x_TD: Tensor) -> Tensor:
        """Fold one micro-batch into max_logit; returns this batch's largest logit per head."""
        largest = self.logits(x_TD).amax(dim=1).float()
        torch.maximum(self.max_logit, largest, out=self.max_logit)
        return largest


class TinyKDA(nn.Module):
    def __init__(self, hidden=24, heads=4, head_dim=6):
        super().__init__()
        self.num_heads, self.head_dim = heads, head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(hidden, heads * head_dim, bias=False))
        self.q_conv1d = nn.Conv1d(heads * head_dim, heads * head_dim, 4, groups=heads * head_dim, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads * head_dim))
        self.f_a_proj = nn.Linear(hidden, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class TinyExperts(nn.Module):
    def __init__(self, hidden=24, width=10, experts=3):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.1)


class TinyLayer(nn.Module):
    def __init__(self, kind: str, value: int = 8):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(24)
        self.self_attn = TinyKDA() if kind == "kda" else TinyMLA(value=value)
        self.self_attention_res_query = nn.Parameter(torch.zeros(24))
        self.block_sparse_moe = nn.Module()
        self.block_sparse_moe.gate = nn.Linear(24, 3, bias=False)
        self.block_sparse_moe.experts = TinyExperts()


class TinyModel(nn.Module):
    """Every kind of parameter the optimizer must tell apart; tied head; a vision tower with its projector."""

    def __init__(self, value: int = 8):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 24)
        self.layers = nn.ModuleList([TinyLayer("kda"), TinyLayer("mla", value)])
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = nn.Linear(24, 36, bias=False)
        self.mlp.down_proj = nn.Linear(18, 24, bias=False)
        self.mlp_res_proj = nn.Linear(24, 1, bias=False)  # a vector stored as a matrix
        self.lm_head = nn.Linear(24, 32, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.vision_tower = nn.Module()
        self.vision_tower.patch_embed = nn.Conv2d(3, 12, 2)
        self.vision_tower.pos_emb = nn.Module()
        self.vision_tower.pos_emb.weight = nn.Parameter(torch.randn(4, 4, 12))
        block = nn.Module()
        block.num_heads, block.head_dim, block.wqkv = 2, 6, nn.Linear(12, 36, bias=True)
        self.vision_tower.blocks = nn.ModuleList([block])
        self.projector = nn.Module()
        self.projector.proj = nn.Linear(48, 24, bias=True)


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
