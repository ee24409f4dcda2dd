"""The grid, and one cell of it: every side checked against float32, then timed in turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

import tessera

from .sides import OURS, Refused, Side, attempt
from .timing import median_ratio, summary, take_turns

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of the largest element: rounding to the dtype, with room for the order of sums.
TOLERANCE = {"fp32": 5e-5, "fp16": 4e-3, "bf16": 2e-2}
DIRECTIONS = ("forward", "backward")
HEAD_DIMS = (64, 128, 256)
CHECKED_ROWS = 2048
CHECKED_HEADS = 4  # of all sequences and heads, as far from each other as there are


@dataclass(frozen=True)
class Sizes:
    """What differs between a GPU's grid and a CPU's."""

    tokens: int
    hidden: int
    seqlens: tuple[int, ...]
    quick_seqlens: tuple[int, ...]
    dtype: str
    buffers: int  # sets that rotate, so that no input is still in a cache


GPU_SIZES = Sizes(16384, 2048, (512, 1024, 2048, 4096, 8192, 16384), (512, 2048, 8192), "bf16", 3)
CPU_SIZES = Sizes(4096, 512, (512, 1024, 2048, 4096), (512, 1024), "fp32", 2)


@dataclass
class Cell:
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    direction: str
    kernel: str = ""  # of Tessera's that ran
    sides: dict[str, dict[str, float]] = field(default_factory=dict)  # seconds, p10, p90, tflops, speedup
    refused: dict[str, str] = field(default_factory=dict)  # who did not run, and why

    @property
    def flop(self) -> float:
        """A causal mask leaves half; backward has five products where forward has two."""
        forward = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (1 if self.direction == "forward" else 2.5)


def grid(
    dtypes: list[str], head_dims: list[int], masks: list[bool], seqlens: list[int], tokens: int, hidden: int
) -> Iterator[Cell]:
    """One cell for each shape; `measure` makes one for each direction of it."""
    for dtype in dtypes:
        for head_dim in head_dims:
            for causal in masks:
                for seqlen in seqlens:
                    batch, heads = max(1, tokens // seqlen), max(1, hidden // head_dim)
                    yield Cell(dtype, head_dim, causal, seqlen, batch, heads, "forward")


# -------------------------------------------------------------------------------- one side, one set


class Data:
    def __init__(self, cell: Cell, device: torch.device) -> None:
        def random() -> torch.Tensor:
            shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
            return torch.randn(shape, device=device).to(DTYPES[cell.dtype])

        self.q, self.k, self.v, self.dout = random(), random(), random(), random()
        self.causal = cell.causal


class Calls:
    """What is timed of a side. For backward, the graph of one forward is kept."""

    def __init__(self, side: Side, data: Data, direction: str) -> None:
        self.attention, self.data, self.direction = side.attention, data, direction
        self.inputs = [t.detach().requires_grad_(direction == "backward") for t in (data.q, data.k, data.v)]
        self.o = self._forward() if direction == "backward" else None

    def _forward(self) -> torch.Tensor:
        return self.attention(*self.inputs, self.data.causal)

    def run(self) -> tuple[torch.Tensor, ...]:
        """o, or dq, dk and dv."""
        if self.direction == "forward":
            with torch.no_grad():
                return (self._forward(),)
        return torch.autograd.grad(self.o, self.inputs, self.data.dout, retain_graph=True)


# -------------------------------------------------------------------------------- the check


def checked_heads(data: Data) -> list[tuple[int, int]]:
    batch, heads = data.q.shape[0], data.q.shape[2]
    count = min(CHECKED_HEADS, batch * heads)
    flat = [round(i * (batch * heads - 1) / max(1, count - 1)) for i in range(count)]
    return [divmod(i, heads) for i in flat]


def exact(data: Data, b: int, h: int) -> dict[str, torch.Tensor]:
    """One head's attention and gradients as written down, in float32, some rows at a time."""
    q, k, v, dout = (t[b, :, h].float() for t in (data.q, data.k, data.v, data.dout))
    scale = 1 / math.sqrt(q.shape[1])
    o, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    keys = torch.arange(len(k), device=k.device)
    for rows in torch.arange(len(q), device=q.device).split(CHECKED_ROWS):
        scores = scale * q[rows] @ k.T
        if data.causal:
            scores = scores.masked_fill(keys > rows[:, None], -math.inf)
        p = scores.softmax(-1)
        o[rows] = p @ v
        dp = dout[rows] @ v.T
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        dq[rows] = scale * ds @ k
        dk += scale * ds.T @ q[rows]
        dv += p.T @ dout[rows]
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def check(
    results: tuple[torch.Tensor, ...], truth: dict[tuple[int, int], dict[str, torch.Tensor]], tolerance: float
) -> None:
    names = ("o",) if len(results) == 1 else ("dq", "dk", "dv")
    for name, result in zip(names, results, strict=True):
        if not torch.isfinite(result).all():
            raise Refused(f"wrong: {name} is not finite")
        for (b, h), true in truth.items():
            scale = true[name].abs().max().item()
            error = (result[b, :, h].float() - true[name]).abs().max().item()
            if not error <= tolerance * scale:
                raise Refused(f"wrong: {name} is off by {error:.2g} where the largest element is {scale:.2g}")


# -------------------------------------------------------------------------------- one cell


def measure(
    shape: Cell, sides: list[Side], directions: list[str], turns: int, buffers: int, device: torch.device
) -> list[Cell]:
    """The shape's cells, one for each direction."""
    sets = [Data(shape, device) for _ in range(buffers)]
    truth = {head: exact(sets[0], *head) for head in checked_heads(sets[0])}
    cells = []
    for direction in directions:
        cell = Cell(
            shape.dtype, shape.head_dim, shape.causal, shape.seqlen, shape.batch, shape.heads, direction
        )
        ready: dict[str, list[Calls]] = {}
        for side in sides:
            try:
                ready[side.name] = attempt(partial(prepare, side, sets, direction, truth, shape.dtype))
                if side.name == OURS:
                    cell.kernel = kernel_of(side, sets[0], direction)
            except Refused as refused:
                cell.refused[side.name] = str(refused)
        release(device)
        seconds = take_turns({name: [c.run for c in calls] for name, calls in ready.items()}, turns, device)
        for name, each in seconds.items():
            times = summary(each)
            cell.sides[name] = {**times, "tflops": cell.flop / times["seconds"] / 1e12}
            if OURS in seconds and name != OURS:  # of ours over theirs
                cell.sides[name]["speedup"] = median_ratio(each, seconds[OURS])
        cells.append(cell)
        del ready
        release(device)
    return cells


def prepare(
    side: Side,
    sets: list[Data],
    direction: str,
    truth: dict[tuple[int, int], dict[str, torch.Tensor]],
    dtype: str,
) -> list[Calls]:
    """A side's calls on every set, the first one's results checked."""
    calls = [Calls(side, data, direction) for data in sets]
    check(calls[0].run(), truth, TOLERANCE[dtype])
    return calls


def kernel_of(side: Side, data: Data, direction: str) -> str:
    options = {"causal": data.causal, "kernel": side.kernel}
    return tessera.explain(data.q, data.k, data.v, direction=direction, **options).kernel


def release(device: torch.device) -> None:
    gc.collect()  # a refusal's traceback holds tensors in a cycle
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
