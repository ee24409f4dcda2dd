"""tessera.decode: values and the cache after an append, torch.compile, CUDA graphs, arrays, errors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import oracle
import pytest
import tessera
import torch
from closeness import DTYPES, close, numbers
from decode_case import DIM, DIM_V, HEADS, LARGEST, Case, int32

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    "one query": {},
    "mqa": {"heads_k": 1},
    "mha": {"heads_k": 6},
    "several queries": {"seqlen_q": 5, "causal": True},
    "window": {"seqlen_q": 3, "window": (7, 1)},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.4},
    "sinks": {"sinks": True, "seqlen_q": 2},
    "alibi": {"alibi": (HEADS,), "seqlen_q": 4, "causal": True},
    "alibi of each sequence": {"alibi": (3, HEADS)},
    "splits": {"num_splits": 3, "lengths": (70, 1, 33)},
    "a bound": {"max_seqlen_k": 60},
    "pages": {"page_size": 16, "seqlen_q": 2, "causal": True},
    "pages of one": {"page_size": 1},
    "pages of 7, head-major": {"page_size": 7, "head_major": True, "new": 2, "seqlen_q": 2},
    "head-major": {"head_major": True, "new": 1},
    "rows of the cache": {"batch_idx": (4, 0, 0)},
    "left padding": {"leftpad": (3, 0, 59), "seqlen_q": 2, "causal": True},
    "append": {"new": 1, "causal": True},
    "append several": {"new": 4, "seqlen_q": 4, "causal": True},
    "append more than is asked": {"new": 3, "seqlen_q": 1},
    "append by rows": {"new": 2, "batch_idx": (4, 0, 2), "leftpad": (1, 0, 5)},
    "append to pages": {"new": 5, "seqlen_q": 5, "causal": True, "page_size": 4},
    "rotary": {"new": 3, "seqlen_q": 3, "causal": True, "rotary": DIM},
    "rotary, partial, interleaved": {
        "new": 2, "seqlen_q": 2, "causal": True, "rotary": 6, "interleaved": True, "page_size": 5,
    },
    "rotary, no mask": {"new": 2, "seqlen_q": 3, "rotary": 8},
    "rotary, window": {"new": 2, "seqlen_q": 2, "rotary": 8, "window": (9, None), "leftpad": (2, 0, 9)},
    "packed": {"packed": [3, 1, 4], "causal": True},
    "packed, append": {"packed": [3, 0, 4], "new": [2, 1, 4], "causal": True, "page_size": 8, "rotary": DIM},
    "everything": {
        "seqlen_q": 3, "new": 3, "page_size": 16, "rotary": 8, "interleaved": True, "window": (20, 0),
        "softcap": 5.0, "sinks": True, "alibi": (HEADS,), "num_splits": 2, "softmax_scale": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_option(device, case):
    for dtype in DTYPES[device]:
        Case(device, dtype, **CASES[case]).check()


EIGHT_BITS = {
    "one query": {},
    "several queries": {"seqlen_q": 5, "causal": True, "heads_k": 6, "num_splits": 3},
    "a scale for all heads": {"scales": "one", "new": 1},
    "without scales": {"scales": "none", "new": 1},
    "append to pages": {"new": 5, "seqlen_q": 5, "causal": True, "page_size": 4},
    "rotary": {"new": 2, "seqlen_q": 2, "causal": True, "rotary": DIM},
    "head-major, packed": {"packed": [3, 0, 4], "new": [2, 1, 4], "causal": True, "head_major": True},
    "left padding": {"leftpad": (3, 0, 59), "new": 1, "batch_idx": (4, 0, 2), "sinks": True},
}


@pytest.mark.parametrize("stored", LARGEST)
@pytest.mark.parametrize("case", EIGHT_BITS)
def test_a_cache_of_8_bits(device, case, stored):
    for dtype in DTYPES[device]:
        Case(device, dtype, stored=stored, **EIGHT_BITS[case]).check()


# A GPU with more than a tile for each of its multiprocessors has blocks of twice the warps.
@pytest.mark.parametrize("large", [False, True])
def test_long_sequences_in_any_batch_have_the_same_bits(device, large):
    dtype = DTYPES[device][0]
    batch, heads, heads_k, dim = (40 if device == "cuda" else 5, 32, 8, 128) if large else (3, 8, 2, 64)
    q = torch.randn(batch, 1, heads, dim, device=device).to(dtype)
    k, v = (torch.randn(batch, 3000, heads_k, dim, device=device).to(dtype) for _ in range(2))
    lengths = int32([(3000, 17, 1500, 2999, 2048, 64)[i % 6] for i in range(batch)], device)
    out, lse = tessera.decode(q, k, v, lengths, return_lse=True)
    for b in (0, 1, 2, batch - 1):
        one = slice(b, b + 1)
        alone, alone_lse = tessera.decode(q[one], k[one], v[one], lengths[one], return_lse=True)
        assert torch.equal(alone, out[one])
        assert torch.equal(alone_lse, lse[one])
        keys = slice(0, int(lengths[b]))
        expected, expected_lse = oracle.attention(*(numbers(x) for x in (q[one], k[one, keys], v[one, keys])))
        close(alone, expected, dtype)
        close(alone_lse, expected_lse, dtype)


def test_one_length_for_all(device):
    case = Case(device, DTYPES[device][0], lengths=(9, 9, 9), new=1, page_size=4)
    case.cache_seqlens = 9
    case.check()
    for length in (-1, 72, 2**40):
        with pytest.raises(ValueError, match=f"cache_seqlens: {length}, expected 0 to 71"):
            tessera.decode(case.q, case.k_cache, case.v_cache, length, **case.options)


def test_what_is_no_key_is_not_read(device):
    dtype = DTYPES[device][0]
    case = Case(device, dtype, leftpad=(3, 0, 5), new=1)
    for b, (first, last) in enumerate(((3, 11), (0, 0), (5, 60))):
        case.k_cache[b, :first] = case.v_cache[b, :first] = torch.nan
        case.k_cache[b, last:] = case.v_cache[b, last:] = torch.nan
    out = tessera.decode(case.q, case.k_cache, case.v_cache, case.cache_seqlens, **case.options)
    assert torch.isfinite(out).all()


def test_keys_and_values_of_one_tensor(device):
    """As servers keep them: a page has its keys, then its values."""
    dtype = DTYPES[device][0]
    case = Case(device, dtype, new=2, page_size=8)
    both = torch.zeros(case.k_cache.shape[0], 2, 8, 2, DIM_V, device=device, dtype=dtype)
    both[:, 0, ..., :DIM], both[:, 1] = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = both[:, 0, ..., :DIM], both[:, 1]
    case.check()


def test_out(device):
    dtype = DTYPES[device][-1]
    case = Case(device, dtype, new=1, seqlen_q=2, causal=True)
    expected = case.expected()[0]
    for kind in (dtype, torch.float32):
        out = torch.full(expected.shape, torch.nan, device=device, dtype=kind)
        version = out._version
        done = tessera.decode(case.q, case.k_cache, case.v_cache, case.cache_seqlens, out=out, **case.options)
        assert done is out
        assert out._version > version
        close(out, expected, dtype)


def test_rows_of_any_strides(device):
    case = Case(device, DTYPES[device][0], new=2, seqlen_q=2, causal=True)
    case.q = case.q.transpose(2, 3).contiguous().transpose(2, 3)
    case.options["k_new"] = case.options["k_new"].transpose(1, 3).contiguous().transpose(1, 3)
    case.check()


def test_autograd_knows_of_the_append():
    """A gradient that needs the cache as it was is an error, not another gradient."""
    k_cache = torch.zeros(1, 8, 1, 4)
    weight = torch.ones(4, requires_grad=True)
    loss = (k_cache * weight).sum()
    x = torch.ones(1, 1, 1, 4)
    tessera.decode(x, k_cache, k_cache.clone(), 0, k_new=x, v_new=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradients():
    q, cache = torch.zeros(1, 1, 1, 4, requires_grad=True), torch.zeros(1, 8, 1, 4)
    with pytest.raises(NotImplementedError, match="no gradients"):
        tessera.decode(q, cache, cache, 3)
    with torch.no_grad():
        assert not tessera.decode(q, cache, cache, 3).requires_grad
    with torch.inference_mode():
        caches = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
        tessera.decode(q, *caches, 3, k_new=q.clone(), v_new=q.clone())


# ---- For torch's dispatcher.


@pytest.mark.parametrize("case", ["one query", "rotary", "append to pages", "packed", "sinks"])
def test_compiled(device, case):
    def call(*tensors, **options):
        out, lse = tessera.decode(*tensors, **options)
        return out * 1, lse

    with torch.no_grad():
        case = Case(device, DTYPES[device][0], **CASES[case])
        case.check(torch.compile(call, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("stored", LARGEST)
def test_compiled_with_a_cache_of_8_bits(device, stored):
    compiled = torch.compile(tessera.decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for options in ({}, {"new": 2, "seqlen_q": 2, "causal": True}):
            Case(device, DTYPES[device][0], stored=stored, **options).check(compiled)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch._dynamo.reset()
    case = Case("cuda", torch.bfloat16, new=1, causal=True)
    torch._dynamo.mark_static_address(case.k_cache)
    torch._dynamo.mark_static_address(case.v_cache)
    compiled = torch.compile(tessera.decode, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            case.check(compiled)


def test_compiled_into_out():
    case = Case("cpu", torch.bfloat16)
    out = torch.empty(3, 1, HEADS, DIM_V)
    compiled = torch.compile(tessera.decode, fullgraph=True, backend="aot_eager")
    tensors = (case.q, case.k_cache, case.v_cache, case.cache_seqlens)
    compiled(*tensors, out=out)
    assert torch.equal(out, tessera.decode(*tensors, out=torch.empty_like(out)))
    with pytest.raises(Exception, match=r"out: torch\.float32"):
        compiled(*tensors, out=torch.empty(3, 1, HEADS, DIM))


def test_opcheck():
    from tessera import _torch_decode
    from tessera._call import CACHE, TENSORS, Options

    # opcheck compares what an operator returns or writes by products that torch has not in float8.
    eight_bits = {"stored": torch.int8}
    for options in (CASES["rotary"], {}, eight_bits, eight_bits | {"new": 1}):
        case = Case("cpu", torch.float32, **options)
        cache = [case.options.get(name) for name in CACHE[1:]]
        operator = _torch_decode.append_op if "new" in options else _torch_decode.decode_op
        tensors = (case.q, case.k_cache, case.v_cache, case.cache_seqlens, *cache, *[None] * len(TENSORS))
        torch.library.opcheck(operator, (*tensors, *Options(), False, 0, False))


def test_dispatch_modes_see_the_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def watched(*tensors, **options):
        with Watch():
            return tessera.decode(*tensors, **options)

    Case("cpu", torch.float32).check(watched)
    Case("cpu", torch.float32, new=1).check(watched)
    assert [name for name in seen if "tessera" in name] == [
        "tessera.decode.default",
        "tessera.decode_append.default",
    ]


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    case = Case("cuda", torch.bfloat16, new=1, causal=True, page_size=16, rotary=DIM, lengths=(1, 0, 2))
    tensors = (case.q, case.k_cache, case.v_cache, case.cache_seqlens)
    call = dict(case.options, return_lse=True, out=torch.empty(3, 1, HEADS, DIM_V).to(case.q))
    tessera.decode(*tensors, **call)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tessera.decode(*tensors, **call)
    for lengths in ((5, 17, 60), (0, 1, 33)):
        case.lengths = lengths
        case.cache_seqlens.copy_(int32(lengths, "cuda"))
        expected = case.expected()
        graph.replay()
        close(out, expected[0], case.dtype)
        close(lse, expected[1], case.dtype)
        close(case.k_cache, expected[2], case.dtype)


@pytest.mark.gpu
def test_on_a_stream_without_waiting():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    case = Case("cuda", torch.bfloat16, new=2, seqlen_q=2, causal=True)
    case.check()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            tessera.decode(case.q, case.k_cache, case.v_cache, case.cache_seqlens, **case.options)
            tessera.decode(case.q, case.k_cache, case.v_cache, 5, **case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()


# ---- Arrays.


def as_arrays(case):
    """The call of a case with NumPy's arrays."""

    def array(x):
        return x.numpy() if isinstance(x, torch.Tensor) else x

    tensors = [array(x) for x in (case.q, case.k_cache, case.v_cache, case.cache_seqlens)]
    return tensors, {name: array(x) for name, x in case.options.items()}


