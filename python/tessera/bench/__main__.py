"""`python -m tessera.bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("tessera.bench measures with PyTorch, which is not installed: pip install torch")

from . import cells, host_time, plots, report, sides, train_step

FAILED, SLOWER = 1, 3  # exit status; 2 is argparse's


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tessera.bench",
        description="Tessera beside every other attention that can be imported here, taking turns.",
        epilog=f"Exit status: {FAILED} where Tessera refused a cell or computed it wrongly, {SLOWER} where "
        "--compare found something slower. Lists have commas.",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: a GPU if there is one")
    parser.add_argument(
        "--dtype", type=names, dest="dtypes", help=f"{', '.join(cells.DTYPES)}; default bf16, on a CPU fp32"
    )
    parser.add_argument("--head-dim", type=numbers, dest="head_dims", default=list(cells.HEAD_DIMS))
    parser.add_argument("--seqlen", type=numbers, dest="seqlens")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--direction", choices=(*cells.DIRECTIONS, "both"), default="both")
    parser.add_argument("--tokens", type=int, help="batch x seqlen; default 16384, on a CPU 4096")
    parser.add_argument("--hidden", type=int, help="heads x head_dim; default 2048, on a CPU 512")
    parser.add_argument("--quick", action="store_true", help="fewer sequence lengths and turns")
    parser.add_argument("--peers", type=names, help=f"of {', '.join(sides.PEERS)}; 'none': Tessera alone")
    parser.add_argument("--kernel", help="the kernel that Tessera is made to use")
    parser.add_argument("--turns", type=int, help="of each side in a cell; default 15, on a CPU 7")
    parser.add_argument("--threads", type=int, help="of every side, on a CPU; default: PyTorch's")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--no-plots", action="store_true")

    step = parser.add_argument_group("a training step")
    step.add_argument(
        "--train-step", action="store_true", help="time a GPT's training step instead of the grid"
    )
    step.add_argument("--layers", type=int, help="default 24, on a CPU 4")
    step.add_argument("--batch", type=int, help="default 4, on a CPU 2")

    parser.add_argument(
        "--host-time",
        action="store_true",
        help="time what a tiny call costs the host, on the CPU and the GPU",
    )

    then = parser.add_argument_group("then and now")
    then.add_argument("--compare", type=Path, metavar="OLD.json", help="say what got slower since")
    then.add_argument("--threshold", type=float, default=0.1, help="how much slower; default 0.1 = 10 %%")
    then.add_argument(
        "--relative", action="store_true", help="judge by the change against the peers' in the cell"
    )
    then.add_argument(
        "--load", type=Path, metavar="NEW.json", help="measure nothing: show, plot, compare this"
    )

    args = parser.parse_args(argv)
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in what depends on the device; an error for what is unknown."""
    try:
        args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        parser.error(f"--device: {sides.short(error)}")
    gpu = args.device.type == "cuda"
    if gpu and args.device.index is None:
        args.device = torch.device("cuda:0")
    if args.device.type not in ("cuda", "cpu"):
        parser.error(f"--device: {args.device} is neither cuda nor cpu")
    if gpu and not torch.cuda.is_available() and not args.load:
        parser.error("--device: this PyTorch sees no GPU")

    sizes = cells.GPU_SIZES if gpu else cells.CPU_SIZES
    args.buffers = sizes.buffers
    args.tokens, args.hidden = args.tokens or sizes.tokens, args.hidden or sizes.hidden
    args.dtypes = args.dtypes or [sizes.dtype]
    args.step_seqlen = args.seqlens[0] if args.seqlens else None
    args.seqlens = args.seqlens or list(sizes.quick_seqlens if args.quick else sizes.seqlens)
    args.turns = args.turns or ((5 if gpu else 3) if args.quick else (15 if gpu else 7))
    args.masks = {"yes": [True], "no": [False], "both": [False, True]}[args.causal]
    args.directions = list(cells.DIRECTIONS) if args.direction == "both" else [args.direction]
    default = sides.TRAIN_PEERS if args.train_step else sides.GRID_PEERS
    args.peers_given = bool(args.peers)
    args.peers = [] if args.peers == ["none"] else args.peers or default
    for option, given, known in (
        ("--dtype", args.dtypes, cells.DTYPES),
        ("--peers", args.peers, sides.PEERS),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{option}: {', '.join(unknown)} is none of {', '.join(known)}")
    for option, values in (
        ("--turns", [args.turns]),
        ("--seqlen", args.seqlens),
        ("--head-dim", args.head_dims),
    ):
        if min(values) < 1:
            parser.error(f"{option}: {min(values)}, expected a positive number")
    for option, path in (("--compare", args.compare), ("--load", args.load)):
        if path and not path.is_file():
            parser.error(f"{option}: there is no file {path}")


def settings(args: argparse.Namespace) -> report.Json:
    kept = ("dtypes", "head_dims", "seqlens", "directions", "tokens", "hidden", "turns", "kernel")
    return {name: getattr(args, name) for name in kept}


def measure_grid(args: argparse.Namespace, all_sides: list[sides.Side], result: report.Json) -> None:
    running = [side for side in all_sides if side.attention]
    shapes = list(cells.grid(args.dtypes, args.head_dims, args.masks, args.seqlens, args.tokens, args.hidden))
    done: list[cells.Cell] = []
    with report.progress(len(shapes)) as begin:
        for shape in shapes:
            mask = ", causal" if shape.causal else ""
            begin(f"{shape.dtype}, head_dim {shape.head_dim}, seqlen {shape.seqlen}{mask}")
            done += cells.measure(shape, running, args.directions, args.turns, args.buffers, args.device)
    result["cells"] = [asdict(cell) | {"flop": cell.flop} for cell in done]


def measure_train_step(args: argparse.Namespace, all_sides: list[sides.Side], result: report.Json) -> None:
    base = train_step.GPU_SHAPE if args.device.type == "cuda" else train_step.CPU_SHAPE
    given = {"layers": args.layers, "batch": args.batch, "seqlen": args.step_seqlen}
    shape = replace(base, **{name: value for name, value in given.items() if value})
    running = [side for side in all_sides if side.attention]
    dtype = args.dtypes[0]
    step = train_step.measure(shape, running, dtype, cells.DTYPES[dtype], args.turns, args.device)
    result["train_step"] = step.as_dict()


def measure_host_time(args: argparse.Namespace, _: list[sides.Side], result: report.Json) -> None:
    devices = dict.fromkeys([torch.device("cpu"), args.device])
    result["host_time"] = [
        host_time.measure(device, dtype, cells.DTYPES[dtype], args.turns).as_dict()
        for device in devices
        for dtype in (("fp32", "bf16") if device.type == "cpu" else ("bf16",))
    ]


MEASURES = {
    "grid": (measure_grid, report.print_grid),
    "train_step": (measure_train_step, report.print_train_step),
    "host_time": (measure_host_time, report.print_host_time),
}


def side_of(name: str, args: argparse.Namespace) -> sides.Side:
    if name == "flex" and args.quick and not args.peers_given:
        why = "left out by --quick, since it compiles for every shape; '--peers flex' takes it in"
        return sides.Side(name, sides.PEERS[name].label, missing=why)
    return sides.peer(name, args.device)


def run(args: argparse.Namespace) -> report.Json:
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")  # the check's float32 is float32
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    elif args.threads:
        torch.set_num_threads(args.threads)
    os.environ["TESSERA_NUM_THREADS"] = str(torch.get_num_threads())
    kind = "host_time" if args.host_time else "train_step" if args.train_step else "grid"
    peers = [] if args.host_time else args.peers  # its one peer is its own
    all_sides = [sides.ours(args.kernel), *(side_of(name, args) for name in peers)]
    result = report.header(kind, all_sides, args.device, settings(args))
    report.print_header(result)
    begin = time.perf_counter()
    MEASURES[kind][0](args, all_sides, result)
    result["clocks"]["after"] = report.clocks(args.device)
    result["seconds"] = time.perf_counter() - begin
    return result


def failures(result: report.Json) -> list[str]:
    """Where Tessera itself refused or was wrong."""
    parts = {report.cell_name(cell): cell for cell in result.get("cells", [])}
    if step := result.get("train_step"):
        parts[step["name"]] = step
    return [f"{name}: {p['refused'][sides.OURS]}" for name, p in parts.items() if sides.OURS in p["refused"]]


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.load:
        result = json.loads(args.load.read_text(encoding="utf-8"))
        stem = args.out / args.load.stem
        report.print_header(result)
    else:
        result = run(args)
        stem = args.out / f"tessera-bench-{result['kind']}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        report.write(result, stem.with_name(stem.name + ".json"))
    MEASURES[result["kind"]][1](result)
    args.out.mkdir(parents=True, exist_ok=True)
    written = [] if args.load else [stem.with_name(stem.name + ".json")]
    if not args.no_plots and result["kind"] in plots.PLOTS:
        written += plots.PLOTS[result["kind"]](result, stem)
    for path in written:
        print(f"wrote {path}")

    slower = 0
    if args.compare:
        old = json.loads(args.compare.read_text(encoding="utf-8"))
        slower = report.compare(old, result, args.threshold, args.relative)
    for failure in (failed := failures(result)):
        print(f"FAILED: {failure}")
    return FAILED if failed else SLOWER if slower else 0


if __name__ == "__main__":
    sys.exit(main())
