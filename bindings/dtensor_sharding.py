"""Sharding of sdpa's operators: with DTensors, attention() computes a share of the batch or of the heads on each device of a
mesh, without communication. Other placements are redistributed first. pytorch.py imports this file when it receives the
first DTensor."""
import math
import re

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# The dimensions (batch, heads) of the optional tensors, counted from the end. None: no such dimension.
DIMENSIONS = {"q_descale": (-2, -1), "k_descale": (-2, -1), "v_descale": (-2, -1), "sinks": (None, -1), "bias": (-4, -3),
              "k_lengths": (-1, None), "q_lengths": (-1, None), "k_firsts": (-1, None), "page_table": (-2, None)}


def placement(x, dimension):
    """The placement that shards a dimension, counted from the end. Replicated if it is missing or has size 1."""
    if dimension is None or x.ndim < -dimension or x.shape[dimension] == 1:
        return Replicate()
    return Shard(x.ndim + dimension)


def shardings(operator, outputs, given):
    """The placements of outputs and arguments for each way to shard the operator over a dimension of the mesh. outputs: the
    arguments whose shapes the outputs have."""
    q, k = given["q"], given["k"]
    text = " ".join(given.get(name) or "" for name in ("score_mod", "mask_mod"))
    # Number of devices over which heads are already sharded. Each device must have the same number of whole groups.
    devices = math.prod(n for n, *places in zip(q.mesh.shape, *(given[name].placements for name in "qkv")) if Shard(1) in places)
    ways = [None]
    if given.get("q_starts") is None and given.get("k_starts") is None and not re.search(r"\bb\b", text):
        ways.append("batch")
    if (k.shape[1] == 1 or k.shape[1] % devices == 0) and q.shape[1] % devices == 0 and not re.search(r"\bh\b", text):
        ways.append("heads")

    def placed(name, x, way):
        if way is None:
            return Replicate()
        if name in DIMENSIONS:
            return placement(x, DIMENSIONS[name][way == "heads"])
        if name in "kv" and (k.shape[1] == 1 if way == "heads" else given.get("page_table") is not None):
            return Replicate()
        return Shard(int(way == "heads")) if name in ("grad", "q", "k", "v", "o", "lse", "grad_lse") else Replicate()

    def of_output(name, way):
        # Each device has a partial gradient of the shared tensors, from its own queries.
        if name == "sinks":
            return Replicate() if way is None or given.get(name) is None else Partial() if way == "batch" else Shard(0)
        if name == "bias":
            place = placed(name, given[name], way) if given.get("to_bias") else Replicate()
            return Partial() if way is not None and given.get("to_bias") and place == Replicate() else place
        return Partial() if way == "heads" and name in "kv" and k.shape[1] == 1 else placed(name, None, way)
    return [([of_output(name, way) for name in outputs],
             [placed(name, x, way) if hasattr(x, "placements") else None for name, x in given.items()]) for way in ways]


def register(operator, outputs):
    names = [argument.name for argument in operator._schema.arguments]
    register_sharding(operator)(lambda *x, **more: shardings(operator, outputs, dict(zip(names, x), **more)))


register(torch.ops.sdpa.attention.default, ("q", "lse"))
register(torch.ops.sdpa.attention_backward.default, ("q", "k", "v", "sinks", "bias"))