@pytest.mark.parametrize("case", CASES)
def test_numpy(case):
    def call(*tensors, **options):
        arrays = Case.__new__(Case)
        arrays.q, arrays.k_cache, arrays.v_cache, arrays.cache_seqlens = tensors
        arrays.options = {name: x for name, x in options.items() if name != "return_lse"}
        given, others = as_arrays(arrays)  # they share memory: the append is seen
        return [torch.from_numpy(x) for x in tessera.decode(*given, return_lse=True, **others)]

    Case("cpu", torch.float32, **CASES[case]).check(call)


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_numpy_with_a_cache_of_int8(case):
    case = Case("cpu", torch.float32, stored=torch.int8, **EIGHT_BITS[case])

    def call(q, k_cache, v_cache, lengths, **options):
        given, others = as_arrays(case)
        return [torch.from_numpy(x) for x in tessera.decode(*given, return_lse=True, **others)]

    case.check(call)


def test_numpy_with_a_cache_of_float8():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = Case("cpu", torch.float32, stored=torch.float8_e4m3fn, new=1)
    expected = case.expected()
    stored = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = (x.view(torch.int8) for x in stored)
    (q, k, v, lengths), options = as_arrays(case)
    k, v = (x.view(ml_dtypes.float8_e4m3fn) for x in (k, v))
    close(tessera.decode(q, k, v, lengths, **options), expected[0], case.dtype)
    case.k_cache, case.v_cache = stored
    np.testing.assert_array_equal(case.caches()[1], expected[3])


