"""libtessera through its C ABI, by ctypes, on torch tensors of the CPU or a GPU: what compare.py and
gpu_compare.py time.

A mirror of include/tessera/tessera.h; `Library` refuses a library of another ABI version.
"""

from __future__ import annotations

import ctypes
import json
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
        ("stream", c_void_p),
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


class DecodeArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[
            (name, TensorPointer)
            for name in (
                "q",
                "k_cache",
                "v_cache",
                "cache_seqlens",
                "page_table",
                "cache_batch_idx",
                "leftpad_k",
                "k_new",
                "v_new",
                "rotary_cos",
                "rotary_sin",
                "o",
                "lse",
            )
        ],
        ("rotary_interleaved", c_int32),
        ("reserved", c_int32),
        ("num_splits", c_int64),
        ("options", POINTER(Options)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        *[(name, TensorPointer) for name in ("k_scale", "v_scale")],
    ]


AnyArgs = ForwardArgs | BackwardArgs | DecodeArgs

DTYPES = {
    torch.float32: DLDataType(2, 32, 1),
    torch.float16: DLDataType(2, 16, 1),
    torch.bfloat16: DLDataType(4, 16, 1),
    torch.int32: DLDataType(0, 32, 1),
    torch.float8_e4m3fn: DLDataType(10, 8, 1),
}
DL_CPU, DL_CUDA = 1, 2


class View:
    """A DLTensor over a torch tensor, which it keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        extents = c_int64 * tensor.dim()
        self.shape = extents(*tensor.shape)
        self.strides = extents(*tensor.stride())
        device = DLDevice(DL_CUDA, tensor.device.index or 0) if tensor.is_cuda else DLDevice(DL_CPU, 0)
        self.dl = DLTensor(
            tensor.data_ptr(), device, tensor.dim(), DTYPES[tensor.dtype], self.shape, self.strides, 0
        )

    def pointer(self) -> ctypes._Pointer[DLTensor]:
        return ctypes.pointer(self.dl)


class Call:
    """A prepared call: run() does nothing but cross the ABI."""

    def __init__(
        self,
        library: Library,
        name: str,
        args: AnyArgs,
        alive: list[object],
        device: torch.device,
    ) -> None:
        self.library, self.name, self.args, self.alive = library, name, args, alive
        self.function = getattr(library.lib, f"tessera_{name}")
        self.reference = ctypes.byref(args)
        size = c_size_t()
        library.check(
            getattr(library.lib, f"tessera_{name}_workspace_size")(self.reference, ctypes.byref(size))
        )
        self.workspace_bytes = size.value
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device=device)
        args.workspace, args.workspace_bytes = self.workspace.data_ptr(), size.value

    def run(self) -> None:
        if self.function(self.reference) != 0:
            raise RuntimeError(self.library.last_error())

    def prepare(self) -> None:
        self.library.check(getattr(self.library.lib, f"tessera_prepare_{self.name}")(self.reference))

    def explain(self) -> dict[str, object]:
        function, size = getattr(self.library.lib, f"tessera_explain_{self.name}"), c_size_t()
        self.library.check(function(self.reference, None, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.library.check(function(self.reference, buffer, ctypes.byref(size)))
        return json.loads(buffer.value.decode())


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
            raise RuntimeError(self.last_error())

    def last_error(self) -> str:
        return self.lib.tessera_last_error().decode()

    def last_kernel(self) -> str:
        return self.lib.tessera_last_kernel().decode()

    def options(self, *, causal: bool = False, threads: int = 0, **more: object) -> Options:
        """more: fields of tessera_options by name; tensors as torch tensors, kernel as str. On a GPU, the
        work goes on torch's current stream of this moment."""
        options = Options(struct_size=ctypes.sizeof(Options), window_left=UNBOUNDED, window_right=UNBOUNDED)
        options.causal, options.num_threads = causal, threads
        if torch.cuda.is_available():
            options.stream = torch.cuda.current_stream().cuda_stream
        options.alive = []  # what the pointers below point to
        for name, value in more.items():
            if isinstance(value, torch.Tensor):
                view = View(value)
                options.alive.append(view)
                setattr(options, name, view.pointer())
            else:
                setattr(options, name, value.encode() if isinstance(value, str) else value)
        return options

    def _fill(self, args: AnyArgs, options: Options, tensors: dict[str, torch.Tensor]) -> list[object]:
        views = {name: View(tensor) for name, tensor in tensors.items()}
        for name, view in views.items():
            setattr(args, name, view.pointer())
        args.options = ctypes.pointer(options)
        return [views, options]

    def forward(self, options: Options, **tensors: torch.Tensor) -> Call:
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs))
        return Call(self, "forward", args, self._fill(args, options, tensors), tensors["q"].device)

    def backward(self, options: Options, **tensors: torch.Tensor) -> Call:
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs))
        return Call(self, "backward", args, self._fill(args, options, tensors), tensors["q"].device)

    def decode(self, options: Options, *, num_splits: int = 0, **tensors: torch.Tensor) -> Call:
        args = DecodeArgs(struct_size=ctypes.sizeof(DecodeArgs), num_splits=num_splits)
        return Call(self, "decode", args, self._fill(args, options, tensors), tensors["q"].device)
