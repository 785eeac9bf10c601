"""Time sums over replicas, as steps make them: of gradients of some bytes, of all replicas of a strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext.diagnosis.plan.links import SumTimes
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.reduce import shares_memory, sum_over_replicas
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["sizes_of_sums", "time_sums", "time_sums_in_memory"]

_ROUNDS = 7
_IN_A_ROW = 4  # sums that a round makes one after the other
_SMALLEST, _LARGEST = 4096, 64 << 20  # bytes


def sizes_of_sums(gradient_bytes: int) -> list[int]:
    """Return the bytes to time: next to none, a quarter of the gradients, and all, within reason.

    >>> sizes_of_sums(1_000_000)
    [4096, 250000, 1000000]
    """
    most = max(4 * _SMALLEST, min(_LARGEST, gradient_bytes))
    return [_SMALLEST, most // 16 * 4, most // 4 * 4]


def time_sums(strategy: tf.distribute.Strategy, gradient_bytes: int) -> SumTimes:
    """Time sums over all replicas of a strategy. Of several workers, every one must call it.

    Args:
        strategy: of at least two replicas.
        gradient_bytes: that a step sums.
    """

    def summing(count: int) -> Any:
        def of_replica(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            value = total = value + tf.cast(context.replica_id_in_sync_group, value.dtype)
            for _ in range(count):
                with tf.control_dependencies([total]):  # each waits for the one before
                    value = tf.identity(value)
                (total,) = context.merge_call(sum_over_replicas, args=([value],))
            return total[0]

        return in_graph(lambda value: strategy.run(of_replica, args=(value,)))

    def wait_for(values: Any) -> None:
        for value in strategy.experimental_local_results(values):
            value.numpy()

    return SumTimes(
        num_replicas=strategy.num_replicas_in_sync,
        seconds=_timed(summing, wait_for, sizes_of_sums(gradient_bytes)),
        where=describe_strategy(strategy),
        in_memory=shares_memory(strategy),
    )


def time_sums_in_memory(num_replicas: int, gradient_bytes: int) -> SumTimes:
    """Time sums of what several replicas on the cores of this machine would have, made in its memory.

    Args:
        num_replicas: how many, at least two.
        gradient_bytes: that a step sums.
    """

    def summing(count: int) -> Any:
        def add_up(value: tf.Tensor) -> tf.Tensor:
            parts = [value + float(number) for number in range(num_replicas)]
            total = parts[0]
            for _ in range(count):
                with tf.control_dependencies([total]):
                    total = tf.add_n(parts)
            return total[0]

        return in_graph(add_up)

    return SumTimes(
        num_replicas=num_replicas,
        seconds=_timed(summing, lambda value: value.numpy(), sizes_of_sums(gradient_bytes)),
        where="the memory of this machine",
        in_memory=True,
    )


def _timed(
    summing: Callable[[int], Any], wait_for: Callable[[Any], Any], sizes: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Return the seconds of a sum by bytes: of several in a row, less those of one, so that no launch is in them."""
    few, many = summing(1), summing(1 + _IN_A_ROW)
    found: dict[int, tuple[float, ...]] = {}
    for size in sizes:
        value = tf.ones([size // 4])

        def seconds(run: Callable[[tf.Tensor], Any], value: tf.Tensor = value) -> float:
            begin = time.perf_counter()
            wait_for(run(value))
            return time.perf_counter() - begin

        for run in (few, many):
            seconds(run)  # traces
            seconds(run)
        found[size] = tuple(max(1e-9, (seconds(many) - seconds(few)) / _IN_A_ROW) for _ in range(_ROUNDS))
    return found
