"""Time sums over replicas, as steps make them: of gradients of some bytes, of all replicas of a strategy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest, TracedFunction
from keras_dist_ext.diagnosis.plan.links import SumTimes
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.reduce import shares_memory, sum_over_replicas
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["sizes_of_sums", "time_sums", "time_sums_in_memory"]

_ROUNDS = 7
_IN_A_ROW = 4  # sums that a round makes one after the other
_MOST_PARTS = 64  # that a sum is divided into
_SMALLEST, _LARGEST = 4096, 64 << 20  # bytes


def sizes_of_sums(gradient_bytes: int) -> list[int]:
    """Return the bytes to time: next to none, a quarter of the gradients, and all, within reason.

    >>> sizes_of_sums(1_000_000)
    [4096, 250000, 1000000]
    """
    most = max(4 * _SMALLEST, min(_LARGEST, gradient_bytes))
    return [_SMALLEST, most // 16 * 4, most // 4 * 4]


def time_sums(strategy: tf.distribute.Strategy, gradient_bytes: int, num_gradients: int = 1) -> SumTimes:
    """Time sums by themselves over all replicas of a strategy. Of several workers, every one must call it.

    Args:
        strategy: of at least two replicas.
        gradient_bytes: that a step sums.
        num_gradients: how many tensors have them, which TensorFlow puts together into a message and takes apart again.
    """
    num_parts = min(num_gradients, _MOST_PARTS)

    def chained(num_sums: int) -> TracedFunction:
        def of_replica(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            floor = value[0] + tf.cast(context.replica_id_in_sync_group, value.dtype)
            length = value.shape[0]
            cuts = [length * number // num_parts for number in range(num_parts + 1)]
            parts = [value[begin:end] for begin, end in itertools.pairwise(cuts)]
            for number in range(_IN_A_ROW):
                parts = [tf.maximum(part, floor) for part in parts]
                if number < num_sums:
                    parts = list(context.merge_call(sum_over_replicas, args=(parts,)))
            return tf.add_n([part[0] for part in parts])

        return in_graph(lambda value: strategy.run(of_replica, args=(value,)))

    def wait_for(values: TensorNest) -> None:
        for value in strategy.experimental_local_results(values):
            value.numpy()

    return SumTimes(
        num_replicas=strategy.num_replicas_in_sync,
        seconds=_timed(chained, wait_for, sizes_of_sums(gradient_bytes)),
        where=describe_strategy(strategy),
        in_memory=shares_memory(strategy),
    )


def time_sums_in_memory(num_replicas: int, gradient_bytes: int) -> SumTimes:
    """Time sums of what several replicas on the cores of this machine would have, made in its memory.

    Args:
        num_replicas: how many, at least two.
        gradient_bytes: that a step sums.
    """

    def chained(num_sums: int) -> TracedFunction:
        def add_up(value: tf.Tensor) -> tf.Tensor:
            parts = [value] * num_replicas
            for number in range(_IN_A_ROW):
                parts = [tf.maximum(part, value[0] + float(index)) for index, part in enumerate(parts)]
                if number < num_sums:
                    parts = [tf.add_n(parts)] * num_replicas
            return tf.add_n([part[0] for part in parts])

        return in_graph(add_up)

    return SumTimes(
        num_replicas=num_replicas,
        seconds=_timed(chained, lambda value: value.numpy(), sizes_of_sums(gradient_bytes)),
        where="the memory of this machine",
        in_memory=True,
    )


def _timed(
    chained: Callable[[int], TracedFunction], wait_for: Callable[[TensorNest], object], sizes: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Return the seconds of a sum by bytes: of a chain with sums, less the same chain without.

    So no launch is in them. What each sum adds up is another value on each replica, and is made of the sum before: else
    TensorFlow would not make all of them.
    """
    without, with_sums = chained(0), chained(_IN_A_ROW)
    found: dict[int, tuple[float, ...]] = {}
    for size in sizes:
        value = tf.ones([size // 4])

        def seconds(run: TracedFunction, value: tf.Tensor = value) -> float:
            begin = time.perf_counter()
            wait_for(run(value))
            return time.perf_counter() - begin

        for run in (without, with_sums):
            seconds(run)  # traces
            seconds(run)
        found[size] = tuple(max(0.0, (seconds(with_sums) - seconds(without)) / _IN_A_ROW) for _ in range(_ROUNDS))
    return found
