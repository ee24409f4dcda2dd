"""Grouped bars, speed over sequence length: one panel for each head_dim, with and without a causal mask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .report import Json, label, present, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "tessera": "#0b6e99",
    "sdpa-flash": "#9aa5ab",
    "sdpa-cudnn": "#e08e0b",
    "sdpa-efficient": "#c9b79c",
    "sdpa-math": "#d9d9d9",
    "flex": "#8e6c8a",
    "fa2": "#5b8c5a",
    "fa3": "#c8553d",
}
FORMATS = (".png", ".svg")


def colour(name: str) -> str:
    return COLOURS.get(name, "#444444")


def pyplot_or_none() -> object | None:
    """For files, not windows."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plots (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_panel(axis: Axes, cells: list[Json], result: Json, scale: float) -> None:
    names = [name for name in present(result) if any(name in cell["sides"] for cell in cells)]
    width = 0.84 / max(1, len(names))
    text_style = {"fontsize": 7} if len(names) <= 3 else {"fontsize": 6, "rotation": 90}
    for i, name in enumerate(names):
        heights = [cell["sides"].get(name, {}).get("tflops", 0) * scale for cell in cells]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(cells))]
        axis.bar(places, heights, width * 0.94, color=colour(name), label=label(result, name))
        for x, height in zip(places, heights, strict=True):
            text = f"{height:.0f}" if height else "–"
            axis.text(x, height, text, ha="center", va="bottom", **text_style)
    axis.set_xticks(range(len(cells)), [length_text(cell["seqlen"]) for cell in cells])
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.14)
    if absent := [label(result, name) for name in present(result) if name not in names]:
        axis.text(0.01, 0.99, f"not run: {', '.join(absent)}", transform=axis.transAxes, va="top", fontsize=7)


def length_text(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def plot_grid(result: Json, stem: Path) -> list[Path]:
    """A figure for each dtype and direction, as PNG and SVG."""
    if (pyplot := pyplot_or_none()) is None:
        return []
    unit, scale = unit_of(result)
    cells, written = result["cells"], []
    for dtype, direction in dict.fromkeys((cell["dtype"], cell["direction"]) for cell in cells):
        part = [cell for cell in cells if (cell["dtype"], cell["direction"]) == (dtype, direction)]
        head_dims = list(dict.fromkeys(cell["head_dim"] for cell in part))
        masks = list(dict.fromkeys(cell["causal"] for cell in part))
        size = (6.2 * len(head_dims), 3.5 * len(masks) + 0.9)
        figure, axes = pyplot.subplots(len(masks), len(head_dims), figsize=size, squeeze=False, sharey="col")
        for row, causal in enumerate(masks):
            for column, head_dim in enumerate(head_dims):
                axis = axes[row][column]
                panel = [c for c in part if (c["head_dim"], c["causal"]) == (head_dim, causal)]
                draw_panel(axis, panel, result, scale)
                axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'no mask'}", fontsize=10)
            axes[row][0].set_ylabel(unit)
        for axis in axes[-1]:
            axis.set_xlabel("sequence length")
        shown = [axis.get_legend_handles_labels() for axis in axes.flat]
        legend = {text: handle for pair in shown for handle, text in zip(*pair, strict=True)}
        where = result["machine"]["device"]
        figure.suptitle(f"Attention {direction}, {dtype}, {where}: higher is faster", y=0.995)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.965), "ncols": 8}
        figure.legend(legend.values(), legend.keys(), frameon=False, **place)
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        written += save(figure, stem.with_name(f"{stem.name}-{dtype}-{direction}"))
        pyplot.close(figure)
    return written


def plot_train_step(result: Json, stem: Path) -> list[Path]:
    if (pyplot := pyplot_or_none()) is None:
        return []
    step = result["train_step"]
    names = [name for name in present(result) if name in step["sides"]]
    heights = [step["sides"][name]["tokens_per_second"] for name in names]
    figure, axis = pyplot.subplots(figsize=(1.6 * len(names) + 2.4, 3.8))
    bars = axis.bar([label(result, name) for name in names], heights, color=[colour(name) for name in names])
    axis.bar_label(bars, [f"{height:,.0f}" for height in heights])
    axis.set_ylabel("tokens/s")
    axis.set_title(f"{step['name']}\n{result['machine']['device']}", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return save(figure, stem)


def save(figure: object, stem: Path) -> list[Path]:
    paths = [stem.with_name(stem.name + suffix) for suffix in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


PLOTS = {"grid": plot_grid, "train_step": plot_train_step}
