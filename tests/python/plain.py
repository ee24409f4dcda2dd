"""Attention as flash-attn means it, in plain PyTorch, and the numbers to try it on."""

import math

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of one dense batch, every score at once."""
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // heads_k, dim=2) for x in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(batch, heads)[:, :, None, None]
        score = score - slopes * (place - key).abs()
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right

    row_max = score.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True) if seqlen_k else 0.0
    row_max = torch.where(torch.as_tensor(row_max) == -math.inf, 0.0, torch.as_tensor(row_max))
    weight = torch.exp(score.masked_fill(~seen, -math.inf) - row_max)
    total = weight.sum(-1, keepdim=True)
    without_keys = total == 0
    total = total.masked_fill(without_keys, 1.0)
    out = torch.einsum("bhij,bjhd->bihd", weight / total, v)
    lse = (row_max + total.log()).masked_fill(without_keys, math.inf)
    return out, lse.squeeze(-1)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
