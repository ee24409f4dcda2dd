"""Tessera as an attention implementation of Hugging Face Transformers (4.53 or newer).

    import tessera.integrations.transformers
    tessera.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera")

Transformers asks two functions: one makes a mask, once for a model's forward, and one computes attention, in
each layer. A mask of ours is one of

    None                   nothing is hidden but what the layer says of itself (is_causal, sliding_window)
    (batch, keys) bool     False: padding. Fewer keys than the cache has: the others are not filled yet
    (batch, keys) int32    several sequences in a row: keys with the same number belong together
    (batch, 1, 1, 2) int32    one query: the first key that it sees, and the one behind the last
    (batch, 1, queries, keys) bool    everything that is hidden; becomes a bias

The last is made for patterns that the others cannot say (chunks, images inside text, functions of the user's)
and for a single query between holes. Only it grows with the square of the length. One that the user gives is
treated alike.

A step of generate() has one query: tessera.decode reads the keys where the cache has them, up to the last one
in use, whatever the cache. That a row's padding has no holes is read from the mask, once for a forward; on a
GPU that waits for it, as generate() itself does after each step.

Rows of padding have finite values of no meaning, as in the other implementations, but not the same ones.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import tessera

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as error:
    raise ImportError("tessera.integrations.transformers needs transformers 4.53 or newer") from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["attention", "mask", "register"]

Window = tuple[int | None, int | None]  # how many keys before and after its own place a query sees; None: all
EVERYTHING: Window = (None, None)


def register(name: str = "tessera") -> None:
    """Makes attn_implementation=name known to Transformers. Calling it again changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


# ---- Attention, in each layer.


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function. Of `others`, what would change the result is refused.

    query, key and value are (batch, heads, sequence, dim); the output is (batch, sequence, heads, dim).
    """
    for name in ("head_mask", "cache", "indices"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{name}: attn_implementation='tessera' cannot take it")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotations may have left them in float32
    batch, queries = q.shape[:2]
    window = layer_window(module, is_causal, sliding_window)
    options: dict[str, Any] = {}

    if s_aux is not None and s_aux.dtype not in (torch.float32, q.dtype):
        s_aux = s_aux.to(q.dtype)

    if attention_mask is None:
        if cu_seq_lens_q is not None:
            options = packed(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    elif is_step(attention_mask):
        first, behind = attention_mask[:, 0, 0].unbind(1)
        if not (dropout or position_bias is not None or wants_gradient(q, k, v, s_aux)):
            out = tessera.decode(
                q,
                k,
                v,
                behind.contiguous(),
                leftpad_k=first.contiguous(),
                softmax_scale=scaling,
                softcap=softcap or 0.0,
                sinks=s_aux,
            )
            return out, None
        window, options = EVERYTHING, {"bias": step_bias(first, behind, k.shape[1])}
    elif attention_mask.dim() == 4:
        window = EVERYTHING
        options = {"bias": bias_of(attention_mask[..., : k.shape[1]], q.dtype)}
    else:
        keys = attention_mask.shape[1]
        k, v = k[:, :keys], v[:, :keys]
        window, options = layout_of(attention_mask, queries, window, position_bias is not None)
    if position_bias is not None:
        if "cu_seqlens_q" in options:
            raise NotImplementedError("position_bias: not for packed sequences")
        position_bias = position_bias[..., : k.shape[1]].to(q.dtype)
        options = {"bias": position_bias + options["bias"] if "bias" in options else position_bias}

    is_packed = "cu_seqlens_q" in options
    if is_packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = tessera.attention(
        q,
        k,
        v,
        window=window,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        dropout_p=dropout,
        **options,
    )
    return out.unflatten(0, (batch, queries)) if is_packed else out, None


def layer_window(module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None) -> Window:
    """What a layer says of itself. A sliding window counts the query's own place, on either side."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = None if sliding_window is None else sliding_window - 1
    return side, 0 if causal else side


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A 4-D mask, of bool or to be added, as a bias. The lowest number becomes -inf: backward needs it."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    hidden = mask < torch.finfo(mask.dtype).min / 2
    mask = mask.masked_fill(hidden, -torch.inf)
    return mask if mask.dtype == torch.float32 else mask.to(dtype)


def packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_q: int | None, max_k: int | None
) -> dict[str, Any]:
    cu_seqlens_q = cu_seqlens_q.to(torch.int32)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k.to(torch.int32)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": None if max_q is None else int(max_q),
        "max_seqlen_k": None if max_k is None else int(max_k),
    }


# ---- One query.


