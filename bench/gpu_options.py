"""What gpu_compare.py measures beside the grid: what each option costs, workspace sizes, JIT times."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_timing import DIRECTIONS, HEAD_DIMS, HIDDEN, TOKENS, Data, Ours, alternate, median_ratio
from report import figure_of
from tessera_ctypes import Library

GOALS = {  # of forward, its time per FLOP by plain's; backward is for information
    "window": 1.15,
    "alibi": 1.15,
    "softcap": 1.15,
    "sinks": 1.15,
    "varlen": 1.15,
    "varlen_mixed": 1.15,
    "gqa": 1.15,
    "window_1024": 1.15,
    "dropout": 1.4,
    "bias": 1.4,
}
HOPPER_GOALS = GOALS | {
    "softcap": 1 / 0.85,
    "window_1024": 1 / 0.85,
    "gqa": 1 / 0.93,
    "varlen_mixed": 1 / 0.93,
}

# The lengths of a packed batch: 16,384 tokens, and nearly the work of 4 x 4096.
MIXED = (6144, 128, 4096, 512, 2560, 384, 1536, 1024)
LONG = 16384

# What an option is compared with, if not plain; and pairs of query and key, by plain's, if not as many.
BASES = {"window_1024": "long"}
WORK = {
    "varlen_mixed": sum(length**2 for length in MIXED) / (4 * 4096**2),
    "window_1024": sum(min(i, 1024) + 1 for i in range(LONG)) / (LONG * (LONG + 1) / 2),
}

# option -> direction -> ratio (to plain, per FLOP), seconds, plain_seconds
Costs = dict[str, dict[str, dict[str, float]]]


def option_calls(library: Library, kernel: str, directions: list[str]) -> dict[str, list[Ours]]:
    """Plain, and each option alone, at head_dim 128 and seqlen 4096; long: causal at 16384; two sets."""
    batch, seqlen, heads, dim = 4, 4096, 16, 128
    cuda = {"device": "cuda"}

    def packed(lengths: Sequence[int]) -> dict[str, object]:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, **cuda)
        longest = max(lengths)
        return {
            "cu_seqlens_q": cu,
            "cu_seqlens_k": cu,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

    varied: dict[str, dict[str, object]] = {
        "plain": {},
        "window": {"window_left": seqlen, "window_right": seqlen},
        "alibi": {"alibi_slopes": torch.rand(heads, **cuda) * 0.1},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.randn(heads, **cuda)},
        "varlen": packed([seqlen] * batch),
        "varlen_mixed": packed(MIXED),
        "gqa": {},
        "dropout": {"dropout_p": 0.1, "seed": 1},
        "bias": {"bias": torch.randn((heads, seqlen, seqlen), dtype=torch.bfloat16, **cuda)},
        "long": {"causal": True},
        "window_1024": {"causal": True, "window_left": 1024},
    }
    calls = {}
    for name, options in varied.items():
        shape = (1, LONG) if name in (*BASES, *BASES.values()) else (batch, seqlen)
        sets = [Data(*shape, heads, dim, heads // 8 if name == "gqa" else None) for _ in range(2)]
        for data in sets if "cu_seqlens_q" in options else []:
            for tensor in ("q", "k", "v", "dout"):
                setattr(data, tensor, getattr(data, tensor).flatten(0, 1))
            data.lse_shape = (heads, batch * seqlen)
        calls[name] = [Ours(library, data, directions, kernel=kernel, **options) for data in sets]
    return calls


def option_costs(library: Library, kernel: str, directions: list[str], turns: int) -> Costs:
    """Backward is without dbias and dsinks."""
    calls = option_calls(library, kernel, directions)
    costs: Costs = {name: {} for name in calls if name not in ("plain", *BASES.values())}
    for each in calls.values():
        for one in each:
            one.forward.run()
    for direction in directions:
        for name in costs:
            base = BASES.get(name, "plain")
            sides = {side: [getattr(one, direction).run for one in calls[side]] for side in (base, name)}
            seconds = alternate(sides, turns)
            costs[name][direction] = {
                "ratio": median_ratio(seconds[name], seconds[base]) / WORK.get(name, 1.0),
                "seconds": statistics.median(seconds[name]),
                "plain_seconds": statistics.median(seconds[base]),
            }
    return costs


def workspaces(library: Library, kernel: str, directions: list[str]) -> list[dict[str, float]]:
    """Bytes beyond the tensors, at seqlen 4096; backward may have dq in float32, delta and 1 MB."""
    found = []
    for head_dim in HEAD_DIMS:
        heads = HIDDEN // head_dim
        call = Ours(library, Data(TOKENS // 4096, 4096, heads, head_dim), directions, kernel=kernel)
        found.append(
            {
                "head_dim": head_dim,
                "forward": call.forward.workspace_bytes,
                "backward": call.backward.workspace_bytes if call.backward else 0,
                "backward_allowed": TOKENS * HIDDEN * 4 + TOKENS * heads * 4 + (1 << 20),
            }
        )
    return found


def probe_jit(path: Path, kernel: str, directions: list[str]) -> None:
    """What this file does as a program, for jit_times(): the seconds that preparing takes, as JSON."""
    library = Library(path)
    torch.cuda.init()
    result = {}
    for direction in directions:
        call = getattr(Ours(library, Data(1, 512, 2, 128), directions, kernel=kernel), direction)
        begin = time.perf_counter()
        call.prepare()
        first = time.perf_counter()
        for _ in range(1000):
            call.prepare()
        again = (time.perf_counter() - first) / 1000
        facts = call.explain()
        result[direction] = {
            "seconds": first - begin,
            "again_seconds": again,
            "cubin": facts.get("cubin"),
            "cubin_seconds": facts.get("cubin_seconds"),
        }
    print(json.dumps(result))


def jit_times(path: Path, kernel: str, directions: list[str]) -> dict[str, object]:
    """Compiled anew, then from the disk cache, in fresh processes without a pack."""
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TESSERA_CACHE_DIR": folder, "TESSERA_PACK": "/nonexistent"}
        for name in ("cold", "cached"):
            command = [sys.executable, __file__, str(path), kernel, *directions]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            times[name] = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
    return times


def goals_of(kernel: str) -> dict[str, float]:
    return GOALS if kernel == "cuda_sm80" else HOPPER_GOALS


def figures_of(costs: Costs, kernel: str) -> list[dict[str, object]]:
    figures = []
    for option, by_direction in costs.items():
        for direction, cost in by_direction.items():
            limit = goals_of(kernel)[option] if direction == "forward" else None
            figures.append(figure_of(f"{direction} with {option} / plain", cost["ratio"], "<=", limit))
    return figures


def print_costs(costs: Costs, kernel: str) -> None:
    goals = goals_of(kernel)
    print("\noption / plain  forward    wanted  met  backward")
    for option, by_direction in costs.items():
        forward, backward = (by_direction.get(d, {}).get("ratio", math.nan) for d in DIRECTIONS)
        met = "" if math.isnan(forward) else "yes" if forward <= goals[option] else "NO"
        print(f"{option:14}  {forward:7.3f}  {f'<= {goals[option]:.3f}':>8}  {met:3}  {backward:8.3f}")


def print_workspaces(rows: list[dict[str, float]]) -> None:
    for row in rows:
        met = "yes" if row["forward"] == 0 and row["backward"] <= row["backward_allowed"] else "NO"
        print(
            f"workspace d{row['head_dim']}: forward {row['forward'] / 1e6:.2f} MB (wanted 0), backward "
            f"{row['backward'] / 1e6:.2f} MB (<= {row['backward_allowed'] / 1e6:.2f})  {met}"
        )


def print_jit_times(jit: dict[str, dict[str, object]]) -> None:
    for name, origin, limit in (("cold", "compiled", 8.0), ("cached", "cache", 0.03)):
        times = jit[name]
        if "error" in times:
            print(f"JIT {name}: failed: {times['error'].strip().splitlines()[-1:]}")
            continue
        slowest = max(t["cubin_seconds"] or 0.0 for t in times.values())
        origins = ", ".join(
            f"{d} {t['cubin']} {(t['cubin_seconds'] or 0) * 1e3:.1f} ms" for d, t in times.items()
        )
        again = max(t["again_seconds"] for t in times.values()) * 1e6
        met = "yes" if slowest <= limit and all(t["cubin"] == origin for t in times.values()) else "NO"
        print(f"JIT {name}: {origins}; prepare() again {again:.1f} us  {met}")


def print_results(result: dict[str, object]) -> None:
    print_costs(result["options"], result["kernel"])
    print()
    print_workspaces(result["workspaces"])
    print_jit_times(result["jit"])


if __name__ == "__main__":
    probe_jit(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
