"""When a tensor is close enough to what the oracle says."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}
# Of the largest value: float32 as sums of some hundred terms have it, the others by their rounding.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def close(actual, expected, dtype, name=""):
    actual = actual.detach().float().cpu().numpy() if isinstance(actual, torch.Tensor) else actual
    assert actual.shape == expected.shape, name
    empty = np.isneginf(expected)
    assert (np.isneginf(actual) == empty).all(), name
    error = np.abs(np.where(empty, 0, actual) - np.where(empty, 0, expected))
    assert error.max(initial=0) <= TOLERANCE[dtype] * max(1, np.abs(expected[~empty]).max(initial=0)), name


def numbers(x):
    return None if x is None else x.detach().double().cpu().numpy()
