#!/usr/bin/env python3
"""Trains a small character-level GPT whose attention is tessera.attention.

    python examples/train_gpt.py                        about a minute on two CPU cores
    python examples/train_gpt.py --attention both       Tessera and PyTorch, same seeds: the same curve?
    python examples/train_gpt.py --layers 12 --width 768 --heads 12 --context 1024 --batch 32     on a GPU

The text is made here, by a small grammar. Its sentences refer back to what earlier ones said, so a model that
does not attend cannot finish them.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import tessera
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# -------------------------------------------------------------------------------- attention
# q, k, v and the result: (batch, seqlen, heads, head_dim)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tessera_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tessera.attention(q, k, v, causal=True)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"tessera": tessera_attention, "sdpa": sdpa_attention}


# -------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # Views of one tensor, whatever their strides: nothing is copied or transposed for attention.
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, attention: Attention
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: (batch, seqlen, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def flop_per_token(self) -> float:
        """Of a training step: 6 for each weight that multiplies, and seven products of causal attention."""
        weights = sum(p.numel() for p in self.parameters())
        weights -= self.token.weight.numel() + self.position.weight.numel()
        return 6.0 * weights + 7.0 * len(self.blocks) * self.token.embedding_dim * self.context

    @torch.no_grad()
    def continue_text(self, tokens: list[int], count: int, temperature: float = 0.5) -> list[int]:
        device = self.token.weight.device
        for _ in range(count):
            seen = torch.tensor([tokens[-self.context :]], device=device)
            probabilities = (self(seen)[0, -1].float() / temperature).softmax(-1)
            tokens = [*tokens, int(torch.multinomial(probabilities, 1))]
        return tokens


# -------------------------------------------------------------------------------- text


def make_text(characters: int, seed: int = 0) -> str:
    """Short stories in which someone takes a thing somewhere, and is asked about it later."""
    rng = random.Random(seed)
    people = ["Mira", "Oren", "Tilda", "Jonas", "Petra", "Anselm"]
    places = ["harbour", "mill", "orchard", "old bridge", "market", "lighthouse"]
    things = ["lamp", "kite", "basket", "drum", "map", "ladder"]
    colours = ["red", "green", "white", "blue", "grey"]
    stories: list[str] = []
    length = 0
    while length < characters:
        who, other = rng.sample(people, 2)
        place, colour, thing = rng.choice(places), rng.choice(colours), rng.choice(things)
        lines = [f"{who} took the {colour} {thing} to the {place}."]
        if rng.random() < 0.5:
            lines.append(f"It was {rng.choice(['early', 'late', 'raining', 'quiet'])}.")
        lines.append(f"{other} asked {who}: where is the {thing}?")
        lines.append(f"It is at the {place}, said {who}, and it is still {colour}.")
        if rng.random() < 0.5:
            lines.append(f"So {other} went to the {place} and found the {colour} {thing}.")
        stories.append(" ".join(lines) + "\n")
        length += len(stories[-1])
    return "".join(stories)


class Batches:
    """Random pieces of the text: the same ones, in the same order, for the same seed."""

    def __init__(self, text: str, context: int, batch: int, seed: int, device: torch.device) -> None:
        self.alphabet = sorted(set(text))
        self.index = {character: i for i, character in enumerate(self.alphabet)}
        self.data = torch.tensor(self.encode(text))
        self.context, self.batch, self.device = context, batch, device
        self.generator = torch.Generator().manual_seed(seed)

    def encode(self, text: str) -> list[int]:
        return [self.index[character] for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - self.context, (self.batch, 1), generator=self.generator)
        piece = self.data[starts + torch.arange(self.context + 1)].to(self.device, non_blocking=True)
        return piece[:, :-1], piece[:, 1:]


# -------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises over the first tenth, then falls along a cosine to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(name: str, args: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    batches = Batches(make_text(args.characters), args.context, args.batch, args.seed, device)
    model = GPT(
        len(batches.alphabet), args.context, args.layers, args.width, args.heads, ATTENTIONS[name]
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    mixed = args.dtype != "fp32"
    autocast = torch.autocast(device.type, dtype=DTYPES[args.dtype]) if mixed else nullcontext()
    weights = sum(p.numel() for p in model.parameters())
    print(f"{name}: {weights / 1e6:.2f} M weights on {device_name(device)}, {args.dtype}")

    losses: list[Tensor] = []
    tokens = args.batch * args.context
    begin, begun = time.perf_counter(), 0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        x, y = batches.next()
        with autocast:
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

        if (step + 1) % args.report == 0 or step + 1 == args.steps:
            value = losses[-1].item()  # waits for the GPU, too
            rate = tokens * (step + 1 - begun) / (time.perf_counter() - begin)
            speed = speed_text(rate * model.flop_per_token(), device, args.peak)
            print(f"  step {step + 1:5}  loss {value:.4f}  {rate:9,.0f} tokens/s  {speed}", flush=True)
            begin, begun = time.perf_counter(), step + 1

    with autocast:
        said = batches.decode(model.continue_text(batches.encode("Mira took the "), args.sample))
    print("  " + said.replace("\n", "\n  "))
    return [loss.item() for loss in losses]


# -------------------------------------------------------------------------------- report

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # fp16 would want its gradients scaled
# TFLOP/s of dense bf16 matrix products, from the makers' data sheets
PEAKS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU, {torch.get_num_threads()} threads"


def speed_text(flops: float, device: torch.device, peak: float | None) -> str:
    """Of the model's own operations: what a step recomputes or moves does not count."""
    if peak is None and device.type == "cuda":
        peak = next((value for name, value in PEAKS.items() if name in device_name(device)), None)
    share = f" ({flops / peak / 1e12:.1%} of peak)" if peak else ""
    return (f"{flops / 1e12:.2f} TFLOP/s" if flops > 1e12 else f"{flops / 1e9:.1f} GFLOP/s") + share


def plot(curves: dict[str, list[float]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    styles = {"tessera": ("#0b6e99", "-", 3.5), "sdpa": ("#e08e0b", "--", 1.5)}
    for name, losses in curves.items():
        colour, line, width = styles[name]
        upper.plot(range(1, len(losses) + 1), losses, line, color=colour, linewidth=width, label=name)
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    apart = [abs(a - b) for a, b in zip(*curves.values(), strict=True)]
    lower.semilogy(range(1, len(apart) + 1), [max(each, 1e-8) for each in apart], color="#555555")
    lower.set_ylabel("difference")
    lower.set_xlabel("step")
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT with tessera.attention.")
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both"), default="tessera")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="tokens that the model sees")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--characters", type=int, default=500_000, help="of text")
    parser.add_argument("--sample", type=int, default=200, help="characters that the trained model writes")
    parser.add_argument("--report", type=int, default=50, help="steps between two lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 by autocast on a GPU, fp32 on a CPU")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, for the share of it")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bf16" if torch.device(args.device).type == "cuda" else "fp32")
    return args


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    args = arguments(argv)
    names = list(ATTENTIONS) if args.attention == "both" else [args.attention]
    curves = {name: train(name, args) for name in names}
    if args.attention == "both":
        apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        print(f"the losses differ by at most {apart:.2g}")
        plot(curves, args.out / "train_gpt.png")
    return curves


if __name__ == "__main__":
    main()
