"""tessera.attention on PyTorch's tensors: values and gradients, torch.compile, autocast, errors, threads."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading

import numpy as np
import oracle
import pytest
import tessera
import torch
from closeness import DTYPES, close, numbers
from hypothesis import given, settings
from hypothesis import strategies as st


def judge(device, dtype, seed=0, batch=2, seqlen_q=17, seqlen_k=23, heads=4, heads_k=2, dim=16, dim_v=24,
          bias=None, sinks=False, alibi=False, **options):  # fmt: skip
    """One call, forward and backward, against the oracle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, kind=dtype, grad=True):
        x = torch.randn(shape, generator=generator).to(device, kind)
        return x.requires_grad_(grad)

    q, k = normal(batch, seqlen_q, heads, dim), normal(batch, seqlen_k, heads_k, dim)
    v = normal(batch, seqlen_k, heads_k, dim_v)
    extra = {}
    if bias is not None:
        extent = (batch, heads, seqlen_q, seqlen_k)
        extra["bias"] = normal(
            *(n if c != "1" else 1 for c, n in zip(bias, extent, strict=True)), kind=torch.float32
        )
    if sinks:
        extra["sinks"] = normal(heads, kind=torch.float32)
    slopes = {"alibi_slopes": normal(heads, kind=torch.float32, grad=False).abs()} if alibi else {}
    out, lse = tessera.attention(q, k, v, return_lse=True, **extra, **slopes, **options)
    dout = normal(*out.shape, grad=False)
    dlse = torch.where(torch.isfinite(lse), normal(*lse.shape, kind=torch.float32, grad=False), 0)
    inputs = {"q": q, "k": k, "v": v, **extra}
    grads = torch.autograd.grad((out, lse), list(inputs.values()), (dout, dlse))
    expected_out, expected_lse, expected = oracle.attention(
        numbers(q), numbers(k), numbers(v), **{n: numbers(x) for n, x in {**extra, **slopes}.items()},
        **options, dout=numbers(dout), dlse=numbers(dlse),
    )  # fmt: skip
    close(out, expected_out, dtype, "out")
    close(lse, expected_lse, dtype, "lse")
    for name, grad in zip(inputs, grads, strict=True):
        assert grad.dtype == inputs[name].dtype
        close(grad, expected[name], dtype, f"d{name}")


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "causal_alignment": "top-left"},
    {"window": (3, 2)},
    {"window": (None, 0), "softmax_scale": 0.3},
    {"softcap": 2.0},
    {"alibi": True, "causal": True},
    {"bias": "bhqk"},
    {"bias": "1h1k", "sinks": True},
    {"sinks": True, "window": (0, 0), "seqlen_q": 30, "seqlen_k": 9},
    {"heads": 6, "heads_k": 1, "dim": 33, "dim_v": 7, "bias": "b1q1", "causal": True, "softcap": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(device, options):
    for dtype in DTYPES[device]:
        judge(device, dtype, **options)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    seqlen_q=st.integers(0, 70),
    seqlen_k=st.integers(0, 70),
    heads_k=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.integers(1, 70),
    dim_v=st.integers(1, 70),
    causal=st.booleans(),
    window=st.tuples(*[st.none() | st.integers(0, 20)] * 2),
    softcap=st.sampled_from([0.0, 0.0, 1.5, 30.0]),
    bias=st.none() | st.sampled_from(["bhqk", "11qk", "b11k", "1h11"]),
    sinks=st.booleans(),
    alibi=st.booleans(),
    causal_alignment=st.sampled_from(["bottom-right", "top-left"]),
)
def test_any_shape_and_options(group, heads_k, **options):
    judge("cpu", torch.float32, heads=heads_k * group, heads_k=heads_k, **options)


