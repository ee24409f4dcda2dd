"""tessera.compat.flash_attn: its signatures, and values and gradients against plain PyTorch in float64."""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from plain import random, reference
from tessera.compat import bert_padding
from tessera.compat import flash_attn as fa
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# ---- Signatures: every parameter of flash-attn 2.8 with its default; `...` where it has none.

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = {"cu_seqlens_q": ..., "cu_seqlens_k": ..., "max_seqlen_q": ..., "max_seqlen_k": ...}
SIGNATURES = {
    "flash_attn_func": {"q": ..., "k": ..., "v": ..., **OPTIONS},
    "flash_attn_kvpacked_func": {"q": ..., "kv": ..., **OPTIONS},
    "flash_attn_qkvpacked_func": {"qkv": ..., **OPTIONS},
    "flash_attn_varlen_func": {"q": ..., "k": ..., "v": ..., **LENGTHS, **OPTIONS, "block_table": None},
    "flash_attn_varlen_kvpacked_func": {"q": ..., "kv": ..., **LENGTHS, **OPTIONS},
    "flash_attn_varlen_qkvpacked_func": {"qkv": ..., "cu_seqlens": ..., "max_seqlen": ..., **OPTIONS},
    "flash_attn_with_kvcache": {
        "q": ...,
        "k_cache": ...,
        "v_cache": ...,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
    "bert_padding.unpad_input": {"hidden_states": ..., "attention_mask": ..., "unused_mask": None},
    "bert_padding.unpad_input_for_concatenated_sequences": {
        "hidden_states": ...,
        "attention_mask_in_length": ...,
    },
    "bert_padding.pad_input": {"hidden_states": ..., "indices": ..., "batch": ..., "seqlen": ...},
    "bert_padding.index_put_first_axis": {"values": ..., "indices": ..., "first_axis_dim": ...},
    "bert_padding.index_first_axis": {"input": ..., "indices": ...},
    "bert_padding.index_first_axis_residual": {"input": ..., "indices": ...},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function: Any = fa
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    found = {p.name: ... if p.default is p.empty else p.default for p in parameters.values()}
    assert list(found.items()) == list(SIGNATURES[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_every_name_is_in_the_table() -> None:
    public = {*fa.__all__} - {"bert_padding"} | {f"bert_padding.{name}" for name in bert_padding.__all__}
    assert public == set(SIGNATURES)


# ---- Imports


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_compat_alone_does_not_import_torch() -> None:
    assert run_python("import sys, tessera.compat; print('torch' in sys.modules)") == "False"


def test_import_paths_of_flash_attn() -> None:
    """In a new process: a program may import from the inner module before the outer one."""
    run_python(
        "from tessera.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "from tessera.compat.flash_attn.flash_attn_interface import flash_attn_varlen_func\n"
        "import tessera.compat.flash_attn as flash_attn\n"
        "assert flash_attn.flash_attn_varlen_func is flash_attn_varlen_func\n"
        "assert flash_attn.bert_padding.unpad_input is unpad_input\n"
    )


# ---- The reference


def packed_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`reference`, one sequence at a time."""
    outs, lses = [], []
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for b, (q_b, k_b, v_b) in enumerate(parts):
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = reference(q_b[None], k_b[None], v_b[None], alibi_slopes=slopes, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


Call = Callable[..., tuple[Tensor, Tensor, Tensor]]
Reference = Callable[..., tuple[Tensor, Tensor]]


def check(call: Call, expected: Reference, inputs: list[Tensor], tolerance: float = 2e-5) -> None:
    """Compares out, softmax_lse and the gradients of the inputs through both (lse: where a row has keys)."""
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, lse, s_dmask = call(*ours)
    out_ref, lse_ref = expected(*theirs)

    assert out.dtype == inputs[0].dtype and out.shape == out_ref.shape
    assert lse.dtype == torch.float32 and lse.shape == lse_ref.shape
    assert s_dmask.shape == (0,) and s_dmask.dtype == inputs[0].dtype
    torch.testing.assert_close(out.double(), out_ref, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), lse_ref, rtol=tolerance, atol=tolerance)

    dout = random(*out.shape, seed=90, dtype=out.dtype)
    has_keys = lse_ref.isfinite()
    dlse = random(*lse.shape, seed=91)[has_keys]
    ((out * dout).sum() + (lse[has_keys] * dlse).sum()).backward()
    ((out_ref * dout.double()).sum() + (lse_ref[has_keys] * dlse.double()).sum()).backward()
    for x, x_ref in zip(ours, theirs, strict=True):
        assert x.grad is not None and x_ref.grad is not None
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.double(), x_ref.grad, rtol=10 * tolerance, atol=10 * tolerance)


HEADS = 6
SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "window left": {"window_size": (5, -1)},
    "window right": {"window_size": (-1, 2)},
    "window of one": {"window_size": (0, 0)},
    "causal window": {"causal": True, "window_size": (9, 4)},
    "softcap": {"softcap": 1.5},
    "softcap off": {"softcap": -1.0},
    "alibi": {"alibi_slopes": SLOPES},
    "causal alibi": {"causal": True, "alibi_slopes": SLOPES},
    "everything": {
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": (11, -1),
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
        "deterministic": True,
    },
}


def for_reference(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "deterministic"}


every_case = pytest.mark.parametrize("case", CASES)


# ---- Dense


@every_case
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (17, 40), (40, 17)])
def test_func(case: str, seqlen_q: int, seqlen_k: int) -> None:
    options = CASES[case]
    inputs = [
        random(2, seqlen_q, HEADS, 32, seed=1),
        random(2, seqlen_k, 2, 32, seed=2),
        random(2, seqlen_k, 2, 32, seed=3),
    ]
    check(
        lambda q, k, v: fa.flash_attn_func(q, k, v, **options, return_attn_probs=True),
        lambda q, k, v: reference(q, k, v, **for_reference(options)),
        inputs,
    )


@every_case
def test_kvpacked(case: str) -> None:
    options = CASES[case]
    check(
        lambda q, kv: fa.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True),
        lambda q, kv: reference(q, kv[:, :, 0], kv[:, :, 1], **for_reference(options)),
        [random(2, 19, HEADS, 32, seed=4), random(2, 27, 2, 3, 32, seed=5)],
    )


@every_case
def test_qkvpacked(case: str) -> None:
    options = CASES[case]
    check(
        lambda qkv: fa.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True),
        lambda qkv: reference(*qkv.unbind(2), **for_reference(options)),
        [random(2, 23, 3, HEADS, 32, seed=6)],
    )


def test_slopes_of_each_sequence() -> None:
    slopes = torch.stack([SLOPES, SLOPES.flip(0)])
    check(
        lambda qkv: fa.flash_attn_qkvpacked_func(qkv, alibi_slopes=slopes, return_attn_probs=True),
        lambda qkv: reference(*qkv.unbind(2), alibi_slopes=slopes),
        [random(2, 23, 3, HEADS, 32, seed=7)],
    )


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (7, 7), (33, 33), (64, 24), (192, 128), (256, 256)])
def test_head_dims(dim: int, dim_v: int) -> None:
    check(
        lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        lambda q, k, v: reference(q, k, v, causal=True),
        [random(1, 9, 2, dim, seed=8), random(1, 12, 1, dim, seed=9), random(1, 12, 1, dim_v, seed=10)],
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_16_bit(dtype: torch.dtype, tolerance: float) -> None:
    check(
        lambda qkv: fa.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True),
        lambda qkv: reference(*qkv.unbind(2), causal=True),
        [random(2, 65, 3, 2, 64, seed=11, dtype=dtype)],
        tolerance,
    )


def test_last_dimension_not_contiguous() -> None:
    inputs = [random(1, 32, 2, 13, seed=seed) for seed in (12, 13, 14)]
    check(
        lambda *qkv: fa.flash_attn_func(*(x.transpose(1, 3) for x in qkv), return_attn_probs=True),
        lambda *qkv: reference(*(x.transpose(1, 3) for x in qkv)),
        inputs,
    )


def test_deterministic_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU no result shows it."""
    seen = []
    monkeypatch.setattr(tessera, "attention", lambda *_, **options: seen.append(options["deterministic"]))
    for deterministic in (False, True):
        fa.flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 2, 8), deterministic=deterministic)
    assert seen == [False, True]


def test_only_out_unless_asked() -> None:
    q, k, v = (random(1, 8, 2, 16, seed=seed) for seed in (15, 16, 17))
    alone = fa.flash_attn_func(q, k, v)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, fa.flash_attn_func(q, k, v, return_attn_probs=True)[0])


def test_negative_window_sides_are_unbounded() -> None:
    q, k, v = (random(1, 12, 2, 16, seed=seed) for seed in (18, 19, 20))
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=(-3, -2)), fa.flash_attn_func(q, k, v))


