#!/usr/bin/env python3
"""Tessera's decode on a GPU against PyTorch's scaled_dot_product_attention by cuDNN, one token a sequence.

bfloat16, head_dim 128, every sequence of the same length. All sides are CUDA graphs of launches on several
caches in turn, which together are far larger than the L2 cache; the graphs take turns, timed by CUDA events.
A row's ratio is the median over the turns of cuDNN's time by ours.

Each row is checked first, against attention in float32 of the last sequence's last head. Then pages of 16, 64
and 1 key against the contiguous cache, on the rows named by --pages-of, and caches of float8_e4m3fn against
those of bfloat16 on the large rows. Prints microseconds and TB/s of keys and values; writes JSON.

Several kernels (--kernel cuda_sm90 --kernel cuda_sm80), libraries (--library NAME=PATH) and numbers of splits
(--splits 0 --splits 8) are compared with each other in one table: for tuning.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from gpu_compare import machine
from report import figure_of, geometric_mean, print_figures
from tessera_ctypes import Call, Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIM = 128
LAUNCHES = 8  # of a graph, at least
CACHES = 512 << 20  # bytes that the caches of a row have together, at least
MOST_CACHES = 64
TURN = 2e-3  # seconds of work a side gets in a turn, at least
LARGE = 0.5e9  # bytes of keys and values from which the bandwidth has a goal
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
ROWS = (
    (1, 32, 8, 1024),
    (1, 32, 8, 8192),
    (1, 32, 8, 65536),
    (8, 32, 8, 8192),
    (64, 32, 8, 1024),
    (64, 32, 8, 8192),
    (32, 64, 8, 4096),
    (32, 32, 32, 4096),
)


@dataclass
class Row:
    batch: int
    heads_q: int
    heads_k: int
    seqlen: int
    page: int = 0
    fp8: bool = False
    caches: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # side -> median
    # side -> the time of cuDNN (pages: of the contiguous cache, fp8: of bfloat16) by its
    ratios: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.seqlen * self.heads_k * HEAD_DIM * (1 if self.fp8 else 2)

    def bytes_of(self, side: str) -> int:
        return 2 * self.bytes if self.fp8 and side == "bf16" else self.bytes

    @property
    def plain(self) -> bool:
        """Contiguous and of bfloat16: what is compared with cuDNN."""
        return not self.page and not self.fp8

    def name(self) -> str:
        kind = f" page {self.page}" if self.page else " fp8" if self.fp8 else ""
        return f"{self.batch:3} {self.heads_q:3}/{self.heads_k:<3} {self.seqlen:6}{kind}"


class Data:
    """q and one cache, contiguous; as pages on demand, in random order."""

    def __init__(self, row: Row) -> None:
        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.row = row
        self.q = some(row.batch, 1, row.heads_q, HEAD_DIM)
        self.k, self.v = (some(row.batch, row.seqlen, row.heads_k, HEAD_DIM) for _ in range(2))
        self.lengths = torch.full((row.batch,), row.seqlen, device="cuda", dtype=torch.int32)

    def tensors(self, page: int, fp8: bool) -> dict[str, torch.Tensor]:
        if fp8:
            return self.eight_bits()
        return self.paged(page) if page else {"k_cache": self.k, "v_cache": self.v}

    def eight_bits(self) -> dict[str, torch.Tensor]:
        """The cache in FP8, with scales that fit the largest number of each key head."""
        tensors = {}
        for name, x in (("k", self.k), ("v", self.v)):
            scale = x.abs().amax(dim=(0, 1, 3)).float() / FP8_MAX
            # A sequence at a time: the cache in float32 would be four times what is kept.
            tensors[f"{name}_cache"] = stored = torch.empty_like(x, dtype=FP8)
            for one, of in zip(stored, x, strict=True):
                one.copy_(of.float().div_(scale[:, None]).clamp_(-FP8_MAX, FP8_MAX))
            tensors[f"{name}_scale"] = scale
        return tensors

    def paged(self, size: int) -> dict[str, torch.Tensor]:
        """The same memory, taken for pages: what a sequence sees is another matter, its bytes are not."""
        row = self.row
        pages = row.batch * row.seqlen // size
        order = torch.randperm(pages, device="cuda").to(torch.int32)
        shape = (pages, size, row.heads_k, HEAD_DIM)
        return {
            "k_cache": self.k.view(shape),
            "v_cache": self.v.view(shape),
            "page_table": order.view(row.batch, row.seqlen // size),
        }

    def exact(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """o of the last sequence's last head, in float32."""
        k, v = tensors["k_cache"], tensors["v_cache"]
        if "page_table" in tensors:
            pages = tensors["page_table"][-1].long()
            k, v = (x[pages, :, -1].reshape(-1, HEAD_DIM).float() for x in (k, v))
        else:
            k, v = (x[-1, :, -1].float() for x in (k, v))
        if "k_scale" in tensors:
            k, v = k * tensors["k_scale"][-1], v * tensors["v_scale"][-1]
        scores = k @ self.q[-1, 0, -1].float() / math.sqrt(HEAD_DIM)
        return scores.softmax(-1) @ v


