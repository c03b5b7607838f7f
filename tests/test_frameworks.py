"""Tests of everything timed besides the kernels, on CPU tensors with fake clocks: tools/frameworks.py, the packages of
tools/engine.py, bindings/context_parallel.py.  usage: python3 -m pytest tests/test_frameworks.py"""
import contextlib
import csv
import io
import itertools
import os
import re
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", minversion="2.11", reason="PyTorch 2.11 or newer is missing")
import torch.nn.functional as F

import builds
import engine
import frameworks

sys.path.insert(0, os.path.join(builds.ROOT, "bindings"))
PLAIN = F.scaled_dot_product_attention


class OnCpu:
    """PyTorch with the CPU as device "cuda", and events that return the time of `clock`."""

    def __init__(self, clock):
        def event(enable_timing):
            own = SimpleNamespace(synchronize=lambda: None, record=lambda: setattr(own, "at", clock.ms), at=None)
            own.elapsed_time = lambda other: other.at - own.at
            return own
        self.cuda = SimpleNamespace(get_device_capability=lambda: (9, 0), synchronize=lambda: None, Event=event,
                                    set_device=lambda rank: None, Stream=lambda: None, stream=lambda stream: contextlib.nullcontext(),
                                    current_stream=lambda: SimpleNamespace(cuda_stream=77), current_device=lambda: 0)
        self.device = lambda *_: torch.device("cpu")

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("empty", "zeros", "randn", "randint", "tensor", "arange", "as_tensor"):
            return found
        return lambda *x, device="cuda", **more: found(*x, **more)


def attention(q, k, v, causal=None, q_starts=None, k_starts=None, **options):
    """attention() of bindings/pytorch.py, a sequence at a time, in double."""
    out = torch.full(q.shape, torch.nan, dtype=torch.double)
    for b in range(q.shape[0] if q_starts is None else len(q_starts) - 1):
        own, other = (slice(b, b + 1), slice(b, b + 1)) if q_starts is None else (
            (slice(None), slice(None), slice(starts[b], starts[b + 1])) for starts in (q_starts, k_starts))
        Q, K, V = q[own].double(), k[other].double(), v[other].double()
        seen = torch.ones(Q.shape[2], K.shape[2], dtype=bool).tril(K.shape[2] - Q.shape[2] if causal == "br" else K.shape[2])
        out[own] = PLAIN(Q, K, V, attn_mask=seen, enable_gqa=True)
    return out.to(q.dtype)


@pytest.fixture
def timed(monkeypatch):
    """A fake clock: PyTorch's attention takes 3 ms and ours 2 ms, a tenth of that in the first calls. Our results are 1% wrong."""
    clock = SimpleNamespace(ms=0.0, active=False, calls=dict.fromkeys((False, True), 0))

    def activate(on):
        assert clock.active != on
        clock.active = on

    def called(q, k, v, **options):
        clock.calls[clock.active] += 1
        clock.ms += (2 if clock.active else 3) * (50 if clock.calls[clock.active] <= 8 else 1)
        return PLAIN(q, k, v, **options) * (1.01 if clock.active else 1)
    monkeypatch.setattr(frameworks, "torch", OnCpu(clock))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    monkeypatch.setattr(frameworks.sdpa, "attention", attention)
    monkeypatch.setattr(frameworks.sdpa, "activate", lambda: activate(True))
    monkeypatch.setattr(frameworks, "restore_flash_attention_impl", lambda: activate(False))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield clock
    assert not clock.active


def test_training(timed, monkeypatch):
    """Times are medians without the turns that build and warm up; a ratio is PyTorch's time divided by the contender's."""
    counted, median = [], frameworks.statistics.median
    monkeypatch.setattr(frameworks.statistics, "median", lambda us: counted.append(len(us)) or median(us))
    monkeypatch.setattr(frameworks, "TRAINING", ["1,2,1,8,64c", "1,1,1,4,64"])
    rows = list(frameworks.training(1))
    assert counted == 4 * [20]  # five times of each of five turns, of which the first one does not count
    assert [(row["contender"], row["us"], row["ratio"]) for row in rows] == 2 * [("PyTorch", 3000, 1), ("sdpa", 2000, 1.5)]
    assert [row["rel_rms"] for row in rows[::2]] == [0, 0] and all(0.005 < row["rel_rms"] < 0.015 for row in rows[1::2])
    assert [row["problem"] for row in rows] == 2 * ["1,2,1,8,64 causal"] + 2 * ["1,1,1,4,64"]


