"""Kimi Delta Attention in chunks: the quick torch form, with a hand-written backward.

With K^ = k e^{G}, K~ = k e^{G_C - G}, Q^ = scale q e^{G}, P and T = (I + L)^{-1} from kernels/kda/intra.py, S
the state before a chunk and S' the state after it:

    W = T (beta K^),   R = T (beta V) - W S,   O = Q^ S + P R
    S' = M S + K~^T T (beta V),   M = diag(e^{G_C}) - K~^T W

All chunks are worked on together; only the K x K by K x V recursion of the states is sequential, and it runs
level by level over all documents (kernels/kda/grid.py). Backward, with dO and the gradient dS' of the state
after the chunk:

    Z = P^T dO,  dS = Q^^T dO - W^T Z + M^T dS',  E = T^T (Z + K~ dS'),  dV = beta E
    dP = tril(dO R^T),  dA = -stril(dV R^T),  dQ^ = dO S^T,  dK^ = -dV S^T,  dK~ = R dS'^T
    db = (1 - beta) sum_v E R                  (b are the logits of beta)
    dG = q dq + k (dk_row - dk_column), plus sum_v S' dS' in the last row;  dg_t = sum of dG over t and after

where A holds the decayed products k_i k_j. Saved for the backward: the inputs, P, T, R and the states.
Everything inside is float32 (float64 for float64 inputs), whatever autocast says.

Definition: kernels/kda/naive.py. Source of the recurrence: Kimi Linear technical report (arXiv 2510.26692),
section 3.

Legend: T tokens, D documents, N chunks, C tokens per chunk, H query/key heads, G value heads, K key dim, V
value dim, B = N * G.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.kda.checks import check_row
from earlyfusion.kernels.kda.gate import compute_dtype, full_precision, log_decay, log_decay_backward
from earlyfusion.kernels.kda.grid import Grid, chunk_grid, chunk_states, scan_gradients
from earlyfusion.kernels.kda.intra import Tree, climb, descend
from earlyfusion.kernels.kda.naive import L2_EPS
from earlyfusion.kernels.segments import Segments


def default_chunk(key_dim: int) -> int:
    """Chunk length measured fastest on a CPU: 32 tokens for key dims up to 64, 64 tokens above."""
    return 32 if key_dim <= 64 else 64


class Options(NamedTuple):
    """What shapes a call besides its tensors."""

    lower_bound: float | None
    scale: float
    group: int  # value heads per query/key head
    grid: Grid


def _chunks(x_RGX: Tensor, grid: Grid) -> Tensor:
    """Rows [N * C, G, X] viewed as [N, G, C, X] (not contiguous)."""
    return x_RGX.view(grid.num, grid.chunk, *x_RGX.shape[1:]).transpose(1, 2)


def _rows(x_BCX: Tensor, heads: int, grid: Grid) -> Tensor:
    """Chunks [B, C, X] back to tokens [T, G, X]."""
    x_NCGX = x_BCX.view(grid.num, heads, grid.chunk, -1).transpose(1, 2)
    return grid.gather(x_NCGX.reshape(grid.padded, heads, -1))


def _normalized(x_THK: Tensor, scale: float, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale * x / |x| as [B, C, K], scale / |x| as [T, H, 1])."""
    grid = options.grid
    x_THK = x_THK.to(dtype)
    rnorm_TH1 = torch.linalg.vecdot(x_THK, x_THK).add_(L2_EPS).rsqrt_().mul_(scale).unsqueeze(-1)
    x_NHCK = _chunks(grid.spread(x_THK), grid)
    out = torch.empty(x_NHCK.shape, dtype=dtype, device=x_THK.device)
    torch.mul(x_NHCK, _chunks(grid.spread(rnorm_TH1), grid), out=out)
    if options.group > 1:
        out = out.repeat_interleave(options.group, dim=1)
    return out.view(-1, *out.shape[2:]), rnorm_TH1


