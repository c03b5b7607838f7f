"""The package sdpa of `pip install ./bindings`: the functions of bindings/pytorch.py (docs/USING.md). The other files of
bindings/ are submodules, as in `from sdpa import flash_attn_interface`. nvcc builds a kernel when it is first needed, in
20 to 60 s, and caches it; `python -m sdpa build` builds kernels in advance."""
import os

__path__ = [os.path.join(os.path.dirname(os.path.abspath(__file__)), folder) for folder in ("bindings", "bindings/flash_attn_3")]

from .pytorch import Unavailable, activate, attention, block_mask, why_not  # noqa: E402, F401
