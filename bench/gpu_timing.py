"""How gpu_compare.py and gpu_options.py time a GPU: random data, Tessera on it, sides that take turns.

A turn is timed by CUDA events, behind a kernel that keeps the GPU busy while the turn is queued.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

import torch
from tessera_ctypes import Call, Library

TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = (64, 128, 256)
DIRECTIONS = ("forward", "backward")
TURN = 2.5e-3  # seconds of work a side gets in a turn, at least
MOST_LAUNCHES = 12
PLUG = 600_000  # cycles, some 0.3 ms: enough to queue a turn behind

Runner = Callable[[], object]


def timed(runs: list[Runner], launches: int, first: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(PLUG)
    begin.record()
    for i in range(launches):
        runs[(first + i) % len(runs)]()
    end.record()
    return begin, end


def alternate(sides: dict[str, list[Runner]], turns: int) -> dict[str, list[float]]:
    """Seconds a launch, for each side and turn. Buffers rotate, and so does who begins."""
    launches = {}
    for name, runs in sides.items():
        for run in runs:  # warm-up, and what is compiled or allocated on first use
            run()
        begin, end = timed(runs, 2, 0)
        end.synchronize()
        each = begin.elapsed_time(end) / 2e3
        launches[name] = max(1, min(MOST_LAUNCHES, math.ceil(TURN / max(each, 1e-6))))
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = timed(sides[name], launches[name], turn * launches[name])
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / launches[name])
    return seconds


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


class Data:
    """One set of (batch, seqlen, heads, head_dim) tensors."""

    def __init__(
        self, batch: int, seqlen: int, heads: int, head_dim: int, heads_k: int | None = None
    ) -> None:
        def some(h: int) -> torch.Tensor:
            return torch.randn((batch, seqlen, h, head_dim), device="cuda", dtype=torch.bfloat16)

        heads_k = heads_k or heads
        self.q, self.k, self.v, self.dout = some(heads), some(heads_k), some(heads_k), some(heads)
        self.lse_shape = (batch, heads, seqlen)

    def views(self) -> list[torch.Tensor]:
        """q, k, v as SDPA has them."""
        return [t.transpose(1, 2).detach().requires_grad_() for t in (self.q, self.k, self.v)]


class Ours:
    """Tessera on one set."""

    def __init__(
        self, library: Library, data: Data, directions: Iterable[str] = DIRECTIONS, **options: object
    ) -> None:
        self.o = torch.empty_like(data.q)
        self.lse = torch.empty(data.lse_shape, device="cuda")
        made = library.options(**options)
        shared = {"q": data.q, "k": data.k, "v": data.v, "o": self.o, "lse": self.lse}
        self.forward: Call = library.forward(made, **shared)
        self.backward: Call | None = None
        if "backward" in directions:
            self.grads = [torch.empty_like(t) for t in (data.q, data.k, data.v)]
            named = dict(zip(("dq", "dk", "dv"), self.grads, strict=True))
            self.backward = library.backward(made, **shared, dout=data.dout, **named)

    def results(self) -> list[torch.Tensor]:
        """o, and the gradients if there are any."""
        self.forward.run()
        if self.backward is None:
            return [self.o]
        self.backward.run()
        return [self.o, *self.grads]
