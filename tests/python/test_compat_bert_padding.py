"""tessera.compat.bert_padding: rows out of a padded batch and back, with their gradients."""

import pytest
import torch
from tessera.compat import bert_padding
from torch import Tensor

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_and_pad(dtype: torch.dtype) -> None:
    x = random(4, 5, 2, 3, seed=51).requires_grad_()
    rows, indices, cu, longest, seqused = bert_padding.unpad_input(x, MASK.to(dtype))
    selected = MASK.bool()
    assert torch.equal(rows, x[selected])
    assert indices.tolist() == selected.flatten().nonzero().flatten().tolist()
    assert cu.dtype == torch.int32 and cu.tolist() == [0, 3, 3, 8, 10]
    assert longest == 5 and isinstance(longest, int)
    assert seqused.dtype == torch.int32 and seqused.tolist() == [3, 0, 5, 2]

    padded = bert_padding.pad_input(rows, indices, 4, 5)
    assert torch.equal(padded, x * selected[:, :, None, None])
    weight = random(4, 5, 2, 3, seed=52)
    (padded * weight).sum().backward()
    assert torch.equal(x.grad, weight * selected[:, :, None, None])


def test_unpad_with_unused_rows() -> None:
    x = random(4, 5, 3, seed=53)
    unused = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]])
    rows, indices, cu, longest, seqused = bert_padding.unpad_input(x, MASK, unused)
    placed = (MASK + unused).bool()
    assert torch.equal(rows, x[placed])
    assert torch.equal(indices, placed.flatten().nonzero().flatten())
    assert cu.tolist() == [0, 4, 5, 10, 14] and longest == 5
    assert seqused.tolist() == [3, 0, 5, 2]


def test_unpad_concatenated_sequences() -> None:
    x = random(3, 6, 2, seed=54).requires_grad_()
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :4], x[2]]))
    assert indices.tolist() == [*range(5), *range(6, 10), *range(12, 18)]
    assert cu.dtype == torch.int32 and cu.tolist() == [0, 2, 5, 8, 9, 15]
    assert longest == 6 and isinstance(longest, int)
    rows.sum().backward()
    assert x.grad.sum() == rows.numel()


def test_index_functions() -> None:
    x = random(6, 2, 3, seed=55).requires_grad_()
    indices = torch.tensor([4, 0, 3])
    weight, residual_weight = random(3, 2, 3, seed=56), random(6, 2, 3, seed=57)

    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, bert_padding.index_first_axis(x, indices))
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    ((rows * weight).sum() + (residual * residual_weight).sum()).backward()
    expected = residual_weight.clone()
    expected[indices] += weight
    torch.testing.assert_close(x.grad, expected)

    values = random(3, 2, 3, seed=58).requires_grad_()
    placed = bert_padding.index_put_first_axis(values, indices, 6)
    assert torch.equal(placed[indices], values) and (placed[[1, 2, 5]] == 0).all()
    (placed * residual_weight).sum().backward()
    assert torch.equal(values.grad, residual_weight[indices])