def test_packed_is_each_sequence_alone(device):
    dtype = DTYPES[device][0]
    lengths_q, lengths_k = [5, 0, 19, 33], [7, 4, 0, 33]
    cu_q, cu_k = ([0, *np.cumsum(x)] for x in (lengths_q, lengths_k))
    q = torch.randn(cu_q[-1], 4, 32, device=device).to(dtype).requires_grad_()
    k, v = (torch.randn(cu_k[-1], 2, 32, device=device).to(dtype).requires_grad_() for _ in range(2))
    cu = {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32, device=device),
    }
    out, lse = tessera.attention(q, k, v, causal=True, return_lse=True, **cu)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for i in range(len(lengths_q)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected, expected_lse, expected_grads = oracle.attention(
            numbers(q[rows])[None], numbers(k[keys])[None], numbers(v[keys])[None], causal=True,
            dout=numbers(dout[rows])[None],
        )  # fmt: skip
        close(out[rows], expected[0], dtype)
        close(lse[:, rows], expected_lse[0], dtype)
        for grad, name, at in zip(grads, "qkv", (rows, keys, keys), strict=True):
            close(grad[at], expected_grads[name][0], dtype, name)


# A GPU takes several heads of a large batch at once, and one of a small one.
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, *({"window": x} for x in ((60, 3), (150, 3), (100, 50)))], ids=str
)
def test_a_few_queries_in_any_batch_have_the_same_bits(device, dim, options):
    dtype = DTYPES[device][0]
    batch = 64 if device == "cuda" else 3
    q = torch.randn(batch, 16, 8, dim, device=device).to(dtype)
    k, v = (torch.randn(batch, 200, 2, dim, device=device).to(dtype) for _ in range(2))
    out, lse = tessera.attention(q, k, v, return_lse=True, **options)
    for b in (0, 1, batch - 1):
        one = slice(b, b + 1)
        alone, alone_lse = tessera.attention(q[one], k[one], v[one], return_lse=True, **options)
        assert torch.equal(alone, out[one])
        assert torch.equal(alone_lse, lse[one])


def test_used_lengths_hide_the_rest(device):
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(2, 12, 2, 16, device=device).to(dtype) for _ in range(3))
    k[0, 7:], v[0, 7:] = torch.nan, torch.nan
    used = torch.tensor([7, 12], dtype=torch.int32, device=device)
    out = tessera.attention(q, k, v, seqused_k=used)
    close(out[:1], oracle.attention(numbers(q[:1]), numbers(k[:1, :7]), numbers(v[:1, :7]))[0], dtype)
    close(out[1:], oracle.attention(numbers(q[1:]), numbers(k[1:]), numbers(v[1:]))[0], dtype)


