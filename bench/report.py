"""What compare.py and gpu_compare.py report alike: operations, figures and their goals, the plot's frame.

A cell is either file's `Cell`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def flops(cell: Any) -> float:
    """A causal mask leaves half; backward has five products, forward two."""
    forward = 4.0 * cell.batch * cell.heads * cell.seqlen**2 * cell.head_dim / (2 if cell.causal else 1)
    return forward * (1 if cell.direction == "forward" else 2.5)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def figure_of(name: str, value: float, comparison: str, limit: float | None) -> dict[str, object]:
    """As `tessera bench` writes them. Without a limit: for information."""
    met = None if limit is None else value >= limit if comparison == ">=" else value <= limit
    return {"name": name, "value": value, "comparison": comparison, "limit": limit, "unit": "x", "met": met}


def print_figures(figures: list[dict[str, object]]) -> None:
    width = max(len(str(figure["name"])) for figure in figures)
    print(f"{'figure':{width}}   measured      wanted  met")
    for f in figures:
        wanted = f"{f['comparison']} {f['limit']:.4g} {f['unit']}"
        print(f"{f['name']:{width}}  {f['value']:9.3f}  {wanted:>10}  {'yes' if f['met'] else 'NO'}")


def load_pyplot() -> ModuleType | None:
    """For files, not windows; None, and a word about it, where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def label_cells(axis: Any, cells: list[Any]) -> None:
    """The x axis: a tick a cell."""
    labels = [f"d{c.head_dim}{' c' if c.causal else ''} {c.seqlen}" for c in cells]
    axis.set_xticks(range(len(cells)), labels, rotation=90, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
