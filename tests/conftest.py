"""SDPA_TEST_QUICK=1 skips tests that are marked as long; ./run_all.sh test --all runs them."""
import os
import sys
import zlib

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # with small tensors, several threads are six times slower

if "SDPA_BUILD_DIR" in os.environ:  # the cache of bindings/pytorch.py, also in subprocesses of tests
    os.environ.setdefault("SDPA_CACHE", os.path.join(os.environ["SDPA_BUILD_DIR"], "pytorch"))


@pytest.fixture(autouse=True)
def seeded(request):
    """Gives each test its own random numbers. They do not depend on which tests ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def quick_refusals(monkeypatch):
    """Refusals without a compiler."""
    import search
    import tool
    tool.judge_quickly(monkeypatch)
    yield
    search.refusal.cache_clear()


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes long for what it finds; left out with SDPA_TEST_QUICK=1")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("SDPA_TEST_QUICK"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
