"""explain(): the same arguments as attention() or decode(), nothing run."""

from __future__ import annotations

import array
import inspect
import json
from typing import Any

import tessera
from tessera import _arrays, _core
from tessera._call import (
    CACHE,
    TENSORS,
    Options,
    alignment_is_top_left,
    decoded_shapes,
    number_of_sequences,
    output_shapes,
)

FLOAT32, INT32 = (_arrays.FLOAT, 32), (_arrays.INT, 32)


def explain(q: Any, k: Any, v: Any, direction: str, given: dict[str, Any]) -> tuple[str, dict, str]:
    if direction not in ("forward", "backward", "decode"):
        raise ValueError(f"direction: {direction!r}, expected 'forward', 'backward' or 'decode'")
    function = tessera.decode if direction == "decode" else tessera.attention
    bound = inspect.signature(function).bind(q, k, v, **given)
    bound.apply_defaults()
    given = bound.arguments
    left, right = given["window"]
    options = Options(
        **{name: given[name] for name in Options._fields if name in given},
        window_left=left,
        window_right=right,
        top_left=alignment_is_top_left(given.get("causal_alignment", "bottom-right")),
    )
    tensors = tuple(_arrays.describe(given.get(name)) for name in TENSORS)
    q, k, v = (_arrays.describe(x) for x in (q, k, v))
    if direction == "decode":
        return explain_decode(q, k, v, tensors, options, given)
    shape, lse_shape = output_shapes(shape_of(q), shape_of(v))
    # Outputs are described as attention() would make them: compact, on q's device, at no address.
    out, lse = like(q, shape, 1), like(q, lse_shape, 2, FLOAT32)
    if direction == "forward":
        values, text = _core.explain_forward(q, k, v, out, lse, tensors, options)
    else:
        dout = like(q, shape, 3)
        grads = (like(q, shape_of(q), 4), like(k, shape_of(k), 5), like(v, shape_of(v), 6), None, None)
        values, text = _core.explain_backward(q, k, v, out, lse, dout, None, grads, tensors, options)
    return parsed(values, text)


def explain_decode(
    q: Any, k_cache: Any, v_cache: Any, tensors: tuple, options: Options, given: dict[str, Any]
) -> tuple[str, dict, str]:
    shape, of_lse = decoded_shapes(shape_of(q), shape_of(v_cache))
    lengths = given["cache_seqlens"]
    if isinstance(lengths, int):
        batch = number_of_sequences(shape_of(q), given["cu_seqlens_q"])
        same = array.array("i", [lengths]) * batch  # read on the CPU, not on a GPU
        address, _ = same.buffer_info()
        given["cache_seqlens"] = like(q, (batch,), 7, INT32, address)
    cache = tuple(_arrays.describe(given[name]) for name in CACHE)
    out = _arrays.describe(given["out"]) if given["out"] is not None else like(q, shape, 1)
    lse = like(q, of_lse, 2, FLOAT32) if given["return_lse"] else None
    numbers = (options, given["rotary_interleaved"], given["num_splits"])
    values, text = _core.explain_decode(q, k_cache, v_cache, out, lse, cache, tensors, *numbers)
    return parsed(values, text)


def parsed(values: str, text: str) -> tuple[str, dict, str]:
    read = json.loads(values)
    return read["kernel"], read, text


def shape_of(x: Any) -> tuple[int, ...]:
    return x[1] if isinstance(x, tuple) else tuple(x.shape)


def like(
    x: Any, shape: tuple[int, ...], number: int, dtype: tuple[int, int] | None = None, address: int = 0
) -> tuple:
    """A compact tensor of this shape, of x's dtype and device, as _core takes it.

    Without an address it has one that is never read or written, for nothing runs, and nobody else's.
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    code, bits, device, index = _core.kind(x)
    if dtype is not None:
        code, bits = dtype
    return (address or number << 42, tuple(shape), tuple(reversed(strides)), code, bits, device, index)
