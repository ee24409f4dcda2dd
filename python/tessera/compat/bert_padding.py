"""flash-attn 2.8's `bert_padding`: from a padded batch to packed rows and back.

    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, attention_mask)
    out = flash_attn_varlen_func(...)
    padded = pad_input(out, indices, batch, seqlen)

A padded batch is (batch, seqlen, ...), packed rows are (total, ...), and indices[r] is the place of row r
among the batch * seqlen places of the padded batch. Everything here is differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` of `input`."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows `indices` of `input`, and `input` itself for a residual connection."""
    return input.index_select(0, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of `first_axis_dim` rows: `values` at `indices`, 0 elsewhere."""
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of `hidden_states` (batch, seqlen, ...) that the masks (batch, seqlen) select.

    `attention_mask` marks the rows in use; `unused_mask` marks rows that get a place without being in use.
    Returns (rows, indices, cu_seqlens, max_seqlen, seqused): `cu_seqlens` (batch + 1, int32) and the int
    `max_seqlen` count both kinds of row, `seqused` (batch, int32) those in use.
    """
    used = attention_mask.bool()
    placed = used if unused_mask is None else used | unused_mask.bool()
    rows, indices = _select(hidden_states, placed)
    cu_seqlens, max_seqlen = _boundaries(placed.sum(-1))
    return rows, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows of the batch that each hold several short sequences, one after another.

    A row of `attention_mask_in_length` (batch, seqlen) begins with the lengths of its sequences, in order:
    [2, 3, 0, 0, 0, 0] is a sequence of 2, one of 3, and padding. Returns (rows, indices, cu_seqlens,
    max_seqlen); `cu_seqlens` has an entry for each short sequence, and one more.
    """
    totals = attention_mask_in_length.sum(-1, keepdim=True)
    position = torch.arange(attention_mask_in_length.shape[-1], device=totals.device)
    rows, indices = _select(hidden_states, position < totals)
    return rows, indices, *_boundaries(attention_mask_in_length[attention_mask_in_length != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The packed rows back at their `indices` in a batch (batch, seqlen, ...), 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _select(hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    indices = mask.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices


def _boundaries(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens of these lengths, and the longest."""
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(lengths.max()) if lengths.numel() else 0
