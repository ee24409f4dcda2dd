"""examples/train_gpt.py: it learns, and Tessera's attention learns what PyTorch's does."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
TINY = shlex.split(
    "--device cpu --dtype fp32 --layers 2 --width 48 --heads 3 --context 64 --batch 8 --steps 60 --lr 5e-3"
    " --characters 20000 --sample 20"
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def curves(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    out = tmp_path_factory.mktemp("train_gpt")
    found = example.main([*TINY, "--attention", "both", "--out", str(out)])
    if importlib.util.find_spec("matplotlib"):
        assert (out / "train_gpt.png").stat().st_size > 1000
    return found


def test_the_loss_falls(curves: dict[str, list[float]]) -> None:
    losses = curves["tessera"]
    assert len(losses) == 60
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


def test_both_attentions_give_one_curve(curves: dict[str, list[float]]) -> None:
    pairs = list(zip(curves["tessera"], curves["sdpa"], strict=True))
    assert max(abs(ours - theirs) for ours, theirs in pairs[:10]) < 1e-4
    # Rounding grows from step to step, whoever attends.
    assert max(abs(ours - theirs) for ours, theirs in pairs) < 5e-3


def test_the_text_is_always_the_same(example: ModuleType) -> None:
    text = example.make_text(5000)
    assert text == example.make_text(5000)
    assert text != example.make_text(5000, seed=1)
    assert 5000 <= len(text) < 6000


def test_a_later_token_does_not_change_an_earlier_one(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(11, 16, 2, 32, 2, example.ATTENTIONS["tessera"])
    tokens = torch.randint(11, (1, 16))
    before = model(tokens)
    tokens[0, -1] = (tokens[0, -1] + 1) % 11
    after = model(tokens)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
