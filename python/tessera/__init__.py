"""Exact attention, tile by tile: forward and backward on CPUs and GPUs, with one meaning.

    import tessera
    out = tessera.attention(q, k, v, causal=True)

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

__all__ = ["Explanation", "Kernel", "attention", "explain", "kernels", "last_kernel"]
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

    direction: "forward" or "backward".
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
