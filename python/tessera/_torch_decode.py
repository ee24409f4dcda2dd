"""decode() and merge_states() for PyTorch.

As in _torch, an eager call goes straight to _core, and through custom operators where torch's dispatcher has
to see it. That of an append says which tensors it writes to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera import _core
from tessera._call import (
    CACHE,
    TENSORS,
    Options,
    check_length,
    decoded_shapes,
    lse_shape,
    number_of_sequences,
)
from tessera._torch import (
    TENSORS_SCHEMA,
    Tensors,
    expect_tensors,
    needs_dispatcher,
    refuse_tangents,
    whole_rows,
)

CU_SEQLENS_Q = TENSORS.index("cu_seqlens_q")


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor | None,
    cache: tuple,
    tensors: Tensors,
    options: Options,
    rotary_interleaved: bool,
    num_splits: int,
    return_lse: bool,
) -> Any:
    lengths, page_table, cache_batch_idx, leftpad_k, k_new, v_new, *more = cache
    expect_tensors(("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    one_length = isinstance(lengths, int)
    names, others = (*CACHE[one_length:], *TENSORS, "out"), (*cache[one_length:], *tensors, out)
    for name, x in zip(names, others):  # noqa: B905
        if x is not None:
            expect_tensors(("q", q), (name, x))
    if one_length:
        check_length(lengths, k_cache.shape, page_table, k_new)
        batch = number_of_sequences(q.shape, tensors[CU_SEQLENS_Q])
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if k_new is not None and v_new is not None:
        k_new, v_new = whole_rows(k_new), whole_rows(v_new)
    cache = (lengths, page_table, cache_batch_idx, leftpad_k, k_new, v_new, *more)
    refuse_gradients(q, k_cache, v_cache, out, *cache, *tensors)
    shape, _ = decoded_shapes(q.shape, v_cache.shape)
    q = whole_rows(q)
    if needs_dispatcher(q, k_cache, v_cache, out, *cache, *tensors):
        if out is not None and (out.shape != shape or out.dtype not in (q.dtype, torch.float32)):
            raise ValueError(
                f"out: {out.dtype} {tuple(out.shape)}, expected {q.dtype} or float32 {tuple(shape)}"
            )
        operator = decode_op if k_new is None else append_op
        numbers = (*options, bool(rotary_interleaved), num_splits)
        wide = out is not None and out.dtype == torch.float32
        made, lse = operator(q, k_cache, v_cache, *cache, *tensors, *numbers, wide)
        out = made if out is None else out.copy_(made)
    else:
        out, lse = _core.torch_decode(
            q, k_cache, v_cache, out, cache, tensors, options, rotary_interleaved, num_splits, return_lse
        )
    return (out, lse) if return_lse else out


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Those that would be lost."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError(
            "tessera.decode has no gradients: call it under torch.no_grad(), or tessera.attention for them"
        )
    if not torch.compiler.is_compiling():
        refuse_tangents("decode", *tensors)


def run_decode(q, k_cache, v_cache, rest):  # noqa: ANN001, ANN202
    """rest: the cache's, the tensors, the options, rotary_interleaved, num_splits, float32_out."""
    *rest, rotary_interleaved, num_splits, wide = rest
    out, _ = fake_decode(q, k_cache, v_cache, wide)
    cut, end = len(CACHE), len(CACHE) + len(TENSORS)
    parts = tuple(rest[:cut]), tuple(rest[cut:end]), tuple(rest[end:])
    return _core.torch_decode(q, k_cache, v_cache, out, *parts, rotary_interleaved, num_splits, True)


def fake_decode(q, k_cache, v_cache, *rest):  # noqa: ANN001, ANN002, ANN202
    shape, of_lse = decoded_shapes(q.shape, v_cache.shape)
    out = q.new_empty(shape, dtype=torch.float32 if rest[-1] else q.dtype)
    return out, q.new_empty(of_lse, dtype=torch.float32)


REST_SCHEMA = (
    "Tensor cache_seqlens, "
    + ", ".join(f"Tensor? {name}" for name in CACHE[1:])
    + f", {TENSORS_SCHEMA}, bool rotary_interleaved, SymInt num_splits, bool float32_out) -> (Tensor, Tensor)"
)


