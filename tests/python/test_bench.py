"""python -m tessera.bench, on shapes so small that only its bookkeeping is tested."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

import tessera  # noqa: E402
from tessera.bench import __main__ as bench  # noqa: E402
from tessera.bench import cells, report, sides, timing, train_step  # noqa: E402

CPU = torch.device("cpu")
TINY = shlex.split("--device cpu --tokens 128 --hidden 64 --head-dim 32 --seqlen 64 --turns 2 --threads 1")
PLOTS = importlib.util.find_spec("matplotlib") is not None


def run(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = bench.main([*TINY, "--out", str(out), *options])
    (path,) = out.glob("*.json")
    return status, json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    status, found = run(folder, "--peers", "sdpa-flash,sdpa-math,sdpa-cudnn,fa2,fa3")
    assert status == 0
    return found


def saved(value: dict[str, Any], path: Path) -> str:
    report.write(value, path)
    return str(path)


# -------------------------------------------------------------------------------- the grid


def test_json_says_what_ran_where(result: dict[str, Any]) -> None:
    assert result["kind"] == "grid"
    assert result["versions"]["tessera"] == tessera.__version__
    assert result["versions"]["torch"] == torch.__version__
    assert {"device", "cpu", "cores", "threads", "system"} <= result["machine"].keys()
    assert {"date", "commit", "clocks", "settings", "seconds"} <= result.keys()
    assert result["settings"]["turns"] == 2


def test_every_cell_has_every_side(result: dict[str, Any]) -> None:
    found = {(cell["direction"], cell["causal"]) for cell in result["cells"]}
    assert found == {(d, c) for d in ("forward", "backward") for c in (False, True)}
    for cell in result["cells"]:
        assert (cell["batch"], cell["seqlen"], cell["heads"], cell["head_dim"]) == (2, 64, 2, 32)
        assert cell["sides"].keys() == {"tessera", "sdpa-flash", "sdpa-math"}
        assert cell["kernel"].startswith("cpu_")
        for side in cell["sides"].values():
            assert 0 < side["p10"] <= side["seconds"] <= side["p90"]
            assert side["tflops"] == pytest.approx(cell["flop"] / side["seconds"] / 1e12)
        assert cell["sides"]["sdpa-flash"]["speedup"] > 0


def test_missing_peers_are_named(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    missing = {name: peer["missing"] for name, peer in result["peers"].items() if peer["missing"]}
    assert missing.keys() == {"sdpa-cudnn", "fa2", "fa3"}
    report.print_header(result)
    printed = capsys.readouterr().out
    for name, reason in missing.items():
        assert reason
        assert any(name in line and reason in line for line in printed.splitlines())


def test_a_peer_that_cannot_be_imported_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sides.PEERS, "absent", sides.Peer("Absent", "no_such_module", _import_nothing))
    side = sides.peer("absent", CPU)
    assert side.attention is None
    assert "no_such_module" in side.missing


def _import_nothing(device: torch.device) -> sides.Attention:
    return importlib.import_module("no_such_module").attention


def test_what_quick_leaves_out_is_named() -> None:
    default, asked = ([*TINY, "--quick"], [*TINY, "--quick", "--peers", "flex"])
    assert "--quick" in bench.side_of("flex", bench.arguments(default)).missing
    if torch.__version__ >= (2, 5):  # before, there was none
        assert bench.side_of("flex", bench.arguments(asked)).attention


def test_exact_is_attention() -> None:
    for causal in (False, True):
        (shape,) = cells.grid(["fp32"], [16], [causal], [70], 70, 32)
        data = cells.Data(shape, CPU)
        q, k, v = (t.double().transpose(1, 2).requires_grad_() for t in (data.q, data.k, data.v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        grads = torch.autograd.grad(o, (q, k, v), data.dout.double().transpose(1, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cells, "CHECKED_ROWS", 32)  # the last block is shorter
            found = cells.exact(data, 0, 1)
        for name, true in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
            torch.testing.assert_close(found[name].double(), true[0, 1].detach(), rtol=0, atol=1e-5)


@pytest.mark.skipif(not PLOTS, reason="no matplotlib")
def test_plots_are_written(result: dict[str, Any], folder: Path) -> None:
    names = {path.name.split("-fp32-")[1] for path in folder.glob("*-fp32-*")}
    assert names == {f"{d}{suffix}" for d in ("forward", "backward") for suffix in (".png", ".svg")}
    assert all(path.stat().st_size > 1000 for path in folder.glob("*-fp32-*"))


def test_flop_of_a_cell() -> None:
    (cell,) = cells.grid(["bf16"], [128], [False], [4096], 16384, 2048)
    assert (cell.batch, cell.heads) == (4, 16)
    assert cell.flop == 4.0 * 4 * 16 * 4096**2 * 128
    cell.causal, cell.direction = True, "backward"
    assert cell.flop == 2.5 * 4.0 * 4 * 16 * 4096**2 * 128 / 2


# -------------------------------------------------------------------------------- wrong and refused


def test_wrong_results_are_not_timed() -> None:
    """One side forgets the mask: it is called wrong where there is one, and timed where there is none."""

    def maskless(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return tessera.attention(q, k, v)

    broken = sides.Side("broken", "Broken", attention=maskless)
    for direction in ("forward", "backward"):
        for causal in (False, True):
            (shape,) = cells.grid(["fp32"], [32], [causal], [64], 128, 64)
            (cell,) = cells.measure(shape, [sides.ours(None), broken], [direction], 1, 2, CPU)
            assert "tessera" in cell.sides
            assert ("broken" in cell.sides) == (not causal)
            if causal:
                assert cell.refused["broken"].startswith("wrong: ")


def test_a_refusal_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        raise NotImplementedError("only on Sundays\nand so on")

    monkeypatch.setitem(sides.PEERS, "picky", sides.Peer("Picky", "torch", lambda _: refuse))
    status, found = run(tmp_path, "--peers", "picky", "--causal", "no", "--no-plots")
    assert status == 0
    assert [cell["refused"] for cell in found["cells"]] == [{"picky": "only on Sundays"}] * 2
    assert "[1] Picky: only on Sundays" in capsys.readouterr().out


def test_a_kernel_that_refuses_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--peers", "none", "--kernel", "cuda_sm80", "--causal", "no", "--no-plots")
    status, found = run(tmp_path, *options)
    assert status == bench.FAILED
    assert all("tessera" in cell["refused"] for cell in found["cells"])
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [("--peers", "nobody"), ("--dtype", "fp7"), ("--turns", "-1"), ("--compare", "absent.json")]
)
def test_bad_options_are_refused(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main([*TINY, *options])
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


# -------------------------------------------------------------------------------- then and now


def compare(old: dict[str, Any], new: dict[str, Any], folder: Path, *options: str) -> int:
    paths = ("--load", saved(new, folder / "new.json"), "--compare", saved(old, folder / "old.json"))
    return bench.main([*paths, "--out", str(folder), "--no-plots", *options])


def test_compare_finds_a_slowdown(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(result, result, tmp_path) == 0
    assert "0 of 4 slower" in capsys.readouterr().out
    slow = copy.deepcopy(result)
    slow["cells"][2]["sides"]["tessera"]["seconds"] *= 1.3
    assert compare(result, slow, tmp_path) == bench.SLOWER
    lines = [line for line in capsys.readouterr().out.splitlines() if "SLOWER" in line]
    assert len(lines) == 1
    assert report.cell_name(slow["cells"][2]) in lines[0]
    assert "1.30" in lines[0]
    assert compare(result, slow, tmp_path, "--threshold", "0.5") == 0
    assert compare(slow, result, tmp_path) == 0  # faster


def test_compare_relative_forgives_a_slow_machine(result: dict[str, Any], tmp_path: Path) -> None:
    slow = copy.deepcopy(result)
    for cell in slow["cells"]:
        for side in cell["sides"].values():
            side["seconds"] *= 1.3
    assert compare(result, slow, tmp_path) == bench.SLOWER
    assert compare(result, slow, tmp_path, "--relative") == 0


def test_compare_notices_what_is_gone(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    less = copy.deepcopy(result)
    del less["cells"][0]["sides"]["tessera"]
    assert compare(result, less, tmp_path) == bench.SLOWER
    assert f"no longer measured: {report.cell_name(less['cells'][0])}" in capsys.readouterr().out


# -------------------------------------------------------------------------------- timing


def test_sides_take_turns_and_buffers_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "clock_of", lambda _: lambda calls: sum(call() for call in calls))
    said: list[str] = []

    def speak(text: str) -> float:
        said.append(text)
        return 1.0

    both = {name: [lambda n=name, i=i: speak(f"{n}{i}") for i in range(2)] for name in "ab"}
    seconds = timing.take_turns(both, 3, CPU)
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert said[6:] == ["a0", "b0", "b1", "a1", "a0", "b0"]


def test_summary_is_the_median() -> None:
    assert timing.summary([3.0, 1.0, 2.0]) == {"seconds": 2.0, "p10": 1.0, "p90": 3.0}


# -------------------------------------------------------------------------------- a training step


TINY_GPT = train_step.Shape(layers=1, batch=1, width=32, heads=2, seqlen=32, vocabulary=40)


def test_train_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_step, "CPU_SHAPE", TINY_GPT)
    status, found = run(tmp_path, "--train-step", "--layers", "2", "--peers", "sdpa-flash,sdpa-math,fa2")
    assert status == 0
    step = found["train_step"]
    assert (step["shape"]["layers"], step["shape"]["seqlen"]) == (2, 64)
    assert step["sides"].keys() == {"tessera", "sdpa-flash", "sdpa-math"}
    assert found["peers"]["fa2"]["missing"]
    losses = [side["loss"] for side in step["sides"].values()]
    assert max(losses) - min(losses) < 1e-4
    for side in step["sides"].values():
        assert side["tokens_per_second"] == pytest.approx(64 / side["seconds"])


def test_host_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--host-time", "--device", "cpu", "--turns", "2", "--out", str(tmp_path)]
    assert bench.main(options) == 0
    assert "host time of a call" in capsys.readouterr().out
    (path,) = tmp_path.glob("*host_time*.json")
    cases = json.loads(path.read_text(encoding="utf-8"))["host_time"]
    assert [case["dtype"] for case in cases] == ["fp32", "bf16"]
    for case in cases:
        assert 0 < case["sides"]["tessera"]["seconds"] < 1
    assert bench.main(["--load", str(path), "--compare", str(path), "--out", str(tmp_path)]) == 0


def test_train_step_calls_a_wrong_attention_wrong() -> None:
    def forgetful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return 100 * v

    three = [sides.ours(None), sides.peer("sdpa-math", CPU), sides.Side("bad", "Bad", attention=forgetful)]
    torch.manual_seed(1)
    found = train_step.measure(TINY_GPT, three, "fp32", torch.float32, 1, CPU)
    assert found.sides.keys() == {"tessera", "sdpa-math"}
    assert found.refused["bad"].startswith("wrong: ")


def test_train_step_starts_again() -> None:
    trainer, attention = train_step.Trainer(TINY_GPT, torch.float32, CPU), sides.ours(None).attention
    before = trainer.probe(attention)
    trainer.rewind()
    trainer.step(attention)
    assert trainer.probe(attention) != before
    trainer.rewind()
    assert trainer.probe(attention) == before


# -------------------------------------------------------------------------------- as a command


def test_as_a_command_without_rich_and_matplotlib(tmp_path: Path) -> None:
    for name in ("rich", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name}')\n", encoding="utf-8")
    package = str(Path(tessera.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), package])}
    command = [sys.executable, "-m", "tessera.bench", *TINY, "--peers", "none", "--causal", "no"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "forward, fp32, GFLOP/s" in done.stdout
    assert "no matplotlib: no plots" in done.stdout
    assert len(list(tmp_path.glob("tessera-bench-grid-*.json"))) == 1