def test_rows_without_keys() -> None:
    """The first rows of a causal call with more queries than keys: out 0, lse +inf, gradients finite."""
    q, k, v = (random(1, n, 2, 16, seed=n).requires_grad_() for n in (9, 4, 4))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :, :5] == math.inf).all() and lse[:, :, 5:].isfinite().all()
    (out.sum() + lse[:, :, 5:].sum()).backward()
    assert (q.grad[:, :5] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_no_keys_at_all() -> None:
    q, k = random(2, 5, 4, 16, seed=21), torch.empty(2, 0, 2, 16)
    out, lse, _ = fa.flash_attn_func(q, k, k, return_attn_probs=True)
    assert (out == 0).all() and (lse == math.inf).all()


# ---- Packed

LENGTHS_Q = [5, 0, 17, 12, 33]
LENGTHS_K = [7, 4, 0, 26, 9]


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_args() -> tuple[Tensor, Tensor, int, int]:
    return cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)


@every_case
def test_varlen(case: str) -> None:
    options = CASES[case]
    check(
        lambda q, k, v: fa.flash_attn_varlen_func(q, k, v, *packed_args(), **options, return_attn_probs=True),
        lambda q, k, v: packed_reference(q, k, v, LENGTHS_Q, LENGTHS_K, **for_reference(options)),
        [
            random(sum(LENGTHS_Q), HEADS, 32, seed=31),
            random(sum(LENGTHS_K), 2, 32, seed=32),
            random(sum(LENGTHS_K), 2, 32, seed=33),
        ],
    )


