"""tessera.integrations.transformers: small random models against attn_implementation="eager".

In float32 on the CPU the two agree to rounding, tokens exactly. In bfloat16 on a GPU both are compared with
eager in float32: tessera's error may not be much above eager's.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tessera  # noqa: E402
import tessera.integrations.transformers as integration  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

integration.register()

VOCABULARY = 61
LENGTH = 21
LENGTHS = {"none": (LENGTH, LENGTH, LENGTH), "right": (9, LENGTH, 14), "left": (9, LENGTH, 14)}

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}

# Family -> the model's class, its configuration's, what its configuration has besides SIZES.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED
        | {
            "head_dim": 16,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 4,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"head_dim": 8, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    # Its layers make sliding masks and do not pass the window on.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        GROUPED
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {"local_attention": 8, "global_attn_every_n_layers": 2},
    ),
}
DECODERS = [name for name in FAMILIES if "bert" not in name]
CHUNKED: dict[str, Any] = {
    "head_dim": 8,
    "attention_chunk_size": 6,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 32,
}
OTHERS = {"llama4": ("Llama4ForCausalLM", "Llama4TextConfig", GROUPED | CHUNKED)}


def needs_interface(model_class: str) -> None:
    """Skips where the model does not exist yet, or has an attention of its own that nothing can replace."""
    found = getattr(transformers, model_class, None)
    if not hasattr(sys.modules.get(getattr(found, "__module__", "")), "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{model_class} of transformers {transformers.__version__} takes no attention function")


def build(family: str, **changes: Any) -> Any:
    """An eager model in float32 on the CPU; the same weights for the same family."""
    model_class, config_class, details = (FAMILIES | OTHERS)[family]
    needs_interface(model_class)
    config = getattr(transformers, config_class)(**SIZES | details | changes)
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(parameter, std=0.5 if name.endswith("sinks") else 0.1)
    return model


def variant(model: Any, implementation: str, device: str = "cpu") -> Any:
    """A copy with another attention, as from_pretrained makes it: float32 on the CPU, bfloat16 on a GPU."""
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=implementation)
    other.load_state_dict(model.state_dict())
    return other.train(model.training).to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def inputs(padding: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS[padding]):
        if padding == "right":
            mask[row, length:] = 0
        else:
            mask[row, : LENGTH - length] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def run(model: Any, batch: dict[str, torch.Tensor], real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits at real places and the gradients of every parameter, for a loss over the real places."""
    model.zero_grad()
    batch = {name: x.to(model.device) for name, x in batch.items()}
    logits = model(**batch).logits[real.to(model.device)]
    torch.manual_seed(3)
    weights = torch.randn(logits.shape).to(logits)
    (logits * weights).float().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach().float().cpu() for name, x in ({"logits": logits} | grads).items()}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm())


