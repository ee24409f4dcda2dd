#!/usr/bin/env python3
"""Tessera against PyTorch's CPU scaled_dot_product_attention (its flash kernel), in one process.

The two take turns on the same data, with the same number of threads and the same (batch, seqlen, heads,
head_dim) memory; PyTorch sees it as the (batch, heads, seqlen, head_dim) views that it wants. A cell's ratio
is the median over the turns of their time by ours: what slows a shared machine for a while slows both.
Prints a row a cell, the geometric means and whether each goal is met; writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from report import figure_of, flops, geometric_mean, label_cells, load_pyplot, print_figures
from tessera_ctypes import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096)
TOKENS, HIDDEN = 4096, 512
GOALS = {"fp32": 1.1, "bf16": 1.5}  # geometric mean over the grid
FLOOR = 0.95  # of every cell
SLOW_TURN = 3.0  # seconds
SHORT_CALL = 0.03
PAUSE = 0.01
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-2, "fp16": 5e-3}  # a sanity check that both did the same work


@dataclass
class Cell:
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    direction: str = "forward"
    ours: float = 0.0  # seconds, medians
    theirs: float = 0.0
    gflops: float = 0.0
    ratio: float = 0.0  # theirs / ours, median over the turns
    kernel: str = ""

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        return max(1, HIDDEN // self.head_dim)


def grid(dtypes: list[str], quick: bool) -> Iterator[Cell]:
    for dtype in dtypes:
        for head_dim in HEAD_DIMS:
            for causal in (False, True):
                for seqlen in SEQLENS[:2] if quick else SEQLENS:
                    yield Cell(dtype, head_dim, causal, seqlen)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def alternate(
    pairs: list[tuple[Callable[[], object], Callable[[], object]]], min_time: float
) -> tuple[float, float, float]:
    """Medians of ours, theirs and their quotient. Buffers rotate; who begins changes from turn to turn."""
    first = [seconds(call) for call in pairs[0]]
    # Where a call takes seconds, a warm-up matters little and repeats cost minutes: the first turn counts.
    slow = sum(first) > SLOW_TURN
    times: tuple[list[float], list[float]] = ([first[0]], [first[1]]) if slow else ([], [])
    least = 1 if slow else 8
    begin, turn = time.perf_counter(), 0
    while turn < least or (time.perf_counter() - begin < min_time and turn < 200):
        pair = pairs[turn % len(pairs)]
        for who in (0, 1) if turn % 2 == 0 else (1, 0):
            # The other side's threads spin for a while after its call, on the same cores: let them go to
            # sleep. A short call is timed right after one that is not, so that this side's threads are awake.
            time.sleep(PAUSE)
            if first[who] < SHORT_CALL:
                pair[who]()
            times[who].append(seconds(pair[who]))
        turn += 1
    quotients = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(quotients)


class Tensors:
    """One set of buffers, (batch, seqlen, heads, head_dim), and both sides' prepared calls."""

    def __init__(self, cell: Cell, library: Library, threads: int) -> None:
        shape, dtype = (cell.batch, cell.seqlen, cell.heads, cell.head_dim), DTYPES[cell.dtype]
        self.q, self.k, self.v, self.dout = (torch.randn(shape).to(dtype) for _ in range(4))
        self.o, self.dq, self.dk, self.dv = (torch.zeros(shape, dtype=dtype) for _ in range(4))
        self.lse = torch.zeros((cell.batch, cell.heads, cell.seqlen))
        options = library.options(causal=cell.causal, threads=threads)
        shared = {"q": self.q, "k": self.k, "v": self.v, "o": self.o, "lse": self.lse}
        self.forward = library.forward(options, **shared)
        gradients = {"dout": self.dout, "dq": self.dq, "dk": self.dk, "dv": self.dv}
        self.backward = library.backward(options, **shared, **gradients)
        self.causal = cell.causal
        self.theirs = [t.transpose(1, 2).detach().requires_grad_() for t in (self.q, self.k, self.v)]
        self.their_dout = self.dout.transpose(1, 2)
        self.their_o = self.their_forward()  # with its graph, kept for backward

    def their_forward(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.theirs, is_causal=self.causal)

    def their_forward_only(self) -> None:
        with torch.no_grad():
            self.their_forward()

    def their_backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.their_o, self.theirs, self.their_dout, retain_graph=True)

    def check(self, dtype: str) -> None:
        """Both sides computed the same thing."""
        self.forward.run()
        self.backward.run()
        pairs = [
            ("o", self.o, self.their_o),
            *zip(("dq", "dk", "dv"), (self.dq, self.dk, self.dv), self.their_backward(), strict=True),
        ]
        for name, ours, theirs in pairs:
            theirs = theirs.transpose(1, 2)
            error = (ours.float() - theirs.float()).abs().max().item()
            if not error <= TOLERANCE[dtype] * max(1.0, theirs.float().abs().max().item()):
                raise RuntimeError(f"{name} differs from PyTorch's by {error}")


