"""Checks an installed tessera from the user's side: that of the Python that runs this, from any folder.

python check_install.py [--torch] [--cubin ORIGIN]

Needs NumPy and nothing else, so that it runs where there is no pytest and no PyTorch; --torch wants PyTorch.
--cubin says where the kernels of a GPU must come from: "pack", "compiled" or "cache". The GPU is made up, by
the driver that TESSERA_CUDA_DRIVER names (tests/cuda/fake_cuda.cpp).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import sys
from pathlib import Path

import tessera

assert "torch" not in sys.modules, "import tessera has imported torch"
assert "numpy" not in sys.modules, "import tessera has imported numpy"

import numpy as np  # noqa: E402


def check_place() -> None:
    folder = Path(tessera.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"tessera is taken from {folder}, expected below {sys.prefix}"
    assert importlib.metadata.version("tessera") == tessera.__version__


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    q, k, v = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ np.swapaxes(k, 2, 3) / np.sqrt(q.shape[3])
    if causal:
        s[..., np.triu(np.ones(s.shape[2:], bool), 1 + s.shape[3] - s.shape[2])] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.moveaxis(p / p.sum(-1, keepdims=True) @ v, 1, 2)


def check_numpy() -> None:
    random = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
        q = random.standard_normal((2, 50, 4, 32)).astype(dtype)
        k, v = (random.standard_normal((2, 70, 2, 32)).astype(dtype) for _ in range(2))
        for causal in (False, True):
            out = tessera.attention(q, k, v, causal=causal)
            assert out.dtype == dtype and out.shape == q.shape
            error = np.abs(out - softmax_attention(q, k, v, causal)).max()
            assert error < tolerance, f"{dtype.__name__}, causal={causal}: off by {error}"
    try:
        tessera.attention(q, k[:, :, :, :7], v)
    except ValueError as error:
        assert "k:" in str(error), error
    else:
        raise AssertionError("a key of another head_dim was taken")


def check_kernels() -> None:
    kernels = {kernel.name: kernel for kernel in tessera.kernels()}
    assert kernels["cpu_baseline"].available
    assert any(kernel.device == "cuda" for kernel in kernels.values()), list(kernels)
    q = np.zeros((1, 8, 1, 16), np.float32)
    for direction in ("forward", "backward"):
        explanation = tessera.explain(q, q, q, direction=direction)
        assert kernels[explanation.kernel].available
        assert explanation.values["flops"] > 0 and str(explanation).startswith("kernel ")


def check_torch() -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        q, k, v = (torch.randn(2, 64, 4, 32, dtype=dtype, requires_grad=True) for _ in range(3))
        dout = torch.randn_like(q)
        out = tessera.attention(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        heads_first = (x.transpose(1, 2).float() for x in (q, k, v))
        right = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        right_grads = torch.autograd.grad(right, (q, k, v), dout.float())
        for x, y in zip((out, *grads), (right, *right_grads), strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x.float(), y.float(), atol=tolerance, rtol=tolerance)


class OnGpu:
    """A bfloat16 array, as DLPack has it, of a GPU that is not there: nobody may read it."""

    class Tensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("manager", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    def __init__(self, shape: tuple[int, ...], address: int, device: int) -> None:
        self.shape = shape
        self.extents = (ctypes.c_int64 * len(shape))(*shape)
        self.tensor = self.Tensor(
            address, 2, device, len(shape), 4, 16, 1, self.extents
        )  # 2: CUDA, 4: bfloat

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.tensor.device_id)

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def check_cubin(origin: str) -> None:
    hopper = 1  # the made-up driver's second device
    q, k, v = (OnGpu((2, 512, 4, 64), i << 30, hopper) for i in (1, 2, 3))
    for direction in ("forward", "backward"):
        explanation = tessera.explain(q, k, v, direction=direction)
        found = explanation.values.get("cubin")
        assert found == origin, f"{direction}: {found}, expected {origin}\n{explanation}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks an installed tessera.")
    parser.add_argument("--torch", action="store_true", help="with PyTorch, too")
    parser.add_argument("--cubin", choices=("pack", "compiled", "cache"), help="where GPU kernels come from")
    args = parser.parse_args()
    check_place()
    check_numpy()
    check_kernels()
    assert "torch" not in sys.modules, "a call on NumPy's arrays has imported torch"
    if args.torch:
        check_torch()
    if args.cubin:
        check_cubin(args.cubin)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"tessera {tessera.__version__} on Python {version}, NumPy {np.__version__}: all right")


if __name__ == "__main__":
    main()
