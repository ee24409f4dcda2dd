"""The options of a call, as _core takes them."""

from __future__ import annotations

from typing import NamedTuple

# Those that are tensors: a tuple in this order.
TENSORS = ("alibi_slopes", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


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


def output_shapes(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the output and of lse."""
    if len(q) not in (3, 4):
        raise ValueError(
            f"q: shape {tuple(q)}, expected (batch, seqlen, heads, dim), or packed (total, heads, dim)"
        )
    if len(v) != len(q):
        raise ValueError(f"v: shape {tuple(v)}, expected {len(q)} dimensions as q has")
    lse = (q[0], q[2], q[1]) if len(q) == 4 else (q[1], q[0])
    return (*q[:-1], v[-1]), lse
