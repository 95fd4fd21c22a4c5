"""An earlyfusion model for transformers: plain PyTorch, no other package and no kernel; for reading, for
checks and for tools that take a transformers model. Training and serving in earlyfusion itself are faster.

    patches -> MoonViT tower -> projector -> over the embeddings of <|media_pad|> -> decoder -> logits

The decoder's layers are Kimi Delta Attention (a state of fixed size) or latent attention without positions,
and a dense or sparse feed-forward; Attention Residuals may stand in place of the residual stream. Batches may
be padded on either side; a padded position leaves no trace in the others.

Sources: Kimi Linear (arXiv 2510.26692), Attention Residuals (arXiv 2603.15031), DeepSeek-V2 (arXiv
2405.04434) for latent attention, Kimi-VL (arXiv 2504.07491) for the tower.

Shapes: B sequences, T new tokens, L tokens seen, D hidden, H heads, K head width, R latent rank, C channels.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_earlyfusion import EarlyFusionConfig

# Newer versions of transformers hand the cache on under another name.
NEW_NAME = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if NEW_NAME else "past_key_values"
CHUNK = 16


class Memory:
    """What the layers keep of the tokens seen: a dict of tensors [B, ...] for each."""

    is_compileable = False

    def __init__(self, layers):
        self.layers = [{} for _ in range(layers)]
        self.length = 0

    def get_seq_length(self, layer_idx=0):
        return self.length

    def _each(self, change):
        for kept in self.layers:
            kept.update({name: change(tensor) for name, tensor in kept.items()})

    def reorder_cache(self, beam_idx):
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices):
        self._each(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats):
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, gate=None):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (y if gate is None else y * gate.float().sigmoid()).to(x.dtype)


class SwiGLU(nn.Module):
    """Gate, up and down by these names: those of dense layers, or of one expert; SiTU where config says
    so."""

    def __init__(self, config, hidden, width, names=("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        bounds = config.activation_situ_beta, config.activation_situ_linear_beta
        self.situ = bounds if config.hidden_act == "situ" else None
        self.names = names
        for name, shape in zip(names, [(hidden, width), (hidden, width), (width, hidden)]):
            self.add_module(name, nn.Linear(*shape, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        g, u = gate(x), up(x)
        if self.situ is None:
            return down(F.silu(g) * u)
        (beta, bound), dtype = self.situ, g.dtype
        g, u = g.float(), u.float()
        u = u if bound is None else bound * torch.tanh(u / bound)
        return down((beta * torch.tanh(g / beta) * g.sigmoid() * u).to(dtype))


class Router(nn.Module):
    """Experts by sigmoid scores; the bias moves the choice and never the weights."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.renormalize = config.moe_renormalize and self.top_k > 1
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scaling


class MixtureOfExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        latent = config.routed_expert_hidden_size
        names = ("w1", "w3", "w2")
        experts = (SwiGLU(config, latent or hidden, width, names) for _ in range(config.num_experts))
        self.experts = nn.ModuleList(experts)
        self.latent = latent is not None
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            normed = config.latent_moe_use_norm
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if normed else None
        shared = config.num_shared_experts * width
        self.shared_experts = SwiGLU(config, hidden, shared) if shared else None

    def forward(self, x):
        flat = x.flatten(0, -2)
        chosen, weights = self.gate(flat)
        inside = self.routed_expert_down_proj(flat) if self.latent else flat
        y = torch.zeros_like(inside)
        for index in chosen.unique().tolist():
            rows, places = (chosen == index).nonzero(as_tuple=True)
            out = self.experts[index](inside[rows]) * weights[rows, places, None].to(flat.dtype)
            y = y.index_add(0, rows, out)
        if self.latent:
            y = y if self.routed_expert_norm is None else self.routed_expert_norm(y)
            y = self.routed_expert_up_proj(y)
        if self.shared_experts is not None:
            y = y + self.shared_experts(flat)
        return y.view_as(x)


