"""tessera.compat.flash_attn with a cache, contiguous or paged, against plain PyTorch in float64."""

import math
from typing import Any

import pytest
import torch
from plain import random, reference
from tessera.compat import flash_attn as fa
from torch import Tensor

CACHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal overrides the right side": {"causal": True, "window_size": (9, 4)},
    "window": {"window_size": (5, 1)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.4},
    "slopes": {"alibi_slopes": True, "causal": True},
    "splits": {"num_splits": 3},
}
LENGTHS_CACHED = (13, 0, 30)
ROOM = 40


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (seqlen, heads, dim)."""
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = x[..., : 2 * half]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pairs = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("layout", ["rows", "rows by index", "pages", "left padding"])
@pytest.mark.parametrize("case", CACHED)
def test_with_kvcache(case: str, layout: str, rotary: str | None, device: str) -> None:
    """Each sequence alone, its keys gathered from the cache and what is appended to them."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch, new, heads, heads_k, dim = 3, 2, 4, 2, 32
    appends = rotary is not None or case != "splits"

    def made(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed).to(device, dtype)

    q, k, v = (
        made(batch, new, heads, dim, seed=71),
        *(made(batch, new, heads_k, dim, seed=n) for n in (72, 73)),
    )
    options = dict(CACHED[case])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = random(heads, seed=74).abs().to(device)
    shape, where, places = (5, ROOM), {}, [[b * ROOM + slot for slot in range(ROOM)] for b in range(batch)]
    if layout == "rows by index":
        index = [3, 1, 4]
        where["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=device)
        places = [[row * ROOM + slot for slot in range(ROOM)] for row in index]
    if layout == "pages":  # of any size: flash-attn wants multiples of 256
        table = torch.randperm(12, generator=torch.Generator().manual_seed(75))[:12].view(3, 4)
        where["block_table"] = table.T.contiguous().T.to(device, torch.int32)
        shape = (12, 10)
        places = [[int(table[b, slot // 10]) * 10 + slot % 10 for slot in range(ROOM)] for b in range(batch)]
    first = [4, 0, 29] if layout == "left padding" else [0, 0, 0]
    if layout == "left padding":
        where["cache_leftpad"] = torch.tensor(first, dtype=torch.int32, device=device)
    k_cache, v_cache = made(*shape, heads_k, dim, seed=76), made(*shape, heads_k, dim, seed=77)
    kept = [x.double().cpu().flatten(0, 1) for x in (k_cache, v_cache)]
    turn = {}
    if rotary is not None:
        angles = torch.arange(64)[:, None] * 10.0 ** -torch.linspace(0, 2, 8)
        turn = {"rotary_cos": angles.cos().to(q), "rotary_sin": angles.sin().to(q)}
        turn["rotary_interleaved"] = rotary == "interleaved"
    lengths = torch.tensor(LENGTHS_CACHED, dtype=torch.int32, device=device)
    appended = {"k": k, "v": v} if appends else {}
    out, lse = fa.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        **appended,
        **turn,
        **where,
        **options,
        cache_seqlens=lengths,
        return_softmax_lse=True,
    )

    after = [x.double().cpu().flatten(0, 1) for x in (k_cache, v_cache)]
    tolerance = 2e-5 if device == "cpu" else 3e-2
    judged = {
        name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items() if name != "num_splits"
    }
    for b, length in enumerate(LENGTHS_CACHED):
        query, keys, values = (x[b].double().cpu() for x in (q, k, v))
        if rotary is not None:
            cos, sin = (turn[name].double().cpu() for name in ("rotary_cos", "rotary_sin"))
            at = length + torch.arange(new)
            keys = rotated(keys, cos, sin, at, rotary == "interleaved")
            moves = options.get("causal") or "window_size" in options
            stand = at if moves else torch.full((new,), length)
            query = rotated(query, cos, sin, stand, rotary == "interleaved")
        slots = torch.tensor(places[b])
        if appends:
            kept[0][slots[length : length + new]] = keys
            kept[1][slots[length : length + new]] = values
        seen = slots[first[b] : length + (new if appends else 0)]
        expected, expected_lse = reference(query[None], kept[0][seen][None], kept[1][seen][None], **judged)
        torch.testing.assert_close(out[b].double().cpu(), expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[b].double().cpu(), expected_lse[0], rtol=tolerance, atol=tolerance)
    for got, want in zip(after, kept, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_with_kvcache_its_lengths() -> None:
    q, cache = random(2, 1, 2, 16, seed=81), random(2, 9, 2, 16, seed=82)
    whole = fa.flash_attn_with_kvcache(q, cache, cache)  # without lengths the cache is full
    torch.testing.assert_close(whole, fa.flash_attn_func(q, cache, cache))
    part = fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4)
    torch.testing.assert_close(part, fa.flash_attn_func(q, cache[:, :4], cache[:, :4]))
    with pytest.raises(ValueError, match="cache_seqlens: None"):
        fa.flash_attn_with_kvcache(q, cache, cache.clone(), q, q)


def test_with_kvcache_a_window_as_wide_as_the_cache_is_none() -> None:
    """flash-attn then rotates every query by the first one's position."""
    q, cache = random(1, 2, 1, 16, seed=83), torch.zeros(1, 9, 1, 16)
    angles = torch.arange(9.0)[:, None] * torch.ones(1, 8)
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": 3}
    outs = [
        fa.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), q, q, window_size=window, **turn)
        for window in ((-1, -1), (9, -1), (9, 20))
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_with_kvcache_has_no_gradient_and_says_nothing() -> None:
    q, cache = random(1, 1, 2, 16, seed=84).requires_grad_(), random(1, 9, 2, 16, seed=85)
    assert not fa.flash_attn_with_kvcache(q, cache, cache).requires_grad


def test_with_kvcache_rows_without_keys() -> None:
    q, cache = random(1, 3, 2, 16, seed=86), random(1, 9, 2, 16, seed=87)
    out, lse = fa.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=2, causal=True, return_softmax_lse=True
    )
    assert (out[:, 0] == 0).all()
    assert (lse[..., 0] == math.inf).all()
    assert torch.isfinite(lse[..., 1:]).all()
