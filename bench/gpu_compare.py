#!/usr/bin/env python3
"""Tessera's GPU kernels against PyTorch's scaled_dot_product_attention: FlashAttention-2 and cuDNN.

The grid: 16,384 tokens, hidden size 2048, bfloat16, head_dim 64, 128 and 256, causal or not, seqlen 512 to
16384, forward and backward. All sides take turns in one process on the same random data, which rotates
through three sets; a turn is timed by CUDA events, behind a kernel that keeps the GPU busy while the turn is
queued. A cell's ratio is the median over the turns of their time by ours: flash's for the mma.sync kernels;
for Hopper's own the best peer's, cuDNN's or FlashAttention-3's, which is known by its ratio to cuDNN.

With --deterministic backward is timed in that mode, too, beside the default: its speed by the default's.

Every cell is checked first, against attention in float32 on a slice and against the flash backend everywhere.
Then: what each option costs, workspace sizes, JIT times. Prints a row a cell and whether each goal is met;
writes JSON and a plot.

Several libraries (--library NAME=PATH ...) are compared with each other in one table: for tuning.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import gpu_options
import torch
from gpu_timing import DIRECTIONS, HEAD_DIMS, HIDDEN, TOKENS, Data, Ours, alternate, median_ratio
from report import figure_of, flops, geometric_mean, label_cells, load_pyplot, print_figures
from tessera_ctypes import Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SETS = 3


@dataclass(frozen=True)
class Goal:
    means: dict[int, float]  # by head_dim, geometric mean over the grid
    floor: float  # of every cell


GOALS = {  # against whom
    "flash": Goal({64: 1.0, 128: 1.0, 256: 0.95}, 0.9),
    "best": Goal({64: 1.0, 128: 1.0, 256: 1.0}, 0.93),
}
ORDERED = "ordered"  # the side that is backward in deterministic mode
ORDERED_GOAL = 0.9  # its speed by the default's
FA3 = Path(__file__).with_name("fa3-over-cudnn-h200.json")


def best_over_cudnn(cell: Cell) -> float:
    """The best peer's speed by cuDNN's; 1 where FlashAttention-3 was not measured."""
    rows = json.loads(FA3.read_text(encoding="utf-8"))["rows"]
    shape = (cell.head_dim, cell.causal, cell.seqlen)
    found = [row[cell.direction] for row in rows if (row["head_dim"], row["causal"], row["seqlen"]) == shape]
    return max([1.0, *found])


@dataclass
class Cell:
    head_dim: int
    causal: bool
    seqlen: int
    direction: str = "forward"
    seconds: dict[str, float] = field(default_factory=dict)  # side -> median
    ratios: dict[str, float] = field(
        default_factory=dict
    )  # library -> time of whom it is against / its, median of the turns
    kernels: dict[str, str] = field(default_factory=dict)
    ordered: float | None = None  # deterministic mode's speed by the default's, of the first library
    error: str = ""

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    def tflops(self, side: str) -> float:
        return flops(self) / self.seconds[side] / 1e12 if side in self.seconds else math.nan


# -------------------------------------------------------------------------------- one cell


class Theirs:
    """One of SDPA's backends on one set. The graph of backward is kept."""

    def __init__(self, backend: str, data: Data, causal: bool, need_backward: bool) -> None:
        self.backend, self.causal = BACKENDS[backend], causal
        self.inputs = data.views()
        self.dout = data.dout.transpose(1, 2)
        self.o = self._attention() if need_backward else None

    def _attention(self) -> torch.Tensor:
        with sdpa_kernel(self.backend):  # an error, not a fallback, where it cannot run
            return scaled_dot_product_attention(*self.inputs, is_causal=self.causal)

    def forward(self) -> None:
        with torch.no_grad():
            self._attention()

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.o, self.inputs, self.dout, retain_graph=True)

    def results(self) -> list[torch.Tensor]:
        """o, and the gradients if backward was asked for."""
        if self.o is None:
            return [self._attention().detach().transpose(1, 2)]
        return [t.transpose(1, 2) for t in (self.o.detach(), *self.backward())]