def test_gradcheck():
    """Central differences of the package itself, as torch sees it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    sinks = torch.randn(2, requires_grad=True)

    def call(*x):
        return tessera.attention(*x[:3], bias=x[3], sinks=x[4], causal=True, softcap=3.0, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks), eps=1e-2, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks"])
def test_any_one_input_may_want_a_gradient(which):
    x = {n: torch.randn(1, 6, 2, 8) for n in "qkv"}
    x["bias"], x["sinks"] = torch.randn(6, 6), torch.randn(2)
    x[which].requires_grad_()
    tessera.attention(**x).sum().backward()
    assert x[which].grad.shape == x[which].shape
    assert torch.isfinite(x[which].grad).all()
    assert all(t.grad is None for n, t in x.items() if n != which)


def test_lse_alone_has_a_gradient():
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    lse = tessera.attention(q, k, v, return_lse=True)[1]
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    expected = oracle.attention(
        numbers(q), numbers(k), numbers(v), dout=np.zeros((1, 6, 2, 8)), dlse=np.ones((1, 2, 6))
    )
    close(dq, expected[2]["q"], torch.float32)
    assert (dv == 0).all()


def test_any_strides(device):
    dtype = DTYPES[device][0]
    qkv = torch.randn(2, 9, 3, 4, 16, device=device).to(dtype)
    packed = qkv.unbind(2)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed]
    last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in packed]
    assert last[0].stride(-1) != 1
    expected = tessera.attention(*(x.contiguous() for x in packed), causal=True)
    for tensors in (packed, transposed, last):
        torch.testing.assert_close(tessera.attention(*tensors, causal=True), expected, rtol=0, atol=0)
    one = packed[1][:1].contiguous()
    # A stride of 0 is not for every kernel: the same one for both, or they differ in their rounding.
    expanded = (packed[0], one.expand(2, -1, -1, -1), packed[2])
    kernel = tessera.explain(*expanded).kernel
    repeated = (packed[0], one.repeat(2, 1, 1, 1), packed[2])
    torch.testing.assert_close(
        tessera.attention(*expanded), tessera.attention(*repeated, kernel=kernel), rtol=0, atol=0
    )


def test_dropout(device):
    dtype = DTYPES[device][0]
    q, k = (torch.randn(1, 64, 2, 16, device=device).to(dtype) for _ in range(2))
    v = torch.ones(1, 64, 2, 16, device=device, dtype=dtype).requires_grad_()
    call = lambda **o: tessera.attention(q, k, v, dropout_p=0.3, **o)  # noqa: E731
    assert torch.equal(call(seed=5), call(seed=5))
    assert not torch.equal(call(seed=5), call(seed=6))
    torch.manual_seed(3)
    first = call()
    assert not torch.equal(first, call())
    torch.manual_seed(3)
    assert torch.equal(first, call())
    assert abs(float(first.float().mean()) - 1) < 0.1
    # Backward drops what forward dropped: dv's sum is out's.
    dv = torch.autograd.grad(first.sum(), v)[0]
    assert abs(float(dv.float().sum() - first.float().sum())) < 0.02 * float(first.float().sum())


def test_autocast(device):
    q, k, v = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = tessera.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, tessera.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()), rtol=0, atol=0
    )


def test_compile_has_one_graph(device):
    dtype = DTYPES[device][0]

    def call(q, k, v, bias, sinks):
        out, lse = tessera.attention(q * 2, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)
        return out.sin(), lse

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = [torch.randn(2, 7, 4, 16, device=device).to(dtype).requires_grad_() for _ in range(3)]
    x += [
        torch.randn(1, 4, 7, 7, device=device).requires_grad_(),
        torch.randn(4, device=device).requires_grad_(),
    ]
    expected, actual = call(*x), compiled(*x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(y[0].float().sum() + y[1].sum(), x) for y in (actual, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_draws_dropout_anew():
    compiled = torch.compile(
        lambda q: tessera.attention(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    q = torch.randn(1, 32, 2, 16)
    assert not torch.equal(compiled(q), compiled(q))
    torch.manual_seed(4)
    first = compiled(q)
    torch.manual_seed(4)
    assert torch.equal(compiled(q), first)


@pytest.mark.parametrize("seed", [3, 2**63 + 11, 2**64 - 1])
def test_compile_with_a_seed(seed):
    if seed >= 2**63 and torch.__version__ < (2, 5):
        pytest.skip("before 2.5, torch.compile holds no integer of 64 bits")
    call = lambda q: tessera.attention(q, q, q, dropout_p=0.5, seed=seed)  # noqa: E731
    q = torch.randn(1, 32, 2, 16, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), call(q))
    assert torch.equal(torch.autograd.grad(compiled(q).sum(), q)[0], torch.autograd.grad(call(q).sum(), q)[0])


@pytest.mark.gpu
def test_compile_with_cuda_graphs():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")

    def call(x):
        return tessera.attention(x * 2, x, x, causal=True).float().sin()

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), call(x))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_dispatch_modes_see_the_operators(device):
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q = torch.randn(2, 7, 4, 16, device=device).to(DTYPES[device][0]).requires_grad_()
    with Watch():
        tessera.attention(q, q, q).float().sum().backward()
    assert "tessera.attention_forward.default" in seen
    assert "tessera.attention_backward.default" in seen
    plain = q.detach()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
        out, lse = tessera.attention(fake, fake, fake, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 7)


def test_without_gradients_the_same_numbers(device):
    q, k, v = (torch.randn(2, 40, 4, 32, device=device).to(DTYPES[device][0]) for _ in range(3))
    options = {"causal": True, "window": (9, None), "softcap": 3.0, "return_lse": True}
    out, lse = tessera.attention(q, k, v, **options)
    assert not out.requires_grad
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        assert not tessera.attention(*leaves).requires_grad
    again, lse_again = tessera.attention(*leaves, **options)
    assert again.requires_grad
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    with torch.no_grad():
        of_parameter = tessera.attention(torch.nn.Parameter(q), k, v, **options)[0]
    assert type(of_parameter) is torch.Tensor
    assert torch.equal(of_parameter, out)
    # A copy of one layer's output is compact even where q is a view.
    view = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert tessera.attention(view, k, v).is_contiguous()


def test_torchs_threads_count():
    code = (
        "import os, torch, tessera\n"
        "torch.set_num_threads(1)\n"
        "x = torch.randn(1, 2000, 4, 64)\n"
        "tessera.attention(x, x, x)\n"
        "torch.set_num_threads(3)\n"  # before 2.5, torch itself starts some here
        "print(len(os.listdir('/proc/self/task')))\n"
        "tessera.attention(x, x, x)\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    environment = {n: v for n, v in os.environ.items() if n != "TESSERA_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    before, after = map(int, result.stdout.split())
    assert after == before + 2


def test_traced_it_is_an_operator():
    """torch.jit.trace must not keep one call's memory."""
    x, y = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    traced = torch.jit.trace(lambda z: tessera.attention(z, z, z, causal=True), (x,))
    torch.testing.assert_close(traced(y), tessera.attention(y, y, y, causal=True))


