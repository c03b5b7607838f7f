"""What `pip install ./bindings` installs as sdpa: the functions of bindings/pytorch.py, which docs/USING.md explains.
The other files of bindings/ are submodules, as in `from sdpa import flash_attn_interface`. Kernels are built by nvcc
when first needed, in 20 to 60 s, and kept; `python -m sdpa build` builds them beforehand."""
import os

__path__ = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "bindings")]

from .pytorch import Unavailable, activate, attention, block_mask, why_not  # noqa: E402, F401
