"""How long a call keeps the host: tiny tensors and no gradients, so that little else is in it.

The sides take turns of many calls each. On a GPU they are queued and not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

import tessera

from .sides import OURS
from .timing import median_ratio, summary

SDPA = "sdpa"
CALLS = 300  # a turn
SHAPE = (1, 16, 2, 64)  # batch, seqlen, heads, head_dim


@dataclass
class Result:
    device: str
    dtype: str
    sides: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"host time of a call on {self.device}, {self.dtype}, {' x '.join(map(str, SHAPE))}"

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, **asdict(self)}


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    call()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


def measure(device: torch.device, dtype: str, torch_dtype: torch.dtype, turns: int) -> Result:
    result = Result(device.type, dtype)
    batch, seqlen, heads, dim = SHAPE
    q, k, v = (torch.randn(SHAPE, device=device).to(torch_dtype) for _ in range(3))
    theirs = [torch.randn(batch, heads, seqlen, dim, device=device).to(torch_dtype) for _ in range(3)]
    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: tessera.attention(q, k, v),
        SDPA: lambda: scaled_dot_product_attention(*theirs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(-2, turns):  # two of warm-up
            for name in calls if turn % 2 else reversed(calls):
                each = seconds_of(calls[name], device)
                if turn >= 0:
                    seconds[name].append(each)
    result.sides = {name: summary(each) for name, each in seconds.items()}
    result.sides[SDPA]["speedup"] = median_ratio(seconds[SDPA], seconds[OURS])
    return result