def test_numpy_of_any_strides():
    case = Case("cpu", torch.float32, new=1)
    expected = case.expected()[0]
    (q, k, v, lengths), options = as_arrays(case)
    wide = np.repeat(lengths, 2)[::2]  # not contiguous
    out = np.empty((3, 1, HEADS, DIM_V), np.float32)
    assert tessera.decode(np.asfortranarray(q), k, v, wide, out=out, **options) is out
    close(torch.from_numpy(out), expected, torch.float32)
    k.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache: a read-only array"):
        tessera.decode(q, k, v, lengths, **options)
    tessera.decode(q, k, v, lengths)
    field = np.zeros(k.shape, dtype=[("pad", "i1"), ("x", "f4")])["x"]
    with pytest.raises(ValueError, match=r"k_cache: strides of .* bytes"):
        tessera.decode(q, field, v, lengths)
    with pytest.raises(ValueError, match=r"k_cache: stride .*, expected a last stride of 1"):
        tessera.decode(q, np.asfortranarray(k), v, lengths)


def test_a_foreign_array():
    class Bare:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    case = Case("cpu", torch.float32)
    (q, k, v, lengths), _ = as_arrays(case)
    out = tessera.decode(Bare(q), Bare(k), Bare(v), Bare(lengths))
    close(torch.from_numpy(out), case.expected()[0], torch.float32)
    with pytest.raises(NotImplementedError, match="k_new: arrays of Bare are not written to"):
        tessera.decode(Bare(q), Bare(k), Bare(v), 1, k_new=Bare(q), v_new=Bare(q))


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    case = Case("cpu", torch.float16, new=1, page_size=16, lengths=(11, 0, 60))
    expected = case.expected()
    given, options = as_arrays(case)
    given = [cupy.asarray(x) for x in given]
    options = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    with cupy.cuda.Stream(non_blocking=True):
        out, lse = tessera.decode(*given, return_lse=True, **options)
        close(torch.from_numpy(cupy.asnumpy(out)), expected[0], case.dtype)
        close(torch.from_numpy(cupy.asnumpy(lse)), expected[1], case.dtype)
        close(torch.from_numpy(cupy.asnumpy(given[1])), expected[2], case.dtype)


