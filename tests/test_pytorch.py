"""bindings/pytorch.py: what needs no GPU (lines and knobs, building, refusals, the fake kernel), and, where there is a GPU, PyTorch's
own samples of scaled_dot_product_attention against its math backend, opcheck, torch.compile, CUDA graphs, streams and backward.
usage: python3 -m pytest tests/test_pytorch.py   (SDPA_TEST_GPU=1: no GPU is a failure)"""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.11", reason="PyTorch 2.11 or newer is missing")
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "bindings"), os.path.join(ROOT, "tools")]
import builds  # noqa: E402
import pytorch as sdpa  # noqa: E402

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU and not os.environ.get("SDPA_TEST_GPU"), reason="no GPU")
HALVES, SIZES = (torch.float16, torch.bfloat16), (64, 128, 256)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float8_e4m3fn: 6e-2}  # of rel_rms, twice a line's
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FAKE_NVCC = """#!/bin/sh
[ "$1" = --version ] && exit
echo run >>"$CALLS"
sleep 0.3
for word; do [ "$last" = -o ] && echo library >"$word"; last=$word; done
%s
"""


# ---- without a GPU ----

@pytest.mark.parametrize("capability, family", [((9, 0), "hopper"), ((8, 6), "ampere"), ((12, 0), "ampere")])
def test_lines_have_the_knobs_that_cmake_reads(capability, family):
    lines = builds.Tree().config_lines()
    for dtype in sdpa.DTYPES:
        for D in SIZES:
            if dtype == torch.float8_e4m3fn and family == "ampere":
                with pytest.raises(sdpa.Unavailable, match="sm_90 alone"):
                    sdpa.line_of(capability, dtype, D)
                continue
            name = sdpa.line_of(capability, dtype, D)
            knobs = dict(word.split("=") for word in lines[name].knobs)
            assert name.startswith(family) and sdpa.knobs_of(name) == knobs
            assert int(knobs.get("HEAD_DIM", 64)) == D and knobs["USE_TUNED"] == "1"
    with pytest.raises(sdpa.Unavailable, match="sm_75; sdpa's kernels need sm_80 or newer"):
        sdpa.line_of((7, 5), torch.float16, 64)


def in_cache(monkeypatch, folder, nvcc=None):
    """A cache of its own, and this text as nvcc."""
    monkeypatch.setenv("SDPA_CACHE", str(folder / "cache"))
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    if nvcc is not None:
        (folder / "nvcc").write_text(nvcc)
        (folder / "nvcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


BUILD = ("import sys; sys.path.insert(0, 'bindings'); import pytorch as sdpa;"
         "print(sdpa.built('a', ['tools/library.cu'], '-DKNOB=1'))")


def test_two_processes_build_a_line_once(monkeypatch, tmp_path):
    in_cache(monkeypatch, tmp_path, FAKE_NVCC % "")
    processes = [subprocess.Popen([sys.executable, "-c", BUILD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for _ in range(2)]
    paths, said = zip(*(process.communicate() for process in processes))
    assert paths[0] == paths[1] and open(paths[0].strip()).read() == "library\n"
    assert (tmp_path / "calls").read_text() == "run\n" and "".join(said).count("sdpa: building a by nvcc, once ... 0 s") == 1
    other = sdpa.built("a", ["tools/library.cu"], "-DKNOB=2")
    assert other != paths[0].strip() and (tmp_path / "calls").read_text() == "run\n" * 2


def test_what_cannot_be_built(monkeypatch, tmp_path, capsys):
    in_cache(monkeypatch, tmp_path, FAKE_NVCC % 'rm -f "$word"; echo "x.cu(3): error: no such knob" >&2; exit 1')
    with pytest.raises(sdpa.Unavailable, match="^nvcc could not build a: error: no such knob$"):
        sdpa.built("a", ["tools/library.cu"])
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".so")]
    monkeypatch.setenv("SDPA_CACHE", "/dev/null/cache")
    with pytest.raises(sdpa.Unavailable, match="^/dev/null/cache cannot be written to .*; set SDPA_CACHE to a folder that can$"):
        sdpa.built("a", ["tools/library.cu"])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    with pytest.raises(sdpa.Unavailable, match="^nvcc is missing; install the CUDA Toolkit"):
        sdpa.built("a", ["tools/library.cu"])
    # A line that cannot be had: the reason reaches C++, and stderr.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    line = sdpa.Line()
    sdpa.load_line(0, 1, 128, 128, 0, line)
    assert line.trouble.startswith(b"nvcc is missing") and not line.forward
    assert "PyTorch's own kernel runs instead" in capsys.readouterr().err


def test_refusals():
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="q is on cpu; sdpa's kernels run on CUDA devices"):
        sdpa.attention(q, q, q)
    for options in {"causal": "middle"}, {"window": (1, 2, "middle")}:
        with pytest.raises(ValueError, match="a mask of 'middle' is none of None, 'br', 'tl'"):
            sdpa.attention(q, q, q, **options)
    assert sdpa.why_not(q, q, q, attn_mask=q) == "there is an attn_mask; PyTorch's FlashAttention takes none"
    assert sdpa.why_not(q, q, q, dropout_p=0.1) == "there is dropout"
    assert sdpa.why_not(q, q, q, scale=-1.0) == "scale=-1.0 is not positive"


