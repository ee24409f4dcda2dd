"""attention() for NumPy's arrays and for everything else that speaks DLPack."""

from __future__ import annotations

import secrets
import sys
from typing import Any

from tessera import _core
from tessera._call import TENSORS, Options, output_shapes

FLOAT, INT, UINT, BFLOAT, OPAQUE = 2, 0, 1, 4, 3  # DLPack's dtype codes
CPU = 1  # and device
LEGACY_STREAM = 1  # DLPack's number of CUDA's default stream


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
        tuple(describe(x) for x in tensors),
        options,
        0,
    )
    return (out, lse) if return_lse else out


def whole_rows(x: Any) -> Any:
    """An array whose elements lie where an index of elements reaches them, its last dimension contiguous."""
    size = x.dtype.itemsize
    whole = x.ndim == 0 or x.strides[-1] == size or x.shape[-1] <= 1
    return x if whole and all(s % size == 0 for s in x.strides) else x.copy()


def foreign_attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "__dlpack_device__"):
            raise ValueError(f"{name}: {type(x).__name__}, expected an array that speaks DLPack")
    device, _ = q.__dlpack_device__()
    if device != CPU:
        return foreign_gpu_attention(q, k, v, tensors, options, return_lse)
    import numpy as np

    def as_numpy(x: Any) -> Any:
        return x if x is None else np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)

    # Through NumPy, and into a new array: JAX's are not written to by anyone but JAX.
    out = attention(as_numpy(q), as_numpy(k), as_numpy(v), tuple(map(as_numpy, tensors)), options, return_lse)
    if not hasattr(q, "__array_namespace__"):  # nobody says how to make one of its kind
        return out
    asarray = q.__array_namespace__().asarray
    return tuple(map(asarray, out)) if return_lse else asarray(out)


def foreign_gpu_attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    """Into arrays that the library has just made.

    On CuPy's current stream. With others, such as JAX, it waits until the result is there.
    """
    shape, lse_shape = output_shapes(q.shape, v.shape)
    _, index = q.__dlpack_device__()
    has_streams = type(q).__module__.partition(".")[0] == "cupy"
    if has_streams:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            stream = cupy.cuda.get_current_stream().ptr
            out = cupy.empty(shape, q.dtype)
            lse = cupy.empty(lse_shape, "float32") if return_lse else None
    else:
        if not hasattr(q, "__array_namespace__"):
            raise NotImplementedError(
                f"q: {type(q).__name__} on a GPU has no __array_namespace__ to make an output with; "
                "torch.from_dlpack(q) has"
            )
        stream, library = 0, q.__array_namespace__()
        out = library.empty(shape, dtype=q.dtype, device=q.device)
        lse = library.empty(lse_shape, dtype="float32", device=q.device) if return_lse else None

    def capsule(name: str, x: Any) -> Any:
        if x is None:
            return None
        if x.__dlpack_device__() != q.__dlpack_device__():
            raise ValueError(f"{name}.device: {x.__dlpack_device__()}, expected q's {q.__dlpack_device__()}")
        if hasattr(x, "block_until_ready"):
            x.block_until_ready()
        return x.__dlpack__(stream=stream or LEGACY_STREAM)

    _core.forward(
        *map(capsule, ("q", "k", "v", "o", "lse"), (q, k, v, out, lse)),
        tuple(map(capsule, TENSORS, tensors)),
        options,
        stream,
    )
    if not has_streams:
        _core.wait(index)
    return (out, lse) if return_lse else out
