#!/usr/bin/env python3
"""Draws what `tessera demo --out` measured: time and peak memory against sequence length."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

TESSERA, STANDARD = "#0b6e99", "#d1495b"
STYLES = {"forward": ("-", "o"), "backward": ("--", "s")}


def seconds_text(value: float, _: object = None) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size * 0.999:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"


def bytes_text(value: float, _: object = None) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size * 0.999:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def draw_curves(axis: Axes, points: list[dict[str, Any]], quantity: str, floor: float) -> None:
    for implementation, colour in (("standard", STANDARD), ("tessera", TESSERA)):
        name = "Tessera" if implementation == "tessera" else "standard attention"
        for direction, (line, marker) in STYLES.items():
            part = [p for p in points if p["direction"] == direction and implementation in p]
            axis.plot(
                [p["seqlen"] for p in part],
                [max(p[implementation][quantity], floor) for p in part],
                line,
                marker=marker,
                markersize=5,
                linewidth=2,
                color=colour,
                label=f"{name}, {direction}",
            )


def draw_forecast(axis: Axes, points: list[dict[str, Any]]) -> None:
    """What standard attention would have needed, where it was not run: it is known exactly."""
    for direction, (line, marker) in STYLES.items():
        part = [p for p in points if p["direction"] == direction]
        missing = [p for p in part if "standard" not in p]
        measured = [p for p in part if "standard" in p][-1:]
        if missing and measured:
            x = [p["seqlen"] for p in measured + missing]
            y = [measured[0]["standard"]["extra_bytes"], *(p["standard_bytes"] for p in missing)]
            axis.plot(
                x,
                y,
                line,
                marker=marker,
                markersize=5,
                linewidth=1,
                color=STANDARD,
                alpha=0.35,
                markevery=slice(1, None),
                markerfacecolor="white",
            )


def finish(axis: Axes, title: str, seqlens: list[int], text: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(seqlens, [f"{n:,}" for n in seqlens])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(text))
    axis.set_xlabel("sequence length")
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def annotate_gap(axis: Axes, points: list[dict[str, Any]]) -> None:
    """The factor between the two, at the longest sequence that both ran backward."""
    both = [p for p in points if p["direction"] == "backward" and "standard" in p]
    if not both:
        return
    last = max(both, key=lambda p: p["seqlen"])
    high, low = last["standard"]["extra_bytes"], max(last["tessera"]["extra_bytes"], 1)
    axis.annotate(
        "",
        (last["seqlen"], low * 1.25),
        (last["seqlen"], high / 1.25),
        arrowprops={"arrowstyle": "<->", "color": "#555555"},
    )
    axis.text(
        last["seqlen"] * 0.93,
        (high * low) ** 0.5,
        f"{high / low:,.0f}× less",
        ha="right",
        va="center",
        color="#333333",
    )


def draw(result: dict[str, Any], path: Path) -> None:
    points = result["points"]
    seqlens = sorted({p["seqlen"] for p in points})
    figure, (time_axis, memory_axis) = pyplot.subplots(1, 2, figsize=(12, 5))
    draw_curves(time_axis, points, "seconds", 0.0)
    draw_curves(memory_axis, points, "extra_bytes", 1e5)
    draw_forecast(memory_axis, points)
    annotate_gap(memory_axis, points)
    finish(time_axis, "Time of one call", seqlens, seconds_text)
    finish(memory_axis, "Peak memory above inputs and outputs", seqlens, bytes_text)
    handles, labels = time_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    machine = result["machine"]
    figure.suptitle(
        f"Exact attention, fp32, {result['heads']} heads of {result['head_dim']}, "
        f"{machine['threads']} threads of {machine['cpu']}",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description="draw the demo's figure")
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.json.read_text(encoding="utf-8")), arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
