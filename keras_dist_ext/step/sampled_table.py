"""Keep what steps in loops leave on a GPU, and the clocks of those of them that are timed.

What a GPU has computed stays on it: to have it on the host would take waiting for the GPU, and nothing could be handed
to it meanwhile. For the same reason clocks are read in some steps only; ``untimed_steps`` has the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras.variables import NamedVariable

__all__ = ["SampledClocks", "SampledTable"]

Table = npt.NDArray[np.float64]  # [n, columns]


class SampledClocks(NamedTuple):
    """What to read the clock after in a step, if it is one of those in which it is read; each on the replica's GPU."""

    is_read: tf.Tensor  # whether it is, a bool on the host
    computed: Sequence[tf.Tensor]  # what the replica has computed last
    over: tf.Tensor  # what is there when it is over with the step


class SampledTable:
    """What steps in loops leave elsewhere than in a replica's table: numbers on its GPU, and clocks of some steps.

    Each is a variable of its own. Ops on one variable wait for each other, and a conditional that waits for an op of
    another device does so whether or not it does anything: on a GPU, until that is done with all it was given.

    Args:
        gpu: of the replica.
        host: its CPU.
        max_steps: that there is room for.
        num_numbers: of a step, that are left on the GPU.
    """

    def __init__(self, gpu: str, host: str, max_steps: int, num_numbers: int) -> None:
        self._gpu = gpu
        self._host = host
        self._max_steps = max_steps
        with tf.device(gpu):
            self._numbers = NamedVariable(tf.zeros([max_steps, num_numbers]))
        with tf.device(host):
            self._end, self._computed = (NamedVariable(self._no_clocks()) for _ in range(2))

    def forget(self) -> None:
        """Forget the clocks: places are filled anew, and steps that are not timed write none."""
        with tf.device(self._host):
            self._end.assign(self._no_clocks())
            self._computed.assign(self._no_clocks())

    def write(self, place: tf.Tensor, numbers: Sequence[tf.Tensor], clocks: SampledClocks) -> None:
        """Leave the numbers of a step at its place, and its clocks if they are to be read."""
        with tf.device(self._host):  # so does a GPU want to have it
            begin, end = tf.stack([place, 0]), tf.stack([place + 1, 0])
        with tf.device(self._gpu):
            row = tf.stack([tf.cast(number, tf.float32) for number in numbers])[None]
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=self._numbers.handle, begin=begin, end=end, strides=[1, 1], value=row, end_mask=2
            )
            for variable, values in ((self._computed, clocks.computed), (self._end, [clocks.over])):
                read = functools.partial(self._read_clock, variable, place, values)
                tf.cond(clocks.is_read, read, tf.no_op)

    def _read_clock(self, variable: NamedVariable, place: tf.Tensor, after: Sequence[tf.Tensor]) -> tf.Operation:
        """Leave the host's time when values have reached it; one number of each is sent."""
        first = []
        for value in after:
            with tf.device(value.device or self._gpu):
                first.append(tf.reshape(value, [-1])[:1])
        with tf.device(self._host):
            with tf.control_dependencies([tf.identity(value) for value in first]):
                clock = tf.timestamp()
            return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=place, updates=clock)

    def fill(self, table: Table, part: slice, num_before: int) -> None:
        """Put what is elsewhere into the rows of a replica's table that lack it, whose end is NaN.

        Args:
            table: of some steps; its first columns are ``end`` and ``computed``.
            part: which steps they are.
            num_before: columns before the numbers.
        """
        rows = np.isnan(table[:, 0])
        if not rows.any():
            return
        for column, variable in enumerate((self._end, self._computed)):
            table[rows, column] = variable.value().numpy()[part][rows]
        numbers = self._numbers.value().numpy()[part][rows]
        table[rows, num_before : num_before + numbers.shape[1]] = numbers

    def _no_clocks(self) -> tf.Tensor:
        return tf.fill([self._max_steps], tf.constant(float("nan"), tf.float64))