def test_the_fake_kernel():
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 100, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k = torch.empty(2, 4, 300, 128, device="cuda", dtype=torch.bfloat16)
        out, lse = sdpa.attention(q, k, k, causal="br", return_lse=True)
        assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
        assert lse.shape == (2, 8, 100) and lse.dtype == torch.float32
        assert sdpa.attention(q.to(torch.float8_e4m3fn), k, k).dtype == torch.float16


def test_pytorch_cpp_compiles_and_takes_its_place(tmp_path):
    """In a process of its own, with the real nvcc: built, loaded, put behind PyTorch's operator without a warning, taken away."""
    if not builds.nvcc():
        pytest.skip("nvcc is missing")
    program = ("import sys; sys.path.insert(0, 'bindings'); import torch, pytorch as sdpa\n"
               "sdpa.activate(); assert torch.nn.attention.current_flash_attention_impl() == 'sdpa'\n"
               "q = torch.zeros(1, 1, 1, 64); print(sdpa.why_not(q, q, q))\n"
               "table = lambda: torch._C._dispatch_dump('aten::_scaled_dot_product_flash_attention')\n"
               "assert 'bindings/pytorch.cpp' in table()\n"
               "torch.nn.attention.restore_flash_attention_impl(); assert 'bindings/pytorch.cpp' not in table()\n")
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "SDPA_CACHE": os.environ.get("SDPA_BUILD_DIR", str(tmp_path)) + "/pytorch"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a tensor is on cpu; sdpa's kernels run on CUDA devices\n"
    assert not [line for line in done.stderr.splitlines() if not line.startswith("sdpa: building pytorch-")], done.stderr


# ---- on a GPU ----

@pytest.fixture
def active():
    sdpa.activate()
    yield
    torch.nn.attention.restore_flash_attention_impl()


def kernels(run):
    """What run() returns, and the names of the kernels that it launched."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = run()
        torch.cuda.synchronize()
    return result, [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def rel_rms(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def reference(q, k, v, mask=None, scale=None, softcap=None, sinks=None):
    """In double: O and LSE. mask: True where a key is seen."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    S = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    if mask is not None:
        S = S.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # one more key, whose V is 0
        S = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return torch.nan_to_num(torch.softmax(S, -1)) @ v, torch.logsumexp(S, -1)


def visible(Sq, Sk, causal, window, device="cuda"):
    q, k = torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)
    own = lambda by: q + (Sk - Sq if by == "br" else 0)  # noqa: E731
    left, right = (1 << 30 if keys is None else keys for keys in window[:2])
    by = window[2] if len(window) > 2 else causal
    return (k >= own(by) - left) & (k <= own(by) + right) & (k <= own(causal) if causal else k >= 0)


