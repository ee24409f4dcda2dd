"""How sides take turns: every side is timed once in a turn, and who begins changes from turn to turn.

What slows the machine for a while then slows all of them. On a GPU a turn is timed by CUDA events, behind a
kernel that keeps the GPU busy while the turn is queued, so that the host's overhead is not in it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], object]
Clock = Callable[[Sequence[Run]], float]  # seconds that the calls take together

GPU_TURN = 2.5e-3  # seconds of work that a side gets in a turn, at least ...
CPU_TURN = 30e-3
MOST_LAUNCHES = 12  # ... unless that takes more calls than this
PLUG_CYCLES = 1_500_000  # some 0.8 ms: enough to queue a turn behind
CPU_PAUSE = 10e-3


def gpu_seconds(calls: Sequence[Run]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(PLUG_CYCLES)
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def cpu_seconds(calls: Sequence[Run]) -> float:
    # The threads of whoever ran before spin for a while on the same cores: let them go to sleep. Where calls
    # are short, an untimed one wakes this side's own threads.
    time.sleep(CPU_PAUSE)
    if len(calls) > 1:
        calls[-1]()
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def clock_of(device: torch.device) -> Clock:
    return gpu_seconds if device.type == "cuda" else cpu_seconds


def take_turns(sides: dict[str, list[Run]], turns: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds a call, for each side and turn. A side has one run for each set of buffers; they rotate."""
    clock, enough = clock_of(device), GPU_TURN if device.type == "cuda" else CPU_TURN
    launches = {}
    for name, runs in sides.items():
        for run in runs:  # warm-up, and whatever is compiled or allocated on first use
            run()
        launches[name] = max(1, min(MOST_LAUNCHES, math.ceil(enough / max(clock(runs[:1]), 1e-6))))
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            runs, count = sides[name], launches[name]
            calls = [runs[(turn * count + i) % len(runs)] for i in range(count)]
            seconds[name].append(clock(calls) / count)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, and the tenth and ninetieth percentile (of few turns: the extremes)."""
    ordered = sorted(seconds)
    low = round(0.1 * (len(ordered) - 1))
    return {"seconds": statistics.median(ordered), "p10": ordered[low], "p90": ordered[-1 - low]}


def median_ratio(above: list[float], below: list[float]) -> float:
    """Turn by turn, so that a slow spell of the machine cancels out."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