def is_step(mask: Tensor) -> bool:
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2:] == (1, 2)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """decode has none."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def step_bias(first: Tensor, behind: Tensor, keys: int) -> Tensor:
    places = torch.arange(keys, device=first.device)
    return padding_bias((places >= first[:, None]) & (places < behind[:, None]))


def step_mask(
    window: Window,
    padding: Tensor | None,
    device: torch.device | str | None,
    batch: int,
    keys: int,
    place: int | Tensor,
) -> Tensor | None:
    """The keys that one query sees, which stands at key `place`; None: they do not follow one another."""
    if padding is not None and not is_one_run(padding):
        return None
    left, right = window
    first = 0 if left is None else clamp(place - left, 0, keys)
    behind = keys if right is None else clamp(place + right + 1, 0, keys)
    if padding is not None:
        start = padding.int().argmax(1)
        behind = (start + padding.sum(1)).clamp(max=behind)
        first = torch.minimum(start.clamp(min=first), behind)
    # Each of the two is contiguous, for the kernels.
    made = torch.empty(2, batch, dtype=torch.int32, device=device)
    made[0], made[1] = first, behind
    return made.T[:, None, None]


def is_one_run(padding: Tensor) -> bool:
    """Whether the keys of every row follow one another. False, too, where that cannot be read."""
    if torch.compiler.is_compiling() or (padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool((runs_of(padding) <= 1).all())


def runs_of(mask: Tensor) -> Tensor:
    """How many there are in each row."""
    return (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, :1].sum(1)


def clamp(x: int | Tensor, low: int, high: int) -> int | Tensor:
    return x.clamp(low, high) if isinstance(x, torch.Tensor) else min(max(x, low), high)


# ---- 2-D masks.


class Layout(NamedTuple):
    """How a 2-D mask is given to tessera.attention."""

    window: Window
    options: dict[str, Any]


# Made with the mask, used by every layer. A mask that was copied on its way (to another device, say) is not
# found: then the layer's own word for its window counts, and the rest is read from the mask, in each layer.
layouts = WeakTensorKeyDictionary()


def layout_of(mask: Tensor, queries: int, window: Window, needs_bias: bool) -> Layout:
    if torch.compiler.is_compiling():
        return Layout(window, {"bias": padding_bias(mask)})
    layout = layouts.get(mask) or make_layout(mask, queries, window)
    if needs_bias and "bias" not in layout.options:
        if mask.dtype == torch.int32:
            raise NotImplementedError("position_bias: not for packed sequences")
        return Layout(layout.window, {"bias": padding_bias(mask)})
    return layout


def make_layout(mask: Tensor, queries: int, window: Window) -> Layout:
    """Reads the mask; on a GPU it waits for it."""
    keys = mask.shape[1]
    if mask.dtype == torch.int32:
        if keys != queries:
            raise ValueError(f"attention_mask: {keys} sequence numbers for {queries} queries")
        return Layout(window, packed_runs(mask))
    mask = mask != 0
    runs = runs_of(mask)
    rises = runs - mask[:, :1].sum(1)
    is_full, is_right, is_one_run = torch.stack((mask.all(), (rises == 0).all(), (runs <= 1).all())).tolist()
    if is_full:
        return Layout(window, {})
    if is_right and (keys == queries or window == EVERYTHING):
        # Query i stands at key i, however few keys are left.
        return Layout(window, {"seqused_k": mask.sum(1, dtype=torch.int32), "causal_alignment": "top-left"})
    if is_one_run and keys == queries and window[1] == 0:
        return Layout(window, packed_runs(mask))  # padding is a sequence of its own
    return Layout(window, {"bias": padding_bias(mask)})


def packed_runs(numbers: Tensor) -> dict[str, Any]:
    """Neighbours in a row with the same number are a sequence."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    firsts = starts.flatten().nonzero().flatten()
    cu_seqlens = torch.cat((firsts, firsts.new_tensor([numbers.numel()])))
    longest = int(cu_seqlens.diff().max()) if len(firsts) else 0
    return packed(cu_seqlens, None, longest, longest)


def padding_bias(mask: Tensor) -> Tensor:
    """One number for each key."""
    mask = mask != 0
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)[:, None, None, :]


# ---- The mask, once for a forward.


def mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Transformers' mask function. attention_mask: bool (batch, positions seen so far); False: padding.

    Queries stand at q_offset, q_offset + 1, …; versions before 5 say it with cache_position. Keys stand at
    kv_offset, ….
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    assert q_length is not None
    pattern = read_pattern(mask_function)
    if pattern is not None:
        padding = key_padding(attention_mask, kv_offset, kv_length)
        device = others.get("device")
        if q_length == 1 and kv_length > 1 and pattern.numbers is None:
            place = q_offset - kv_offset
            step = step_mask(pattern.window, padding, device, batch_size, kv_length, place)
            if step is not None:
                return step
        small = small_mask(pattern, padding, device, batch_size, q_length, kv_length, q_offset, kv_offset)
        if small is not NotImplemented:
            return small

    queries = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **queries,
        **others,
    )


