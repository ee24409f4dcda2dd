"""attention() for PyTorch: autograd, torch.compile, autocast.

In eager mode a call goes straight to _core, with gradients through an autograd.Function: custom operators
cost some ten microseconds more. Where torch's dispatcher has to see it - under torch.compile and dispatch
modes, and for subclasses of tensors - it goes through two custom operators, which have fakes.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from tessera import _core
from tessera._call import TENSORS, Options, output_shapes

# alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
Tensors = tuple[
    Optional[Tensor],
    Optional[Tensor],
    Optional[Tensor],
    Optional[Tensor],
    Optional[Tensor],
    Optional[Tensor],
    Optional[Tensor],
]
Grads = tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]  # dq, dk, dv, dbias, dsinks
BIAS, SINKS = 1, 2  # in Tensors


def attention(q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, options: Options, return_lse: bool) -> Any:
    expect_tensors(("q", q), ("k", k), ("v", v))
    q, k, v = autocast(q, k, v)
    q, k, v = whole_rows(q), whole_rows(k), whole_rows(v)
    bias, sinks = tensors[BIAS], tensors[SINKS]
    if not torch.compiler.is_compiling():
        refuse_tangents("attention", q, k, v, bias, sinks)
    if needs_dispatcher(q, k, v, *tensors):
        out, lse = forward_op(q, k, v, drawn_seed(options), *tensors, *for_operator(options))
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sinks)):
        out, lse = Attention.apply(q, k, v, bias, sinks, tensors, options)
    else:
        out, lse, _ = forward(q, k, v, tensors, options, return_lse)
    return (out, lse) if return_lse else out


def expect_tensors(*named: tuple[str, Any]) -> None:
    """All of torch's, for the first is."""
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: {type(tensor).__name__}, expected a torch.Tensor as {named[0][0]} is")


def needs_dispatcher(*tensors: Optional[Tensor]) -> bool:
    """Whether torch's dispatcher has to see the call."""
    return torch.compiler.is_compiling() or is_watched() or not all(map(is_plain, tensors))


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def whole_rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, as the kernels want it."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.size(-1) <= 1 else x.contiguous()


def is_plain(x: Tensor | None) -> bool:
    """Whether it is no subclass with a meaning of its own, such as a fake or a distributed tensor."""
    return x is None or type(x) in (Tensor, torch.nn.Parameter)


def is_watched() -> bool:
    """By a dispatch mode, such as a fake one or a counter of FLOPs, or by torch.jit.trace."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def refuse_tangents(name: str, *tensors: Optional[Tensor]) -> None:
    """Those of forward-mode gradients, which would be lost."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(f"tessera.{name} has no forward-mode gradients: use backward()")