@every_case
def test_varlen_kvpacked(case: str) -> None:
    options = CASES[case]
    check(
        lambda q, kv: fa.flash_attn_varlen_kvpacked_func(
            q, kv, *packed_args(), **options, return_attn_probs=True
        ),
        lambda q, kv: packed_reference(q, kv[:, 0], kv[:, 1], LENGTHS_Q, LENGTHS_K, **for_reference(options)),
        [random(sum(LENGTHS_Q), HEADS, 32, seed=34), random(sum(LENGTHS_K), 2, 3, 32, seed=35)],
    )


@every_case
def test_varlen_qkvpacked(case: str) -> None:
    options = CASES[case]
    check(
        lambda qkv: fa.flash_attn_varlen_qkvpacked_func(
            qkv, cu_seqlens(LENGTHS_Q), max(LENGTHS_Q), **options, return_attn_probs=True
        ),
        lambda qkv: packed_reference(*qkv.unbind(1), LENGTHS_Q, LENGTHS_Q, **for_reference(options)),
        [random(sum(LENGTHS_Q), 3, HEADS, 32, seed=36)],
    )


def test_varlen_slopes_of_each_sequence() -> None:
    slopes = torch.stack([SLOPES * (b + 1) for b in range(len(LENGTHS_Q))])
    check(
        lambda q, kv: fa.flash_attn_varlen_kvpacked_func(
            q, kv, *packed_args(), alibi_slopes=slopes, return_attn_probs=True
        ),
        lambda q, kv: packed_reference(q, kv[:, 0], kv[:, 1], LENGTHS_Q, LENGTHS_K, alibi_slopes=slopes),
        [random(sum(LENGTHS_Q), HEADS, 32, seed=37), random(sum(LENGTHS_K), 2, 3, 32, seed=38)],
    )