@pytest.mark.parametrize("wrong", ("", "sdpa", "deterministic", "FlashAttention-4"))
def test_gradients(timed, monkeypatch, capsys, wrong):
    """The gradients of all contenders are compared with float32, on grouped heads and packed sequences. Contenders whose bits
    differ between two runs are left out of the deterministic mode; for attention() that is an error."""
    runs = itertools.count()

    def drifting(out):
        out.register_hook(lambda grad: grad * (1 + next(runs)))
        return out

    def ours(q, k, v, causal, backward, **options):
        out = attention(q, k, v, causal, **options)
        return out * 1.1 if wrong == "sdpa" else drifting(out) if wrong == backward else out

    def flash_attention_4(q, k, v, causal, deterministic, cu_seqlens_q=None, cu_seqlens_k=None, **most):
        is_packed = cu_seqlens_q is not None
        q, k, v = ((x[None] if is_packed else x).transpose(1, 2) for x in (q, k, v))
        out = attention(q, k, v, "br" if causal else None, cu_seqlens_q, cu_seqlens_k).transpose(1, 2)
        out = out[0] if is_packed else out
        return (drifting(out) if wrong == "FlashAttention-4" and deterministic else out), None
    turns = itertools.count(1)
    for name, stand_in in dict(installed=lambda module, function: flash_attention_4, GRADIENTS=["2,4,2,24,64"],
                               PACKED={"packed": [3, 20, 9]}, graph_of=lambda call, calls, stream: call, loop_us=lambda run, repeats, count: 1.0,
                               turn_us=lambda run, us: next(turns)).items():
        monkeypatch.setattr(frameworks, name, stand_in)
    monkeypatch.setattr(frameworks.sdpa, "attention", ours)
    monkeypatch.setattr(frameworks.importlib.metadata, "version", lambda package: "4.0")
    assert not list(frameworks.gradients(3, re.compile(""), re.compile("causal.")))
    measured = frameworks.gradients(3, re.compile("FlashAttention-4"), re.compile("2,4|packed"))
    if wrong == "deterministic":
        with pytest.raises(RuntimeError, match="two runs differ"):
            next(measured)
        return
    rows, names = list(measured), ["sdpa", "FlashAttention-4 4.0"]
    problems = [problem + causal for problem in ("2,4,2,24,64", "packed") for causal in ("", " causal")]
    assert [(row["what"], row["problem"], row["contender"]) for row in rows] == [
        (what, problem, name) for problem in problems
        for what, own in (("backward", names), ("backward, deterministic", names[:1 if wrong == names[1][:-4] else 2])) for name in own]
    assert ("FlashAttention-4 4.0, deterministic: two runs differ" in capsys.readouterr().err) == (wrong == "FlashAttention-4")
    for row in rows:
        assert (row["rel_rms"] <= frameworks.WRONG) == (wrong != "sdpa" or row["contender"] != "sdpa"), row
        pairs = {"2,4,2,24,64": 8 * 24 * 24, "2,4,2,24,64 causal": 8 * 300, "packed": 16 * 490, "packed causal": 16 * 261}[row["problem"]]
        D = 64 if row["problem"].startswith("2") else 128
        assert row["tflops"] == pytest.approx(10 * D * pairs / row["us"] * 1e-6)
    if not wrong:  # the order of 4 contenders moves by one place per turn
        assert [row["us"] for row in rows[:4]] == [8, 5, 6, 7] and [row["ratio"] for row in rows[:4]] == [1, 5 / 8, 1, 7 / 6]