def samples(dtype, D, requires_grad):
    """PyTorch's own samples of scaled_dot_product_attention, with rows of D instead of 8 elements unless D is 8, and some more."""
    from torch.testing._internal.common_methods_invocations import op_db
    op, = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    for sample in op.sample_inputs("cuda", dtype, requires_grad=requires_grad):
        if D != 8:
            sample.input, *sample.args = (make(*x.shape[:-1], D) for x in (sample.input, *sample.args))
        yield sample.input, *sample.args, sample.kwargs
    if D != 8:
        yield make(2, 8, 77, D), make(2, 2, 300, D), make(2, 2, 300, D), {"enable_gqa": True}
        yield make(2, 8, 200, D), make(2, 8, 200, D), make(2, 8, 200, D), {"is_causal": True, "scale": 0.3}
        qkv = make(2, 130, 3, 4, D).permute(2, 0, 3, 1, 4)
        yield *qkv, {"is_causal": True}
        yield make(1, 4, 1, D), make(1, 4, 5000, D), make(1, 4, 5000, D), {}
        yield make(1, 4, 9, D + 8)[..., :D], make(1, 4, 9, D), make(1, 4, 9, D), {}
        if not requires_grad:  # odd: copied; FlashAttention-2's backward fails on such a tensor
            yield make(1, 4, 9, D + 1)[..., 1:], make(1, 4, 9, D), make(1, 4, 9, D), {}


@needs_gpu
@pytest.mark.parametrize("requires_grad", (False, True))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("D", (8, *SIZES))
def test_samples_of_pytorch(active, dtype, D, requires_grad):
    ours = declined = 0
    for q, k, v, options in samples(dtype, D, requires_grad):
        why = sdpa.why_not(q, k, v, **{name: value for name, value in options.items() if name != "enable_gqa"})
        tensors = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
        got, names = kernels(lambda: F.scaled_dot_product_attention(*tensors, **options))
        assert any("sdpa::" in name for name in names) == (not why), (why, names, q.shape, options)
        ours, declined = ours + (not why), declined + bool(why)
        if options.get("dropout_p"):
            continue  # another kernel has other random numbers
        wide = [x.detach().double().requires_grad_(requires_grad) for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*wide, **{**options, **({"attn_mask": options["attn_mask"].double()}
                                                                     if "attn_mask" in options else {})})
        assert rel_rms(got, want) <= LIMITS[dtype], (q.shape, options)
        if requires_grad:
            grad = torch.randn_like(got)
            for a, b in zip(torch.autograd.grad(got, tensors, grad), torch.autograd.grad(want, wide, grad.double())):
                assert rel_rms(a, b) <= 2 * LIMITS[dtype], (q.shape, options)
    print(f"{dtype} D={D} requires_grad={requires_grad}: {ours} by sdpa, {declined} declined")
    assert ours == (D in SIZES and 8 - requires_grad) and declined


CASES = [(torch.float16, 2, 8, 2, 100, 300, 64, "br", (None, None)), (torch.bfloat16, 1, 4, 4, 300, 100, 128, "br", (None, None)),
         (torch.bfloat16, 2, 4, 1, 130, 513, 256, "tl", (None, None)), (torch.float16, 1, 8, 8, 333, 333, 128, "br", (64, 0)),
         (torch.bfloat16, 1, 2, 2, 200, 220, 64, None, (10, 7)), (torch.float16, 1, 2, 1, 90, 220, 128, None, (30, 7, "br")), (torch.float8_e4m3fn, 2, 8, 2, 200, 333, 128, "br", (None, None)),
         (torch.float8_e4m3fn, 1, 2, 2, 64, 1000, 64, None, (None, None)), (torch.bfloat16, 4, 32, 8, 1, 3000, 128, None, (None, None))]


def case_tensors(dtype, B, Hq, Hkv, Sq, Sk, D, causal, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, H, D, device="cuda").to(dtype).transpose(1, 2) for S, H in ((Sq, Hq), (Sk, Hkv), (Sk, Hkv)))
    factors = {}
    if dtype == torch.float8_e4m3fn:
        factors = {"q_descale": torch.rand(B, Hq, device="cuda") + 0.5, "k_descale": torch.rand(B, Hkv, device="cuda") + 0.5,
                   "v_descale": torch.tensor(0.7, device="cuda")}
    return q, k, v, factors


