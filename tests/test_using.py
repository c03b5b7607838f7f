"""The blocks of docs/USING.md, word for word: C++ and ctypes on the CPU backend, PyTorch's on fake tensors and, where there is a
GPU, on real ones, and the adapter for transformers against a model's own attention.  usage: python3 -m pytest tests/test_using.py"""
import ctypes
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "bindings"), os.path.join(ROOT, "tools")]
import builds  # noqa: E402

TEXT = builds.Tree().read("docs/USING.md")


def blocks(heading, language):
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE).group()
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def knobs(name):
    return builds.Tree().config_lines()[name].knobs


def test_the_blocks_are_found():
    assert [len(blocks(*where)) for where in (("C and C\\+\\+", "cpp"), ("Python without", "python"), ("PyTorch", "python"),
                                              ("transformers", "python"))] == [1, 1, 2, 1]
    assert set(re.findall(r"(?<!results/)bindings/[\w.]+", TEXT)) == {"bindings/" + name for name in ("sdpa.h", "pytorch.py", "context_parallel.py")}


@pytest.mark.parametrize("name", ["scalar_async2", "hopper", "mma_decode"])
def test_the_cpp_example(name, tmp_path):
    (tmp_path / "example.cpp").write_text(blocks("C and C\\+\\+", "cpp")[0])
    library = builds.host_library(*knobs(name), program="tests/host_library.cu")
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-w", "-ffp-contract=off", "-I" + os.path.join(ROOT, "bindings"),
                    "-I" + os.path.join(ROOT, "simt"), tmp_path / "example.cpp", library, "-pthread",
                    "-o", tmp_path / "example"], check=True)
    done = subprocess.run([tmp_path / "example"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "O is right\n"), done.stdout + done.stderr


class HostArray:
    """An array in the CPU backend's device memory, as CuPy and PyTorch show theirs."""

    def __init__(self, library, values):
        library.host_allocate.restype = ctypes.c_void_p
        self.pointer, self.shape, self.dtype = library.host_allocate(ctypes.c_size_t(values.nbytes)), values.shape, values.dtype
        ctypes.memmove(self.pointer, values.ctypes.data, values.nbytes)
        self.strides = values.strides

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3, "strides": self.strides}

    def numpy(self):
        import numpy as np
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(out.ctypes.data, self.pointer, out.nbytes)
        return out


def test_the_ctypes_example():
    """Two lines in one process, each with its own type, and a refusal."""
    np = pytest.importorskip("numpy")
    space = {}
    exec(blocks("Python without", "python")[0], space)
    random = np.random.default_rng(0)
    for name in ("scalar_async2", "mma_lazy"):
        library = ctypes.CDLL(builds.host_library(*knobs(name), program="tests/host_library.cu"))
        assert library.sdpa_library_params_bytes() == ctypes.sizeof(space["Params"])
        q, k, v = (random.standard_normal(shape).astype(np.float16) for shape in ((1, 4, 30, 64), (1, 2, 50, 64), (1, 2, 50, 64)))
        arrays = [HostArray(library, x) for x in (q, k, v, np.zeros_like(q))]
        space["attention"](library, *arrays, causal=1, window_left=20)
        library.host_synchronize()
        K, V = (x.astype(float).repeat(2, 1) for x in (k, v))
        own = np.arange(30)[:, None] + 20
        S = np.where((np.arange(50) <= own) & (np.arange(50) >= own - 20), q.astype(float) @ K.swapaxes(2, 3) / 8, -np.inf)
        P = np.exp(S - S.max(-1, keepdims=True))
        assert np.abs(arrays[3].numpy() - P / P.sum(-1, keepdims=True) @ V).max() < 2e-3
        with pytest.raises(RuntimeError, match="Q is a null pointer"):
            space["attention"](library, *arrays, Q=None)


