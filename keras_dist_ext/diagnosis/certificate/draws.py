"""Watch what random ops draw on each replica: replicas must not draw the same, and dropout must keep its share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.layers import current_layer_path
from keras_dist_ext._keras.random import intercept_dropout, intercept_random_ops
from keras_dist_ext._keras.strategies import replica_id
from keras_dist_ext.aliases import Array, Original, StepData, TensorNest
from keras_dist_ext.diagnosis.certificate.training_run import TrainingRun

__all__ = ["Draws", "watch_draws"]

LOOKED_AT = 4096  # numbers of a draw
SIGMAS = 5.0  # a share of kept units further off than this is no chance: 6e-7


@dataclass(frozen=True)
class Draws:
    """What the random ops of one layer drew on the replicas."""

    layer: str  # its path, or "the step" outside of all layers
    num_ops: int  # random ops in a step
    num_numbers: int  # drawn by all replicas, as far as they were looked at
    equal: float  # the largest share of numbers that two replicas have in common
    is_equal: bool  # whether two replicas drew the same
    rate: float | None = None  # of dropout
    kept: float | None = None  # the share of units that dropout kept, all replicas together
    keeps_right: bool = True


def watch_draws(side: TrainingRun, batch: StepData, bounds: Sequence[int], num_steps: int = 2) -> tuple[Draws, ...]:
    """Make steps with random ops as they are, and look at what each replica drew.

    Args:
        side: the replicas' side; its state is put back, but its train function is another one.
        batch: a global batch.
        bounds: of the rows of each replica, for stock Keras.
        num_steps: how many steps to make.
    """
    watcher = _Watcher()
    before = side.state()
    side.retrace()
    with intercept_random_ops(watcher.draw), intercept_dropout(watcher.dropout):
        for _ in range(num_steps):
            side.step(batch, bounds)
    side.retrace()
    side.load(before)
    return tuple(watcher.draws())


class _Watcher:
    """Notes what random ops draw, on the host."""

    def __init__(self) -> None:
        self._num_ops: dict[tuple[str, int], int] = defaultdict(int)  # by layer and replica, as traced
        self._drawn: dict[tuple[str, int, int], list[Array]] = defaultdict(list)
        self._kept: dict[tuple[str, float], list[tuple[int, int]]] = defaultdict(list)

    def draw(self, name: str, original: Original, /, *args: TensorNest, **kwargs: TensorNest) -> tf.Tensor:
        """Draw, and note what."""
        del name
        drawn = original(*args, **kwargs)
        context = tf.distribute.get_replica_context()
        if context is None:
            return drawn
        layer, replica = _layer(), int(replica_id())
        op = self._num_ops[layer, replica]
        self._num_ops[layer, replica] += 1

        def note(values: object) -> TensorNest:
            self._drawn[layer, op, replica].append(np.array(values))
            return np.int32(0)

        return _after(tf.numpy_function(note, [tf.reshape(drawn, [-1])[:LOOKED_AT]], tf.int32), drawn)

    def dropout(
        self, original: Original, inputs: tf.Tensor, rate: float, *args: TensorNest, **kwargs: TensorNest
    ) -> tf.Tensor:
        """Drop units, and count those that are kept."""
        outputs = original(inputs, rate, *args, **kwargs)
        noise_shape = args[0] if args else kwargs.get("noise_shape")
        if not 0 < rate < 1 or noise_shape is not None:  # units that are dropped together are too few to count
            return outputs
        layer = _layer()

        def note(kept: tf.Tensor, total: tf.Tensor) -> TensorNest:
            self._kept[layer, float(rate)].append((int(kept), int(total)))
            return np.int32(0)

        was = tf.math.count_nonzero(inputs)
        return _after(tf.numpy_function(note, [tf.math.count_nonzero(outputs), was], tf.int32), outputs)

    def draws(self) -> Iterator[Draws]:
        """Compare what the replicas drew, layer by layer."""
        rates = {layer: (rate, counts) for (layer, rate), counts in self._kept.items()}
        for layer in dict.fromkeys(layer for layer, _, _ in self._drawn):
            ops = sorted({op for name, op, _ in self._drawn if name == layer})
            shares: list[tuple[float, bool]] = []
            num_numbers = 0
            for op in ops:
                of_replicas = [drawn for (n, o, _), drawn in self._drawn.items() if (n, o) == (layer, op)]
                num_numbers += sum(len(numbers) for drawn in of_replicas for numbers in drawn)
                shares += [_equal(of_replicas[0], other) for other in of_replicas[1:]]
            rate, counts = rates.get(layer, (None, []))
            kept, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
            yield Draws(
                layer=layer,
                num_ops=len(ops),
                num_numbers=num_numbers,
                equal=max((share for share, _ in shares), default=0.0),
                is_equal=any(same for _, same in shares),
                rate=rate,
                kept=kept / total if total else None,
                keeps_right=rate is None or not total or _is_likely(kept, total, 1 - rate),
            )


def _layer() -> str:
    return current_layer_path() or "the step"


def _after(noted: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([noted]):
        return tf.identity(value)


def _equal(ones: Sequence[Array], others: Sequence[Array]) -> tuple[float, bool]:
    """The share of numbers that are equal, draw by draw, and whether that is no chance."""
    pairs = [(one[: len(other)], other[: len(one)]) for one, other in zip(ones, others, strict=False)]
    size, num_equal = sum(len(one) for one, _ in pairs), sum(int(np.sum(one == other)) for one, other in pairs)
    if not size:
        return 0.0, False
    enough = 1 if pairs[0][0].dtype.kind == "f" else 32  # two integers of a small range are often equal
    return num_equal / size, size >= enough and num_equal == size


def _is_likely(kept: int, total: int, share: float) -> bool:
    return abs(kept - total * share) <= SIGMAS * math.sqrt(total * share * (1 - share)) + 1
