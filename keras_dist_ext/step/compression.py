"""Send gradients between replicas in 16 bits, and what rounding has left of them with those of the next step.

Letters: R = replicas in sync, over all workers.

Source: error feedback as in Seide et al., 1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs, Interspeech 2014.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras.variables import Variable, local_component
from keras_dist_ext.aliases import Gradient
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.step.reduce import has_gpus, shares_memory
from keras_dist_ext.strategy.virtual import VirtualReplicas

__all__ = [
    "CompressionKind",
    "GradientCompression",
    "RoundedGradients",
    "checked_compression",
    "compression_of",
    "kind_of",
    "sends_rounded",
]

CompressionKind: TypeAlias = Literal["bfloat16"] | None


def checked_compression(
    value: object, strategy: tf.distribute.Strategy, virtual: VirtualReplicas | None, *, exact: bool
) -> CompressionKind:
    """Return what was given as ``gradient_compression``.

    Raises:
        StrategyError: it is neither None nor "bfloat16"; or gradients cannot be summed so: under parameter servers,
            with virtual replicas, between GPUs, or if replicas are to do exactly what one device does.
    """
    given = arguments.optional(
        arguments.one_of, "gradient_compression", value, choices=("bfloat16",), error=StrategyError
    )
    if given is not None and isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise StrategyError(
            f"gradient_compression={given!r} under a ParameterServerStrategy, whose workers send their gradients to "
            "servers and not to each other. Compile without it, or under a mirrored strategy."
        )
    if given is not None and strategy.num_replicas_in_sync > 1 and has_gpus(strategy):
        raise StrategyError(
            f"gradient_compression={given!r} on {strategy.num_replicas_in_sync} replicas that are GPUs: TensorFlow's "
            "collectives add up no bfloat16 there. Compile without it."
        )
    if given is not None and virtual is not None:
        raise StrategyError(
            f"gradient_compression={given!r} with virtual_replicas={virtual.count}, whose sums are to have the same "
            "bits on any number of devices, which rounded ones have not. Compile without one of the two."
        )
    if given is not None and exact:
        raise StrategyError(
            f"gradient_compression={given!r} with exact=True: what replicas send each other would be rounded, and one "
            "device does not do that. Compile without one of the two."
        )
    return given  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, eq=False)
class RoundedGradients:
    """A replica's gradients, rounded.

    Attributes:
        terms: those of ``variables``, for a sum over replicas; what was not rounded has its own dtype.
        dtypes: which the sums are to have.
        left: this replica's variables, and what rounding has left for them.
    """

    terms: list[Gradient]
    dtypes: list[tf.DType]
    left: list[tuple[tf.Variable, tf.Tensor]]

    def restored(self, sums: Sequence[Gradient]) -> list[Gradient]:
        """Return sums over replicas in the dtypes of the gradients."""
        return [
            total if total.dtype == dtype else tf.cast(total, dtype)
            for total, dtype in zip(sums, self.dtypes, strict=True)
        ]

    def keep(self, may_update: tf.Tensor | None) -> None:
        """Keep what rounding has left, unless the step is left out."""
        for variable, value in self.left:
            value = tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))
            variable.assign(value if may_update is None else tf.where(may_update, value, variable.read_value()))


def kind_of(compression: GradientCompression | None) -> CompressionKind:
    """Return what it was made of."""
    return None if compression is None else compression.kind


def compression_of(kind: CompressionKind) -> GradientCompression | None:
    """Return what does as was asked."""
    return None if kind is None else GradientCompression()


def sends_rounded(strategy: tf.distribute.Strategy, compression: GradientCompression | None) -> bool:
    """Whether replicas send each other rounded gradients."""
    return compression is not None and strategy.num_replicas_in_sync > 1 and not shares_memory(strategy)


class GradientCompression:
    """Rounds gradients of 32 bits to bfloat16 before they are sent, on each replica by itself.

    Sums of R of them round again, at each addition; so what comes out differs from the sum in 32 bits by about 1/256 of
    it in a step, and the difference that each replica makes is added to its gradient of the next one.

    Attributes:
        kind: "bfloat16".
    """

    kind: CompressionKind = "bfloat16"

    def __init__(self) -> None:
        self._left: dict[int, tuple[Variable, tf.Variable]] = {}  # by the variable's id; the rest, of each replica

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Make what holds the rest of each variable's gradients; outside of graphs, in the strategy's scope."""
        for variable in variables:
            if id(variable) not in self._left and tf.as_dtype(variable.dtype) == tf.float32:
                left = tf.Variable(
                    tf.zeros(variable.shape),
                    trainable=False,
                    name="left_by_rounding",
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                self._left[id(variable)] = variable, left

    def round(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable], scale: tf.Tensor | float = 1.0
    ) -> RoundedGradients:
        """Round what this replica adds to gradients; sparse ones, and those of other dtypes, stay as they are.

        Args:
            gradients: of `variables`.
            variables: Keras', one for each.
            scale: of the loss.
        """
        rounded = RoundedGradients([], [gradient.dtype for gradient in gradients], [])
        for gradient, variable in zip(gradients, variables, strict=True):
            _, of_all = self._left.get(id(variable), (None, None))
            if of_all is None or isinstance(gradient, tf.IndexedSlices) or gradient.dtype != tf.float32:
                rounded.terms.append(gradient)
                continue
            left = local_component(of_all)
            whole = gradient + left * scale
            term = tf.cast(whole, tf.bfloat16)
            rounded.terms.append(term)
            rounded.left.append((left, (whole - tf.cast(term, tf.float32)) / scale))
        return rounded
