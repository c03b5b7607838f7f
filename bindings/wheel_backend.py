"""The PEP 517 backend with which pip installs ./bindings. The wheel contains this folder and the sources that nvcc needs, with
the same relative paths as in the repository. Nothing is compiled, so one wheel works for every Python, PyTorch and GPU."""
import base64
import hashlib
import os
import pathlib
import re
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME, VERSION = "sdpa", "0.1.0"
FOR_PIP = {"__init__.py", "wheel_backend.py", "pyproject.toml"}
# Packages with nvcc for a PyTorch of CUDA 13. There are none for CUDA 12: nvidia-cuda-nvcc-cu12 contains only ptxas.
NVCC13 = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime nvidia-nvvm".split()
METADATA = f"""Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Summary: Attention kernels for NVIDIA GPUs, forward and backward, in CUDA, behind PyTorch
License: MIT
Requires-Python: >=3.10
Requires-Dist: torch>=2.11
Provides-Extra: nvcc13
""" + "".join(f'Requires-Dist: {package}==13.*; extra == "nvcc13"\n' for package in NVCC13)


class UnsupportedOperation(Exception):
    """Required by PEP 517 for what a backend does not support."""


def files():
    """{path in the wheel: bytes}."""
    root = HERE.parent
    if not (root / "sdpa.cu").is_file():
        raise SystemExit(f"sdpa: {root} has no sdpa.cu; install from a clone, with pip 21.3 or newer")
    found = {f"{NAME}/{name}": (root / name).read_bytes() for name in ("sdpa.cu", "sdpa_backward.cu", "configs.txt")}
    found[f"{NAME}/__init__.py"] = (HERE / "__init__.py").read_bytes()
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and path.name not in FOR_PIP and "__pycache__" not in path.parts:
            found[f"{NAME}/bindings/{path.relative_to(HERE).as_posix()}"] = path.read_bytes()
    for name, text in found.items():
        if name.endswith(".py"):  # imported from the path in a clone, from the package in a wheel
            found[name] = re.sub(rb"^import pytorch as sdpa$", b"from sdpa import pytorch as sdpa", text, flags=re.M)
    info = f"{NAME}-{VERSION}.dist-info"
    found[f"{info}/METADATA"] = METADATA.encode()
    found[f"{info}/LICENSE"] = (root / "LICENSE").read_bytes()
    found[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: sdpa\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return found


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    found, record = files(), f"{NAME}-{VERSION}.dist-info/RECORD"
    rows = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b'=').decode()},{len(text)}"
            for name, text in found.items()]
    found[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    wheel = f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in found.items():  # without dates, so that wheels are reproducible
            file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise UnsupportedOperation("sdpa: no source distribution, since bindings/ does not contain sdpa.cu")
