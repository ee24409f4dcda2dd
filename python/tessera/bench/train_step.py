"""One training step of a GPT, forward, backward and AdamW, with one attention after the other.

Every turn starts from the same weights and sees the same tokens: only attention differs. Before any side is
timed, their losses and gradients are compared with each other.
"""

from __future__ import annotations

import copy
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .cells import release
from .sides import OURS, Attention, Refused, Side, attempt
from .timing import clock_of, median_ratio, summary

TOLERANCE = 0.02  # of the loss and of the gradients' norm, which a wrong attention changes more than that


@dataclass(frozen=True)
class Shape:
    layers: int
    batch: int
    width: int
    heads: int
    seqlen: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def flop(self) -> float:
        """A step's: 6 for each weight of a product and token, and causal attention's seven half products."""
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return self.tokens * (6.0 * weights + 7.0 * self.layers * self.width * self.seqlen)


GPU_SHAPE = Shape(layers=24, batch=4, width=1024, heads=16, seqlen=4096, vocabulary=50304)
CPU_SHAPE = Shape(layers=4, batch=2, width=256, heads=4, seqlen=512, vocabulary=512)


# -------------------------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v, True).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A GPT whose attention is an argument."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.seqlen, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, attention)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# -------------------------------------------------------------------------------- the measurement


@dataclass
class Result:
    shape: Shape
    dtype: str
    sides: dict[str, dict[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        s = self.shape
        return f"train step, {s.layers} layers of {s.width}, {s.batch} x {s.seqlen} tokens, {self.dtype}"

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "shape": asdict(self.shape),
            "dtype": self.dtype,
            "sides": self.sides,
            "refused": self.refused,
        }


class Trainer:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.dtype = device, dtype
        with device:
            self.model = Model(shape)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=fused)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seqlen + 1), device=device)
        self.tokens, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.start = copy.deepcopy(self.model.state_dict())

    def step(self, attention: Attention) -> None:
        self._backward(attention)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def probe(self, attention: Attention) -> dict[str, float]:
        """The loss, and the norm of the gradients that come out of attention."""
        loss = self._backward(attention).item()
        norms = [block.qkv.weight.grad.norm() for block in self.model.blocks]
        return {"loss": loss, "gradient": torch.stack(norms).norm().item()}

    def _backward(self, attention: Attention) -> torch.Tensor:
        with self._autocast():
            loss = self.model(self.tokens, self.targets, attention)
        loss.backward()
        return loss.detach()

    def rewind(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.model.load_state_dict(self.start)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def disagreements(probes: dict[str, dict[str, float]]) -> dict[str, str]:
    """Who is far from the median of all, and where."""
    wrong: dict[str, str] = {}
    for what in ("loss", "gradient"):
        middle = statistics.median(probe[what] for probe in probes.values()) if probes else 0.0
        for name, probe in probes.items():
            if not abs(probe[what] - middle) <= TOLERANCE * middle:
                wrong.setdefault(name, f"wrong: its {what} is {probe[what]:.4g}, the median {middle:.4g}")
    return wrong


def measure(
    shape: Shape, sides: list[Side], dtype: str, torch_dtype: torch.dtype, turns: int, device: torch.device
) -> Result:
    result = Result(shape, dtype)
    trainer = Trainer(shape, torch_dtype, device)
    probes: dict[str, dict[str, float]] = {}
    for side in sides:
        try:
            probes[side.name] = attempt(partial(trainer.probe, side.attention))
        except Refused as refused:
            result.refused[side.name] = str(refused)
        trainer.rewind()
        release(device)
    result.refused |= disagreements(probes)

    clock = clock_of(device)
    ready = [side for side in sides if side.name not in result.refused]
    seconds: dict[str, list[float]] = {side.name: [] for side in ready}
    for turn in range(turns):
        first = turn % max(1, len(ready))
        for side in ready[first:] + ready[:first]:
            trainer.rewind()
            step = partial(trainer.step, side.attention)
            step()  # warm-up; makes the optimiser's state
            seconds[side.name].append(clock([step]))
    for name, each in seconds.items():
        times = summary(each)
        result.sides[name] = {
            **times,
            "tokens_per_second": shape.tokens / times["seconds"],
            "model_tflops": shape.flop / times["seconds"] / 1e12,
            "loss": probes[name]["loss"],
        }
        if OURS in seconds and name != OURS:
            result.sides[name]["speedup"] = median_ratio(each, seconds[OURS])
    return result