def in_pages(tensors, size):
    """Tensors [B,H,S,D] as [pages,H,size,D], and the table of the pages, which are in no order."""
    B, H, S, _ = tensors[0].shape
    count = -(-S // size)
    table = torch.randperm(B * count, device="cuda")
    paged = []
    for x in tensors:
        rows = x.contiguous().view(torch.uint8)
        whole = torch.zeros(B, H, count * size, rows.shape[3], dtype=torch.uint8, device="cuda")
        whole[:, :, :S] = rows
        pages = torch.empty(B * count, H, size, rows.shape[3], dtype=torch.uint8, device="cuda")
        pages[table] = whole.view(B, H, count, size, -1).transpose(1, 2).flatten(0, 1)
        paged.append(pages.view(x.dtype))
    return paged, table.view(B, count).int()


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case):
    dtype, Sq, Sk, causal, window = case[0], case[4], case[5], case[7], case[8]
    q, k, v, factors = case_tensors(*case)
    out, lse = sdpa.attention(q, k, v, causal=causal, window=window, return_lse=True, **factors)
    wide = [x.double() * factors[name].double().expand(x.shape[:2])[..., None, None] if factors else x
            for x, name in zip((q, k, v), ("q_descale", "k_descale", "v_descale"))]
    want, want_lse = reference(*wide, visible(Sq, Sk, causal, window))
    seen = torch.isfinite(want_lse)
    assert rel_rms(out, want) <= LIMITS[dtype] and out.stride() == torch.empty_like(q).stride()
    assert torch.equal(torch.isfinite(lse), seen) and (lse - want_lse)[seen].abs().max() <= 1e-2
    options = {"causal": causal, "window": window, **factors}
    torch.compiler.reset()  # or the cases before count as recompilations of this one, and those have a limit
    compiled = torch.compile(lambda *x: sdpa.attention(*x, **options), fullgraph=True)
    assert torch.equal(compiled(q, k, v), out)


@needs_gpu
@pytest.mark.parametrize("dtype, D, softcap", [(torch.float16, 64, None), (torch.bfloat16, 128, 5.0), (torch.bfloat16, 256, 50.0),
                                               (torch.float8_e4m3fn, 128, None), (torch.float16, 128, 5.0)], ids=str)