def check(model: Any, batch: dict[str, torch.Tensor], real: torch.Tensor, device: str) -> None:
    """Tessera's logits and gradients against eager's."""
    want = run(variant(model, "eager"), batch, real)
    got = run(variant(model, "tessera", device), batch, real)
    plain = run(variant(model, "eager", device), batch, real) if device != "cpu" else want
    assert want.keys() == got.keys()
    # A sum's rounding is that of its terms: what is small by cancellation (the gradient of a key's bias is 0)
    # is measured against the largest gradient.
    largest = max(float(x.norm()) for name, x in want.items() if name != "logits")
    for name, x in want.items():
        scale = float(x.norm()) + (0 if name == "logits" else 1e-2 * largest)
        allowed = 2e-5 * scale if device == "cpu" else 3 * distance(plain[name], x) + 0.05 * scale
        assert distance(got[name], x) <= allowed, name
        assert torch.isfinite(got[name]).all(), name


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Of PyTorch's: for such small models more only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Spy:
    """Counts the calls of tessera.attention and tessera.decode, and keeps the options of the former."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.steps = 0

    def options(self) -> set[str]:
        return {name for call in self.calls for name, x in call.items() if x is not None}

    def bias_rows(self) -> int:
        """Of the largest bias."""
        return max((call["bias"].shape[-2] for call in self.calls if call.get("bias") is not None), default=0)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    attention, decode, watcher = tessera.attention, tessera.decode, Spy()

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        watcher.calls.append(options)
        return attention(q, k, v, **options)

    def watched_decode(q: Any, k: Any, v: Any, lengths: Any, **options: Any) -> Any:
        watcher.steps += 1
        assert k.shape[0] == q.shape[0]
        return decode(q, k, v, lengths, **options)

    monkeypatch.setattr(tessera, "attention", watched)
    monkeypatch.setattr(tessera, "decode", watched_decode)
    yield watcher


@pytest.mark.parametrize("padding", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, padding: str, device: str, spy: Spy) -> None:
    batch = inputs(padding)
    check(build(family), batch, batch["attention_mask"].bool(), device)
    assert len(spy.calls) == SIZES["num_hidden_layers"]
    assert spy.bias_rows() <= 1  # no queries x keys


@pytest.mark.parametrize(("padding", "option"), [("right", "seqused_k"), ("left", "cu_seqlens_q")])
def test_padding_needs_no_bias(padding: str, option: str, spy: Spy) -> None:
    variant(build("llama"), "tessera")(**inputs(padding))
    assert option in spy.options()
    assert "bias" not in spy.options()


def test_holes_in_the_padding(spy: Spy) -> None:
    batch = inputs("left")
    batch["attention_mask"][:, 16:18] = 0
    check(build("mistral"), batch, batch["attention_mask"].bool(), "cpu")
    assert spy.bias_rows() == 1


@pytest.mark.parametrize("padding", LENGTHS)
def test_a_pattern_that_needs_a_full_mask(padding: str, spy: Spy) -> None:
    """Llama 4's chunks."""
    batch = inputs(padding)
    check(build("llama4"), batch, batch["attention_mask"].bool(), "cpu")
    assert spy.bias_rows() == LENGTH


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", DECODERS)
def test_generate(family: str, padding: str, cache: str, device: str, spy: Spy) -> None:
    model = build(family)

    def generate(implementation: str) -> Any:
        copied = variant(model, implementation, device)
        return copied.generate(
            **{name: x.to(device) for name, x in inputs(padding).items()},
            do_sample=False,
            max_new_tokens=12,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )

    want, got = generate("eager"), generate("tessera")
    assert len(spy.calls) == SIZES["num_hidden_layers"]  # the prompt
    assert spy.steps == 11 * SIZES["num_hidden_layers"]
    assert spy.bias_rows() <= 1
    if device == "cpu":
        assert torch.equal(got.sequences, want.sequences)
        return
    # In bfloat16 two close logits may change places; until then the logits agree.
    agree = (got.sequences == want.sequences)[:, LENGTH:].long().cumprod(1)
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        rows = agree[:, :step].all(1)
        assert distance(a[rows].float(), b[rows].float()) <= 0.05 * float(b.float().norm())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("how", ["holes", "beams"])
def test_generate_in_other_ways(how: str, cache: str, spy: Spy) -> None:
    """Padding inside the prompt becomes a bias of one row; beams move their rows of the cache about."""
    batch, model = inputs("left"), build("mistral", sliding_window=30)
    if how == "holes":
        batch["attention_mask"][:, 15:17] = 0
    options = {"num_beams": 2} if how == "beams" else {}
    tokens = [
        variant(model, name).generate(
            **batch,
            **options,
            do_sample=False,
            max_new_tokens=6,
            cache_implementation=cache,
            disable_compile=True,
        )
        for name in ("tessera", "eager")
    ]
    assert torch.equal(*tokens)
    assert spy.bias_rows() <= 1
    assert spy.steps == (0 if how == "holes" else 5 * SIZES["num_hidden_layers"])


