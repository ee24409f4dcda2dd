"""attention(), decode() and merge_states() for NumPy's arrays and for everything else that speaks DLPack."""

from __future__ import annotations

import secrets
import sys
from typing import Any

from tessera import _core
from tessera._call import (
    CACHE,
    TENSORS,
    Options,
    check_length,
    decoded_shapes,
    lse_shape,
    number_of_sequences,
    output_shapes,
)

FLOAT, INT, UINT, BFLOAT, OPAQUE, FLOAT8_E4M3FN = 2, 0, 1, 4, 3, 10  # DLPack's dtype codes
OF_ML_DTYPES = {"bfloat16": BFLOAT, "float8_e4m3fn": FLOAT8_E4M3FN}
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
    code = OF_ML_DTYPES.get(dtype.name) or {"f": FLOAT, "i": INT, "u": UINT}.get(dtype.kind, OPAQUE)
    strides = tuple(stride // dtype.itemsize for stride in x.strides)
    return (x.ctypes.data, x.shape, strides, code, 8 * dtype.itemsize, CPU, 0)


def attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    if options.dropout_p and options.seed is None:
        options = options._replace(seed=secrets.randbits(64))
    if not is_numpy(q):
        return foreign_attention(q, k, v, tensors, options, return_lse)
    expect_numpy(q=q, k=k, v=v)
    q, k, v = whole_rows(q), whole_rows(k), whole_rows(v)
    shape, of_lse = output_shapes(q.shape, v.shape)
    out = numpy().empty(shape, q.dtype)
    lse = numpy().empty(of_lse, numpy().float32) if return_lse else None
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


def expect_numpy(**arrays: Any) -> None:
    first = next(iter(arrays))
    for name, x in arrays.items():
        if not is_numpy(x):
            raise ValueError(f"{name}: {type(x).__name__}, expected a numpy.ndarray as {first} is")


def expect_dlpack(**arrays: Any) -> None:
    for name, x in arrays.items():
        if not hasattr(x, "__dlpack_device__"):
            raise ValueError(f"{name}: {type(x).__name__}, expected an array that speaks DLPack")


def as_numpy(x: Any) -> Any:
    if x is None or isinstance(x, int):
        return x
    return numpy().asarray(x) if hasattr(x, "__array__") else numpy().from_dlpack(x)


def numpy() -> Any:
    """NumPy itself, which nobody has to have who does not come with its arrays."""
    import numpy as module

    return module


def like(q: Any, results: Any) -> Any:
    """NumPy's results as arrays of q's kind."""
    if not hasattr(q, "__array_namespace__"):  # nobody says how to make one of its kind
        return results
    asarray = q.__array_namespace__().asarray
    return tuple(map(asarray, results)) if isinstance(results, tuple) else asarray(results)


def foreign_attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    expect_dlpack(q=q, k=k, v=v)
    if is_on_gpu(q):
        return foreign_gpu_attention(q, k, v, tensors, options, return_lse)
    # Through NumPy, and into a new array: JAX's are not written to by anyone but JAX.
    out = attention(as_numpy(q), as_numpy(k), as_numpy(v), tuple(map(as_numpy, tensors)), options, return_lse)
    return like(q, out)


def is_on_gpu(x: Any) -> bool:
    device, _ = x.__dlpack_device__()
    return device != CPU


class Gpu:
    """The device of q, its library's stream, and new arrays there.

    CuPy's current stream. Others, such as JAX, say none: they are waited for, and the result is, too.
    """

    def __init__(self, q: Any) -> None:
        self.q = q
        _, self.index = q.__dlpack_device__()
        self.cupy = sys.modules["cupy"] if type(q).__module__.partition(".")[0] == "cupy" else None
        self.made: list[Any] = []  # until finish(): work may not have begun when a call returns
        if self.cupy is not None:
            with self.cupy.cuda.Device(self.index):
                self.stream = self.cupy.cuda.get_current_stream().ptr
        else:
            if not hasattr(q, "__array_namespace__"):
                raise NotImplementedError(
                    f"q: {type(q).__name__} on a GPU has no __array_namespace__ to make an output with; "
                    "torch.from_dlpack(q) has"
                )
            self.stream = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if self.cupy is not None:
            with self.cupy.cuda.Device(self.index):
                made = self.cupy.empty(shape, dtype)
        else:
            made = self.q.__array_namespace__().empty(shape, dtype=dtype, device=self.q.device)
        self.made.append(made)
        return made

    def capsule(self, name: str, x: Any) -> Any:
        """As _core takes it."""
        if x is None:
            return None
        expect_dlpack(**{name: x})
        device = self.q.__dlpack_device__()
        if x.__dlpack_device__() != device:
            raise ValueError(f"{name}.device: {x.__dlpack_device__()}, expected q's {device}")
        if hasattr(x, "block_until_ready"):
            x.block_until_ready()
        return x.__dlpack__(stream=self.stream or LEGACY_STREAM)

    def workspace(self, size: int) -> Any:
        return self.capsule("workspace", self.empty((size,), "uint8"))

    def finish(self) -> None:
        if self.cupy is None:
            _core.wait(self.index)


def foreign_gpu_attention(q: Any, k: Any, v: Any, tensors: tuple, options: Options, return_lse: bool) -> Any:
    """Into arrays that the library has just made."""
    shape, of_lse = output_shapes(q.shape, v.shape)
    gpu = Gpu(q)
    out = gpu.empty(shape, q.dtype)
    lse = gpu.empty(of_lse, "float32") if return_lse else None
    _core.forward(
        *map(gpu.capsule, ("q", "k", "v", "o", "lse"), (q, k, v, out, lse)),
        tuple(map(gpu.capsule, TENSORS, tensors)),
        options,
        gpu.stream,
    )
    gpu.finish()
    return (out, lse) if return_lse else out


# ---- decode and merge_states.


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    out: Any,
    cache: tuple,
    tensors: tuple,
    options: Options,
    rotary_interleaved: bool,
    num_splits: int,
    return_lse: bool,
) -> Any:
    if not is_numpy(q):
        return foreign_decode(
            q, k_cache, v_cache, out, cache, tensors, options, rotary_interleaved, num_splits, return_lse
        )
    named = dict(zip(CACHE, cache, strict=True))
    expect_numpy(q=q, k_cache=k_cache, v_cache=v_cache)
    for name, x in (*named.items(), *zip(TENSORS, tensors, strict=True)):
        if not (x is None or (name == "cache_seqlens" and isinstance(x, int))):
            expect_numpy(q=q, **{name: x})
    written = {"k_cache": k_cache, "v_cache": v_cache} if named["k_new"] is not None else {}
    if out is not None:
        expect_numpy(q=q, out=out)
        written["out"] = out
    for name, x in written.items():
        if not x.flags.writeable:
            raise ValueError(f"{name}: a read-only array, expected one that can be written to")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        # Copies of these would be large, or lose what is written.
        if x is not None and any(stride % x.dtype.itemsize for stride in x.strides):
            raise ValueError(f"{name}: strides of {x.strides} bytes, expected multiples of an element's")
    shape, of_lse = decoded_shapes(q.shape, v_cache.shape)
    lengths = one_length(named, k_cache, q, tensors, lambda n, x: numpy().full(n, x, numpy().int32))
    made = numpy().empty(shape, q.dtype) if out is None else out
    lse = numpy().empty(of_lse, numpy().float32) if return_lse else None
    # Described, they keep nothing alive: copies have to have a name.
    inputs = [None if x is None else whole_rows(x) for x in (q, lengths, *cache[1:], *tensors)]
    q, *rest = map(describe, inputs)
    _core.decode(
        q,
        describe(k_cache),
        describe(v_cache),
        describe(made),
        describe(lse),
        tuple(rest[: len(CACHE)]),
        tuple(rest[len(CACHE) :]),
        options,
        rotary_interleaved,
        num_splits,
        0,
        None,
    )
    return (made, lse) if return_lse else made