def draw_seed(q: Tensor) -> int:
    """From the CPU's generator: no GPU is waited for."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "seed: None while a CUDA graph is captured, whose replays would all drop the same; expected an "
            "integer, for which that is meant"
        )
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, options: Options, with_lse: bool
) -> tuple[Tensor, Tensor | None, Options]:
    """The output, lse, and the options with the seed that was drawn."""
    output_shapes(q.shape, v.shape)
    if options.dropout_p and options.seed is None:
        options = options._replace(seed=draw_seed(q))
    out, lse = _core.torch_forward(q, k, v, tensors, options, with_lse)
    return out, lse, options


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    options: Options,
    needs: tuple[bool, bool],
) -> Grads:
    """The gradients. needs: whether of bias, of sinks."""
    bias, sinks = tensors[BIAS], tensors[SINKS]
    grads = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
        torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if needs[0] else None,
        torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device) if needs[1] else None,
    )
    dout = whole_rows(dout)
    _core.torch_backward(q, k, v, out, lse, dout, dlse, grads, tensors, options)
    return grads


class Attention(torch.autograd.Function):
    """attention() in eager mode, with gradients of q, k, v, bias and sinks, and through lse."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, tensors, options):  # noqa: ANN001, ANN205
        out, lse, options = forward(q, k, v, tensors, options, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # noqa: ANN001, ANN205
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needs = (ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        grads = Gradients.apply(q, k, v, out, lse, dout, dlse, tuple(tensors), ctx.options, needs)
        return (*grads, None, None)


class Gradients(torch.autograd.Function):
    """The backward of Attention, whose own backward says that there is none."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse, dout, dlse, tensors, options, needs):  # noqa: ANN001, ANN205
        return backward(q, k, v, out, lse, dout, dlse, tensors, options, needs)

    @staticmethod
    def backward(ctx, *grads):  # noqa: ANN001, ANN002, ANN205
        raise NotImplementedError("tessera.attention has no double backward: its gradients cannot be derived")


# ---- For torch's dispatcher: the same as operators. An absent gradient is an empty tensor.
#
# A seed that is drawn is a tensor, for what torch.compile traces must not hold its value: on the CPU, where
# it is read without waiting for a GPU. Without dropout there is none, and a graph is all on one device.


def drawn_seed(options: Options) -> Tensor | None:
    if not options.dropout_p or options.seed is not None:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def for_operator(options: Options) -> Options:
    """An operator's integers have a sign."""
    seed = options.seed
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}, expected None or an integer from 0 to 2^64 - 1")
    return options if seed is None or seed < 2**63 else options._replace(seed=seed - 2**64)


def from_operator(seed: Tensor | None, numbers: tuple) -> Options:
    options = Options(*numbers)
    if seed is not None:
        return options._replace(seed=int(seed))
    return options if options.seed is None else options._replace(seed=options.seed % 2**64)


# The tensors in TENSORS' order, the numbers in Options'.
TENSORS_SCHEMA = (
    ", ".join(f"Tensor? {name}" for name in TENSORS)
    + ", float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, bool top_left"
    ", float softcap, float dropout_p, SymInt? seed, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
    ", bool deterministic, str? kernel"
)
OPTIONS_SCHEMA = f"Tensor? drawn_seed, {TENSORS_SCHEMA}"  # what both operators end with


def split_options(rest: tuple) -> tuple[Tensors, Options]:
    """The tensors and the options of an operator's last arguments."""
    drawn_seed, *rest = rest
    return tuple(rest[: len(TENSORS)]), from_operator(drawn_seed, rest[len(TENSORS) :])


@torch.library.custom_op(
    "tessera::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
)
def forward_op(q, k, v, *rest):  # noqa: ANN001, ANN002, ANN202
    """The output and lse."""
    tensors, options = split_options(rest)
    out, lse, _ = forward(q, k, v, tensors, options, True)
    return out, lse


@forward_op.register_fake
def _(q, k, v, *_):  # noqa: ANN001, ANN002, ANN202
    shape, lse_shape = output_shapes(q.shape, v.shape)
    return q.new_empty(shape), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op(
    "tessera::attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse"
    f", bool needs_dbias, bool needs_dsinks, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_op(q, k, v, out, lse, dout, dlse, needs_dbias, needs_dsinks, *rest):  # noqa: ANN001, ANN002, ANN202
    tensors, options = split_options(rest)
    needs = (needs_dbias, needs_dsinks)
    dq, dk, dv, dbias, dsinks = backward(q, k, v, out, lse, dout, dlse, tensors, options, needs)
    return (
        dq,
        dk,
        dv,
        q.new_empty(0) if dbias is None else dbias,
        q.new_empty(0) if dsinks is None else dsinks,
    )


@backward_op.register_fake
def _(q, k, v, out, lse, dout, dlse, needs_dbias, needs_dsinks, seed, alibi, bias, sinks, *_):  # noqa: ANN001, ANN002, ANN202
    def like(x):  # noqa: ANN001, ANN202
        return x.new_empty(x.shape)

    return (
        like(q),
        like(k),
        like(v),
        like(bias) if needs_dbias else q.new_empty(0),
        like(sinks) if needs_dsinks else q.new_empty(0),
    )


FIRST_TENSOR = 4  # among forward_op's inputs: after q, k, v and the seed


def setup_context(ctx, inputs, output):  # noqa: ANN001, ANN202
    q, k, v, *rest = inputs
    seed_and_tensors, numbers = rest[: 1 + len(TENSORS)], rest[1 + len(TENSORS) :]
    ctx.save_for_backward(q, k, v, *output, *seed_and_tensors)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def op_backward(ctx, dout, dlse):  # noqa: ANN001, ANN202
    q, k, v, out, lse, *seed_and_tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = (ctx.needs_input_grad[FIRST_TENSOR + BIAS], ctx.needs_input_grad[FIRST_TENSOR + SINKS])
    dq, dk, dv, dbias, dsinks = backward_op(
        q, k, v, out, lse, dout, dlse, *needs, *seed_and_tensors, *ctx.numbers
    )
    grads = [None] * (len(ctx.needs_input_grad) - 3)
    grads[FIRST_TENSOR - 3 + BIAS] = dbias if needs[0] else None
    grads[FIRST_TENSOR - 3 + SINKS] = dsinks if needs[1] else None
    return dq, dk, dv, *grads


forward_op.register_autograd(op_backward, setup_context=setup_context)
