"""flash-attn 2.8's functions, computed by Tessera.

    from tessera.compat.flash_attn import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)  # q (batch, seqlen_q, heads, dim)

Signatures, defaults and results are flash-attn's; docs/migrating-from-flash-attn.md lists every difference.
flash-attn's modules `bert_padding` and `flash_attn_interface` can be imported from here, too.

Shapes: dense (batch, seqlen, heads, dim), packed ("varlen") (total, heads, dim); `qkv` and `kv` have one
dimension more before the heads, of size 3 or 2. Query i of a sequence stands at key i + seqlen_k - seqlen_q.
"""

import math
import sys

import torch
from torch import Tensor

import tessera
from tessera.compat import bert_padding

__version__ = "2.8.3"  # the flash-attn whose functions these are: callers compare it

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]
"""out, or with return_attn_probs=True (out, softmax_lse, S_dmask)."""

# A module that others are imported from, as os.path is from os.
flash_attn_interface = sys.modules[__name__]
sys.modules[f"{__name__}.flash_attn_interface"] = flash_attn_interface
sys.modules[f"{__name__}.bert_padding"] = bert_padding


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, heads_q, dim) over k and v (batch, seqlen_k, heads_k, dim).

    A side of `window_size` below 0 is unbounded. With `return_attn_probs` the result is (out, softmax_lse,
    S_dmask): softmax_lse (batch, heads_q, seqlen_q) is +inf where a row sees no key; S_dmask is empty, or
    None under dropout.
    """
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with kv (batch, seqlen_k, 2, heads_k, dim)."""
    return _attend(
        q,
        *_unpack("kv", kv, 5, 2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, dim)."""
    return _attend(
        *_unpack("qkv", qkv, 5, 3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of packed sequences: q (total_q, heads_q, dim), k and v (total_k, heads_k, dim).

    Sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 (int32). softmax_lse is (heads_q, total_q).
    With `block_table` (batch, max_blocks) k and v are pages (blocks, block_size, heads_k, dim), and
    cu_seqlens_k says how long the sequences are; without gradients and dropout.
    """
    if block_table is not None:
        if dropout_p > 0.0:
            raise NotImplementedError(f"dropout_p: {dropout_p}, expected 0 with block_table")
        result = tessera.decode(
            q,
            k,
            v,
            cu_seqlens_k.diff(),
            page_table=_contiguous(block_table),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=int(max_seqlen_q),
            max_seqlen_k=int(max_seqlen_k),
            causal=causal,
            window=_window(window_size, causal),
            softmax_scale=softmax_scale,
            softcap=max(softcap, 0.0),
            alibi_slopes=alibi_slopes,
            return_lse=return_attn_probs,
        )
        if not return_attn_probs:
            return result
        out, lse = result
        return out, _mark_empty(lse), q.new_empty(0)
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=int(max_seqlen_q),
        max_seqlen_k=int(max_seqlen_k),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with kv (total_k, 2, heads_k, dim)."""
    return flash_attn_varlen_func(
        q,
        *_unpack("kv", kv, 4, 2),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with qkv (total, 3, heads, dim)."""
    return flash_attn_varlen_func(
        *_unpack("qkv", qkv, 4, 3),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads_q, dim) to a cache, without gradients.

    k_cache and v_cache are (batch_cache, seqlen_cache, heads_k, dim), or with `block_table` (batch,
    max_blocks) (blocks, block_size, heads_k, dim). `k` and `v` (batch, seqlen_new, heads_k, dim) are first
    written to the slots from `cache_seqlens` on, in place; without `cache_seqlens` the cache is full.
    `rotary_cos` and `rotary_sin` (positions, rotary_dim / 2) turn k and q: from position cache_seqlens on,
    all queries at cache_seqlens where there is neither `causal` nor a window. With `return_softmax_lse` the
    result is (out, softmax_lse).
    """
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: None, expected an int or an int32 tensor, for k is appended")
        cache_seqlens = room
    # A side as wide as the cache is no window: without one, rotary positions are others.
    window_size = tuple(-1 if side >= room else side for side in window_size)
    with torch.no_grad():
        result = tessera.decode(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            k_new=k,
            v_new=v,
            page_table=_contiguous(block_table),
            cache_batch_idx=_contiguous(cache_batch_idx),
            leftpad_k=cache_leftpad,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            causal=causal,
            window=_window(window_size, causal),
            softmax_scale=softmax_scale,
            softcap=max(softcap, 0.0),
            alibi_slopes=alibi_slopes,
            num_splits=max(num_splits, 0),
            return_lse=return_softmax_lse,
        )
    if not return_softmax_lse:
        return result
    out, lse = result
    return out, _mark_empty(lse)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _window(sides: tuple[int, int], causal: bool) -> tuple[int | None, int | None]:
    """A negative side is unbounded; causal overrides the right one."""
    left, right = (None if side < 0 else side for side in sides)
    return left, None if causal else right


def _mark_empty(lse: Tensor) -> Tensor:
    """flash-attn's mark of a row without keys."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    **packed: Tensor | int,
) -> Result:
    result = tessera.attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=max(softcap, 0.0),  # a negative one is off, too
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        **packed,
    )
    if not return_attn_probs:
        return result
    out, lse = result
    return out, _mark_empty(lse), None if dropout_p > 0.0 else q.new_empty(0)


def _unpack(name: str, x: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, along the dimension before the heads. Their gradients arrive in it."""
    if x.dim() != rank or x.shape[-3] != parts:
        shape = f"(batch, seqlen, {parts}, heads, dim)" if rank == 5 else f"(total, {parts}, heads, dim)"
        raise ValueError(f"{name}: expected {shape}, got {tuple(x.shape)}")
    return x.unbind(-3)