def test_forward_mode_says_no():
    import torch.autograd.forward_ad as forward_ad

    x = torch.randn(1, 5, 2, 8)
    with forward_ad.dual_level():
        assert tessera.attention(x, x, x).shape == x.shape
        with pytest.raises(NotImplementedError, match="no forward-mode gradients"):
            tessera.attention(forward_ad.make_dual(x, torch.ones_like(x)), x, x)


def test_a_bad_seed_under_compile():
    call = torch.compile(lambda q: tessera.attention(q, q, q, dropout_p=0.5, seed=-1), backend="aot_eager")
    with pytest.raises(Exception, match="seed: -1, expected"):
        call(torch.randn(1, 8, 2, 8))


def test_vmap_says_no():
    x = torch.randn(3, 1, 5, 2, 8)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        torch.vmap(lambda y: tessera.attention(y, y, y))(x)


@pytest.mark.gpu
def test_graphs_and_streams():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = tessera.attention(x, x, x, causal=True)
    graph, still = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = tessera.attention(still, still, still, causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    still.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(out, tessera.attention(still, still, still, causal=True))

    # On a stream that is still busy with the input: were the call on another, it would read zeros.
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        out = tessera.attention(late, late, late, causal=True)
    assert not stream.query()  # nobody waited for the GPU
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_wants_a_seed(monkeypatch):
    from tessera import _torch

    class OnGpu:
        is_cuda = True

    assert 0 <= _torch.draw_seed(torch.zeros(1)) < 2**64
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="seed: None while a CUDA graph is captured"):
        _torch.draw_seed(OnGpu())


