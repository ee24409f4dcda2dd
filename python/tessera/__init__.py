"""Exact attention, tile by tile: forward and backward on CPUs and GPUs, with one meaning.

    import tessera
    out = tessera.attention(q, k, v, causal=True)
    out = tessera.decode(q, k_cache, v_cache, cache_seqlens, k_new=k, v_new=v, causal=True)

q, k and v are tensors of PyTorch (with autograd), arrays of NumPy, or of any library that speaks DLPack.
What each option means, exactly, is in docs/semantics.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera import _core
from tessera._call import Options, alignment_is_top_left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Explanation",
    "Kernel",
    "attention",
    "decode",
    "explain",
    "kernels",
    "last_kernel",
    "merge_states",
]
__version__: str = _core.version()

# torch.compiler.is_compiling, once the program has imported torch.
_is_compiling: Callable[[], bool] | None = None


def _meet_torch() -> bool:
    """Whether torch.compile is at work, where torch may have been imported since the last call."""
    global _is_compiling
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    _is_compiling = torch.compiler.is_compiling
    return _is_compiling()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Sequence[int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    causal_alignment: str = "bottom-right",
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """softmax(mask(softcap(softmax_scale * q k^T) + alibi + bias)) v.

    Args:
        q: (batch, seqlen_q, heads_q, dim), or packed (total_q, heads_q, dim).
        k: (batch, seqlen_k, heads_k, dim), or packed (total_k, heads_k, dim). heads_k divides heads_q.
        v: like k, with a dim of its own.
        causal: a query sees no later key; the same as a right window of 0.
        window: (left, right), how many keys before and after its own place a query sees. None: all.
        softmax_scale: 1 / sqrt(dim) if None.
        softcap: scores become softcap * tanh(score / softcap). 0: off.
        alibi_slopes: float32 (heads_q) or (batch, heads_q).
        bias: broadcast to (batch, heads_q, seqlen_q, seqlen_k); float32 or q's dtype.
        sinks: (heads_q), the logits of keys without a value; float32 or q's dtype.
        dropout_p: the probability to drop an attention weight.
        seed: of dropout, below 2^64 (2^63 for torch.compile before PyTorch 2.5). None: drawn from the
            library's generator (PyTorch: that of the CPU).
        cu_seqlens_q: int32 (batch + 1), where packed sequences begin and end. Likewise cu_seqlens_k.
        max_seqlen_q: of packed sequences, for those who know it. Likewise max_seqlen_k.
        seqused_q: int32 (batch), how many rows of a sequence count. Likewise seqused_k.
        causal_alignment: "bottom-right" or "top-left": where the diagonal lies if seqlen_q != seqlen_k.
        deterministic: backward bitwise repeatable on a GPU, too.
        return_lse: also return the logarithm of the softmax's denominator.
        kernel: force a kernel by its name.

    Returns:
        The output, in q's shape but for v's dim, of q's kind and dtype. With return_lse, a pair with lse:
        float32 (batch, heads_q, seqlen_q), packed (heads_q, total_q).

    Raises:
        ValueError: an argument is wrong. The text has its name, its value and what was expected.
        NotImplementedError: no kernel, or not the one asked for, can run the call. The text has the reasons.
    """
    left, right = window
    top_left = causal_alignment != "bottom-right" and alignment_is_top_left(causal_alignment)
    compiling = _meet_torch() if _is_compiling is None else _is_compiling()
    if not compiling:
        done = _core.simple_attention(
            q, k, v,
            alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            softmax_scale, causal, left, right, top_left, softcap, dropout_p, seed, max_seqlen_q,
            max_seqlen_k, deterministic, kernel,
            return_lse,
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    options = Options(
        softmax_scale, causal, left, right, top_left, softcap, dropout_p, seed, max_seqlen_q, max_seqlen_k,
        deterministic, kernel,
    )  # fmt: skip
    tensors = (alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    # PyTorch's, and no other library's. Before 2.5, torch.compile cannot be asked for the attribute.
    if compiling or hasattr(q, "requires_grad"):
        from tessera import _torch

        return _torch.attention(q, k, v, tensors, options, return_lse)
    from tessera import _arrays

    return _arrays.attention(q, k, v, tensors, options, return_lse)


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    *,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    leftpad_k: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = False,
    window: Sequence[int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    out: Any = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """Attention of a few new queries a sequence to a cache of keys and values.

    Without gradients. Nothing is read from a GPU: the lengths there may change between replays of a CUDA
    graph.

    Args:
        q: (batch, seqlen_q, heads_q, dim), or packed (total_q, heads_q, dim).
        k_cache: (batch_cache, seqlen_cache, heads_k, dim), with page_table (pages, page_size, heads_k, dim);
            of q's dtype, or of 8 bits: float8_e4m3fn or int8. Written to if k_new is given.
        v_cache: like k_cache, with a dim of its own.
        cache_seqlens: int32 (batch), the slots in use before the call appends; or one int for all.
        k_new: (batch, seqlen_new, heads_k, dim), packed where q is; appended to the cache, in place, before
            anything is read. Likewise v_new.
        page_table: int32 (batch, max_pages): the page that has slot i is page_table[b, i / page_size].
        cache_batch_idx: int32 (batch), the row of the cache that a sequence has; without it its own.
        leftpad_k: int32 (batch): slots before it are no keys of the sequence.
        rotary_cos: (positions, rotary_dim / 2), float32 or q's dtype: turns k_new and q, by the positions
            that follow cache_seqlens. Likewise rotary_sin.
        rotary_interleaved: whether pairs are neighbours, (2i, 2i + 1), or (i, i + rotary_dim / 2).
        k_scale: float32 (heads_k), with an 8-bit cache: a key is what is stored times the scale of its head.
            None: 1. What is appended is divided by it, rounded and saturated. Likewise v_scale.
        causal, window, softmax_scale, softcap, alibi_slopes, sinks: as in attention(). The last query stands
            at the last key, after the append.
        cu_seqlens_q: int32 (batch + 1): q is packed, and k_new by cu_seqlens_k.
        max_seqlen_q: the most queries of any packed sequence, for those who know it.
        max_seqlen_k: the most keys of any sequence after the append; default: what the cache has room for.
        num_splits: parts that a sequence's keys are cut into, at most; 0: automatic.
        out: what the output is written to: q's shape but for v's dim, q's dtype or float32.
        return_lse: also return the logarithm of the softmax's denominator.
        kernel: force a kernel by its name.

    Returns:
        As attention().

    Raises:
        ValueError: an argument is wrong; nothing has been written. Lengths, indices and tables on a GPU are
            believed.
        NotImplementedError: no kernel, or not the one asked for, can run the call, or a gradient is wanted.
    """
    left, right = window
    compiling = _meet_torch() if _is_compiling is None else _is_compiling()
    if not compiling:
        done = _core.simple_decode(
            q, k_cache, v_cache, out,
            cache_seqlens, page_table, cache_batch_idx, leftpad_k, k_new, v_new, rotary_cos, rotary_sin,
            k_scale, v_scale,
            alibi_slopes, None, sinks, cu_seqlens_q, cu_seqlens_k, None, None,
            softmax_scale, causal, left, right, False, softcap, 0.0, None, max_seqlen_q, max_seqlen_k, False,
            kernel,
            rotary_interleaved, num_splits, return_lse,
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    options = Options(
        softmax_scale, causal, left, right, softcap=softcap, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, kernel=kernel,
    )  # fmt: skip
    tensors = (alibi_slopes, None, sinks, cu_seqlens_q, cu_seqlens_k, None, None)
    cache = (
        cache_seqlens, page_table, cache_batch_idx, leftpad_k, k_new, v_new, rotary_cos, rotary_sin,
        k_scale, v_scale,
    )  # fmt: skip
    rest = (cache, tensors, options, rotary_interleaved, num_splits, return_lse)
    if compiling or hasattr(q, "requires_grad"):
        from tessera import _torch_decode

        return _torch_decode.decode(q, k_cache, v_cache, out, *rest)
    from tessera import _arrays

    return _arrays.decode(q, k_cache, v_cache, out, *rest)


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, kernel: str | None = None) -> tuple[Any, Any]:
    """Two results over different keys of the same queries to the one over all of them.

    With PyTorch's tensors it has the gradients of all four, also through the lse that it returns.

    Args:
        o_a: as attention() or decode() returns it: (batch, seqlen_q, heads_q, dim), or packed.
        lse_a: with it: float32 (batch, heads_q, seqlen_q), packed (heads_q, total_q). -inf: no weight.
        o_b: like o_a, of any floating dtype.
        lse_b: like lse_a.
        kernel: force a kernel by its name.

    Returns:
        The output, of o_a's dtype, and its lse.

    Raises:
        ValueError, NotImplementedError: as attention().
    """
    compiling = _meet_torch() if _is_compiling is None else _is_compiling()
    if compiling or hasattr(o_a, "requires_grad"):
        from tessera import _torch_decode

        return _torch_decode.merge_states(o_a, lse_a, o_b, lse_b, kernel)
    from tessera import _arrays

    return _arrays.merge_states(o_a, lse_a, o_b, lse_b, kernel)


@dataclass(frozen=True)
class Explanation:
    """What would run for a call, and why. str() of it is for people."""

    kernel: str
    values: dict[str, Any]  # as `tessera explain --json` has them
    text: str

    @property
    def refusals(self) -> dict[str, str]:
        """Kernels that were asked before, and why they refused."""
        return {refusal["kernel"]: refusal["reason"] for refusal in self.values["refusals"]}

    def __str__(self) -> str:
        return self.text


def explain(q: Any, k: Any, v: Any, *, direction: str = "forward", **options: Any) -> Explanation:
    """What attention(q, k, v, **options) would run: the kernel, its tile, work, memory, who refused and why.

    direction: "forward", "backward", or "decode" for decode(q, k, v, **options).
    """
    from tessera import _explain

    kernel, values, text = _explain.explain(q, k, v, direction, options)
    return Explanation(kernel, values, text)


@dataclass(frozen=True)
class Kernel:
    """A kernel of this build."""

    name: str
    description: str
    device: str  # of the tensors it takes: "cpu" or "cuda"
    available: bool  # on this machine
    why_not: str  # if not


def kernels() -> list[Kernel]:
    """The kernels in the order in which a call asks them."""
    return [Kernel(*fields) for fields in _core.kernels()]


def last_kernel() -> str:
    """The name of the kernel that this thread's last call ran; empty before the first."""
    return _core.last_kernel()