def delta_rule(q, k, v, g, beta, state):
    """Gated delta rule, chunk by chunk, in fp32: all [B, H, T, K], beta [B, H, T, 1], state [B, H, K, V].

    S_t = (I - beta k k^T) Diag(e^g) S_{t-1} + beta k v^T, o_t = S_t^T q_t / sqrt(K). With G the running sum
    of g in a chunk, what is written solves (I + L) R = beta (v - (k e^G) S), L_ij = beta_i sum_d k_i k_j
    e^(G_i - G_j) for i > j. Differences of G are masked before the exponential, so decays of any strength
    stay finite.
    """
    outputs = []
    for chunk in zip(*(x.split(CHUNK, dim=2) for x in (q, k, v, g, beta))):
        q, k, v, g, beta = chunk
        G, size = g.cumsum(2), q.shape[2]
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        decay = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(later[..., None], -torch.inf).exp()
        mixed_k = k.unsqueeze(2) * decay
        L = (k.unsqueeze(3) * mixed_k).sum(-1).tril(-1) * beta
        eye = torch.eye(size, device=q.device)
        right = beta * (v - (k * G.exp()) @ state)
        R = torch.linalg.solve_triangular(eye + L, right, upper=False, unitriangular=True)
        outputs.append((q * G.exp()) @ state + (q.unsqueeze(3) * mixed_k).sum(-1).tril() @ R)
        last = G[:, :, -1:]
        state = last.exp().transpose(2, 3) * state + (k * (last - G).exp()).transpose(2, 3) @ R
    return torch.cat(outputs, dim=2) * q.shape[-1] ** -0.5, state


class ShortConv(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x, taps):
        """x [B, T, C] behind the W - 1 inputs before it -> silu(convolution), and the inputs to keep."""
        whole = torch.cat([taps.to(x.dtype), x], dim=1)
        y = F.conv1d(whole.float().transpose(1, 2), self.weight.float(), groups=x.shape[2])
        return F.silu(y.transpose(1, 2)).to(x.dtype), whole[:, whole.shape[1] - taps.shape[1] :]


class KimiDeltaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        linear, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        self.lower_bound, self.taps = linear["gate_lower_bound"], linear["short_conv_kernel_size"] - 1
        self.full_rank = linear["full_rank_output_gate"]
        channels = self.heads * self.width
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(hidden, channels, bias=False))
            self.add_module(f"{name}_conv1d", ShortConv(channels, self.taps + 1))
        self.A_log = nn.Parameter(torch.empty(1, 1, self.heads, 1, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(channels, dtype=torch.float32))
        self.f_a_proj = nn.Linear(hidden, self.width, bias=False)
        self.f_b_proj = nn.Linear(self.width, channels, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        if self.full_rank:
            self.g_proj = nn.Linear(hidden, channels, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.width, bias=False)
            self.g_b_proj = nn.Linear(self.width, channels, bias=False)
        self.o_norm = RMSNorm(self.width, config.rms_norm_eps)
        self.o_proj = nn.Linear(channels, hidden, bias=False)

    def forward(self, x, real, mask, kept):
        """real [B, T, 1]: 0 where a position is padding, which is neither read nor written."""
        heads, channels = (self.heads, self.width), self.heads * self.width
        qkv, taps = [], kept.get("taps")
        if taps is None:
            taps = x.new_zeros(len(x), self.taps, 3 * channels)
        left = []
        for name, before in zip("qkv", taps.split(channels, dim=2)):
            projected = getattr(self, f"{name}_proj")(x) * real.to(x.dtype)
            y, after = getattr(self, f"{name}_conv1d")(projected, before)
            qkv.append(y.unflatten(2, heads).transpose(1, 2).float())
            left.append(after)
        q, k, v = qkv
        q, k = (each * torch.rsqrt(each.pow(2).sum(-1, keepdim=True) + 1e-6) for each in (q, k))

        f = (self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias.float()).unflatten(2, heads)
        rate = self.A_log.float().exp()
        if self.lower_bound is None:
            g = -rate * F.softplus(f)
        else:
            g = self.lower_bound * (rate * f).sigmoid()
        g = (g * real[..., None]).transpose(1, 2)
        beta = (self.b_proj(x).float().sigmoid() * real).transpose(1, 2)[..., None]
        state = kept.get("state")
        if state is None:
            state = q.new_zeros(len(x), self.heads, self.width, self.width)
        o, state = delta_rule(q, k, v, g, beta, state)
        kept |= {"taps": torch.cat(left, dim=2), "state": state}

        gate = self.g_proj(x) if self.full_rank else self.g_b_proj(self.g_a_proj(x))
        o = self.o_norm(o.transpose(1, 2).to(x.dtype), gate.unflatten(2, heads))
        return self.o_proj(o.flatten(2))


class MultiHeadLatentAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.nope, self.shared = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.rank = config.v_head_dim, config.kv_lora_rank
        query = self.heads * (self.nope + self.shared)
        self.low_rank = config.q_lora_rank is not None
        if self.low_rank:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.kv_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.shared, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.kv_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        gated = config.mla_output_gate
        self.g_proj = nn.Linear(hidden, self.heads * self.value, bias=False) if gated else None
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, x, real, mask, kept):
        """mask [B, 1, T, L]: what a token may look at."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank else self.q_proj(x)
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.shared], dim=2)
        latent = torch.cat([self.kv_a_layernorm(latent), shared], dim=2)
        if "latent" in kept:
            latent = torch.cat([kept["latent"], latent], dim=1)
        kept["latent"] = latent

        c, shared = latent.split([self.rank, self.shared], dim=2)
        kv = self.kv_b_proj(c).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split([self.nope, self.value], dim=3)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=3)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.o_proj(o if self.g_proj is None else o * self.g_proj(x).sigmoid())


def mix(sources, proj, norm):
    """Attention over earlier outputs, token by token: softmax over sources of w . RMSNorm(source)."""
    weights = torch.stack([proj(norm(source)).float() for source in sources]).softmax(0)
    return sum(w * source.float() for w, source in zip(weights, sources)).to(sources[0].dtype)


class DecoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attn_res, self.first = config.attn_res, 2 * index
        # Sub-layers of a block; the configuration counts layers.
        self.block = 1 if self.attn_res == "full" else 2 * config.attn_res_block_size
        mixer = MultiHeadLatentAttention if config.is_mla(index) else KimiDeltaAttention
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = mixer(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if config.is_moe(index):
            self.block_sparse_moe = MixtureOfExperts(config)
        else:
            self.mlp = SwiGLU(config, hidden, config.intermediate_size)
        if self.attn_res != "none":
            for name in ("self_attention", "mlp"):
                self.add_module(f"{name}_res_proj", nn.Linear(hidden, 1, bias=False))
                self.add_module(f"{name}_res_norm", RMSNorm(hidden, eps))

    def feed_forward(self, x):
        return self.block_sparse_moe(x) if hasattr(self, "block_sparse_moe") else self.mlp(x)

    def forward(self, sources, real, mask, kept):
        """sources: the stream alone, or the finished blocks and behind them the running sum of the last."""
        if self.attn_res == "none":
            (x,) = sources
            x = x + self.self_attn(self.input_layernorm(x), real, mask, kept)
            return [x + self.feed_forward(self.post_attention_layernorm(x))]
        for place, name in ((self.first, "self_attention"), (self.first + 1, "mlp")):
            x = mix(sources, getattr(self, f"{name}_res_proj"), getattr(self, f"{name}_res_norm"))
            if name == "mlp":
                y = self.feed_forward(self.post_attention_layernorm(x))
            else:
                y = self.self_attn(self.input_layernorm(x), real, mask, kept)
            # The first sub-layer of a block opens a sum of its own; the others add to it.
            fresh = place % self.block == 0
            sources = [*sources, y] if fresh else [*sources[:-1], sources[-1] + y]
        return sources


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_res = config.attn_res != "none"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.attn_res:
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, attention_mask, memory):
        """x [B, T, D] behind the tokens in memory; attention_mask [B, L], 0 for padding."""
        new, seen = x.shape[1], memory.length
        if attention_mask is None:
            attention_mask = torch.ones(len(x), seen + new, device=x.device)
        if attention_mask.shape != (len(x), seen + new):
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)}: expected {[len(x), seen + new]}, 0 for padding"
            )
        real = attention_mask[:, seen:, None].float()
        places = torch.arange(seen + new, device=x.device)
        look = places[None, :] <= places[seen:, None]
        # Padding sees itself: a row that sees nothing has no softmax.
        own = places[None, :] == places[seen:, None]
        mask = (look & attention_mask[:, None, None].bool()) | own
        sources = [x]
        for layer, kept in zip(self.layers, memory.layers):
            sources = layer(sources, real, mask, kept)
        memory.length += new
        if self.attn_res:
            sources = [mix(sources, self.output_attn_res_proj, self.output_attn_res_norm)]
        return self.norm(sources[0])


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


# ---- the tower


def vision_norm(config, size, eps):
    return nn.RMSNorm(size, eps=eps) if config.norm == "rms" else nn.LayerNorm(size, eps=eps)


class PositionTable(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mode, _, antialias = config.pos_emb_interpolation.partition("_")
        self.antialias = bool(antialias)
        shape = config.pos_emb_height, config.pos_emb_width, config.hidden_size
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, t, h, w):
        """[t h w, C]: the table stretched to h x w, and for a clip the sine and cosine of each frame."""
        table = self.weight.float().permute(2, 0, 1)[None]
        if table.shape[2:] != (h, w):
            table = F.interpolate(
                table, size=(h, w), mode=self.mode, align_corners=False, antialias=self.antialias
            )
        table = table[0].permute(1, 2, 0).flatten(0, 1)
        if t == 1:
            return table
        half = table.shape[1] // 2
        rate = 10000.0 ** (-torch.arange(half, device=table.device, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(t, device=table.device), rate)
        time = torch.cat([angle.sin(), angle.cos()], dim=1).to(table.dtype)
        return (table[None] + time[:, None]).flatten(0, 1)


class PatchEmbed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Conv2d(
            config.in_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
            bias=config.bias,
        )
        self.pos_emb = PositionTable(config)

    def forward(self, patches, grids):
        x = self.proj(patches.to(self.proj.weight.dtype)).flatten(1)
        return (x + torch.cat([self.pos_emb(*grid) for grid in grids])).to(x.dtype)


class EncoderBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        inner = self.heads * config.head_dim
        self.norm0 = vision_norm(config, size, config.norm_eps)
        self.norm1 = vision_norm(config, size, config.norm_eps)
        self.wqkv = nn.Linear(size, 3 * inner, bias=config.bias)
        self.wo = nn.Linear(inner, size, bias=config.bias)
        self.mlp = nn.Module()
        self.mlp.fc0 = nn.Linear(size, config.intermediate_size, bias=config.bias)
        self.mlp.fc1 = nn.Linear(config.intermediate_size, size, bias=config.bias)

    def forward(self, x, turns, lengths):
        qkv = self.wqkv(self.norm0(x)).unflatten(1, (3, self.heads, -1))
        q, k = (torch.view_as_complex(qkv[:, i].float().unflatten(-1, (-1, 2)).contiguous()) for i in (0, 1))
        q, k = (torch.view_as_real(each * turns[:, None]).flatten(-2).to(x.dtype) for each in (q, k))
        # A picture looks at itself alone.
        parts = [each.transpose(0, 1).split(lengths, dim=1) for each in (q, k, qkv[:, 2])]
        o = torch.cat([F.scaled_dot_product_attention(*part) for part in zip(*parts)], dim=1)
        x = x + self.wo(o.transpose(0, 1).flatten(1))
        return x + self.mlp.fc1(F.gelu(self.mlp.fc0(self.norm1(x)), approximate="tanh"))


class VisionTower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_hidden_layers))
        self.encoder.final_layernorm = vision_norm(config, config.hidden_size, config.norm_eps)

    def turns(self, t, h, w, device):
        """2-D RoPE of t frames of h x w patches: pairs of x (column) and y (row) alternate."""
        pairs = self.config.head_dim // 4
        if self.config.rope_theta is None:
            return torch.ones(t * h * w, 2 * pairs, device=device, dtype=torch.complex64)
        steps = torch.arange(pairs, device=device, dtype=torch.float64)
        rate = self.config.rope_theta ** (-4.0 * steps / self.config.head_dim)
        row, column = (torch.arange(n, device=device, dtype=torch.float64)[:, None] * rate for n in (h, w))
        angle = torch.stack([column.expand(h, w, -1), row[:, None].expand(h, w, -1)], dim=-1)
        angle = angle.reshape(h * w, -1)
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64).repeat(t, 1)

    def forward(self, patches, grids):
        """Patches [P, 3, p, p] of pictures (t, h, w), row by row -> [M, patches of a token, C]."""
        x = self.patch_embed(patches, grids)
        turns = torch.cat([self.turns(*grid, x.device) for grid in grids])
        lengths = [t * h * w for t, h, w in grids]
        for block in self.encoder.blocks:
            x = block(x, turns, lengths)
        rows, cols = self.config.merge_kernel_size
        tokens = []
        for part, (t, h, w) in zip(self.encoder.final_layernorm(x).split(lengths), grids):
            part = part.view(t, h // rows, rows, w // cols, cols, -1).transpose(2, 3)
            tokens.append(part.float().mean(0).to(part.dtype).reshape(-1, rows * cols, part.shape[-1]))
        return torch.cat(tokens)


class Projector(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        first = config.projector == "v1"
        width = config.hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        eps = config.projector_ln_eps
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=eps) if first else None
        layers = nn.Linear(width, width, bias=first), nn.GELU(), nn.Linear(width, hidden, bias=first)
        self.proj = nn.Sequential(*layers)
        self.post_norm = None if first else nn.RMSNorm(hidden, eps=eps)

    def forward(self, x):
        x = self.proj((x if self.pre_norm is None else self.pre_norm(x)).flatten(1))
        return x if self.post_norm is None else self.post_norm(x)


# ---- the model


@dataclass
class Output(CausalLMOutputWithPast):
    cache: Memory | None = None


class EarlyFusionForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """Text and pictures in, next tokens out."""

    config_class = EarlyFusionConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _no_split_modules = ["DecoderLayer", "EncoderBlock"]
    _tied_weights_keys = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias"]
    _is_stateful = True
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.language_model = LanguageModel(config.text_config)
        self.vision_tower = VisionTower(config.vision_config)
        self.mm_projector = Projector(config.vision_config, config.text_config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        # Weights come from a checkpoint; this serves those who make the class from a configuration.
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias" or name == "A_log" or "_res_proj" in name:
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.config.text_config.initializer_range)
            else:
                nn.init.constant_(parameter, -4.0 if name == "dt_bias" else 1.0)

    def get_input_embeddings(self):
        return self.language_model.model.embed_tokens

    def set_input_embeddings(self, value):
        self.language_model.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.language_model.lm_head

    def set_output_embeddings(self, value):
        self.language_model.lm_head = value

    def get_image_features(self, pixel_values, image_grid_thw, **kwargs):
        """Patches [P, 3, p, p], normalised to -1..1, of pictures with grids [n, 3] -> features [M, D]."""
        return self.mm_projector(self.vision_tower(pixel_values, torch.as_tensor(image_grid_thw).tolist()))

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        pixel_values=None,
        image_grid_thw=None,
        labels=None,
        inputs_embeds=None,
        use_cache=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        **kwargs,
    ):
        """input_ids [B, T] (or inputs_embeds), attention_mask [B, L] with 0 for padding; pixel_values and
        image_grid_thw as the processor gives them; labels [B, T], -100 where nothing is learned."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values, image_grid_thw)
            place = input_ids == self.config.media_placeholder_token_id
            if len(features) != int(place.sum()):
                raise ValueError(
                    f"the pictures give {len(features)} features, the text has {int(place.sum())} places"
                    " for them (<|media_pad|>); make both with the processor"
                )
            place = place[..., None].expand_as(inputs_embeds)
            inputs_embeds = inputs_embeds.masked_scatter(place, features.to(inputs_embeds.dtype))
        memory = kwargs.get(CACHE)
        if memory is None:
            memory = Memory(len(self.language_model.model.layers))
        hidden = self.language_model.model(inputs_embeds, attention_mask, memory)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.language_model.lm_head(hidden[:, keep])

        loss = None
        if labels is not None:
            target = labels[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target, reduction="sum")
            count = (target != -100).sum() if num_items_in_batch is None else num_items_in_batch
            loss = loss / count
        if use_cache is False or labels is not None:
            return Output(loss=loss, logits=logits)
        return Output(loss=loss, logits=logits, **{CACHE: memory})

    @classmethod
    def _supports_default_dynamic_cache(cls):
        # The layers keep states that transformers' caches have no place for.
        return False

    def _expand_inputs_for_generation(
        self, expand_size=1, input_ids=None, pixel_values=None, image_grid_thw=None, **kwargs
    ):
        """Rows several times, each with its own pictures: transformers would repeat patch by patch."""
        before = input_ids
        input_ids, kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, input_ids=input_ids, **kwargs
        )
        if pixel_values is not None and expand_size > 1:
            rows, columns = self.config.vision_config.merge_kernel_size
            parts = pixel_values.split(image_grid_thw.prod(dim=1).tolist())
            tokens = (image_grid_thw[:, 1] * image_grid_thw[:, 2] // (rows * columns)).cumsum(0)
            places = (before == self.config.media_placeholder_token_id).sum(1).cumsum(0)
            # The row of a picture is the first whose places reach its last token.
            owner = torch.searchsorted(places, tokens)
            order = [
                picture
                for row in range(len(before))
                for picture in expand_size * (owner == row).nonzero().flatten().tolist()
            ]
            pixel_values, image_grid_thw = torch.cat([parts[i] for i in order]), image_grid_thw[order]
        return input_ids, kwargs | {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}

    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, pixel_values=None, image_grid_thw=None, **kwargs
    ):
        given = {"attention_mask": attention_mask, "use_cache": kwargs.get("use_cache"), "logits_to_keep": 1}
        memory = kwargs.get(CACHE)
        if memory is None or memory.length == 0:
            embeds = kwargs.get("inputs_embeds")
            given |= {"input_ids": input_ids} if embeds is None else {"inputs_embeds": embeds}
            return given | {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw, CACHE: memory}
        # What is not in memory yet; a prompt of embeddings is not among the ids.
        start = memory.length if input_ids.shape[1] > memory.length else -1
        return given | {"input_ids": input_ids[:, start:], CACHE: memory}


EarlyFusionForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