@torch.library.custom_op(
    "tessera::decode", mutates_args=(), schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {REST_SCHEMA}"
)
def decode_op(q, k_cache, v_cache, *rest):  # noqa: ANN001, ANN002, ANN202
    """The output and lse."""
    return run_decode(q, k_cache, v_cache, rest)


@torch.library.custom_op(
    "tessera::decode_append",
    mutates_args=("k_cache", "v_cache"),
    schema=f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {REST_SCHEMA}",
)
def append_op(q, k_cache, v_cache, *rest):  # noqa: ANN001, ANN002, ANN202
    """The output and lse; k_new and v_new are then in the cache."""
    return run_decode(q, k_cache, v_cache, rest)


decode_op.register_fake(fake_decode)
append_op.register_fake(fake_decode)


# ---- merge_states.


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, kernel: str | None) -> Any:
    expect_tensors(("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b))
    states = (whole_rows(o_a), lse_a, whole_rows(o_b), lse_b)
    if not torch.compiler.is_compiling():
        refuse_tangents("merge_states", *states)
    if needs_dispatcher(*states):
        return merge_op(*states, kernel)
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        return Merge.apply(*states, kernel)
    return merge(*states, kernel)


def merge(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, kernel: str | None
) -> tuple[Tensor, Tensor]:
    lse = torch.empty(lse_shape("o_a", o_a.shape), dtype=torch.float32, device=o_a.device)
    o = torch.empty(o_a.shape, dtype=o_a.dtype, device=o_a.device)
    _core.torch_merge_states(o_a, lse_a, o_b, lse_b, o, lse, kernel)
    return o, lse


@torch.library.custom_op(
    "tessera::merge_states",
    mutates_args=(),
    schema="(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, str? kernel) -> (Tensor, Tensor)",
)
def merge_op(o_a, lse_a, o_b, lse_b, kernel):  # noqa: ANN001, ANN202
    return merge(o_a, lse_a, o_b, lse_b, kernel)


@merge_op.register_fake
def _(o_a, lse_a, o_b, lse_b, kernel):  # noqa: ANN001, ANN202
    return o_a.new_empty(o_a.shape), o_a.new_empty(lse_shape("o_a", o_a.shape), dtype=torch.float32)


def setup_merge(ctx, inputs, output):  # noqa: ANN001, ANN202
    *states, _ = inputs
    _, lse = output
    ctx.save_for_backward(*states, lse)
    ctx.set_materialize_grads(False)


def merge_backward(ctx, do, dlse):  # noqa: ANN001, ANN202
    """By torch's own operations: they can be derived again, and take little beside the attention itself.

    With the weights w of the sides: do_a = w_a do, dlse_a = w_a (dlse + w_b <do, o_a - o_b>), and likewise b.
    """
    if do is None and dlse is None:
        return (None,) * 5
    o_a, lse_a, o_b, lse_b, lse = ctx.saved_tensors
    w_a, w_b = weight(lse_a, lse), weight(lse_b, lse)
    do_a = do_b = None
    difference = 0.0
    if do is not None:
        wide = do.float()
        do_a, do_b = (rows(w_a) * wide).to(o_a.dtype), (rows(w_b) * wide).to(o_b.dtype)
        apart = o_a.float() - o_b.float()
        # A side without weight may hold anything, NaN included: out before it is multiplied, for this has
        # derivatives, too.
        apart = torch.where(rows((w_a == 0) | (w_b == 0)), 0.0, apart)
        difference = (wide * apart).sum(-1).transpose(-1, -2)
    flow = 0.0 if dlse is None else dlse
    return do_a, w_a * (flow + w_b * difference), do_b, w_b * (flow - w_a * difference), None


def weight(part: Tensor, whole: Tensor) -> Tensor:
    """Of a side. Where neither has a key, 0."""
    return torch.exp(torch.where(part == -torch.inf, part, part - whole))


def rows(of_lse: Tensor) -> Tensor:
    """Of lse's shape, one number for each row of o."""
    return of_lse.transpose(-1, -2).unsqueeze(-1)


merge_op.register_autograd(merge_backward, setup_context=setup_merge)


class Merge(torch.autograd.Function):
    """merge_states() in eager mode, with gradients of both outputs and both lse."""

    @staticmethod
    def forward(o_a, lse_a, o_b, lse_b, kernel):  # noqa: ANN001, ANN205
        return merge(o_a, lse_a, o_b, lse_b, kernel)

    setup_context = staticmethod(setup_merge)
    backward = staticmethod(merge_backward)
