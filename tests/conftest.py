"""SDPA_TEST_QUICK=1 leaves out what is marked as long: tests that take long for what they find (./run_all.sh test --all has
them)."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: more threads would wait for each other, six times as long

if "SDPA_BUILD_DIR" in os.environ:  # what bindings/pytorch.py builds, in processes that a test starts as well
    os.environ.setdefault("SDPA_CACHE", os.path.join(os.environ["SDPA_BUILD_DIR"], "pytorch"))


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes long for what it finds; left out with SDPA_TEST_QUICK=1")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("SDPA_TEST_QUICK"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