def test_generate_with_a_compiled_model(device: str) -> None:
    """Transformers compiles a model with a static cache, on a CPU if told to: decode is in the graph."""
    if not hasattr(transformers, "CompileConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no CompileConfig")
    torch._dynamo.reset()
    seen: set[str] = set()

    def backend(graph: Any, _: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph

    config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True
    model = build("llama")

    def generate(implementation: str, **options: Any) -> torch.Tensor:
        return variant(model, implementation, device).generate(
            **{name: x.to(device) for name, x in inputs("left").items()},
            do_sample=False,
            max_new_tokens=5,
            cache_implementation="static",
            **options,
        )

    got = generate("tessera", compile_config=config)
    assert "tessera.decode.default" in seen
    if device == "cpu":
        assert torch.equal(got, generate("eager", disable_compile=True))


def test_a_step_reads_no_unused_slot() -> None:
    """Nor padding: both are NaN."""
    heads, keys = 2, 9
    query, key, value = torch.randn(2, heads, 1, 8), *torch.randn(2, 2, heads, keys, 8)
    step = integration.mask(
        2, keys, q_length=1, q_offset=5, attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    )
    assert step[:, 0, 0].tolist() == [[0, 6], [2, 6]]
    whole = tessera.attention(*(x.transpose(1, 2)[1:] for x in (query, key[..., 2:6, :], value[..., 2:6, :])))
    for x in (key, value):
        x[..., 6:, :] = torch.nan
        x[1, :, :2] = torch.nan
    out, _ = integration.attention(torch.nn.Identity(), query, key, value, step)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[1:], whole)


def test_a_step_with_gradients(spy: Spy) -> None:
    """decode has none: then it is attention."""
    batch, model = inputs("left"), build("mistral")

    def grads(implementation: str) -> list[torch.Tensor]:
        copied = variant(model, implementation)
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        cache = copied(
            batch["input_ids"][:, :-1], attention_mask=batch["attention_mask"][:, :-1], use_cache=True
        ).past_key_values
        copied(
            batch["input_ids"][:, -1:],
            attention_mask=batch["attention_mask"],
            position_ids=positions[:, -1:],
            past_key_values=cache,
        ).logits.square().sum().backward()
        return [parameter.grad for parameter in copied.parameters()]

    for got, want in zip(grads("tessera"), grads("eager"), strict=True):
        assert distance(got, want) <= 1e-4 * (float(want.norm()) + 1)
    assert spy.steps == 0
    assert spy.bias_rows() == 1