# ---- Errors.


def test_errors_name_the_argument():
    def call(**changes):
        case = Case("cpu", torch.float32, new=2, seqlen_q=2, causal=True, rotary=8)
        values = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache}
        values |= {"cache_seqlens": case.cache_seqlens, **case.options}
        values |= {name: x(values) if callable(x) else x for name, x in changes.items()}
        before = values["k_cache"].clone() if isinstance(values["k_cache"], torch.Tensor) else None
        try:
            tessera.decode(**values)
        finally:
            assert before is None or torch.equal(values["k_cache"], before)  # nothing is written

    for changes, text in [
        ({"cache_seqlens": int32([1, 2, 69], "cpu")}, r"cache_seqlens\[2\]: 69, expected 0 to 68"),
        ({"cache_seqlens": int32([1, 2], "cpu")}, "cache_seqlens: shape"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, "cache_seqlens.dtype: int64"),
        ({"cache_seqlens": None}, "cache_seqlens: not given"),
        ({"cache_seqlens": [1, 2, 3]}, "cache_seqlens: list"),
        ({"q": lambda x: x["q"][0]}, "q: "),
        ({"q": lambda x: x["q"][0, 0]}, "q: shape"),
        ({"k_cache": lambda x: x["k_cache"].bfloat16()}, "k_cache.dtype: bfloat16"),
        ({"k_cache": lambda x: x["k_cache"].numpy()}, "k_cache: ndarray, expected a torch.Tensor"),
        ({"v_cache": lambda x: x["v_cache"][0]}, "v_cache: shape"),
        ({"v_new": None}, "v_new: not given, expected with k_new"),
        ({"k_new": None, "v_new": None}, "k_new: not given, expected with rotary_cos"),
        ({"rotary_sin": None}, "rotary_sin: not given"),
        ({"rotary_sin": 3}, "rotary_sin: int, expected a torch.Tensor"),
        ({"sinks": 3, "cache_seqlens": 2}, "sinks: int, expected a torch.Tensor"),
        (
            {"cache_batch_idx": int32([1, 2, 2], "cpu"), "cache_seqlens": 5},
            r"cache_batch_idx\[2\]: 2, expected",
        ),
        ({"leftpad_k": int32([0, 1, 0], "cpu")}, r"leftpad_k\[1\]: 1"),
        ({"page_table": int32([[0], [1], [7]], "cpu")}, r"page_table\[2\]\[0\]: 7"),
        ({"num_splits": -1}, "num_splits: -1"),
        ({"num_splits": 1.5}, "num_splits: 1.5, expected an integer"),
        ({"window": (-3, 0)}, "window_left: -3"),
        ({"max_seqlen_k": 5}, "max_seqlen_k: 5, expected at least"),
        ({"out": torch.empty(3, 2, HEADS, DIM)}, "out: shape"),
        ({"out": torch.empty(3, 2, HEADS, DIM_V, dtype=torch.float16)}, "out.dtype: float16"),
        ({"out": lambda x: x["q"]}, "out: "),
        ({"kernel": "nobody"}, "kernel: nobody"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            call(**changes)
    with pytest.raises(NotImplementedError, match="cuda_sm80"):
        call(kernel="cuda_sm80")


def test_errors_of_a_cache_of_8_bits():
    def call(stored=torch.float8_e4m3fn, **changes):
        case = Case("cpu", torch.float32, new=1, stored=stored)
        values = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache}
        values |= {"cache_seqlens": case.cache_seqlens, **case.options}
        values |= {name: x(values[name]) if callable(x) else x for name, x in changes.items()}
        before = numbers(case.k_cache)
        try:
            tessera.decode(**values)
        finally:
            np.testing.assert_array_equal(numbers(case.k_cache), before)  # nothing is written

    for changes, text in [
        ({"stored": None, "k_scale": torch.ones(2)}, "k_scale: given, expected only with a cache of float8"),
        ({"k_scale": torch.ones(3)}, r"k_scale: shape \(3\), expected"),
        ({"k_scale": torch.tensor(1.0)}, "k_scale: "),
        ({"v_scale": lambda x: x.double()}, "v_scale.dtype: float64, expected float32"),
        ({"v_scale": torch.tensor([1.0, 0.0])}, r"v_scale\[1\]: 0, expected a positive normal float32"),
        ({"k_scale": torch.tensor([torch.nan, 1.0])}, r"k_scale\[0\]: nan, expected a positive"),
        ({"v_scale": 0.5}, "v_scale: float, expected a torch.Tensor"),
        ({"v_cache": lambda x: x.view(torch.int8)}, "v_cache.dtype: int8, expected k_cache's float8_e4m3fn"),
        (
            {"k_cache": lambda x: x.view(torch.uint8)},
            "k_cache.dtype: uint8, expected .* float8_e4m3fn or int8",
        ),
        ({"k_cache": lambda x: x.view(torch.float8_e5m2)}, "k_cache.dtype: "),
        ({"k_new": lambda x: x.to(torch.float8_e4m3fn)}, "k_new.dtype: float8_e4m3fn, expected"),
    ]:
        with pytest.raises(ValueError, match=text):
            call(**changes)


def test_a_forced_kernel_runs(device):
    case = Case(device, DTYPES[device][0])
    for kernel in tessera.kernels():
        if kernel.available and kernel.device == device and kernel.name not in ("cpu_amx", "cpu_avx512_bf16"):
            case.options["kernel"] = kernel.name
            tessera.decode(case.q, case.k_cache, case.v_cache, case.cache_seqlens, **case.options)
            assert tessera.last_kernel() == kernel.name


def test_explain_takes_the_same_arguments():
    case = Case("cpu", torch.float32, new=1)
    for lengths in (case.cache_seqlens, 7):
        explained = tessera.explain(
            case.q, case.k_cache, case.v_cache, direction="decode", cache_seqlens=lengths, **case.options
        )
        tessera.decode(case.q, case.k_cache, case.v_cache, lengths, **case.options)
        assert explained.kernel == tessera.last_kernel()
    case = Case("cpu", torch.float32, stored=torch.float8_e4m3fn)
    lengths = {"cache_seqlens": case.cache_seqlens}
    tessera.explain(case.q, case.k_cache, case.v_cache, direction="decode", **lengths, **case.options)
    with pytest.raises(ValueError, match="cache_seqlens"):
        tessera.explain(case.q, case.k_cache, case.v_cache, direction="decode", cache_seqlens=71)


def test_the_documentation_runs():
    """Every piece of code in docs/serving.md, one after another, but for what needs a GPU."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    pieces = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(pieces) == 6
    names = {}
    for piece in pieces:
        if not piece.startswith("# on a GPU"):
            exec(piece, names)
    assert torch.isfinite(names["out"]).all()


def test_signature():
    """What is not said by position has a name, and attention's names mean the same."""
    parameters = inspect.signature(tessera.decode).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k_cache", "v_cache", "cache_seqlens"]
    of_attention = inspect.signature(tessera.attention).parameters
    for name in parameters.keys() & of_attention.keys():
        assert parameters[name].default == of_attention[name].default, name
