"""attention() for NumPy's arrays and for everything else that speaks DLPack."""

from __future__ import annotations

import secrets
import sys
from typing import Any

from tessera import _core
from tessera._call import Options, output_shapes

FLOAT, INT, UINT, BFLOAT, OPAQUE = 2, 0, 1, 4, 3  # DLPack's dtype codes
CPU = 1  # and device


def is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def describe(x: Any) -> Any:
    """A NumPy array as _core takes it: without DLPack, which refuses read-only arrays and bfloat16."""
    if x is None or not is_numpy(x):
        return x
    dtype = x.dtype
    code = {"f": FLOAT, "i": INT, "u": UINT}.get(dtype.kind, OPAQUE)
    if dtype.name == "bfloat16":  # of ml_dtypes
        code = BFLOAT
    strides = tuple(stride // dtype.itemsize for stride in x.strides)
    return (x.ctypes.data, x.shape, strides, code, 8 * dtype.itemsize, CPU, 0)


def attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    if options.dropout_p and options.seed is None:
        options = options._replace(seed=secrets.randbits(64))
    if not is_numpy(q):
        return foreign_attention(q, k, v, tensors, options, return_lse)
    import numpy as np

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_numpy(x):
            raise ValueError(f"{name}: {type(x).__name__}, expected a numpy.ndarray as q is")
    q, k, v = whole_rows(q), whole_rows(k), whole_rows(v)
    shape, lse_shape = output_shapes(q.shape, v.shape)
    out = np.empty(shape, q.dtype)
    lse = np.empty(lse_shape, np.float32) if return_lse else None
    _core.forward(
        describe(q),
        describe(k),
        describe(v),
        describe(out),
        describe(lse),
        tuple(describe(four_dimensional(x) if i == 1 else x) for i, x in enumerate(tensors)),
        options.numbers(),
        None,
    )
    return (out, lse) if return_lse else out


def whole_rows(x: Any) -> Any:
    """An array whose elements lie where an index of elements reaches them, its last dimension contiguous."""
    size = x.dtype.itemsize
    whole = x.ndim == 0 or x.strides[-1] == size or x.shape[-1] <= 1
    return x if whole and all(s % size == 0 for s in x.strides) else x.copy()


def four_dimensional(bias: Any) -> Any:
    return bias if bias is None or bias.ndim >= 4 else bias[(None,) * (4 - bias.ndim)]


def foreign_attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    """Through NumPy on the CPU: JAX's arrays and others are not written to by anyone but their library."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "__dlpack_device__"):
            raise ValueError(f"{name}: {type(x).__name__}, expected an array that speaks DLPack")
    device, index = q.__dlpack_device__()
    if device != CPU:
        raise NotImplementedError(
            f"q: an array of {type(q).__module__} on device ({int(device)}, {index}); on a GPU only PyTorch's "
            "tensors are taken so far: pass torch.from_dlpack(q)"
        )
    import numpy as np

    out = attention(
        np.asarray(q),
        np.asarray(k),
        np.asarray(v),
        tuple(None if x is None else np.asarray(x) for x in tensors),
        options,
        return_lse,
    )
    namespace = q.__array_namespace__()
    return tuple(map(namespace.asarray, out)) if return_lse else namespace.asarray(out)