def measure(cell: Cell, library: Library, threads: int, min_time: float) -> list[Cell]:
    sets = [Tensors(cell, library, threads) for _ in range(2)]
    if cell.seqlen == SEQLENS[0]:
        sets[0].check(cell.dtype)
    for each in sets:
        each.forward.run()  # o and lse, for backward
    calls = {
        "forward": [(s.forward.run, s.their_forward_only) for s in sets],
        "backward": [(s.backward.run, s.their_backward) for s in sets],
    }
    cells = []
    for direction, pairs in calls.items():
        result = Cell(cell.dtype, cell.head_dim, cell.causal, cell.seqlen, direction)
        result.ours, result.theirs, result.ratio = alternate(pairs, min_time)
        result.gflops = flops(result) / result.ours / 1e9
        result.kernel = library.last_kernel()
        cells.append(result)
    return cells


def print_row(cell: Cell) -> None:
    mark = "" if cell.ratio >= FLOOR else "  < floor"
    print(
        f"{cell.dtype}  {cell.direction:8}  {cell.head_dim:8}  {'yes' if cell.causal else 'no':>6}"
        f"  {cell.seqlen:6}  {cell.ours * 1e3:9.2f}  {cell.theirs * 1e3:9.2f}  {cell.gflops:8.1f}"
        f"  {cell.ratio:6.2f}{mark}",
        flush=True,
    )


def figures_of(cells: list[Cell]) -> list[dict[str, object]]:
    figures = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        for direction in ("forward", "backward"):
            mean = geometric_mean(c.ratio for c in cells if (c.dtype, c.direction) == (dtype, direction))
            name = f"{direction} {dtype} / PyTorch, geometric mean"
            figures.append(figure_of(name, mean, ">=", GOALS.get(dtype, 1.0)))
    worst = min(cells, key=lambda cell: cell.ratio)
    where = f"{worst.direction} {worst.dtype} d{worst.head_dim} seqlen {worst.seqlen}"
    where += " causal" if worst.causal else ""
    figures.append(figure_of(f"worst cell / PyTorch ({where})", worst.ratio, ">=", FLOOR))
    return figures


def plot(cells: list[Cell], path: Path) -> None:
    if (pyplot := load_pyplot()) is None:
        return
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    figure, axes = pyplot.subplots(
        len(dtypes), 2, figsize=(12, 3.6 * len(dtypes)), squeeze=False, sharey="row"
    )
    for row, dtype in enumerate(dtypes):
        for column, direction in enumerate(("forward", "backward")):
            part = [cell for cell in cells if (cell.dtype, cell.direction) == (dtype, direction)]
            axis = axes[row][column]
            colours = ["#0b6e99" if cell.ratio >= FLOOR else "#c0392b" for cell in part]
            axis.bar(range(len(part)), [cell.ratio for cell in part], color=colours)
            axis.axhline(1, color="black", linewidth=1)
            mean = geometric_mean(cell.ratio for cell in part)
            axis.axhline(mean, color="#e08e0b", linewidth=1.5, label=f"mean {mean:.2f}")
            label_cells(axis, part)
            axis.set_title(f"{dtype} {direction}")
            axis.set_ylim(0, 1.2 * max(cell.ratio for cell in cells if cell.dtype == dtype))
            axis.legend(frameon=False, loc="upper left")
        axes[row][0].set_ylabel("speed / PyTorch's")
    figure.suptitle(
        f"Tessera against PyTorch {torch.__version__} on the CPU, {torch.get_num_threads()} threads"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def write(path: Path, cells: list[Cell], figures: list[dict[str, object]], cli: dict[str, object]) -> None:
    result = {
        "machine": cli.get("machine", {}),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "figures": figures,
        "cells": [asdict(cell) for cell in cells],
        "tessera_bench": cli,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tessera against PyTorch on the CPU")
    parser.add_argument("--library", type=Path, required=True, help="libtessera.so")
    parser.add_argument("--cli-json", type=Path, help="what `tessera bench --out` wrote: its figures join in")
    parser.add_argument("--dtype", default="fp32,bf16", help="fp32, bf16, fp16; several with commas")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--min-time", type=float, default=0.5, help="seconds a cell is measured for, at least"
    )
    parser.add_argument("--quick", action="store_true", help="two sequence lengths, short measurements")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parsed = parser.parse_args()
    parsed.dtypes = parsed.dtype.split(",")
    if unknown := set(parsed.dtypes) - set(DTYPES):
        parser.error(f"--dtype: {', '.join(sorted(unknown))} is none of {', '.join(DTYPES)}")
    return parsed


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    library = Library(args.library)
    cli = json.loads(args.cli_json.read_text(encoding="utf-8")) if args.cli_json else {}
    print(f"PyTorch {torch.__version__}, {args.threads} threads, {TOKENS} tokens, hidden size {HIDDEN}\n")
    print("dtype direction  head_dim  causal  seqlen   ours, ms  torch, ms   GFLOP/s   ratio")
    cells: list[Cell] = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error, not a fallback, where it cannot run
        for cell in grid(args.dtypes, args.quick):
            for result in measure(cell, library, args.threads, 0.05 if args.quick else args.min_time):
                cells.append(result)
                print_row(result)
    figures = figures_of(cells) + list(cli.get("figures", []))
    print()
    print_figures(figures)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    write(stem.with_suffix(".json"), cells, figures, cli)
    plot(cells, stem.with_suffix(".png"))
    print(f"\nresults: {stem}.json, {stem}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
