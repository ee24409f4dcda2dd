"""tessera.attention on NumPy's arrays and on others that speak DLPack, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import oracle
import pytest
import tessera


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy(dtype):
    q, k, v = (
        normal(2, 9, 4, 16, dtype=dtype),
        normal(2, 12, 2, 16, dtype=dtype),
        normal(2, 12, 2, 8, dtype=dtype),
    )
    bias = normal(9, 12)
    out, lse = tessera.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    expected, expected_lse = oracle.attention(q, k, v, bias=bias[None, None], causal=True)
    assert type(out) is np.ndarray
    assert out.dtype == dtype
    np.testing.assert_allclose(out, expected, atol=1e-5 if dtype == np.float32 else 3e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5 if dtype == np.float32 else 3e-3)


def test_numpy_of_any_strides():
    q = normal(2, 9, 4, 16)
    expected = tessera.attention(q, q, q)
    readonly = q.copy()
    readonly.flags.writeable = False
    backwards = np.ascontiguousarray(q[..., ::-1])[..., ::-1]
    field = np.zeros(q.shape, dtype=[("pad", "i1"), ("x", "f4")])
    field["x"] = q
    for x in (readonly, np.asfortranarray(q), backwards, field["x"]):
        np.testing.assert_array_equal(tessera.attention(x, x, x), expected)


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = normal(1, 9, 2, 16).astype(ml_dtypes.bfloat16)
    out = tessera.attention(q, q, q)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.astype("f4"), oracle.attention(q, q, q)[0], atol=3e-2)


def test_numpy_dropout_with_a_seed_repeats():
    q = normal(1, 40, 2, 16)
    first = tessera.attention(q, q, q, dropout_p=0.5, seed=2**64 - 1)
    np.testing.assert_array_equal(first, tessera.attention(q, q, q, dropout_p=0.5, seed=2**64 - 1))
    assert (first != tessera.attention(q, q, q, dropout_p=0.5)).any()


def test_errors():
    q = normal(1, 4, 2, 8)
    for arguments, text in [
        ((q, q, q.astype("f8")), "v.dtype: float64"),
        ((q, [1], q), "k: list"),
        ((1.0, q, q), "q: float"),
        ((q[0, 0], q, q), "q: shape"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            tessera.attention(*arguments)


def test_a_foreign_array():
    """Something that speaks DLPack and the array API and is neither NumPy's nor PyTorch's."""

    class Foreign:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **_):
            return self.x.__dlpack__()

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

        def __array__(self, dtype=None, copy=None):
            return self.x

        def __array_namespace__(self):
            class Namespace:
                asarray = staticmethod(Foreign)

            return Namespace

    q = normal(1, 4, 2, 8)
    out = tessera.attention(Foreign(q), Foreign(q), Foreign(q))
    assert type(out) is Foreign
    np.testing.assert_array_equal(out.x, tessera.attention(q, q, q))


def test_a_bare_producer():
    """DLPack and nothing else: the result is NumPy's."""

    class Bare:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    q = normal(1, 4, 2, 8)
    out = tessera.attention(Bare(q), Bare(q), Bare(q))
    np.testing.assert_array_equal(out, tessera.attention(q, q, q))

    class BareOnGpu(Bare):
        shape = q.shape

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(NotImplementedError, match="q: BareOnGpu on a GPU has no __array_namespace__"):
        tessera.attention(BareOnGpu(q), BareOnGpu(q), BareOnGpu(q))


def gpu_module(name):
    """The library, with a GPU."""
    module = pytest.importorskip(name)
    try:
        found = module.cuda.runtime.getDeviceCount() if name == "cupy" else len(module.devices("gpu"))
    except Exception:  # whatever a library says where there is none
        found = 0
    if not found:
        pytest.skip("no GPU")
    return module


@pytest.mark.gpu
def test_cupy():
    cupy = gpu_module("cupy")
    q, k, v = (
        normal(2, 70, 4, 64, dtype="f2"),
        normal(2, 90, 2, 64, dtype="f2"),
        normal(2, 90, 2, 32, dtype="f2"),
    )
    sinks = normal(4)
    expected, expected_lse = oracle.attention(q, k, v, causal=True, sinks=sinks)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            out, lse = tessera.attention(*arrays, sinks=cupy.asarray(sinks), causal=True, return_lse=True)
            assert isinstance(out, cupy.ndarray)
            assert tessera.last_kernel().startswith("cuda_")
            np.testing.assert_allclose(cupy.asnumpy(out * 1), expected, atol=3e-3)
            np.testing.assert_allclose(cupy.asnumpy(lse * 1), expected_lse, atol=3e-3)
    with pytest.raises(ValueError, match=r"k\.device"):
        tessera.attention(arrays[0], np.zeros(arrays[1].shape, "f2"), arrays[2])


@pytest.mark.gpu
def test_jax_on_a_gpu():
    jax = gpu_module("jax")
    jnp = jax.numpy
    q, k, v = normal(2, 70, 4, 64), normal(2, 90, 2, 64), normal(2, 90, 2, 32)
    arrays = [jnp.asarray(x).astype(jnp.bfloat16) for x in (q, k, v)]
    expected, expected_lse = oracle.attention(*(np.asarray(x, "f4") for x in arrays), causal=True)
    for _ in range(3):
        out, lse = tessera.attention(*arrays, causal=True, return_lse=True)
        assert isinstance(out, jax.Array)
        assert out.dtype == jnp.bfloat16
        assert tessera.last_kernel().startswith("cuda_")
        np.testing.assert_allclose(np.asarray(out, "f4"), expected, atol=3e-2)
        np.testing.assert_allclose(np.asarray(lse), expected_lse, atol=3e-2)


def test_jax_on_the_cpu():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        q = jax.numpy.asarray(normal(1, 9, 2, 16))
        out = tessera.attention(q, q, q)
        assert isinstance(out, jax.Array)
        np.testing.assert_allclose(np.asarray(out), oracle.attention(*(np.asarray(q),) * 3)[0], atol=1e-5)


def test_importing_does_not_import_torch():
    code = "import sys, tessera; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_numpy_works():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, tessera\n"
        "q = numpy.ones((1, 3, 1, 4), 'f')\n"
        "assert (tessera.attention(q, q, q) == 1).all()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