def test_rows_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(engine, "need_gpu", lambda: None)
    monkeypatch.setattr(engine, "measured_on", lambda gpu: dict(device="Fake", git_sha="abc"))
    for name in ("problems", "models", "sequences", "invariant", "training", "host"):
        monkeypatch.setattr(frameworks, name, lambda repeats, name=name: [
            dict(what=name, problem="p", contender="c", us=1234.56, rel_rms=0.00123456,
                 **dict(ratio=1.23456) if name == "training" else {})])

    def rows(*words):
        monkeypatch.setattr(sys, "argv", ["frameworks.py", *words])
        assert frameworks.main() == 0
        return [tuple(row.values()) for row in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    tail = ("Fake", "abc", torch.__version__)
    assert rows() == [] and rows("--training", "--lengths") == [("sequences", "p", "c", "1235", "", "1.23e-03", *tail),
                                                                ("training", "p", "c", "1235", "1.235", "1.23e-03", *tail)]
    assert [row[0] for row in rows("--models", "--host", "--invariant", "--problems")] == ["problems", "models", "invariant", "host"]


# ---- packages beside a line, in tools/engine.py ----

def loaded(text, function=None):
    kernel = engine.LoadedTorch.__new__(engine.LoadedTorch)
    kernel.line, kernel.text, kernel.torch, kernel.function = builds.Torch(text), text, torch, function
    return kernel


def problem(shape, causal="off"):
    return engine.parse_problem(shape + f",64,fp16,{causal}")


def qkv(p):
    return [torch.randn(p.B, H, S, p.D).half() for H, S in ((p.Hq, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk))]


@pytest.mark.parametrize("text", ["torch:fa3", "torch:fa4", "flashinfer"])
@pytest.mark.parametrize("causal", ("off", "br", "tl"))
def test_of_a_package(text, causal):
    """Packages' functions take rows of all heads, use a bottom-right mask and may return LSE as well; O equals PyTorch's."""
    asked = []

    def function(q, k, v, causal, **options):
        asked.append(options)
        if text == "flashinfer":
            q, k, v = q[None], k[None], v[None]
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), "br" if causal else None).transpose(1, 2)
        return out[0] if text == "flashinfer" else (out, "LSE") if text == "torch:fa3" else out
    p = problem("1,4,2,9,20" if causal == "br" else "1,4,2,20,20", causal)
    tensors = qkv(p)
    found = loaded(text, function).of_package(*tensors, p)
    assert torch.equal(found, attention(*tensors, None if causal == "off" else "br"))
    loaded(text, function).of_package(*tensors, p._replace(left=5))  # whose mask is not computed here
    own = {"torch:fa3": dict(num_splits=0), "torch:fa4": {}, "flashinfer": dict(backend="fa3")}[text]
    unlimited = 0 if causal != "off" else -1 if text == "torch:fa3" else None
    assert asked == [own, own | (dict(window_left=5) if text == "flashinfer" else dict(window_size=(5, unlimited)))]


def test_what_packages_do_not_compute():
    square = problem("1,1,1,4,4")
    for text, p, words in (("torch:fa3", problem("1,1,1,4,5", "tl"), "its causal mask is the bottom-right one"),
                           ("torch:fa4", problem("1,1,1,4,5")._replace(left=2), "its causal mask is the bottom-right one"),
                           ("flashinfer", problem("2,1,1,4,5"), "it is called for one sequence"),
                           ("torch:flash", problem("1,1,1,4,5", "br"), "PyTorch's is_causal is top-left"),
                           ("torch:flash", square._replace(dtype="e4m3"), "it has no attention of e4m3"),
                           ("torch:flash", square._replace(left=2), "it takes no window"),
                           ("torch:cudnn", square._replace(dtype="u8"), "it has no attention of u8")):
        with pytest.raises(engine.CudaError, match=words):
            loaded(text).prepare(None, None, p) if text in ("torch:flash", "torch:cudnn") else loaded(text).of_package(*qkv(p), p)
    with pytest.raises(engine.CudaError, match="^words$"), engine.as_cuda_error():
        raise RuntimeError("\nwords\nmore")
    with pytest.raises(engine.CudaError, match="^ours$"), engine.as_cuda_error():
        raise engine.CudaError("ours")


