"""explain(): the same arguments as attention(), nothing run."""

from __future__ import annotations

import inspect
import json
from typing import Any

import tessera
from tessera import _arrays, _core
from tessera._call import TENSORS, Options, alignment_is_top_left, output_shapes

FLOAT32 = (_arrays.FLOAT, 32)


def explain(q: Any, k: Any, v: Any, direction: str, given: dict[str, Any]) -> tuple[str, dict, str]:
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: {direction!r}, expected 'forward' or 'backward'")
    bound = inspect.signature(tessera.attention).bind(q, k, v, **given)
    bound.apply_defaults()
    given = bound.arguments
    left, right = given["window"]
    options = Options(
        **{name: given[name] for name in Options._fields if name in given},
        window_left=left,
        window_right=right,
        top_left=alignment_is_top_left(given["causal_alignment"]),
    )
    tensors = tuple(_arrays.describe(given[name]) for name in TENSORS)
    q, k, v = (_arrays.describe(x) for x in (q, k, v))
    shape, lse_shape = output_shapes(shape_of(q), shape_of(v))
    # Outputs are described as attention() would make them: compact, on q's device, at no address.
    out, lse = like(q, shape, 1), like(q, lse_shape, 2, FLOAT32)
    if direction == "forward":
        values, text = _core.explain_forward(q, k, v, out, lse, tensors, options)
    else:
        dout = like(q, shape, 3)
        grads = (like(q, shape_of(q), 4), like(k, shape_of(k), 5), like(v, shape_of(v), 6), None, None)
        values, text = _core.explain_backward(q, k, v, out, lse, dout, None, grads, tensors, options)
    values = json.loads(values)
    return values["kernel"], values, text


def shape_of(x: Any) -> tuple[int, ...]:
    return x[1] if isinstance(x, tuple) else tuple(x.shape)


def like(x: Any, shape: tuple[int, ...], number: int, dtype: tuple[int, int] | None = None) -> tuple:
    """A compact tensor of this shape, of x's dtype and device, as _core takes it.

    Its address is never read or written, for nothing runs; it only is nobody else's.
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    code, bits, device, index = _core.kind(x)
    if dtype is not None:
        code, bits = dtype
    return (number << 42, tuple(shape), tuple(reversed(strides)), code, bits, device, index)
