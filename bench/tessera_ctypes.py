"""libtessera through its C ABI, by ctypes, on torch tensors: what compare.py times.

A mirror of include/tessera/tessera.h; `Library` refuses a library of another ABI version.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
)
from pathlib import Path

import torch

ABI_VERSION = 1
UNBOUNDED = -1


class DLDevice(Structure):
    _fields_ = [("device_type", c_int), ("device_id", c_int)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


TensorPointer = POINTER(DLTensor)


class Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("softmax_scale", c_double),
        ("has_softmax_scale", c_int32),
        ("causal", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("alignment", c_int32),
        ("deterministic", c_int32),
        ("softcap", c_double),
        ("alibi_slopes", TensorPointer),
        ("bias", TensorPointer),
        ("sinks", TensorPointer),
        ("dropout_p", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        ("cu_seqlens_q", TensorPointer),
        ("cu_seqlens_k", TensorPointer),
        ("seqused_q", TensorPointer),
        ("seqused_k", TensorPointer),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_k", c_int64),
        ("kernel", c_char_p),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    ]


class ForwardArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[(name, TensorPointer) for name in ("q", "k", "v", "o", "lse")],
        ("options", POINTER(Options)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class BackwardArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[
            (name, TensorPointer)
            for name in ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")
        ],
        ("options", POINTER(Options)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


DTYPES = {
    torch.float32: DLDataType(2, 32, 1),
    torch.float16: DLDataType(2, 16, 1),
    torch.bfloat16: DLDataType(4, 16, 1),
}


class View:
    """A DLTensor over a torch tensor, which it keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        extents = c_int64 * tensor.dim()
        self.shape = extents(*tensor.shape)
        self.strides = extents(*tensor.stride())
        self.dl = DLTensor(
            tensor.data_ptr(), DLDevice(1, 0), tensor.dim(), DTYPES[tensor.dtype], self.shape, self.strides, 0
        )

    def pointer(self) -> ctypes._Pointer[DLTensor]:
        return ctypes.pointer(self.dl)


class Call:
    """A prepared call: run() does nothing but cross the ABI."""

    def __init__(
        self, library: Library, name: str, args: ForwardArgs | BackwardArgs, alive: list[object]
    ) -> None:
        self.library, self.args, self.alive = library, args, alive
        self.function = getattr(library.lib, f"tessera_{name}")
        size = c_size_t()
        library.check(
            getattr(library.lib, f"tessera_{name}_workspace_size")(ctypes.byref(args), ctypes.byref(size))
        )
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8)
        args.workspace, args.workspace_bytes = self.workspace.data_ptr(), size.value

    def run(self) -> None:
        self.library.check(self.function(ctypes.byref(self.args)))


class Library:
    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path.resolve()))
        self.lib.tessera_last_error.restype = c_char_p
        self.lib.tessera_last_kernel.restype = c_char_p
        self.lib.tessera_version.restype = c_char_p
        if (found := self.lib.tessera_abi_version()) != ABI_VERSION:
            raise RuntimeError(f"{path} has ABI version {found}, expected {ABI_VERSION}")

    def check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(self.lib.tessera_last_error().decode())

    def last_kernel(self) -> str:
        return self.lib.tessera_last_kernel().decode()

    def options(self, *, causal: bool, threads: int) -> Options:
        options = Options(struct_size=ctypes.sizeof(Options), window_left=UNBOUNDED, window_right=UNBOUNDED)
        options.causal, options.num_threads = causal, threads
        return options

    def _fill(
        self, args: ForwardArgs | BackwardArgs, options: Options, tensors: dict[str, torch.Tensor]
    ) -> list[object]:
        views = {name: View(tensor) for name, tensor in tensors.items()}
        for name, view in views.items():
            setattr(args, name, view.pointer())
        args.options = ctypes.pointer(options)
        return [views, options]

    def forward(self, options: Options, **tensors: torch.Tensor) -> Call:
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs))
        return Call(self, "forward", args, self._fill(args, options, tensors))

    def backward(self, options: Options, **tensors: torch.Tensor) -> Call:
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs))
        return Call(self, "backward", args, self._fill(args, options, tensors))