@pytest.mark.gpu
def test_a_training_step_in_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = [
        torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]

    def step():
        return torch.autograd.grad(tessera.attention(*x, causal=True, deterministic=True).float().sum(), x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    graph.replay()
    for actual, wanted in zip(grads, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_opcheck():
    from tessera import _torch

    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    bias, sinks = torch.randn(1, 2, 6, 6, requires_grad=True), torch.randn(2, requires_grad=True)
    for drawn, dropout_p, seed in ((None, 0.0, None), (torch.tensor(5), 0.3, None), (None, 0.3, -7)):
        tensors = (drawn, None, bias, sinks, None, None, None, None)
        numbers = (None, True, None, None, False, 0.0, dropout_p, seed, None, None, False, None)
        torch.library.opcheck(_torch.forward_op, (q, k, v, *tensors, *numbers))
        out, lse = _torch.forward_op(q, k, v, *tensors, *numbers)
        detached = [None if x is None else x.detach() for x in tensors]
        torch.library.opcheck(
            _torch.backward_op,
            (*(x.detach() for x in (q, k, v, out, lse, torch.randn_like(out))), None, True, True, *detached,
             *numbers),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_double_backward_says_no():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(tessera.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad.sum().backward()


def test_errors_name_the_argument():
    x = torch.randn(2, 5, 4, 8)
    for arguments, options, error, text in [
        ((x.double(),) * 3, {}, ValueError, "q.dtype: float64"),
        ((x, x.bfloat16(), x), {}, ValueError, "k.dtype"),
        ((x, x[:1], x), {}, ValueError, "k"),
        ((x[0, 0], x, x), {}, ValueError, "q: shape"),
        ((x, x, x[0]), {}, ValueError, "v: shape"),
        ((x, x[..., :3, :], x), {}, ValueError, "heads"),
        ((x, x, x), {"causal_alignment": "middle"}, ValueError, "causal_alignment: 'middle'"),
        ((x, x, x), {"dropout_p": 1.5}, ValueError, "dropout_p"),
        ((x, x, x), {"window": (-2, 0)}, ValueError, "window_left"),
        ((x, x, x), {"kernel": "fast"}, (ValueError, NotImplementedError), "fast"),
        ((x, x, x), {"kernel": 5}, (ValueError, TypeError), "kernel: 5, expected"),
        ((x, x, x), {"window": (1.5, None)}, TypeError, "window_left: 1.5, expected"),
        ((x, x, x), {"window": (None, 2**70)}, ValueError, "window_right: 1180591620717411303424, expected"),
        ((x, x, x), {"softcap": "x"}, TypeError, "softcap: 'x', expected a number"),
        ((x, x, x), {"dropout_p": "x"}, TypeError, "dropout_p: 'x', expected a number"),
        ((x, x, x), {"dropout_p": 0.5, "seed": -1}, ValueError, "seed: -1, expected"),
        ((x, x, x), {"dropout_p": 0.5, "seed": 2**64}, ValueError, "seed: 18446744073709551616, expected"),
        ((x, x, x), {"sinks": torch.randn(3)}, ValueError, "sinks"),
        ((x, x, x), {"bias": torch.randn(2, 4, 5, 6)}, ValueError, "bias"),
        ((x, x.numpy(), x), {}, ValueError, "k: ndarray"),
        ((x.to("meta"),) * 3, {}, ValueError, "meta"),
    ]:
        with pytest.raises(error, match=text):
            tessera.attention(*arguments, **options)


def test_a_forced_kernel_runs():
    x = torch.randn(1, 5, 2, 8)
    tessera.attention(x, x, x, kernel="cpu_baseline")
    assert tessera.last_kernel() == "cpu_baseline"


def test_threads():
    x = torch.randn(1, 200, 4, 32)
    expected, wrong = tessera.attention(x, x, x, causal=True), []

    def run():
        for _ in range(20):
            if not torch.equal(tessera.attention(x, x, x, causal=True), expected):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_explain_takes_the_same_arguments():
    x = torch.randn(1, 64, 4, 32)
    explanation = tessera.explain(x, x, x, causal=True, window=(5, None))
    assert explanation.kernel == tessera.explain(x, x, x, kernel=explanation.kernel).kernel
    assert 0 < explanation.values["flops"] < explanation.values["dense_flops"]
    assert "cuda_sm80" in explanation.refusals
    assert tessera.explain(x, x, x, direction="backward").values["flops"] > explanation.values["flops"]
    with pytest.raises(TypeError, match="cauzal"):
        tessera.explain(x, x, x, cauzal=True)
    with pytest.raises(ValueError, match="direction: 'sideways'"):
        tessera.explain(x, x, x, direction="sideways")


def test_signature():
    parameters = inspect.signature(tessera.attention).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert {n: p.default for n, p in parameters.items() if n not in "qkv"} == {
        "causal": False, "window": (None, None), "softmax_scale": None, "softcap": 0.0, "alibi_slopes": None,
        "bias": None, "sinks": None, "dropout_p": 0.0, "seed": None, "cu_seqlens_q": None,
        "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None, "seqused_q": None,
        "seqused_k": None, "causal_alignment": "bottom-right", "deterministic": False, "return_lse": False,
        "kernel": None,
    }  # fmt: skip