@pytest.mark.parametrize("shape,causal", [("2,4,2,20,20", "br"), ("1,2,1,9,20", "tl")])
def test_of_pytorch(shape, causal, monkeypatch):
    """Runs the named PyTorch backend with its own mask, which equals ours if Sq = Sk."""
    kernel, p, backends = loaded("torch:math"), problem(shape, causal), []
    tensors = dict(zip("QKV", qkv(p)))
    monkeypatch.setattr(kernel, "tensor", lambda x, shape, dtype: x if x.shape == shape and dtype == "fp16" else None, raising=False)
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: backends.append(backend.name) or contextlib.nullcontext())
    launch, outputs, workspace = kernel.prepare(None, SimpleNamespace(address=tensors), p)
    want = PLAIN(*tensors.values(), is_causal=True, enable_gqa=True)
    assert torch.equal(kernel.output, want) and torch.equal(launch(), want) and set(backends) == {"MATH"} and workspace == (0, 0)
    assert outputs == (kernel.output.data_ptr(), 0, "fp16", engine.LIMITS["fp16"])


# ---- a sequence spread over GPUs ----

def test_context_parallel(monkeypatch, capsys):
    """Times two kernels on one GPU and on all. The results differ by the error of a share."""
    clock, course = SimpleNamespace(ms=0.0), []
    monkeypatch.setenv("LOCAL_RANK", "0")
    context_parallel = pytest.importorskip("context_parallel")

    @contextlib.contextmanager
    def shared(mesh, buffers, buffer_seq_dims):
        assert buffer_seq_dims == [2, 2, 2] and all(x.shape[2] == 6 for x in buffers)
        course.append("shared")
        yield
        course.append("whole")

    def called(q, k, v, is_causal, enable_gqa):
        assert is_causal and enable_gqa and q.dtype == torch.half and [x.shape[1:3] for x in (q, k, v)] == [(4, 6), (2, 6), (2, 6)]
        assert {x.shape[0] for x in (q, k, v)} == {3} and {x.shape[3] for x in (q, k, v)} == {64}
        clock.ms += 1 if course[-1:] == ["shared"] else 3
        return PLAIN(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa) * (1.01 if course[-1:] == ["shared"] else 1)
    for name, stand_in in dict(init_process_group=lambda *_, **__: None, barrier=lambda: None, get_world_size=lambda: 2, get_rank=lambda: 0,
                               all_reduce=lambda times, kind: times.mul_(2), destroy_process_group=lambda: course.append("end")).items():
        monkeypatch.setattr(context_parallel.dist, name, stand_in)
    for name, stand_in in dict(torch=OnCpu(clock), init_device_mesh=lambda *x: x, context_parallel=shared,
                               context_parallel_unshard=lambda mesh, buffers, dims: buffers, sdpa=SimpleNamespace(
                                   activate=lambda: course.append("ours"))).items():
        monkeypatch.setattr(context_parallel, name, stand_in)
    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    monkeypatch.setattr(sys, "argv", "context_parallel.py --shape 3,4,2,6,64 --dtype float16".split())
    context_parallel.main()
    assert course == ["shared", "whole", "ours", "shared", "whole", "end"]
    times = "1 GPU     6.00 ms   2 GPUs     2.00 ms   3.00 times as fast   rel_rms 1.0e-02"  # of the slowest GPU
    assert capsys.readouterr().out == f"PyTorch  {times}\nsdpa     {times}\n"


@pytest.mark.parametrize("words,sentence", [
    *((f"--shape {shape}", f"--shape {shape}: want B,Hq,Hkv,S,D") for shape in ("1,8,8,64", "1,8,8,64,64,7", "1,8,8,64,64x", "1,8,0,64,64", "x1,8,8,64,64")),
    ("--shape 1,8,3,64,64", "--shape 1,8,3,64,64: Hq is not a multiple of Hkv"), ("--dtype half", "argument --dtype: invalid choice: 'half'"),
    ("--shape 1,8,8,64,64", "start it with torchrun")])
def test_context_parallel_refuses(monkeypatch, capsys, words, sentence):
    context_parallel = pytest.importorskip("context_parallel")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", *words.split()])
    with pytest.raises(SystemExit) as end:
        context_parallel.main()
    assert end.value.code == 2 and f"error: {sentence}" in capsys.readouterr().err
