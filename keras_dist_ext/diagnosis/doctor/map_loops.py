"""Find loops over examples in a step, as `tf.map_fn` makes them, and measure what such a loop takes by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_dist_ext.diagnosis.doctor.examination import MapLoops
from keras_dist_ext.diagnosis.doctor.setting import layer_of
from keras_dist_ext.step.graphs import in_graph

__all__ = ["MAP_LOOP", "find_map_loops", "measure_turn"]

MAP_LOOP = re.compile(r"(?:^|/)map(?:_\d+)?/while(?:_\d+)?")  # python/ops/map_fn.py
_REPLICA = re.compile(r"(?:^|/)replica_\d+/")
_TIMED, _ROUNDS = 64, 5


def find_map_loops(graphs: Iterable[tf.Graph], layers: Sequence[str], device: str, num_rows: int) -> MapLoops | None:
    """Return the loops in the forward pass of the first replica, with what one turn takes; None where there is none.

    Args:
        graphs: of training functions.
        layers: the names of the model's layers.
        device: of a replica, such as "CPU:0".
        num_rows: of a replica, in a step.
    """
    found: dict[str, int] = {}
    for graph in graphs:
        definition = graph.as_graph_def()
        for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
            by_name = {node.name: node for node in nodes}
            for node in nodes:
                if node.op not in ("While", "StatelessWhile") or not MAP_LOOP.search(node.name.removesuffix("_grad")):
                    continue
                if node.name.startswith("gradient") or _REPLICA.search(node.name) or len(node.input) < 2:
                    continue
                limit = by_name.get(node.input[1].partition(":")[0])  # maximum_iterations (python/ops/while_v2.py)
                turns = num_rows
                if limit is not None and limit.op == "Const":
                    turns = int(tf.make_ndarray(limit.attr["value"].tensor))
                found[f"{layer_of(node.name, layers)}: {node.name}"] = turns
    if not found:
        return None
    names = tuple(dict.fromkeys(name.partition(": ")[0] for name in found))
    return MapLoops(names, sum(found.values()), measure_turn(device))


def measure_turn(device: str) -> float:
    """Return the seconds of a turn of a loop that computes next to nothing, forward and back."""

    @in_graph
    def loop(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.map_fn(lambda row: 2.0 * row, x)
        return tf.reduce_sum(tape.gradient(value, x))

    with tf.device(device):
        x = tf.ones([_TIMED, 8])
        loop(x)
        taken = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            loop(x).numpy()
            taken.append(time.perf_counter() - begin)
    return min(taken) / _TIMED
