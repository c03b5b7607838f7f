"""Times parts of the loop of the backward kernel for ./run_all.sh micro --backward. tools/backward_parts.cu has the kernels."""
import ctypes
import itertools
import math

import numpy as np

import builds
import engine
import search
from cli import Refused

LINE, PROGRAM = "backward_hopper_d128_bf16", "tools/backward_parts.cu"
D, ROWS, TILES_PER_HEAD, CTAS_PER_HEAD = 128, 64, 64, 32  # as in the program
THREADS, TILE_FLOATS = 256, ROWS * D
TILES = 8192        # launch and prologue take less than 0.1% of their time
CHECKED_TILES = 67  # more than a head has
COLUMNS = "part ns_tile tflops added_tb_per_s clock_mhz device driver cuda git_sha".split()


class Parts:
    """The compiled program and its buffers. names: the parts."""

    def __init__(self, gpu, path, ctas):
        self.gpu, self.ctas, self.library = gpu, ctas, ctypes.CDLL(path)
        self.library.backward_part_name.restype = ctypes.c_char_p
        self.names = [name.decode() for name in iter(map(self.library.backward_part_name, itertools.count()).__next__, None)]
        self.sums_size = math.ceil(ctas / CTAS_PER_HEAD) * TILES_PER_HEAD * TILE_FLOATS
        self.sums, self.results = gpu.allocate(4 * self.sums_size), gpu.allocate(4 * ctas * THREADS)

    def launch(self, name, tiles):
        buffers = map(ctypes.c_void_p, (self.sums, self.results))
        if self.library.backward_part(self.names.index(name), self.ctas, tiles, *buffers, self.gpu.stream):
            raise engine.CudaError(f"{name}: the kernel could not be launched")

    def trouble(self, name):
        """Describes what is wrong with the results of a part; "" if nothing is."""
        self.gpu.fill(self.sums, 0, 4 * self.sums_size)
        self.gpu.fill(self.results, 0xff, 4 * self.ctas * THREADS)
        self.launch(name, CHECKED_TILES)
        self.gpu.synchronize()
        # Threads have the accumulators of wgmma, and four of each thread are stored together.
        axes = -1, TILES_PER_HEAD, 2, 8, 4, 8, 4, 2, 2  # head, tile, warpgroup, 8 columns, warp, row, 2 columns, 8 rows, column
        sums = self.gpu.download(self.sums, self.sums_size, np.float32).astype(np.float64).reshape(axes)
        sums = sums.transpose(0, 1, 4, 7, 5, 2, 3, 6, 8).reshape(-1, TILES_PER_HEAD, ROWS, D)
        result = self.gpu.download(self.results, self.ctas * THREADS, np.float32).astype(np.float64).sum()
        want_sums, want_result = expected(name, self.ctas, CHECKED_TILES)
        error = np.abs(sums - want_sums).max() / max(1, np.abs(want_sums).max())
        if not error <= 1e-3:
            return f"{name}: dQ has an error of {error:.1e}"
        if not np.isclose(result, want_result, rtol=1e-3, atol=1e-3):
            return f"{name}: dV and dK have the sum {result:g} but should have {want_result:g}"
        return ""


def added_share(name):
    """The share of dQ that a part adds to the sums."""
    return 0.5 if "half of red" in name else float("red" in name)


def expected(name, ctas, tiles):
    """The sums of dQ [heads][tiles][ROWS][D], and the sum of dV and dK over all CTAs."""
    i = np.arange(6 * TILE_FLOATS, dtype=np.uint64)
    values = (((i * 2654435761) % 2**32 >> 24) / 128 - 1).reshape(6, ROWS, D)
    Q, dO, K, V = values[0], values[1], np.vstack(values[2:4]), np.vstack(values[4:6])
    P, dS = (engine.as_values(engine.as_bits((x @ y.T).astype(np.float32), "bf16"), "bf16") for x, y in ((K, Q), (V, dO)))
    multiplies, exchanges = "products" in name, "exchanged" in name
    dQ = dS.T @ K if multiplies else np.ones((ROWS, D))
    if added_share(name) < 1:
        dQ[:, np.arange(D) % 64 >= 64 * added_share(name)] = 0
    # K and V of odd CTAs are twice as large. A pair of CTAs adds 1 + 2 * 2 times dQ, or 2 + 2 times if they exchange dS.
    of_pair = (4 if exchanges else 5) if multiplies else 2
    pairs = np.minimum(CTAS_PER_HEAD, ctas - CTAS_PER_HEAD * np.arange(math.ceil(ctas / CTAS_PER_HEAD))) / 2
    first = int(multiplies and exchanges)  # the first tile has no dS of the other CTA yet
    times = np.bincount(np.arange(first, tiles) % TILES_PER_HEAD, minlength=TILES_PER_HEAD)
    sums = np.outer(pairs * of_pair, times)[..., None, None] * dQ
    results = multiplies * tiles * ctas / 2 * (1 + 2) * ((P @ dO).sum() + (dS @ Q).sum())
    return sums, results


def row(gpu, series, name, ctas):
    """The row of a part."""
    us = series.us(name) / TILES
    flops = 5 * 2 * 128 * ROWS * D * ("products" in name)
    added = 4 * TILE_FLOATS * added_share(name)
    return dict(part=name, ns_tile=f"{1e3 * us:.1f}", tflops=f"{ctas * flops / us * 1e-6:.1f}" * (flops > 0),
                added_tb_per_s=f"{ctas * added / us * 1e-6:.2f}" * (added > 0), clock_mhz=f"{series.clock(name):.0f}",
                **engine.measured_on(gpu))


def measure(gpu, output):
    """Prints and stores the rows of all parts."""
    line = search.parse_line(builds.Tree(), LINE)
    if not line.runs_on(gpu.arch):
        raise Refused(f"{LINE} is a line for sm_90a, and the GPU is sm_{gpu.arch}")
    built, = builds.build([line], gpu.arch, program=PROGRAM).values()
    if built.trouble:
        raise Refused(f"{PROGRAM} does not compile: {built.trouble}", 3)
    parts = Parts(gpu, built.path, gpu.attribute(engine.SM_COUNT) // 2 * 2)
    graphs = {}
    for name in parts.names:
        if sentence := parts.trouble(name):
            raise Refused(sentence, 3)
        enqueue, close = gpu.capture(lambda: parts.launch(name, TILES), 1)  # noqa: B023
        graphs[name] = engine.Graph(enqueue, 1, 1.0 * TILES, close=close)
    series = engine.measure(gpu, graphs, engine.PACE, blocks=3)
    table = engine.Table(output or engine.results_path("variants", gpu.name, "backward-parts", new=True), COLUMNS)
    print(*COLUMNS[1:5], COLUMNS[0], sep="  ")
    for name in parts.names:
        found = row(gpu, series, name, parts.ctas)
        table.add(**found)
        print("  ".join(f"{found[column]:>{len(column)}}" for column in COLUMNS[1:5]), name, sep="  ")
    return table.name