def _normalize_backward(
    dy_BCK: Tensor, y_BCK: Tensor, rnorm_TH1: Tensor, scale: float, x: Tensor, opts: Options
) -> Tensor:
    """Gradient of the raw q or k: (scale / |x|) (dy - y (y . dy) / scale^2)."""
    grid, heads = opts.grid, x.shape[1]
    along_BC1 = torch.linalg.vecdot(y_BCK, dy_BCK).unsqueeze(-1)
    if opts.group > 1:
        shape = (grid.num, heads, opts.group, grid.chunk, -1)
        dy_BCK, along_BC1 = dy_BCK.view(shape).sum(2), along_BC1.view(shape).sum(2)
        y_BCK = y_BCK.view(shape)[:, :, 0]
        dy_BCK, along_BC1, y_BCK = (
            x.reshape(grid.num * heads, grid.chunk, -1) for x in (dy_BCK, along_BC1, y_BCK)
        )
    dx_BCK = torch.addcmul(dy_BCK, y_BCK, along_BC1, value=-1.0 / scale**2)
    return _rows(dx_BCK, heads, grid).mul_(rnorm_TH1).to(x.dtype)


def _decay(
    f: Tensor, A_log: Tensor, dt_bias: Tensor, options: Options, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(g_TGK in nats, alpha as a contiguous [B, C, K]): 0 at a severed row, 1 at a dead one."""
    grid = options.grid
    g_TGK = log_decay(f, A_log, dt_bias, options.lower_bound).to(dtype)
    alpha_RGK = grid.spread(g_TGK.exp())
    alpha_RGK.index_fill_(0, grid.severed, 0.0).index_fill_(0, grid.dead, 1.0)
    alpha_NGCK = _chunks(alpha_RGK, grid).contiguous()
    return g_TGK, alpha_NGCK.view(-1, *alpha_NGCK.shape[2:])


def _column(x_TG: Tensor, grid: Grid) -> Tensor:
    """[T, G] to [B, C, 1]."""
    return _chunks(grid.spread(x_TG).unsqueeze(-1), grid).contiguous().view(-1, grid.chunk, 1)


def _values(x_TGV: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """[T, G, V] to a contiguous [B, C, V]."""
    return _chunks(grid.spread(x_TGV.to(dtype)), grid).reshape(-1, grid.chunk, x_TGV.shape[-1])


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        initial: Tensor | None,
        opts: Options,
    ) -> tuple[Tensor, Tensor]:
        grid, dtype = opts.grid, compute_dtype(q, v)
        heads, value_dim = v.shape[1:]
        with full_precision(q.device):
            q_BCK, _ = _normalized(q, opts.scale, opts, dtype)
            k_BCK, _ = _normalized(k, 1.0, opts, dtype)
            _, alpha_BCK = _decay(f, A_log, dt_bias, opts, dtype)
            beta_BC1 = _column(torch.sigmoid(b.to(dtype)), grid)
            tree, P, T = climb(q_BCK, k_BCK, alpha_BCK, beta_BC1, keep=False)
            assert P is not None and T is not None
            vk_BCX = torch.cat([_values(v, grid, dtype), tree.k_BCK], dim=-1).mul_(beta_BC1)
            RW_BCX = torch.bmm(T, vk_BCX)
            bM_BKX = torch.bmm(tree.tail_BCK.transpose(1, 2), RW_BCX)
            M = bM_BKX[..., value_dim:].neg()
            M.diagonal(dim1=1, dim2=2).add_(tree.carry_BK)
            before, after = chunk_states(M, bM_BKX[..., :value_dim], initial, grid)
            S = before.flatten(0, 1)
            R = torch.baddbmm(RW_BCX[..., :value_dim], RW_BCX[..., value_dim:], S, alpha=-1.0)
            o_BCV = torch.bmm(tree.q_BCK, S).baddbmm_(P, R)
            o = _rows(o_BCV, heads, grid).to(v.dtype)
            final = after.index_select(0, grid.tail_D)
        ctx.save_for_backward(q, k, v, f, b, A_log, dt_bias, initial, P, T, R, before, after)
        ctx.opts = opts
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, f, b, A_log, dt_bias, initial, P, T, R, before, after = ctx.saved_tensors
        opts: Options = ctx.opts
        grid, dtype = opts.grid, R.dtype
        with full_precision(q.device):
            q_BCK, rnorm_q = _normalized(q, opts.scale, opts, dtype)
            k_BCK, rnorm_k = _normalized(k, 1.0, opts, dtype)
            g_TGK, alpha_BCK = _decay(f, A_log, dt_bias, opts, dtype)
            beta_BC1 = _column(torch.sigmoid(b.to(dtype)), grid)
            tree, _, _ = climb(q_BCK, k_BCK, alpha_BCK, None, keep=True)
            do_BCV = _values(do, grid, dtype)
            Z = torch.bmm(P.transpose(1, 2), do_BCV)
            D_BKV, dinitial = _state_gradients(tree, T, beta_BC1, do_BCV, Z, dfinal, initial, grid)
            E = torch.bmm(T.transpose(1, 2), Z.baddbmm_(tree.tail_BCK, D_BKV))
            db_BC1 = (1.0 - beta_BC1) * torch.linalg.vecdot(E, R).unsqueeze(-1)
            minus_dV = E.mul_(beta_BC1).neg_()
            S = before.flatten(0, 1)
            R_t, S_t = R.transpose(1, 2), S.transpose(1, 2)
            dP = torch.bmm(do_BCV, R_t)
            dq, dk = torch.bmm(do_BCV, S_t), torch.bmm(minus_dV, S_t)
            dtail = torch.bmm(R, D_BKV.transpose(1, 2))
            descend(tree, dP, torch.bmm(minus_dV, R_t), dq, dk, dtail)
            dq.mul_(alpha_BCK)
            dk.mul_(alpha_BCK)
            dg_TGK = _gate_gradient(q_BCK, k_BCK, dq, dk, dtail, after, D_BKV, grid)
            # A token that keeps less than the machine epsilon of the state passes its gate no gradient beyond
            # the rounding noise of the running sum, and the factor exp(A_log) of the gate would amplify that
            # noise.
            dg_TGK = dg_TGK.masked_fill(g_TGK < math.log(torch.finfo(dtype).eps), 0.0)
            same_BC1 = dP.diagonal(dim1=1, dim2=2).unsqueeze(
                -1
            )  # a token reading itself: no decay in between
            dq.addcmul_(k_BCK, same_BC1)
            dk.add_(dtail).addcmul_(q_BCK, same_BC1)
            df, dA_log, ddt_bias = log_decay_backward(dg_TGK, f, g_TGK, A_log, dt_bias, opts.lower_bound)
            return (
                _normalize_backward(dq, q_BCK, rnorm_q, opts.scale, q, opts),
                _normalize_backward(dk, k_BCK, rnorm_k, 1.0, k, opts),
                _rows(minus_dV.neg_(), v.shape[1], grid).to(v.dtype),
                df.to(f.dtype),
                _rows(db_BC1, v.shape[1], grid).squeeze(-1).to(b.dtype),
                dA_log.to(A_log.dtype),
                ddt_bias.to(dt_bias.dtype),
                dinitial,
                None,
            )


def _state_gradients(
    tree: Tree,
    T: Tensor,
    beta_BC1: Tensor,
    do_BCV: Tensor,
    Z_BCV: Tensor,
    dfinal_DGKV: Tensor,
    initial_DGKV: Tensor | None,
    grid: Grid,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of the state after every chunk as [B, K, V], gradient of the initial states)."""
    W = torch.bmm(T, tree.k_BCK * beta_BC1)
    M = torch.bmm(tree.tail_BCK.transpose(1, 2), W).neg_()
    M.diagonal(dim1=1, dim2=2).add_(tree.carry_BK)
    local = torch.bmm(tree.q_BCK.transpose(1, 2), do_BCV).baddbmm_(W.transpose(1, 2), Z_BCV, alpha=-1.0)
    M_NGKK = M.view(grid.num, -1, *M.shape[1:])
    local_NGKV = local.view(grid.num, -1, *local.shape[1:])
    D_NGKV = torch.zeros_like(local_NGKV)
    D_NGKV[:-1] = local_NGKV[1:]
    if grid.aligned:
        D_NGKV.index_copy_(0, grid.tail_D, dfinal_DGKV.to(D_NGKV.dtype))
    D_NGKV = scan_gradients(M_NGKK, D_NGKV, grid.scan)
    dinitial = None
    if initial_DGKV is not None:
        M_D, D_D = M_NGKK.index_select(0, grid.head_D), D_NGKV.index_select(0, grid.head_D)
        dinitial = local_NGKV.index_select(0, grid.head_D) + M_D.transpose(2, 3) @ D_D
        dinitial = dinitial.to(initial_DGKV.dtype)
    return D_NGKV.flatten(0, 1), dinitial


def _gate_gradient(
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    dk_row: Tensor,
    dk_column: Tensor,
    after: Tensor,
    D_BKV: Tensor,
    grid: Grid,
) -> Tensor:
    """dg_TGK of the log decay, from the gradients of the decayed pairs."""
    heads = after.shape[1]
    dG_BCK = (dk_row - dk_column).mul_(k).addcmul_(q, dq)
    dG_BCK[:, -1] += torch.linalg.vecdot(after.flatten(0, 1), D_BKV)
    dG_NCX = dG_BCK.view(grid.num, heads, grid.chunk, -1).transpose(1, 2).reshape(grid.num, grid.chunk, -1)
    dg_NCX = torch.bmm(grid.reach_NCC, dG_NCX)
    return grid.gather(dg_NCX.view(grid.padded, heads, -1))


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    f_TGK: Tensor,
    b_TG: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    segments: Segments,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed documents; arguments and results as in :func:`earlyfusion.kernels.kda.naive.kda`.

    Differentiable once, in every tensor. ``chunk`` (a power of two, at least 2, by default chosen from K)
    only changes speed and rounding.

    Raises:
        ValueError: shapes do not fit each other or the segments, or ``chunk`` is not a power of two.
    """
    check_row(q_THK, k_THK, v_TGV, f_TGK, b_TG, segments)
    chunk = default_chunk(q_THK.shape[2]) if chunk is None else chunk
    if chunk < 2 or chunk & (chunk - 1):
        raise ValueError(f"kda: chunk={chunk}; expected a power of two, at least 2, or None for the default")
    dtype = compute_dtype(q_THK, v_TGV)
    if segments.total == 0:
        state_shape = (0, v_TGV.shape[1], q_THK.shape[2], v_TGV.shape[2])
        return v_TGV.clone(), v_TGV.new_zeros(state_shape, dtype=dtype) if output_final_state else None
    aligned = output_final_state or initial_state_NGKV is not None
    options = Options(
        lower_bound=lower_bound,
        scale=q_THK.shape[2] ** -0.5 if scale is None else scale,
        group=v_TGV.shape[1] // q_THK.shape[1],
        grid=chunk_grid(segments, chunk, aligned, dtype, q_THK.device),
    )
    inputs = (q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK, initial_state_NGKV)
    o_TGV, final_NGKV = _ChunkKDA.apply(*inputs, options)
    if not aligned and segments.num > 1 and not o_TGV.detach().sum().isfinite():
        # Zero times NaN is NaN: in a chunk that documents share, one broken token would reach its neighbours
        # through the masked products. The aligned grid gives no chunk to two documents.
        options = options._replace(grid=chunk_grid(segments, chunk, True, dtype, q_THK.device))
        o_TGV, final_NGKV = _ChunkKDA.apply(*inputs, options)
    return o_TGV, final_NGKV if output_final_state else None
