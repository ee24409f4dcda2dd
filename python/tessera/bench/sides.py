"""Who takes part: Tessera and its peers, all behind one signature.

A side is a function of q, k, v (batch, seqlen, heads, head_dim) and `causal` that returns o, shaped alike.
Autograd can differentiate it. A peer that is not here has a reason in place of a function.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tessera

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

OURS = "tessera"


@dataclass(frozen=True)
class Side:
    name: str
    label: str  # for tables and figures
    version: str = ""
    attention: Attention | None = None
    missing: str = ""  # why there is no attention
    kernel: str | None = None  # that Tessera is made to use


class Unavailable(Exception):
    """This peer cannot run here, and why."""


class Refused(Exception):
    """A side does not do this, and why."""


# -------------------------------------------------------------------------------- Tessera


def ours(kernel: str | None) -> Side:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return tessera.attention(q, k, v, causal=causal, kernel=kernel)

    return Side(OURS, "Tessera", tessera.__version__, attention, kernel=kernel)


# -------------------------------------------------------------------------------- PyTorch


def sdpa(backend: SDPBackend) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        views = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):  # an error, not a fallback, where it cannot run
            return scaled_dot_product_attention(*views, is_causal=causal).transpose(1, 2)

    return attention


def sdpa_on_gpu(backend: SDPBackend) -> Callable[[torch.device], Attention]:
    def make(device: torch.device) -> Attention:
        require_gpu(device)
        return sdpa(backend)

    return make


def flex(device: torch.device) -> Attention:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    # Backward is timed again and again on one graph, so its buffers may not be given away.
    config.donated_buffer = False

    def below_diagonal(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i >= j

    compiled: Callable[..., torch.Tensor] = flex_attention
    mask: BlockMask | None = None
    compiled_for: tuple[object, ...] = ()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        nonlocal compiled, mask, compiled_for
        if compiled_for != (wanted := (q.shape, q.dtype, causal)):
            torch._dynamo.reset()  # or it runs uncompiled once a few shapes have been compiled
            compiled = torch.compile(flex_attention, dynamic=False)
            length = q.shape[1]
            mask = create_block_mask(below_diagonal, None, None, length, length, device) if causal else None
            compiled_for = wanted
        views = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(*views, block_mask=mask).transpose(1, 2)

    return attention


# -------------------------------------------------------------------------------- FlashAttention


def flash_attention(module: str) -> Callable[[torch.device], Attention]:
    def make(device: torch.device) -> Attention:
        require_gpu(device)
        function = importlib.import_module(module).flash_attn_func

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
            result = function(q, k, v, causal=causal)
            return result[0] if isinstance(result, tuple) else result  # some releases add the lse

        return attention

    return make


# -------------------------------------------------------------------------------- the list


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("runs on GPUs only")


@dataclass(frozen=True)
class Peer:
    label: str
    module: str  # whose version is written down
    make: Callable[[torch.device], Attention]


PEERS = {
    "sdpa-flash": Peer("SDPA flash", "torch", lambda _: sdpa(SDPBackend.FLASH_ATTENTION)),
    "sdpa-cudnn": Peer("SDPA cuDNN", "torch", sdpa_on_gpu(SDPBackend.CUDNN_ATTENTION)),
    "sdpa-efficient": Peer("SDPA efficient", "torch", sdpa_on_gpu(SDPBackend.EFFICIENT_ATTENTION)),
    "sdpa-math": Peer("SDPA math", "torch", lambda _: sdpa(SDPBackend.MATH)),
    "flex": Peer("Flex", "torch", flex),
    "fa2": Peer("FlashAttn 2", "flash_attn", flash_attention("flash_attn")),
    "fa3": Peer("FlashAttn 3", "flash_attn_interface", flash_attention("flash_attn_interface")),
}
GRID_PEERS = [name for name in PEERS if name != "sdpa-math"]  # whose memory grows with seqlen squared
TRAIN_PEERS = [name for name in PEERS if name.startswith("sdpa-")]


def peer(name: str, device: torch.device) -> Side:
    """The side, or a side without attention that says what is missing."""
    entry = PEERS[name]
    try:
        attention = entry.make(device)
        version = getattr(importlib.import_module(entry.module), "__version__", "")
        return Side(name, entry.label, str(version), attention)
    except (Unavailable, ImportError, AttributeError, OSError, RuntimeError) as error:
        return Side(name, entry.label, missing=short(error))


def short(error: object, most: int = 160) -> str:
    """An error's first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "…"


SAYS_NOTHING = ("not used because", "runtime disabled", "deprecated")  # among SDPA's warnings


def attempt(call: Callable[[], object]) -> object:
    """The call's result. What it raises becomes `Refused`, with the reasons that PyTorch warns of."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            return call()
        except Exception as error:  # compilers and extensions raise whatever they like; the run goes on
            said = [str(w.message).split(" (Triggered internally")[0] for w in caught]
            said = [short(text) for text in said if not any(each in text for each in SAYS_NOTHING)]
            raise Refused("; ".join(dict.fromkeys([short(error), *said[:3]]))) from error
        finally:
            torch.set_warn_always(always)