def test_varlen_max_seqlen_as_a_tensor_too_large_and_too_small() -> None:
    qkv, cu = random(sum(LENGTHS_Q), 3, 2, 16, seed=39), cu_seqlens(LENGTHS_Q)
    exact = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, max(LENGTHS_Q))
    assert torch.equal(exact, fa.flash_attn_varlen_qkvpacked_func(qkv, cu, torch.tensor(100)))
    with pytest.raises(ValueError, match="max_seqlen_q"):
        fa.flash_attn_varlen_qkvpacked_func(qkv, cu, max(LENGTHS_Q) - 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (5, 1)},
        {"alibi_slopes": random(4, seed=88).abs(), "causal": True},
    ],
    ids=["plain", "causal", "window", "slopes"],
)
def test_varlen_of_pages(options: dict[str, Any]) -> None:
    cu_q, cu_k, max_q, max_k = packed_args()
    lengths = cu_k.diff().tolist()
    pages = -(-max_k // 3)
    table = torch.randperm(len(lengths) * pages).view(len(lengths), pages).to(torch.int32)
    q = random(int(cu_q[-1]), 4, 16, seed=89)
    k, v = (random(table.numel(), 3, 2, 16, seed=n) for n in (90, 91))
    rows = [(table[b].long()[:, None] * 3 + torch.arange(3)).flatten()[:n] for b, n in enumerate(lengths)]
    packed = [x.flatten(0, 1)[torch.cat(rows)] for x in (k, v)]
    lengths_of = (cu_q, cu_k, max_q, max_k)
    got = fa.flash_attn_varlen_func(
        q, k, v, *lengths_of, block_table=table, return_attn_probs=True, **options
    )
    want = fa.flash_attn_varlen_func(q, *packed, *lengths_of, return_attn_probs=True, **options)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        fa.flash_attn_varlen_func(q, k, v, *lengths_of, 0.5, block_table=table)
    with pytest.raises(NotImplementedError, match="no gradients"):
        fa.flash_attn_varlen_func(q.requires_grad_(), k, v, *lengths_of, block_table=table)


# ---- Dropout


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_expectation(p: float) -> None:
    torch.manual_seed(0)
    seqlen, heads = 256, 4
    q, ones = torch.zeros(1, seqlen, heads, 16), torch.ones(1, seqlen, heads, 16)
    out = fa.flash_attn_func(q, q, ones, dropout_p=p)[..., 0]  # a row's kept weights: mean 1
    deviation = math.sqrt(p / (1 - p) / (heads * seqlen * seqlen))
    assert abs(out.mean().item() - 1) < 5 * deviation
    assert abs(out.std().item() / math.sqrt(p / (1 - p) / seqlen) - 1) < 0.2


def test_dropout_follows_the_seed_of_torch() -> None:
    q, k, v = (random(1, 40, 2, 16, seed=seed) for seed in (41, 42, 43))

    def draw() -> Tensor:
        return fa.flash_attn_func(q, k, v, dropout_p=0.3)

    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)


def test_dropout_backward_drops_the_same() -> None:
    """out is linear in v, so <dout, out> = <dv, v> if backward has forward's mask."""
    torch.manual_seed(8)
    qkv = random(sum(LENGTHS_Q), 3, 2, 16, seed=44).requires_grad_()
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens(LENGTHS_Q), max(LENGTHS_Q), dropout_p=0.4)
    dout = random(*out.shape, seed=45)
    (out * dout).sum().backward()
    torch.testing.assert_close((qkv.grad[:, 2] * qkv[:, 2]).sum(), (out * dout).sum(), rtol=1e-4, atol=1e-4)