def exact(data: Data, causal: bool) -> list[torch.Tensor]:
    """o, dq, dk, dv of the last batch entry's last head, in float32."""
    q, k, v = (t[-1, :, -1].float().requires_grad_() for t in (data.q, data.k, data.v))
    scores = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    o = scores.softmax(-1) @ v
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), data.dout[-1, :, -1].float())]


def check(data: Data, causal: bool, ours: list[torch.Tensor], flash: list[torch.Tensor] | None) -> str:
    """What is wrong; empty: nothing. On the slice at most twice flash's error; everywhere close to flash."""
    names = ("o", "dq", "dk", "dv")[: len(ours)]
    for i, name in enumerate(names):
        if not torch.isfinite(ours[i]).all():
            return f"{name} is not finite"
    for i, (name, true) in enumerate(zip(names, exact(data, causal), strict=False)):
        error = (ours[i][-1, :, -1].float() - true).abs().max().item()
        scale = true.abs().max().item()
        if flash is None:
            allowed = 0.02 * scale
        else:
            allowed = 2 * (flash[i][-1, :, -1].float() - true).abs().max().item() + 1e-3 * scale
            apart = (ours[i].float() - flash[i].float()).abs().max().item()
            if not apart <= 0.04 * flash[i].float().abs().max().item():
                return f"{name} differs from flash's by {apart:.3g}"
        if not error <= allowed:
            return f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
    return ""


def measure(cell: Cell, libraries: dict[str, Library], kernel: str, args: argparse.Namespace) -> list[Cell]:
    """Forward and backward of one shape, checked and timed."""
    sets = [Data(cell.batch, cell.seqlen, cell.heads, cell.head_dim) for _ in range(SETS)]
    ours = {
        name: [Ours(library, data, args.directions, causal=cell.causal, kernel=kernel) for data in sets]
        for name, library in libraries.items()
    }
    if args.deterministic:
        library = next(iter(libraries.values()))
        ours[ORDERED] = [
            Ours(library, data, causal=cell.causal, kernel=kernel, deterministic=1) for data in sets
        ]
    theirs: dict[str, list[Theirs]] = {}
    for backend in BACKENDS:
        try:
            backward = "backward" in args.directions
            made = [Theirs(backend, data, cell.causal, backward) for data in sets]
            made[0].results()
            theirs[backend] = made
        except RuntimeError:
            torch.cuda.synchronize()  # that backend does not take this shape
    flash = theirs["flash"][0].results() if "flash" in theirs else None
    errors = {}
    for name, each in ours.items():
        if wrong := check(sets[0], cell.causal, each[0].results(), flash):
            errors[name] = wrong
    del flash

    cells = []
    for direction in args.directions:
        result = Cell(cell.head_dim, cell.causal, cell.seqlen, direction)
        result.error = "; ".join(f"{name}: {wrong}" for name, wrong in errors.items())
        shown = [name for name in ours if name != ORDERED or direction == "backward"]
        sides = {name: [getattr(each, direction).run for each in ours[name]] for name in shown}
        for name in shown:
            for one in ours[name]:
                one.forward.run()  # o and lse, for backward
            if name in libraries:
                result.kernels[name] = libraries[name].last_kernel()
        sides |= {name: [getattr(each, direction) for each in sets_] for name, sets_ in theirs.items()}
        seconds = alternate(sides, args.turns)
        result.seconds = {name: statistics.median(turns) for name, turns in seconds.items()}
        peer, faster = ("flash", 1.0) if args.against == "flash" else ("cudnn", best_over_cudnn(result))
        if peer in seconds:
            result.ratios = {name: median_ratio(seconds[peer], seconds[name]) / faster for name in libraries}
        if ORDERED in seconds:
            result.ordered = median_ratio(seconds[next(iter(libraries))], seconds[ORDERED])
        cells.append(result)
    return cells


# -------------------------------------------------------------------------------- the report


