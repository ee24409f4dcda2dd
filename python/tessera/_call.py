"""The options of a call, as _core takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

# Those that are tensors: a tuple in this order.
TENSORS = ("alibi_slopes", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
# Of decode, besides: where the keys lie, and what is appended. A tuple in this order.
CACHE = (
    "cache_seqlens",
    "page_table",
    "cache_batch_idx",
    "leftpad_k",
    "k_new",
    "v_new",
    "rotary_cos",
    "rotary_sin",
    "k_scale",
    "v_scale",
)


class Options(NamedTuple):
    """Those that are not tensors, in _core's order."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    kernel: str | None = None


def alignment_is_top_left(alignment: str) -> bool:
    if alignment == "bottom-right":
        return False
    if alignment == "top-left":
        return True
    raise ValueError(f"causal_alignment: {alignment!r}, expected 'bottom-right' or 'top-left'")


def lse_shape(name: str, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Of lse, for a q or an o of this shape."""
    if len(rows) not in (3, 4):
        expected = "(batch, seqlen, heads, dim), or packed (total, heads, dim)"
        raise ValueError(f"{name}: shape {tuple(rows)}, expected {expected}")
    return (rows[0], rows[2], rows[1]) if len(rows) == 4 else (rows[1], rows[0])


def output_shapes(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the output and of lse."""
    lse = lse_shape("q", q)
    if len(v) != len(q):
        raise ValueError(f"v: shape {tuple(v)}, expected {len(q)} dimensions as q has")
    return (*q[:-1], v[-1]), lse


def decoded_shapes(q: tuple[int, ...], v_cache: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the output and of lse of decode."""
    lse = lse_shape("q", q)
    if len(v_cache) != 4:
        raise ValueError(
            f"v_cache: shape {tuple(v_cache)}, expected (batch, seqlen, heads, dim), or with page_table "
            "(pages, page_size, heads, dim)"
        )
    return (*q[:-1], v_cache[-1]), lse


def number_of_sequences(q: tuple[int, ...], cu_seqlens_q: Any) -> int:
    return q[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def check_length(length: int, k_cache: tuple[int, ...], page_table: Any, k_new: Any) -> None:
    """cache_seqlens where it is one number: known to the host also for a cache on a GPU."""
    room = k_cache[1] if len(k_cache) == 4 else 2**31 - 1
    if page_table is not None and len(page_table.shape) == 2:
        room *= page_table.shape[1]
    most = room - (k_new.shape[1] if k_new is not None and len(k_new.shape) == 4 else 0)
    if not 0 <= length <= most:
        raise ValueError(
            f"cache_seqlens: {length}, expected 0 to {most}, or an int32 tensor"
            if most >= 0
            else f"k_new: {k_new.shape[1]} keys, expected at most the cache's {room} slots"
        )