def test_pytorch_on_fake_tensors():
    """The blocks' calls, shapes and names, on tensors without memory."""
    torch = pytest.importorskip("torch", minversion="2.11")
    if not builds.nvcc():
        pytest.skip("nvcc is missing")
    program = "\n".join(blocks("PyTorch", "python")).replace("import pytorch as sdpa\n", "import pytorch as sdpa\n" + """
sdpa.why_not = lambda q, k, v, **options: ""
F.scaled_dot_product_attention = lambda q, k, v, **options: torch.empty_like(q)
torch.compile = lambda function, fullgraph: function
torch._subclasses.FakeTensorMode().__enter__()
""")
    if torch.cuda.is_available():
        program = "\n".join(blocks("PyTorch", "python"))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "SDPA_CACHE": os.path.join(builds.BUILD, "pytorch")})
    assert (done.returncode, done.stdout) == (0, "sdpa's kernel ran\n"), done.stderr


MODELS = {"Llama": dict(head_dim=128), "Mistral": dict(head_dim=64, sliding_window=16), "Gemma": dict(head_dim=256),
          "Gemma2": dict(head_dim=256, sliding_window=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
          "GptOss": dict(head_dim=64, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)}


@pytest.mark.parametrize("kind", MODELS)
def test_transformers(kind, monkeypatch):
    """Prefill and generate give the logits of the model's own attention. Without a GPU a reference stands in for the kernel."""
    torch, transformers = pytest.importorskip("torch", minversion="2.11"), pytest.importorskip("transformers", minversion="5")
    import pytorch as sdpa
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    calls = []

    def reference(q, k, v, causal=None, window=(None, None), scale=None, softcap=None, sinks=None):
        Sq, Sk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        own, keys = torch.arange(Sq)[:, None] + (Sk - Sq), torch.arange(Sk)
        seen = (keys <= own) if causal == "br" else torch.ones(Sq, Sk, dtype=bool)
        if window[0] is not None:
            seen &= keys >= own - window[0]
        S = q @ k.repeat_interleave(group, 1).mT * scale
        S = (softcap * torch.tanh(S / softcap) if softcap else S).masked_fill(~seen, -torch.inf)
        sums = torch.logsumexp(S, -1, keepdim=True)
        sums = sums if sinks is None else torch.logaddexp(sums, sinks[:, None, None])
        return torch.exp(S - sums) @ v.repeat_interleave(group, 1)

    kernel = sdpa.attention if device == "cuda" else reference
    monkeypatch.setattr(sdpa, "attention", lambda *x, **more: calls.append((x[3:5], more)) or kernel(*x, **more))
    exec(blocks("transformers", "python")[0], {"sdpa": sdpa})
    config = getattr(transformers, kind + "Config")(vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                                    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **MODELS[kind])
    torch.manual_seed(0)
    model = getattr(transformers, kind + "ForCausalLM")(config).to(device, dtype).eval()
    for name, sinks in model.named_parameters():
        if name.endswith("sinks"):  # they are 0 or less without training
            sinks.data.normal_(1)
    tokens = torch.randint(1, 97, (2, 40), device=device)
    options = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    results = []
    with torch.no_grad():
        for name in ("eager", "attention_cu"):
            model.set_attn_implementation(name)
            generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
            results.append((model(tokens).logits.double(), torch.stack(generated.logits).double(), generated.sequences))
    (a, b, _), (c, d, _) = results
    limit = 3e-2 if device == "cuda" else 1e-5
    assert float((a - c).norm() / a.norm()) <= limit and float((b - d).norm() / b.norm()) <= limit
    window = (MODELS[kind]["sliding_window"] - 1, 0) if "sliding_window" in MODELS[kind] else (None, None)
    seen = {call for call, _ in calls}
    assert seen == {("br", window)} | ({("br", (None, None))} if kind in ("Gemma2", "GptOss") else set())  # every second layer
    assert all((more["softcap"] == 2.0) == (kind == "Gemma2") and (more["sinks"] is not None) == (kind == "GptOss") for _, more in calls)
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    with pytest.raises(ValueError, match="the batch is padded"):
        model(tokens, attention_mask=padded)