def test_softcap_sinks_and_lengths(dtype, D, softcap):
    """Short queries and long ones, by the tiles for both, with sinks and without; sequences of different lengths."""
    for Sq, Sk, mask in (1, 3000, None), (200, 333, "br"):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, D, mask, (None, None))
        q = (q.float() * 3).to(dtype)
        for sinks in (None, torch.randn(8, device="cuda") + 3):
            out, lse = sdpa.attention(q, k, v, mask, softcap=softcap, sinks=sinks, return_lse=True)
            want, want_lse = reference(q, k, v, visible(Sq, Sk, mask, (None, None)), None, softcap, sinks)
            assert rel_rms(out, want) <= LIMITS[dtype] and (lse - want_lse).abs().max() <= 1e-2
        lengths = torch.tensor([Sk, Sk - 101], dtype=torch.int32, device="cuda")
        out = sdpa.attention(q, k, v, mask, softcap=softcap, k_lengths=lengths)
        for b, n in enumerate(lengths.tolist()):
            one = [x[b:b + 1, :, :rows] for x, rows in ((q, Sq), (k, n), (v, n))]
            want, _ = reference(*one, visible(Sq, n, mask, (None, None)), None, softcap)
            assert rel_rms(out[b:b + 1], want) <= LIMITS[dtype]
        paged, table = in_pages((k, v), 16 if Sq > 1 else 64)
        if softcap != 5:  # each is a build of its own
            assert rel_rms(sdpa.attention(q, *paged, mask, softcap=softcap, k_lengths=lengths, page_table=table), out) <= LIMITS[dtype]
        starts = torch.tensor([0, 0, Sq // 3, Sq], dtype=torch.int32, device="cuda")
        k_starts = torch.tensor([0, 11, Sk // 2, Sk], dtype=torch.int32, device="cuda")
        out, lse = sdpa.attention(*(x[:1] for x in (q, k, v)), mask, softcap=softcap, q_starts=starts, k_starts=k_starts, return_lse=True)
        for (q0, q1), (k0, k1) in zip(zip(starts, starts[1:]), zip(k_starts, k_starts[1:])):
            one = q[:1, :, q0:q1], k[:1, :, k0:k1], v[:1, :, k0:k1]
            want, want_lse = reference(*one, visible(int(q1 - q0), int(k1 - k0), mask, (None, None)), None, softcap)
            if q1 > q0:
                assert rel_rms(out[:, :, q0:q1], want) <= LIMITS[dtype] and (lse[:, :, q0:q1] - want_lse).abs().max() <= 1e-2
    with pytest.raises(RuntimeError, match=r"k_lengths is not a contiguous int32 tensor \[\d+\] beside q"):
        sdpa.attention(q, k, v, k_lengths=torch.zeros(7, dtype=torch.int32, device="cuda"))
    with pytest.raises(RuntimeError, match=r"page_table is not an int32 tensor \[2,pages of a sequence\] beside q"):
        sdpa.attention(q, *paged, page_table=table[:1])
    with pytest.raises(RuntimeError, match=r"sinks is not a contiguous float32 tensor \[Hq\]"):
        sdpa.attention(q, k, v, sinks=torch.zeros(7, device="cuda"))
    with pytest.raises(NotImplementedError, match="no backward for e4m3, softcap, sinks"):
        sdpa.attention(q.half().requires_grad_(), k.half(), v.half(), sinks=torch.zeros(8, device="cuda")).sum().backward()
    with pytest.raises(RuntimeError, match="e4m3 has no softcap"):
        sdpa.attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), softcap=3.0)


@needs_gpu
@pytest.mark.parametrize("dtype, D, Dv", [(torch.float16, 96, 96), (torch.bfloat16, 192, 128), (torch.bfloat16, 80, 48)], ids=str)
def test_head_sizes(dtype, D, Dv):
    """Sizes without a line of their own, and a size of v."""
    for Sq, Sk, mask in (1, 3000, None), (200, 333, "br"):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, max(D, Dv), mask, (None, None))
        q, k, v = (x[..., :size] for x, size in ((q, D), (k, D), (v, Dv)))
        out, lse = sdpa.attention(q, k, v, mask, return_lse=True)
        want, want_lse = reference(q, k, v, visible(Sq, Sk, mask, (None, None)))
        assert out.shape == want.shape and rel_rms(out, want) <= LIMITS[dtype] and (lse - want_lse).abs().max() <= 1e-2
        compiled = torch.compile(lambda *x: sdpa.attention(*x, mask), fullgraph=True)
        assert torch.equal(compiled(q, k, v), out)
    with pytest.raises(RuntimeError, match="there is no line for D=40"):
        sdpa.attention(*(x[..., :40] for x in (q, k, v)))


@needs_gpu
def test_opcheck():
    for case in CASES:
        q, k, v, factors = case_tensors(*case)
        left, right = (-1 if keys is None else keys for keys in case[8][:2])
        by = case[8][2] if len(case[8]) > 2 else None
        square = case[0] in HALVES and (case[7] != "tl" and left + right == -2 or case[4] == case[5])
        arguments = [x.requires_grad_() if square else x for x in (q, k, v)]
        # PyTorch cannot compare tensors of e4m3, by which test_schema finds out whether an input was written to.
        tests = [name for name in OPCHECKS if case[0] in HALVES or name != "test_schema"]
        torch.library.opcheck(torch.ops.sdpa.attention.default, (*arguments, sdpa.MASKS[case[7]], left, right, sdpa.MASKS[by], 0.0,
                              0.0, *(factors.get(name) for name in ("q_descale", "k_descale", "v_descale")), *[None] * 5, 0), test_utils=tests)


@needs_gpu
def test_backward_of_attention():
    for causal, window, Sq, Sk in (("br", (None, None), 100, 300), ("br", (30, None), 200, 200), (None, (20, 9), 150, 150),
                                   ("tl", (None, None), 99, 99), (None, (None, None), 60, 170), (None, (20, 9, "br"), 60, 170)):
        q, k, v = (torch.randn(2, 4, S, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for S in (Sq, Sk, Sk))
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        got, want = sdpa.attention(q, k, v, causal=causal, window=window), reference(*wide, visible(Sq, Sk, causal, window))[0]
        grad = torch.randn_like(got)
        for a, b in zip(torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(want, wide, grad.double())):
            assert rel_rms(a, b) <= 3e-2, (causal, window, Sq, Sk)
    q, k = torch.randn(1, 1, 3, 64, device="cuda", dtype=torch.half, requires_grad=True), torch.randn(1, 1, 5, 64, device="cuda").half()
    with pytest.raises(NotImplementedError, match="no backward"):
        sdpa.attention(q, k, k, causal="tl").sum().backward()


@needs_gpu
def test_graphs_and_streams(active):
    """Problems with ranges of keys need a workspace: of each stream, of each graph, and of each stream within a graph."""
    make = lambda Sk: [torch.randn(1, 8, S, 128, device="cuda", dtype=torch.half) for S in (1, Sk, Sk)]  # noqa: E731
    problems = [make(Sk) for Sk in (9000, 20000, 5000)]
    want = [reference(*x)[0] for x in problems]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        torch.cuda.synchronize()
        got = []
        for stream, x in zip(streams, problems):
            with torch.cuda.stream(stream):
                got += [F.scaled_dot_product_attention(*x) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(rel_rms(o, want[i // 4]) <= 2e-3 for i, o in enumerate(got))
    free = []
    for round in range(4):
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:
            with torch.cuda.graph(graph):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    graph.a = F.scaled_dot_product_attention(*problems[0])
                graph.b = F.scaled_dot_product_attention(*problems[1])
                graph.c = F.scaled_dot_product_attention(*problems[2])
                torch.cuda.current_stream().wait_stream(side)
        for _ in range(20):
            for stream, graph in zip(streams, graphs):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            assert all(rel_rms(o, w) <= 2e-3 for graph in graphs for o, w in zip((graph.a, graph.b, graph.c), want))
        _, names = kernels(graphs[0].replay)
        assert not [name for name in names if "emset" in name], names
        del graph, graphs
        torch.cuda.synchronize()
        F.scaled_dot_product_attention(*problems[0])
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1], free  # a graph's workspace goes with it


@needs_gpu
def test_bad_input(active):
    q = torch.randn(1, 2, 30, 64, device="cuda", dtype=torch.half)
    rows = "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes"
    for bad, why in ((q.float(), "no line for Float"), (torch.randn(1, 2, 30, 72, device="cuda").half(), "no line for D=72"),
                     (torch.randn(1, 2, 64, 30, device="cuda").half().mT, rows),
                     (torch.randn(1, 2, 30, 65, device="cuda").half()[..., 1:], rows)):
        with pytest.raises(RuntimeError, match=why):
            sdpa.attention(bad, bad, bad)
        assert why == rows or why in sdpa.why_not(bad, bad, bad)
        out, want = (F.scaled_dot_product_attention(x, x, x) for x in (bad, bad.double()))
        assert rel_rms(out, want) <= 2e-3
    with pytest.raises(RuntimeError, match="tensors are on|a tensor is on cpu"):
        sdpa.attention(q, q.cpu(), q)
    with pytest.raises(RuntimeError, match="different dtypes"):
        sdpa.attention(q, q.bfloat16(), q.bfloat16())
    with pytest.raises(RuntimeError, match="heads of q are no multiple"):
        sdpa.attention(q, torch.cat([q, q[:, :1]], 1), torch.cat([q, q[:, :1]], 1))
    with pytest.raises(RuntimeError, match="window_left=-7 is outside"):
        sdpa.attention(q, q, q, window=(-7, 0))
    with pytest.raises(RuntimeError, match="q_descale is for builds with an 8-bit DTYPE"):
        sdpa.attention(q, q, q, q_descale=torch.ones(1, device="cuda"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not any("sdpa::" in name for name in kernels(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))[1])