def small_mask(
    pattern: Pattern,
    padding: Tensor | None,
    device: torch.device | str | None,
    batch: int,
    queries: int,
    keys: int,
    q_offset: int | Tensor,
    kv_offset: int,
) -> Tensor | None:
    """A mask that does not grow with queries x keys; NotImplemented where there is none."""
    compiling = torch.compiler.is_compiling()
    if isinstance(q_offset, torch.Tensor):
        if compiling or (queries == 1 and q_offset.is_cuda):
            return NotImplemented  # a full mask of one row is small, and waits for no GPU
        q_offset = int(q_offset)

    left, right = pattern.window
    seen = q_offset + queries - kv_offset  # keys up to the last query's place
    width = seen if right == 0 else keys
    if width > keys or (pattern.window != EVERYTHING and seen != width):
        return NotImplemented
    padding = None if padding is None else padding[:, :width]
    reaches = (left is None or left >= width - 1) and (right in (None, 0) or right >= width - 1)
    if compiling:
        plain = reaches and width == keys and pattern.numbers is None
        return padding if plain else NotImplemented
    if padding is not None and bool(padding.all()):
        padding = None
    if padding is None and reaches and width == keys and pattern.numbers is None:
        return None
    if queries == 1:
        return NotImplemented

    if pattern.numbers is not None:
        if padding is not None or width != queries:
            return NotImplemented
        made = pattern.numbers.to(torch.int32, copy=True)
        layouts[made] = make_layout(made, queries, pattern.window)
    elif padding is not None:
        made = padding
        layouts[made] = make_layout(made, queries, pattern.window)
    else:
        made = torch.ones(batch, width, dtype=torch.bool, device=device)
        layouts[made] = Layout(pattern.window, {})
    return made


def key_padding(attention_mask: Tensor | None, offset: int, length: int) -> Tensor | None:
    """Of the keys. Positions beyond the mask are hidden."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, offset : offset + length] != 0
    return torch.nn.functional.pad(padding, (0, length - padding.shape[1]))


# ---- What a mask function of Transformers means.


class Pattern(NamedTuple):
    window: Window
    numbers: Tensor | None = None  # of the sequence that each place of a row belongs to


def read_pattern(function: Callable[..., Any]) -> Pattern | None:
    """None: not one that we know. Transformers makes the functions for each call; their closures tell."""
    if function is masking_utils.causal_mask_function:
        return Pattern((None, 0))
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern(EVERYTHING)
    if getattr(function, "__module__", None) != masking_utils.__name__ or torch.compiler.is_compiling():
        return None
    maker = function.__qualname__.partition(".<locals>.")[0]
    values = inspect.getclosurevars(function).nonlocals
    if maker in overlays:
        return Pattern(overlays[maker](values["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Pattern(EVERYTHING, values["packed_sequence_mask"])
    if maker == "and_masks":
        return intersection([read_pattern(part) for part in values["mask_functions"]])
    return None


def intersection(patterns: list[Pattern | None]) -> Pattern | None:
    if any(pattern is None for pattern in patterns):
        return None
    lefts, rights = zip(*(pattern.window for pattern in patterns), strict=True)
    numbers = [pattern.numbers for pattern in patterns if pattern.numbers is not None]
    if len(numbers) > 1:
        return None
    left, right = (
        min((side for side in sides if side is not None), default=None) for sides in (lefts, rights)
    )
    return Pattern((left, right), numbers[0] if numbers else None)


def windows_of_overlays() -> dict[str, Callable[[int], Window]]:
    """Makers of windows, and the window of a size. One that this Transformers means otherwise is left out."""
    readings: dict[str, Callable[[int], Window]] = {
        "sliding_window_overlay": lambda size: (size - 1, None),
        "sliding_window_bidirectional_overlay": lambda size: (size, size),
    }
    places = torch.arange(9)
    distance = places - places[:, None]  # of a key from a query

    def agrees(name: str) -> bool:
        maker = getattr(masking_utils, name, None)
        if maker is None:
            return False
        left, right = readings[name](3)
        sees = (distance >= -left) & (distance <= (9 if right is None else right))
        return bool((maker(3)(0, 0, places[:, None], places) == sees).all())

    return {name: reading for name, reading in readings.items() if agrees(name)}


overlays = windows_of_overlays()