class Ours:
    def __init__(
        self, library: Library, data: Data, kernel: str, splits: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.data = data
        self.o = torch.empty_like(data.q)
        self.tensors = tensors
        options = library.options(kernel=kernel) if kernel else library.options()
        self.call: Call = library.decode(
            options, num_splits=splits, q=data.q, o=self.o, cache_seqlens=data.lengths, **self.tensors
        )
        self.call.prepare()

    def run(self) -> None:
        self.call.run()

    def error(self) -> str:
        self.o.fill_(math.nan)
        self.run()
        torch.cuda.synchronize()
        if not torch.isfinite(self.o).all():
            return "o is not finite"
        true = self.data.exact(self.tensors)
        error = (self.o[-1, 0, -1].float() - true).abs().max().item()
        scale = true.abs().max().item()
        return "" if error <= 0.02 * scale else f"o is off by {error:.3g} of {scale:.3g}"


class Theirs:
    def __init__(self, data: Data) -> None:
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (data.q, data.k, data.v))

    def run(self) -> None:
        gqa = self.q.shape[1] != self.k.shape[1]
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=gqa)


class Graph:
    """Launches on the caches in turn, as those of a model's layers: only the first begins a replay."""

    def __init__(self, runs: list[Ours] | list[Theirs], stream: torch.cuda.Stream) -> None:
        rounds = math.ceil(LAUNCHES / len(runs))
        self.count = len(runs) * rounds
        with torch.cuda.stream(stream):
            for run in runs[:3]:
                run.run()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for run in runs * rounds:
                run.run()
        torch.cuda.synchronize()

    def seconds(self, replays: int, stream: torch.cuda.Stream) -> float:
        """A launch."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            begin.record()
            for _ in range(replays):
                self.graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / replays / self.count


def alternate(graphs: dict[str, Graph], turns: int, stream: torch.cuda.Stream) -> dict[str, list[float]]:
    replays = {}
    for name, graph in graphs.items():
        graph.seconds(1, stream)
        replays[name] = max(1, math.ceil(TURN / (graph.seconds(2, stream) * graph.count)))
    names = list(graphs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(graphs[name].seconds(replays[name], stream))
    return seconds


def medians(row: Row, seconds: dict[str, list[float]], against: str) -> None:
    for name, each in seconds.items():
        row.seconds[name] = statistics.median(each)
        if against in seconds and name != against:
            row.ratios[name] = statistics.median(a / b for a, b in zip(seconds[against], each, strict=True))


def measure(row: Row, args: argparse.Namespace, stream: torch.cuda.Stream) -> list[Row]:
    """The row, and if asked for the same with pages, and in 8 bits."""
    row.caches = min(MOST_CACHES, max(2, math.ceil(CACHES / row.bytes)))
    data = [Data(row) for _ in range(row.caches)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # what the options remember

        def sides(to: Row) -> dict[str, Graph]:
            graphs = {}
            caches = [each.tensors(to.page, to.fp8) for each in data]
            for name, (library, kernel, splits) in args.sides.items():
                ours = [
                    Ours(library, each, kernel, splits, cache)
                    for each, cache in zip(data, caches, strict=True)
                ]
                to.errors[name] = ours[-1].error()
                to.kernels[name] = library.last_kernel()
                graphs[name] = Graph(ours, stream)
                graphs[name].alive = ours
            return graphs

        rows = [row]
        graphs = sides(row)
        contiguous = dict(graphs)
        if args.cudnn:
            try:
                graphs["cudnn"] = Graph([Theirs(each) for each in data], stream)
            except RuntimeError as error:
                print(f"cuDNN does not run {row.name()}: {str(error).splitlines()[0]}")
        medians(row, alternate(graphs, args.turns, stream), "cudnn")
        pages = args.pages if list(ROWS).index(row_key(row)) in args.pages_of else []
        others = [(Row(*row_key(row), page=page, caches=row.caches), "contiguous") for page in pages]
        if args.fp8 and row.bytes >= LARGE:
            others.append((Row(*row_key(row), fp8=True, caches=row.caches), "bf16"))
        for other, against in others:
            both = sides(other)
            turns = alternate(both | {f"{n} {against}": g for n, g in contiguous.items()}, args.turns, stream)
            for name in both:
                medians(other, {name: turns[name], against: turns[f"{name} {against}"]}, against)
            rows.append(other)
    return rows


def row_key(row: Row) -> tuple[int, int, int, int]:
    return (row.batch, row.heads_q, row.heads_k, row.seqlen)


def print_row(row: Row) -> None:
    text = f"{row.name():24}"
    for side, seconds in row.seconds.items():
        ratio = f" {row.ratios[side]:5.2f}x" if side in row.ratios else ""
        text += f" | {side} {seconds * 1e6:7.1f} us {row.bytes_of(side) / seconds / 1e12:5.2f} TB/s{ratio}"
    for side, error in row.errors.items():
        if error:
            text += f"  WRONG ({side}): {error}"
    print(text, flush=True)


def figures_of(rows: list[Row], side: str) -> list[dict[str, object]]:
    figures = []
    rated = [row for row in rows if row.plain and side in row.ratios]
    if rated:
        mean = geometric_mean(row.ratios[side] for row in rated)
        figures.append(figure_of("geometric mean / cuDNN", mean, ">=", 1.0))
        worst = min(rated, key=lambda row: row.ratios[side])
        what = f"worst row / cuDNN ({worst.name().strip()})"
        figures.append(figure_of(what, worst.ratios[side], ">=", 0.95))
    for row in rows:
        if side not in row.seconds:
            continue
        if row.plain and row.bytes >= LARGE:
            speed = row.bytes / row.seconds[side] / 1e12
            figures.append(figure_of(f"{row.name().strip()}", speed, ">=", 4.3) | {"unit": "TB/s"})
        if row.plain and row_key(row) == ROWS[0]:
            micro = row.seconds[side] * 1e6
            figures.append(figure_of(f"{row.name().strip()}", micro, "<=", 6.5) | {"unit": "us"})
        if row.page and side in row.ratios:
            goal = 0.7 if row.page == 1 else 0.95
            figures.append(figure_of(f"{row.name().strip()} / contiguous", row.ratios[side], ">=", goal))
    fp8 = [row.ratios[side] for row in rows if row.fp8 and side in row.ratios]
    if fp8:
        # The rows have the same tokens: their times' ratio is that of tokens/s.
        what = "fp8 / bf16 tokens/s, geometric mean"
        figures.append(figure_of(what, geometric_mean(fp8), ">=", 1.7))
    return figures


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tessera's decode against cuDNN's on a GPU")
    parser.add_argument("--library", action="append", required=True, help="libtessera.so, or NAME=PATH")
    parser.add_argument("--kernel", action="append", help="forced; default: the first that fits")
    parser.add_argument("--splits", action="append", type=int, help="num_splits; default: automatic")
    parser.add_argument("--rows", type=numbers, default=list(range(len(ROWS))), help="0,1,2: which rows")
    parser.add_argument("--pages", type=numbers, default=[16, 64, 1], help="page sizes")
    parser.add_argument("--pages-of", type=numbers, default=[3, 5], help="rows that are also paged")
    parser.add_argument("--no-cudnn", action="store_false", dest="cudnn")
    parser.add_argument("--no-fp8", action="store_false", dest="fp8", help="no caches of float8_e4m3fn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    args = parser.parse_args()
    args.sides = {}
    for text in args.library:
        name, _, path = text.rpartition("=")
        library = Library(Path(path))
        for kernel in args.kernel or [""]:
            for splits in args.splits or [0]:
                parts = [name or "ours", kernel, f"s{splits}" if splits else ""]
                args.sides[" ".join(part for part in parts if part)] = (library, kernel, splits)
    return args


def main() -> int:
    args = arguments()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    stream = torch.cuda.Stream()
    facts = machine()
    print(f"{facts['device']}, PyTorch {torch.__version__}, cuDNN {facts['cudnn']}, {args.turns} turns")
    rows: list[Row] = []
    for index in args.rows:
        done = measure(Row(*ROWS[index]), args, stream)
        rows += done
        for row in done:
            print_row(row)
        torch.cuda.empty_cache()
    result = {
        "machine": facts,
        "machine_after": machine()["nvidia_smi"],
        "rows": [asdict(row) | {"bytes": row.bytes} for row in rows],
        "figures": {side: figures_of(rows, side) for side in args.sides},
    }
    for side, figures in result["figures"].items():
        if figures:
            print(f"\n{side}")
            print_figures(figures)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu-decode-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"results: {path}")
    return 1 if any(error for row in rows for error in row.errors.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