def figures_of(cells: list[Cell], name: str, against: str) -> list[dict[str, object]]:
    figures, goal = [], GOALS[against]
    for direction in DIRECTIONS:
        for head_dim in HEAD_DIMS:
            part = [
                c.ratios[name]
                for c in cells
                if (c.direction, c.head_dim) == (direction, head_dim) and name in c.ratios
            ]
            if part:
                what = f"{direction} d{head_dim} / {against}, geometric mean"
                figures.append(figure_of(what, geometric_mean(part), ">=", goal.means[head_dim]))
    if rated := [c for c in cells if name in c.ratios]:
        worst = min(rated, key=lambda c: c.ratios[name])
        where = f"{worst.direction} d{worst.head_dim}{' causal' if worst.causal else ''} {worst.seqlen}"
        figures.append(figure_of(f"worst cell / {against} ({where})", worst.ratios[name], ">=", goal.floor))
    if ordered := [c.ordered for c in cells if c.ordered is not None]:
        what = "backward, deterministic / default, geometric mean"
        figures.append(figure_of(what, geometric_mean(ordered), ">=", ORDERED_GOAL))
    return figures


def print_header(names: list[str], directions: list[str], against: str) -> None:
    sides = [*names, "flash", "cudnn"]
    whom = {"flash": "flash", "best": "the better of cuDNN and FlashAttention-3"}[against]
    print(f"TFLOP/s; ratio: speed against {whom}" + (", of each library" if len(names) > 1 else ""))
    text = "dim causal seqlen"
    for direction in directions:
        text += f" | {'fwd' if direction == 'forward' else 'bwd'} " + " ".join(
            f"{side[:8]:>8}" for side in sides
        )
        text += " " + " ".join(f"{'ratio':>6}" for _ in names)
    print(text)


def print_row(cells: list[Cell], names: list[str], floor: float) -> None:
    one = cells[0]
    text = f"{one.head_dim:3} {'yes' if one.causal else 'no':>6} {one.seqlen:6}"
    for cell in cells:
        text += " |     " + " ".join(f"{cell.tflops(side):8.0f}" for side in [*names, "flash", "cudnn"])
        ratios = [cell.ratios.get(name, math.nan) for name in names]
        text += " " + " ".join(f"{r:5.2f}{'!' if r < floor else ' '}" for r in ratios)
        if cell.ordered is not None:
            text += f" deterministic {cell.ordered:.2f}"
    print(text + (f"  WRONG: {one.error}" if one.error else ""), flush=True)