@pytest.mark.parametrize("padding", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_in_pieces(family: str, padding: str, spy: Spy) -> None:
    """Several queries behind a cache."""
    batch, model = inputs(padding), build(family)

    def logits(implementation: str) -> torch.Tensor:
        copied, cache, pieces = variant(model, implementation), None, []
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        for start, stop in ((0, 8), (8, 13), (13, LENGTH)):
            result = copied(
                input_ids=batch["input_ids"][:, start:stop],
                attention_mask=batch["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = result.past_key_values
            pieces.append(result.logits)
        return torch.cat(pieces, 1)[batch["attention_mask"].bool()]

    with torch.no_grad():
        torch.testing.assert_close(logits("tessera"), logits("eager"), rtol=1e-4, atol=1e-4)
    assert spy.bias_rows() <= 1


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_users(kind: str, device: str, spy: Spy) -> None:
    """4-D: the first four tokens see one another, and no token sees the sixth but itself."""
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    sees[:4, :4] = True
    sees[6:, 5] = False
    mask = sees.expand(3, 1, -1, -1)
    batch = inputs("none")
    model = build("llama")
    lowest = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    real = torch.ones(3, LENGTH, dtype=torch.bool)
    want = run(variant(model, "eager"), batch | {"attention_mask": lowest}, real)
    got = run(
        variant(model, "tessera", device),
        batch | {"attention_mask": mask if kind == "bool" else lowest},
        real,
    )
    for name, x in want.items():
        allowed = (1e-4 if device == "cpu" else 0.05) * (float(x.norm()) + 1)
        assert distance(got[name], x) <= allowed, name
    assert spy.bias_rows() == LENGTH


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_by_positions(family: str, spy: Spy) -> None:
    """Positions that begin anew begin a sequence."""
    positions = torch.cat([torch.arange(n) for n in (7, 1, 13)])[None].expand(3, -1)
    batch = {"input_ids": inputs("none")["input_ids"], "position_ids": positions, "use_cache": False}
    model = build(family)
    with torch.no_grad():
        got = variant(model, "tessera")(**batch).logits
        want = variant(model, "eager")(**batch).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert "cu_seqlens_q" in spy.options()
    assert "bias" not in spy.options()


def test_packed_by_lengths() -> None:
    """As a collator that flattens a batch says it to the flash implementations."""
    model = variant(build("llama"), "tessera")
    ids = inputs("none")["input_ids"][:1]
    cu_seqlens = torch.tensor([0, 8, LENGTH], dtype=torch.int32)
    with torch.no_grad():
        got = model(
            input_ids=ids,
            position_ids=torch.cat((torch.arange(8), torch.arange(LENGTH - 8)))[None],
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=LENGTH - 8,
            max_length_k=LENGTH - 8,
            use_cache=False,
        ).logits
        want = torch.cat((model(ids[:, :8]).logits, model(ids[:, 8:]).logits), 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", LENGTHS)
def test_encoder_and_decoder(padding: str, device: str, spy: Spy) -> None:
    """T5: a learned bias of positions, keys of another length, a decoder behind a padded encoder."""
    needs_interface("T5ForConditionalGeneration")
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        initializer_factor=1.0,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    batch = inputs(padding)
    decoder_ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    real = torch.ones(3, LENGTH, dtype=torch.bool)
    check(model, batch | {"decoder_input_ids": decoder_ids}, real, device)
    assert len(spy.calls) == 6
    if device == "cpu":
        tokens = [
            variant(model, name).generate(**batch, do_sample=False, max_new_tokens=8)
            for name in ("tessera", "eager")
        ]
        assert torch.equal(*tokens)


def test_dropout() -> None:
    model = variant(build("llama", attention_dropout=0.4), "tessera").train()
    batch = inputs("left")

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**batch).logits.detach()

    assert torch.equal(logits(5), logits(5))
    assert not torch.allclose(logits(5), logits(6))
    model.eval()
    assert torch.equal(logits(5), logits(6))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_compiled_step(padding: str, spy: Spy) -> None:
    """With its mask: where padding cannot be read it is a bias, else the step is decode."""
    batch, model = inputs(padding), variant(build("llama"), "tessera")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, -1:]
    if padding == "none":
        del batch["attention_mask"]

    def step(compiled: bool) -> torch.Tensor:
        mask = batch.get("attention_mask")
        before, now = (
            ({}, {}) if mask is None else ({"attention_mask": mask[:, :-1]}, {"attention_mask": mask})
        )
        cache = model(batch["input_ids"][:, :-1], **before, use_cache=True).past_key_values
        call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        return call(batch["input_ids"][:, -1:], **now, position_ids=positions, past_key_values=cache).logits

    logits = []
    for compiled in (False, True):
        spy.steps = 0
        with torch.no_grad():
            logits.append(step(compiled))
        assert spy.steps == (0 if compiled and padding == "left" else SIZES["num_hidden_layers"])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiled(padding: str) -> None:
    """Under torch.compile nothing is read from a mask."""
    batch, model = inputs(padding), variant(build("llama"), "tessera")
    real = batch["attention_mask"].bool()
    if padding == "none":
        del batch["attention_mask"]
    with torch.no_grad():
        want = model(**batch, use_cache=False).logits[real]
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(**batch, use_cache=False).logits[real]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_refusals() -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="head_mask"):
        integration.attention(torch.nn.Identity(), x, x, x, None, head_mask=torch.ones(2))
