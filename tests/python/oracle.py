"""Attention and its gradients in float64, plain NumPy, one query head at a time: the package's judge."""

from __future__ import annotations

import numpy as np


def scores_of(q, k, *, scale, softcap, slopes, bias, seqlen_q, seqlen_k, top_left):
    """The scores of one head before the mask, and softcap's derivative."""
    s = scale * (q @ k.T)
    slope = np.ones_like(s)
    if softcap:
        t = np.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    if slopes is not None:
        i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
        s = s - slopes * np.abs(i + seqlen_k - seqlen_q - j)
    if bias is not None:
        s = s + bias
    return s, slope


def visible(seqlen_q, seqlen_k, *, causal, window, top_left):
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    at = i + (0 if top_left else seqlen_k - seqlen_q)
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    mask = np.ones((seqlen_q, seqlen_k), bool)
    if left is not None:
        mask &= j >= at - left
    if right is not None:
        mask &= j <= at + right
    return mask


def attention(
    q, k, v, *, causal=False, window=(None, None), softmax_scale=None, softcap=0.0, alibi_slopes=None,
    bias=None, sinks=None, causal_alignment="bottom-right", dout=None, dlse=None,
):  # fmt: skip
    """Dense tensors (batch, seqlen, heads, dim). The output, lse, and with dout a dict of gradients."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, heads_k, dim_v = k.shape[1], k.shape[2], v.shape[-1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    top_left = causal_alignment == "top-left"
    wide = (
        None if bias is None else np.broadcast_to(bias, (batch, heads, seqlen_q, seqlen_k)).astype(np.float64)
    )
    mask = visible(seqlen_q, seqlen_k, causal=causal, window=window, top_left=top_left)
    out, lse = np.zeros((batch, seqlen_q, heads, dim_v)), np.zeros((batch, heads, seqlen_q))
    grads = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    dwide, dsinks = np.zeros((batch, heads, seqlen_q, seqlen_k)), np.zeros(heads)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // heads_k)
            slopes = None
            if alibi_slopes is not None:
                slopes = np.broadcast_to(alibi_slopes, (batch, heads))[b, h].astype(np.float64)
            s, slope = scores_of(
                q[b, :, h], k[b, :, g], scale=scale, softcap=softcap, slopes=slopes,
                bias=None if wide is None else wide[b, h], seqlen_q=seqlen_q, seqlen_k=seqlen_k,
                top_left=top_left,
            )  # fmt: skip
            s = np.where(mask, s, -np.inf)
            sink = -np.inf if sinks is None else float(sinks[h])
            with np.errstate(divide="ignore", invalid="ignore"):
                top = np.maximum(s.max(axis=1, initial=-np.inf), sink)
                base = np.where(np.isfinite(top), top, 0.0)
                e = np.exp(s - base[:, None])
                total = e.sum(axis=1) + np.exp(sink - base)
                p = np.where(total[:, None] > 0, e / total[:, None], 0.0)
                lse[b, h] = np.where(total > 0, base + np.log(total), -np.inf)
            out[b, :, h] = p @ v[b, :, g]
            if dout is None:
                continue
            do = np.asarray(dout, np.float64)[b, :, h]
            dl = np.zeros(seqlen_q) if dlse is None else np.asarray(dlse, np.float64)[b, h]
            dp = do @ v[b, :, g].T
            delta = (p * dp).sum(axis=1) - dl
            ds = p * (dp - delta[:, None])
            sunk = np.where(total > 0, np.exp(sink - base) / np.where(total > 0, total, 1.0), 0.0)
            dsinks[h] += (sunk * -delta).sum()
            dwide[b, h] = ds
            ds = ds * slope * scale
            grads["v"][b, :, g] += p.T @ do
            grads["q"][b, :, h] = ds @ k[b, :, g]
            grads["k"][b, :, g] += ds.T @ q[b, :, h]
    if dout is None:
        return out, lse
    if bias is not None:
        axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1 and dwide.shape[i] != 1)
        grads["bias"] = dwide.sum(axis=axes, keepdims=True)
    if sinks is not None:
        grads["sinks"] = dsinks
    return out, lse, grads


def rotated(x, cos, sin, positions, *, interleaved):
    """Rows x (rows, heads, dim), turned by the angles of their positions."""
    x, half = x.copy(), cos.shape[1]
    first, second = (
        (np.arange(half) * 2, np.arange(half) * 2 + 1)
        if interleaved
        else (np.arange(half), np.arange(half) + half)
    )
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = x[..., first], x[..., second]
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def decode(
    q, k_cache, v_cache, lengths, *, k_new=None, v_new=None, page_table=None, cache_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False, alibi_slopes=None,
    rounded=lambda x: x, rounded_v=lambda x: x, causal=False, window=(None, None), **options,
):  # fmt: skip
    """A sequence at a time: q, k_new and v_new are lists of (rows, heads, dim).

    The outputs and lse, as lists, and the caches after the append; rounded: keys to what the cache holds of
    them, rounded_v: values.
    """
    k_cache, v_cache = k_cache.astype(np.float64), v_cache.astype(np.float64)
    q = [np.asarray(x, np.float64) for x in q]
    new = [0 if k_new is None else len(k_new[b]) for b in range(len(q))]

    def places(b):
        """Of the slots of a sequence: block and row in it."""
        slots = np.arange(lengths[b] + new[b])
        if page_table is None:
            row = b if cache_batch_idx is None else cache_batch_idx[b]
            return np.full_like(slots, row), slots
        size = k_cache.shape[1]
        return page_table[b][slots // size], slots % size

    for b in range(len(q)):  # every append comes before anything is read
        if k_new is None:
            continue
        keys, at = np.asarray(k_new[b], np.float64), lengths[b] + np.arange(new[b])
        if rotary_cos is not None:
            keys = rotated(keys, rotary_cos, rotary_sin, at, interleaved=rotary_interleaved)
            moves = causal or window != (None, None)
            stand = lengths[b] + (np.arange(len(q[b])) if moves else np.zeros(len(q[b]), int))
            q[b] = rotated(q[b], rotary_cos, rotary_sin, stand, interleaved=rotary_interleaved)
        blocks, rows = (x[lengths[b] :] for x in places(b))
        k_cache[blocks, rows] = rounded(keys)
        v_cache[blocks, rows] = rounded_v(v_new[b])
    outs, lses = [], []
    for b in range(len(q)):
        blocks, rows = (x[0 if leftpad_k is None else leftpad_k[b] :] for x in places(b))
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
        out, lse = attention(
            q[b][None], k_cache[blocks, rows][None], v_cache[blocks, rows][None],
            causal=causal, window=window, alibi_slopes=slopes, **options,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    return outs, lses, k_cache, v_cache