def plot(cells: list[Cell], names: list[str], device: str, path: Path) -> None:
    if (pyplot := load_pyplot()) is None:
        return
    directions = list(dict.fromkeys(cell.direction for cell in cells))
    figure, axes = pyplot.subplots(
        len(directions), 1, figsize=(13, 4.2 * len(directions)), squeeze=False, sharex=True
    )
    colours = {"flash": "#999999", "cudnn": "#e08e0b"}
    for row, direction in enumerate(directions):
        part = [cell for cell in cells if cell.direction == direction]
        axis = axes[row][0]
        for i, side in enumerate([*names, "flash", "cudnn"]):
            heights = [cell.tflops(side) for cell in part]
            style = {"color": colours[side]} if side in colours else {"linewidth": 2, "zorder": 3 + i}
            axis.plot(range(len(part)), heights, marker="o", markersize=4, label=side, **style)
        label_cells(axis, part)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(f"{direction}, TFLOP/s")
        axis.legend(frameon=False, ncols=4)
    figure.suptitle(f"Tessera on {device}, bf16, {TOKENS} tokens, hidden size {HIDDEN}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, object]:
    asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    smi = output_of("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")
    folder = str(Path(__file__).resolve().parent)
    return {
        "device": torch.cuda.get_device_name(),
        "nvidia_smi": dict(zip(asked.split(","), [x.strip() for x in smi.split(",")], strict=False)),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": os.environ.get("TESSERA_COMMIT")
        or output_of("git", "-C", folder, "describe", "--always", "--dirty"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# -------------------------------------------------------------------------------- main


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    for head_dim in args.head_dims:
        for causal in args.causal:
            for seqlen in args.seqlens:
                yield Cell(head_dim, causal, seqlen)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tessera against PyTorch on a GPU")
    parser.add_argument(
        "--library",
        action="append",
        required=True,
        help="libtessera.so, or NAME=PATH; several are compared with each other",
    )
    parser.add_argument("--kernel", default="cuda_sm80", help="the kernel that is forced")
    parser.add_argument("--against", choices=GOALS, help="default: flash for cuda_sm80, else best")
    parser.add_argument("--quick", action="store_true", help="three sequence lengths, few turns, no options")
    parser.add_argument("--direction", choices=DIRECTIONS, help="only this one")
    parser.add_argument(
        "--head-dim", type=numbers, dest="head_dims", default=list(HEAD_DIMS), help="64,128,256"
    )
    parser.add_argument("--seqlen", type=numbers, dest="seqlens", help="512,1024,2048,4096,8192,16384")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--turns", type=int, help="per cell; default 15, with --quick 5")
    parser.add_argument("--deterministic", action="store_true", help="backward in that mode, too")
    parser.add_argument("--options", choices=("yes", "no", "only"), help="measure what the options cost")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    args = parser.parse_args()
    args.libraries = {}
    for text in args.library:
        name, _, path = text.rpartition("=")
        args.libraries[name or ("ours" if len(args.library) == 1 else Path(path).parent.name)] = Path(path)
    if len(args.libraries) != len(args.library):
        parser.error("--library: two of the same name, expected NAME=PATH with different names")
    args.against = args.against or ("flash" if args.kernel == "cuda_sm80" else "best")
    args.directions = [args.direction] if args.direction else list(DIRECTIONS)
    if args.deterministic and args.directions == ["forward"]:
        parser.error("--deterministic: it is backward that has this mode, expected no --direction forward")
    args.causal = {"yes": [True], "no": [False], "both": [False, True]}[args.causal]
    args.seqlens = args.seqlens or ([512, 2048, 8192] if args.quick else list(SEQLENS))
    args.turns = args.turns or (5 if args.quick else 15)
    args.options = args.options or ("no" if args.quick or len(args.libraries) > 1 else "yes")
    return args


def main() -> int:
    args = arguments()
    name, path = next(iter(args.libraries.items()))
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.perf_counter()
    libraries = {each: Library(file) for each, file in args.libraries.items()}
    result: dict[str, object] = {
        "machine": machine(),
        "kernel": args.kernel,
        "against": args.against,
        "turns": args.turns,
    }
    print(f"{result['machine']['device']}, PyTorch {torch.__version__}, {args.kernel}, {args.turns} turns")

    cells: list[Cell] = []
    if args.options != "only":
        print_header(list(libraries), args.directions, args.against)
        for cell in grid(args):
            done = measure(cell, libraries, args.kernel, args)
            cells += done
            print_row(done, list(libraries), GOALS[args.against].floor)
            torch.cuda.empty_cache()
    if args.options != "no":
        result["workspaces"] = gpu_options.workspaces(libraries[name], args.kernel, args.directions)
        result["jit"] = gpu_options.jit_times(path, args.kernel, args.directions)
        result["options"] = gpu_options.option_costs(
            libraries[name], args.kernel, args.directions, args.turns
        )
    result["machine_after"] = machine()["nvidia_smi"]  # clocks, as soon as the timing is done
    result["figures"] = {each: figures_of(cells, each, args.against) for each in libraries}
    for each, figures in result["figures"].items():
        if figures:
            print(f"\n{each}")
            print_figures(figures)
    if args.options != "no":
        result["figures"][name] += gpu_options.figures_of(result["options"], args.kernel)
        gpu_options.print_results(result)
    result["cells"] = [asdict(cell) | {"tflops": {s: cell.tflops(s) for s in cell.seconds}} for cell in cells]
    result["seconds"] = time.perf_counter() - begin
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"gpu-bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if cells:
        plot(cells, list(libraries), result["machine"]["device"], stem.with_suffix(".png"))
    print(f"results: {stem}.json, {stem}.png; {result['seconds']:.0f} s")
    return 1 if any(cell.error for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
