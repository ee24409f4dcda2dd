"""A call of tessera.decode, and what it should give."""

from __future__ import annotations

import numpy as np
import oracle
import tessera
import torch
from closeness import close, numbers

HEADS, DIM, DIM_V = 6, 16, 24
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def quantised(x, scale, stored):
    """float32, (..., heads, dim), as an 8-bit cache holds it."""
    x = (x.float() / scale[:, None]).clamp(-LARGEST[stored], LARGEST[stored])
    return (x.round() if stored == torch.int8 else x).to(stored)


class Case:
    """A call with random tensors: what tessera.decode takes, and what the oracle says of it."""

    def __init__(
        self, device, dtype, *, lengths=(11, 0, 60), seqlen_q=1, new=None, heads_k=2, page_size=None,
        leftpad=None, batch_idx=None, rotary=None, interleaved=False, packed=None, sinks=False, alibi=None,
        head_major=False, stored=None, scales="each", seed=0, **options,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, kind=dtype):
            return torch.randn(shape, generator=generator).to(device, kind)

        self.dtype, batch, room = dtype, len(lengths), 70
        self.lengths = lengths
        rows_q = packed or [seqlen_q] * batch
        rows_new = None if new is None else (new if isinstance(new, (list, tuple)) else [new] * batch)
        self.options = options
        self.options |= {"sinks": normal(HEADS, kind=torch.float32)} if sinks else {}
        if alibi is not None:
            self.options["alibi_slopes"] = normal(*alibi, kind=torch.float32).abs()

        blocks, size = 5, room
        if page_size is not None:
            size, pages = page_size, -(-room // page_size)
            blocks = batch * pages + 2
            order = torch.randperm(blocks, generator=generator)[: batch * pages]
            self.options["page_table"] = order.view(batch, pages).to(device, torch.int32)
        if batch_idx is not None:
            self.options["cache_batch_idx"] = int32(batch_idx, device)
        if leftpad is not None:
            self.options["leftpad_k"] = int32(leftpad, device)
        shape = (blocks, heads_k, size) if head_major else (blocks, size, heads_k)
        self.k_cache, self.v_cache = normal(*shape, DIM), normal(*shape, DIM_V)
        if head_major:
            self.k_cache, self.v_cache = self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2)
        self.cache_seqlens = int32(lengths, device)
        self.stored, self.scales = stored, [torch.ones(heads_k, device=device)] * 2
        if stored is not None:
            if scales == "each":  # what they reach, 1.5 to 3, is less than some of the numbers
                self.scales = [
                    (1.5 + 1.5 * torch.rand(heads_k, generator=generator)).to(device) / LARGEST[stored]
                    for _ in range(2)
                ]
            elif scales == "one":
                self.scales = [torch.tensor(2.0 / LARGEST[stored], device=device).expand(heads_k)] * 2
            if scales != "none":
                self.options |= dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
            self.k_cache, self.v_cache = (
                quantised(x, scale, stored)
                for x, scale in zip((self.k_cache, self.v_cache), self.scales, strict=True)
            )

        def rows(counts, heads, dim):
            return normal(sum(counts), heads, dim) if packed else normal(batch, counts[0], heads, dim)

        def each(x, counts):
            return [
                part.numpy() for part in torch.from_numpy(numbers(x)).view(-1, *x.shape[-2:]).split(counts)
            ]

        self.q = rows(rows_q, HEADS, DIM)
        judged = {"q": each(self.q, rows_q)}
        if rows_new is not None:
            self.options |= {"k_new": rows(rows_new, heads_k, DIM), "v_new": rows(rows_new, heads_k, DIM_V)}
            judged |= {name: each(self.options[name], rows_new) for name in ("k_new", "v_new")}
        if packed:
            self.options["cu_seqlens_q"] = int32([0, *np.cumsum(rows_q)], device)
            if rows_new is not None:
                self.options["cu_seqlens_k"] = int32([0, *np.cumsum(rows_new)], device)
        if rotary is not None:
            angles = torch.arange(80)[:, None] * 10.0 ** -torch.linspace(0, 2, rotary // 2)
            self.options |= {
                "rotary_cos": angles.cos().to(device, dtype),
                "rotary_sin": angles.sin().to(device, dtype),
                "rotary_interleaved": interleaved,
            }
        self.judged = judged

    def caches(self):
        """As numbers."""
        return [
            numbers(x) * numbers(scale)[:, None]
            for x, scale in zip((self.k_cache, self.v_cache), self.scales, strict=True)
        ]

    def rounded(self, x, scale):
        """What the cache holds of it."""
        x = torch.from_numpy(x)
        if self.stored is None:
            return numbers(x.to(self.dtype))
        return numbers(quantised(x, scale.cpu(), self.stored)) * numbers(scale)[:, None]

    def expected(self):
        skipped = ("num_splits", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_k", "max_seqlen_q")
        skipped += ("k_scale", "v_scale")
        others = {
            name: numbers(x) if isinstance(x, torch.Tensor) else x
            for name, x in self.options.items()
            if name not in skipped
        }
        for name in ("page_table", "cache_batch_idx", "leftpad_k"):
            if name in others:
                others[name] = others[name].astype(int)
        judged = dict(self.judged)
        queries = judged.pop("q")
        outs, lses, k_cache, v_cache = oracle.decode(
            queries, *self.caches(), self.lengths, **others | judged,
            rounded=lambda x: self.rounded(x, self.scales[0]),
            rounded_v=lambda x: self.rounded(x, self.scales[1]),
        )  # fmt: skip
        if self.q.dim() == 3:
            return np.concatenate(outs), np.concatenate(lses, -1), k_cache, v_cache
        return np.stack(outs), np.stack(lses), k_cache, v_cache

    def check(self, call=tessera.decode):
        """call: tessera.decode, or something that does the same."""
        out_, lse_, k_, v_ = self.expected()
        before = self.caches()
        out, lse = call(
            self.q, self.k_cache, self.v_cache, self.cache_seqlens, return_lse=True, **self.options
        )
        assert out.dtype == self.q.dtype
        close(out, out_, self.dtype, "out")
        close(lse, lse_, self.dtype, "lse")
        # A rotated key may be rounded the other way; all else is copied, or not touched.
        k_cache, v_cache = self.caches()
        close(k_cache, k_, self.dtype, "k_cache")
        np.testing.assert_array_equal(v_cache, v_)
        if "k_new" not in self.options:
            np.testing.assert_array_equal(k_cache, before[0])
        return out, lse