def test_dropout_leaves_lse_and_returns_no_mask() -> None:
    q, k, v = (random(1, 40, 2, 16, seed=seed) for seed in (46, 47, 48))
    _, lse, s_dmask = fa.flash_attn_func(q, k, v, dropout_p=0.3, softcap=2.0, return_attn_probs=True)
    _, lse_without, _ = fa.flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True)
    assert s_dmask is None
    assert torch.equal(lse, lse_without)


# ---- PyTorch


def test_compile() -> None:
    """In one graph, with the same results."""

    def call(qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = fa.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
        return out, lse

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        qkv = random(2, 9, 3, 2, 16, seed=49).requires_grad_()
        out, lse = function(qkv)
        (out.sum() + lse.sum()).backward()
        results.append((out, lse, qkv.grad))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


def test_autocast() -> None:
    q, k, v = (random(1, 8, 2, 16, seed=seed) for seed in (71, 72, 73))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa.flash_attn_func(q, k, v)
    assert torch.equal(out, fa.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_checkpointing_repeats_the_dropout() -> None:
    qkv = random(1, 24, 3, 2, 16, seed=74)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(9)
        x = qkv.clone().requires_grad_()
        if checkpointed:
            out = checkpoint(fa.flash_attn_qkvpacked_func, x, 0.3, use_reentrant=False)
        else:
            out = fa.flash_attn_qkvpacked_func(x, 0.3)
        out.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_padded_batch_through_packed_attention() -> None:
    """unpad, attention, pad: what a padded model does, against each sequence on its own."""
    lengths = [3, 5, 2]
    x = random(3, 5, 3, 2, 16, seed=59).requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    rows, indices, cu, longest, _ = bert_padding.unpad_input(x, mask)
    out = fa.flash_attn_varlen_qkvpacked_func(rows, cu, longest, causal=True)
    padded = bert_padding.pad_input(out, indices, 3, 5)
    weight = random(*padded.shape, seed=60)
    (padded * weight).sum().backward()

    x_ref = x.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(lengths):
        expected, _ = reference(*x_ref[b : b + 1, :length].unbind(2), causal=True)
        torch.testing.assert_close(padded[b, :length].double(), expected[0], rtol=2e-5, atol=2e-5)
        assert (padded[b, length:] == 0).all()
        loss = loss + (expected[0] * weight[b, :length]).sum()
    loss.backward()
    torch.testing.assert_close(x.grad.double(), x_ref.grad, rtol=2e-4, atol=2e-4)


# ---- Errors


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: fa.flash_attn_qkvpacked_func(x(1, 8, 2, 2, 16)), "qkv"),
        (lambda x: fa.flash_attn_qkvpacked_func(x(8, 3, 2, 16)), "qkv"),
        (lambda x: fa.flash_attn_kvpacked_func(x(1, 8, 2, 16), x(1, 8, 3, 2, 16)), "kv"),
        (lambda x: fa.flash_attn_func(x(1, 8, 2, 16), x(1, 8, 2, 8), x(1, 8, 2, 16)), "k"),
        (lambda x: fa.flash_attn_func(x(1, 8, 3, 16), x(1, 8, 2, 16), x(1, 8, 2, 16)), "head"),
        (lambda x: fa.flash_attn_func(x(1, 8, 2, 16), x(1, 8, 2, 16), x(1, 9, 2, 16)), "v"),
        (lambda x: fa.flash_attn_qkvpacked_func(x(1, 8, 3, 2, 16), dropout_p=1.5), "dropout_p"),
        (
            lambda x: fa.flash_attn_qkvpacked_func(
                x(1, 8, 3, 2, 16), alibi_slopes=torch.ones(2, dtype=torch.float64)
            ),
            "alibi_slopes",
        ),
        (
            lambda x: fa.flash_attn_varlen_qkvpacked_func(x(8, 3, 2, 16), torch.tensor([0, 8]), 8),
            "cu_seqlens",
        ),
        (
            lambda x: fa.flash_attn_varlen_qkvpacked_func(
                x(8, 3, 2, 16), torch.tensor([0, 9], dtype=torch.int32), 9
            ),
            "cu_seqlens",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[..., Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        call(torch.zeros)
