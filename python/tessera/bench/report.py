"""What a run leaves behind: tables, JSON, and the comparison with an earlier run's JSON.

rich is optional: without it the same tables are plain text.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tessera

from .sides import OURS, Side

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    Console = None

Json = dict[str, Any]

# -------------------------------------------------------------------------------- what ran where


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str | None:
    """Of the source tree that this file is in; None where it was installed."""
    root = Path(__file__).resolve().parents[3]
    described = output_of("git", "-C", str(root), "describe", "--always", "--dirty")
    known = described if (root / ".git").exists() else ""
    return os.environ.get("TESSERA_COMMIT") or known or None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine(device: torch.device) -> Json:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about: Json = {"cpu": cpu_name(), "cores": cores, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    return {
        "device": about.get("gpu", about["cpu"]),
        **about,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> Json:
    found: Json = {"tessera": tessera.__version__, "torch": torch.__version__}
    found["python"] = platform.python_version()
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def clocks(device: torch.device) -> Json | None:
    """What nvidia-smi says about the GPU; None where there is none."""
    if device.type != "cuda":
        return None
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    if uuid := getattr(torch.cuda.get_device_properties(device), "uuid", None):
        command.append(f"--id=GPU-{uuid}")
    answer = output_of(*command)
    if not answer:
        return None
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    return dict(zip(asked.split(","), values, strict=False))


def header(kind: str, sides: list[Side], device: torch.device, settings: Json) -> Json:
    """Everything that does not depend on a measurement."""
    return {
        "kind": kind,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(device),
        "versions": versions(),
        "clocks": {"before": clocks(device)},
        "settings": settings,
        "peers": {
            side.name: {"label": side.label, "version": side.version, "missing": side.missing or None}
            for side in sides
        },
    }


def write(result: Json, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------- the screen


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that is called with the name of each thing as it begins."""
    if Console is None or not sys.stdout.isatty():
        done = 0

        def say(text: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {text}", flush=True)

        yield say
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True, refresh_per_second=1) as bar:  # it redraws while others are timed
        task = bar.add_task("", total=total)
        begun = 0

        def advance(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield advance


def print_table(title: str, names: list[str], rows: list[list[str]]) -> None:
    if Console is not None and sys.stdout.isatty():
        table = Table(*names, title=title, title_justify="left", header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    print(f"\n{title}")
    for row in [names, *rows]:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


class Footnotes:
    """Numbers for reasons, the same reason once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def print(self) -> None:
        for number, text in enumerate(self.texts, 1):
            print(f"[{number}] {text}")


def label(result: Json, name: str) -> str:
    return result["peers"][name]["label"]


def present(result: Json) -> list[str]:
    """The sides that are here, ours first."""
    return [name for name, peer in result["peers"].items() if not peer["missing"]]


def unit_of(result: Json) -> tuple[str, float]:
    """Of speeds, and how many there are in a TFLOP/s."""
    return ("TFLOP/s", 1.0) if "gpu" in result["machine"] else ("GFLOP/s", 1e3)


def print_header(result: Json) -> None:
    about, found = result["machine"], result["versions"]
    threads = "" if "gpu" in about else f", threads: {about['threads']}"
    at = f" at {result['commit']}" if result["commit"] else ""
    print(f"Tessera {found['tessera']}{at} on {about['device']}{threads}, PyTorch {found['torch']}")
    for name, peer in result["peers"].items():
        if peer["missing"]:
            print(f"  not here: {name} ({peer['label']}): {peer['missing']}")


def print_grid(result: Json) -> None:
    cells = result["cells"]
    sides = present(result)
    unit, scale = unit_of(result)
    for dtype, direction in dict.fromkeys((cell["dtype"], cell["direction"]) for cell in cells):
        part = [cell for cell in cells if (cell["dtype"], cell["direction"]) == (dtype, direction)]
        notes = Footnotes()
        rows = []
        for cell in part:
            row = [str(cell["head_dim"]), "yes" if cell["causal"] else "no", str(cell["seqlen"])]
            for name in sides:
                if name in cell["sides"]:
                    row.append(f"{cell['sides'][name]['tflops'] * scale:.0f}")
                else:
                    row.append(notes.mark(f"{label(result, name)}: {cell['refused'].get(name, 'not run')}"))
            best = best_speedup(cell)
            rows.append([*row, "" if best is None else f"{best:.2f}"])
        names = ["head_dim", "causal", "seqlen", *(label(result, name) for name in sides), "/ best peer"]
        print_table(f"{direction}, {dtype}, {unit}", names, rows)
        notes.print()
    print_means(result)


def best_speedup(cell: Json) -> float | None:
    """Our speed over that of the fastest peer."""
    return min((side["speedup"] for side in cell["sides"].values() if "speedup" in side), default=None)


def print_means(result: Json) -> None:
    """Our speed over each peer's: geometric mean and worst cell."""
    groups = dict.fromkeys((c["dtype"], c["direction"], c["head_dim"]) for c in result["cells"])
    peers = [name for name in present(result) if name != OURS]
    rows = []
    for group in groups:
        part = [c for c in result["cells"] if (c["dtype"], c["direction"], c["head_dim"]) == group]
        row = [str(each) for each in group]
        for name in peers:
            ratios = [c["sides"][name]["speedup"] for c in part if "speedup" in c["sides"].get(name, {})]
            row.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "–")
        rows.append(row)
    if peers:
        title = "Tessera's speed over theirs: geometric mean (worst cell)"
        print_table(title, ["dtype", "direction", "head_dim", *(label(result, name) for name in peers)], rows)


def print_train_step(result: Json) -> None:
    step = result["train_step"]
    unit, scale = unit_of(result)
    notes = Footnotes()
    rows = []
    for name in present(result):
        if side := step["sides"].get(name):
            rows.append(
                [
                    label(result, name),
                    f"{side['seconds'] * 1e3:.1f}",
                    f"{side['tokens_per_second']:.0f}",
                    f"{side['model_tflops'] * scale:.3g}",
                    f"{side['loss']:.4f}",
                    f"{side['speedup']:.2f}" if "speedup" in side else "",
                ]
            )
        else:
            mark = notes.mark(f"{label(result, name)}: {step['refused'].get(name, 'not run')}")
            rows.append([label(result, name), mark, "", "", "", ""])
    names = ["attention", "ms", "tokens/s", f"model {unit}", "loss", "Tessera / it"]
    print_table(step["name"], names, rows)
    notes.print()


def print_host_time(result: Json) -> None:
    rows = []
    for each in result["host_time"]:
        ours, sdpa = each["sides"][OURS], each["sides"]["sdpa"]
        times = [f"{side['seconds'] * 1e6:.2f}" for side in (ours, sdpa)]
        rows.append([each["device"], each["dtype"], *times, f"{sdpa['speedup']:.2f}"])
    names = ["device", "dtype", "Tessera", "SDPA", "SDPA / Tessera"]
    print_table("host time of a call, microseconds", names, rows)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# -------------------------------------------------------------------------------- then and now


def cell_name(cell: Json) -> str:
    mask = " causal" if cell["causal"] else ""
    shape = f"{cell['batch']} x {cell['seqlen']} x {cell['heads']} x {cell['head_dim']}"
    return f"{cell['dtype']} {cell['direction']} {shape}{mask}"


def timings(result: Json) -> dict[str, dict[str, float]]:
    """What was measured -> side -> seconds."""
    parts = {cell_name(cell): cell["sides"] for cell in result.get("cells", [])}
    if step := result.get("train_step"):
        parts[step["name"]] = step["sides"]
    parts |= {each["name"]: each["sides"] for each in result.get("host_time", [])}
    return {name: {side: each["seconds"] for side, each in sides.items()} for name, sides in parts.items()}


def compare(old: Json, new: Json, threshold: float, relative: bool) -> int:
    """Prints what changed by more than the threshold, and returns how much of it got slower.

    With `relative`, a change is ours divided by the peers' in the same cell: the machine's own cancels out.
    """
    before, after = timings(old), timings(new)
    both = [name for name in after if OURS in after[name] and OURS in before.get(name, {})]
    lost = [name for name in after if OURS not in after[name] and OURS in before.get(name, {})]
    print(f"\nagainst {old['date']}, {old['commit'] or old['versions']['tessera']}: {len(both)} in both")
    if old["machine"]["device"] != new["machine"]["device"]:
        print(f"another machine: {old['machine']['device']}, now {new['machine']['device']}")
    rows, slower = [], 0
    for name in both:
        change = after[name][OURS] / before[name][OURS]
        common = [side for side in after[name] if side != OURS and side in before[name]]
        theirs = geometric_mean(after[name][s] / before[name][s] for s in common) if common else None
        judged = change / theirs if relative and theirs else change
        if judged > 1 + threshold or judged < 1 / (1 + threshold):
            verdict = "SLOWER" if judged > 1 else "faster"
            slower += judged > 1
            times = [f"{t * 1e3:.3g} ms" for t in (before[name][OURS], after[name][OURS])]
            rows.append([name, *times, f"{change:.2f}", f"{theirs:.2f}" if theirs else "", verdict])
    if rows:
        print_table("time, now over then", ["what", "then", "now", "Tessera", "its peers", ""], rows)
    for name in lost:
        print(f"no longer measured: {name}")
    print(f"{slower} of {len(both)} slower by more than {threshold:.0%}")
    if not both:
        print("nothing in common to compare")
    return slower + len(lost)