def one_length(named: dict[str, Any], k_cache: Any, q: Any, tensors: tuple, full: Any) -> Any:
    """cache_seqlens as an array. full(n, x): one of n times x."""
    length = named["cache_seqlens"]
    if not isinstance(length, int):
        return length
    check_length(length, k_cache.shape, named["page_table"], named["k_new"])
    return full(number_of_sequences(q.shape, tensors[TENSORS.index("cu_seqlens_q")]), length)


def foreign_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    out: Any,
    cache: tuple,
    tensors: tuple,
    options: Options,
    rotary_interleaved: bool,
    num_splits: int,
    return_lse: bool,
) -> Any:
    expect_dlpack(q=q, k_cache=k_cache, v_cache=v_cache)
    named = dict(zip(CACHE, cache, strict=True))
    if type(q).__module__.partition(".")[0] != "cupy":
        for name, x in (("k_new", named["k_new"]), ("out", out)):
            if x is not None:
                raise NotImplementedError(
                    f"{name}: arrays of {type(q).__name__} are not written to in place; PyTorch's, NumPy's "
                    "and CuPy's are"
                )
    numbers = (options, rotary_interleaved, num_splits)
    if not is_on_gpu(q):
        q_, k_, v_ = as_numpy(q), as_numpy(k_cache), as_numpy(v_cache)
        others = tuple(map(as_numpy, cache)), tuple(map(as_numpy, tensors))
        return like(q, decode(q_, k_, v_, None, *others, *numbers, return_lse))

    shape, of_lse = decoded_shapes(q.shape, v_cache.shape)
    gpu = Gpu(q)

    def full(n: int, length: int) -> Any:
        filled = gpu.empty((n,), "int32")
        if gpu.cupy is None:
            return q.__array_namespace__().full_like(filled, length)
        filled.fill(length)
        return filled

    cache = (one_length(named, k_cache, q, tensors, full), *cache[1:])
    made = gpu.empty(shape, q.dtype) if out is None else out
    lse = gpu.empty(of_lse, "float32") if return_lse else None
    names, arrays = ("q", "k_cache", "v_cache", "out", "lse"), (q, k_cache, v_cache, made, lse)
    _core.decode(
        *map(gpu.capsule, names, arrays),
        tuple(map(gpu.capsule, CACHE, cache)),
        tuple(map(gpu.capsule, TENSORS, tensors)),
        *numbers,
        gpu.stream,
        gpu.workspace,
    )
    gpu.finish()
    return (made, lse) if return_lse else made


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, kernel: str | None) -> Any:
    given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    if is_numpy(o_a):
        expect_numpy(**given)
        states = [whole_rows(x) for x in given.values()]
        o, lse = (
            numpy().empty(o_a.shape, o_a.dtype),
            numpy().empty(lse_shape("o_a", o_a.shape), numpy().float32),
        )
        _core.merge_states(*map(describe, states), describe(o), describe(lse), kernel, 0)
        return o, lse
    expect_dlpack(**given)
    if not is_on_gpu(o_a):
        return like(o_a, merge_states(*map(as_numpy, given.values()), kernel))
    gpu = Gpu(o_a)
    o, lse = gpu.empty(o_a.shape, o_a.dtype), gpu.empty(lse_shape("o_a", o_a.shape), "float32")
    capsules = [gpu.capsule(name, x) for name, x in {**given, "o": o, "lse": lse}.items()]
    _core.merge_states(*capsules, kernel, gpu.stream)
    gpu.finish()
    return o, lse
