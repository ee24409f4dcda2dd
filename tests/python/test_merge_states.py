"""tessera.merge_states: values and gradients, torch.compile, arrays, errors."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
import torch
from closeness import DTYPES, close, numbers

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"dense": (2, 5, 3, 8), "packed": (7, 3, 8)}


def states(device, dtype, shape, seed=0):
    """o_a, lse_a, o_b, lse_b, with a row that the first side, the second, and neither has keys for."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for empty in ((0, 2), (1, 2)):
        o = torch.randn(shape, generator=generator)
        lse = 3 * torch.randn((*shape[:-3], shape[-2], shape[-3]), generator=generator)
        lse[..., list(empty)] = -torch.inf
        made += [o.to(device, dtype), lse.to(device)]
    return made


def plain(o_a, lse_a, o_b, lse_b):
    """The same by torch, in float64, for rows that have keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    o = sum(
        torch.exp(part - lse).transpose(-1, -2).unsqueeze(-1) * x for x, part in ((o_a, lse_a), (o_b, lse_b))
    )
    return o, lse


def expected_values(tensors):
    wide = [x.double().cpu() for x in tensors]
    o, lse = plain(*wide)
    return torch.nan_to_num(o).numpy(), lse.numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_values(device, shape):
    for dtype in DTYPES[device]:
        tensors = states(device, dtype, SHAPES[shape])
        o, lse = tessera.merge_states(*tensors)
        assert o.dtype == dtype
        assert tessera.last_kernel().startswith("cpu_" if device == "cpu" else "cuda_")
        expected = expected_values(tensors)
        close(o, expected[0], dtype, "o")
        close(lse, expected[1], torch.float32, "lse")


def test_the_parts_of_a_cache_are_the_whole(device):
    dtype = DTYPES[device][0]
    q = torch.randn(2, 3, 4, 32, device=device).to(dtype)
    k, v = (torch.randn(2, 50, 2, 32, device=device).to(dtype) for _ in range(2))
    parts = [
        tessera.attention(q, k[:, part], v[:, part], return_lse=True)
        for part in (slice(0, 20), slice(20, 50))
    ]
    o, lse = tessera.merge_states(*parts[0], *parts[1])
    whole, whole_lse = tessera.attention(q, k, v, return_lse=True)
    close(o, numbers(whole), dtype)
    close(lse, numbers(whole_lse), dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_gradients(device, shape, through):
    dtype = DTYPES[device][0]
    tensors = [x.requires_grad_() for x in states(device, dtype, SHAPES[shape])]
    with torch.no_grad():  # no gradient asks for what a side without weight holds
        tensors[0].masked_fill_((tensors[1] == -torch.inf).transpose(-1, -2)[..., None], torch.nan)
    made = dict(zip(("o", "lse"), tessera.merge_states(*tensors), strict=True))
    asked = [made[name] for name in (("o", "lse") if through == "both" else (through,))]
    flows = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x) for i, x in enumerate(asked)
    ]
    grads = torch.autograd.grad(asked, tensors, flows, allow_unused=True)

    # Only rows with keys on both sides have derivatives by torch; of the others they are said below.
    wide = [torch.nan_to_num(x.detach().double().cpu(), neginf=-1e4).requires_grad_() for x in tensors]
    again = dict(zip(("o", "lse"), plain(*wide), strict=True))
    expected = torch.autograd.grad(
        [again[name] for name in (("o", "lse") if through == "both" else (through,))],
        wide,
        [x.double().cpu() for x in flows],
        allow_unused=True,
    )
    for name, grad, want, x in zip(("o_a", "lse_a", "o_b", "lse_b"), grads, expected, tensors, strict=True):
        if grad is None:
            assert through == "lse"
            assert name.startswith("o")
            continue
        assert grad.dtype == x.dtype
        assert torch.isfinite(grad).all()
        rows = want.numpy().copy()
        (rows if name.startswith("lse") else np.moveaxis(rows, -3, -1))[..., 2] = 0  # neither has keys
        close(grad, rows, dtype, name)


def test_gradients_can_be_derived():
    tensors = states("cpu", torch.float32, (1, 6, 2, 4))
    # As in test_gradients; a side without keys has no weight, whatever it holds.
    expected = [torch.nan_to_num(x.double(), neginf=-100).requires_grad_() for x in tensors]
    for o, lse in (tensors[:2], tensors[2:]):
        o.masked_fill_((lse == -torch.inf).transpose(-1, -2)[..., None], torch.nan)
    tensors = [x.requires_grad_() for x in tensors]
    with_keys = [0, 1, 3, 4, 5]

    def second(function, inputs):
        o, lse = function(*inputs)
        loss = o[:, with_keys].square().sum() + lse[..., with_keys].square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    for grad, want in zip(second(tessera.merge_states, tensors), second(plain, expected), strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-3, atol=1e-4)


def test_training_through_two_parts(device):
    """Attention to two parts of the keys and a merge have the gradients of attention to all."""
    dtype = DTYPES[device][0]
    q = torch.randn(1, 9, 4, 16, device=device).to(dtype).requires_grad_()
    k, v = (torch.randn(1, 30, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(2))
    flow = torch.randn_like(q)

    def merged():
        first = tessera.attention(q, k[:, :11], v[:, :11], return_lse=True)
        return tessera.merge_states(*first, *tessera.attention(q, k[:, 11:], v[:, 11:], return_lse=True))[0]

    grads = torch.autograd.grad(merged(), (q, k, v), flow)
    whole = torch.autograd.grad(tessera.attention(q, k, v), (q, k, v), flow)
    for grad, want in zip(grads, whole, strict=True):
        close(grad, numbers(want), dtype)


def test_compiled(device):
    dtype = DTYPES[device][0]
    tensors = [x.requires_grad_() for x in states(device, dtype, SHAPES["dense"])]
    compiled = torch.compile(tessera.merge_states, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, tessera.merge_states):
        o, lse = function(*tensors)
        loss = o.float().square().sum() + torch.where(lse == -torch.inf, 0, lse).sum()
        results.append((o, lse, *torch.autograd.grad(loss, tensors)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_opcheck():
    from tessera import _torch_decode

    tensors = [x.requires_grad_() for x in states("cpu", torch.float32, (1, 5, 2, 4))]
    torch.library.opcheck(_torch_decode.merge_op, (*tensors, None))


def test_numpy():
    tensors = states("cpu", torch.float32, SHAPES["dense"])
    arrays = [x.numpy() for x in tensors]
    o, lse = tessera.merge_states(*arrays)
    assert type(o) is np.ndarray
    expected = expected_values(tensors)
    close(torch.from_numpy(o), expected[0], torch.float32)
    close(torch.from_numpy(lse), expected[1], torch.float32)
    again = tessera.merge_states(np.asfortranarray(arrays[0]), *map(np.asfortranarray, arrays[1:]))
    np.testing.assert_array_equal(again[0], o)


def test_errors_name_the_argument():
    o_a, lse_a, o_b, lse_b = states("cpu", torch.float32, SHAPES["dense"])
    for arguments, text in [
        ((o_a[0, 0], lse_a, o_b, lse_b), "o_a: shape"),
        ((o_a, lse_a[0], o_b, lse_b), "lse_a: "),
        ((o_a, lse_a.double(), o_b, lse_b), r"lse_a\.dtype: float64"),
        ((o_a, lse_a, o_b[:, :3], lse_b), "o_b: shape"),
        ((o_a, lse_a, o_b, lse_b.numpy()), "lse_b: ndarray, expected a torch.Tensor as o_a is"),
        ((o_a.numpy(), lse_a, o_b, lse_b), "lse_a: Tensor, expected a numpy.ndarray as o_a is"),
        (([1], lse_a, o_b, lse_b), "o_a: list"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            tessera.merge_states(*arguments)
    with pytest.raises(ValueError, match="kernel: nobody"):
        tessera.merge_states(o_a, lse_a, o_b, lse_b, kernel="nobody")
    with pytest.raises(NotImplementedError, match="cuda_sm80"):
        tessera.merge_states(o_a, lse_a, o_b, lse_b, kernel="cuda_sm80")
