"""Remember the gradients that a step was given and that are not summed yet, and where they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext.aliases import Gradient
from keras_dist_ext.step.gradient_values import parts
from keras_dist_ext.step.step_plan import StalePlan

__all__ = ["KeptGradient", "KeptGradients"]


@dataclasses.dataclass(eq=False)
class KeptGradient:
    """A gradient that a step was given, and that an optimizer is to sum.

    Attributes:
        given: what the step has.
        value: what this replica adds to the sum.
        call: the number of the tape's call that made it.
        place: its own number among the gradients of the call.
        graph: where it was made.
        num_uses: how many optimizers were given it; more than one where it cannot be summed.
        is_checked: whether it may have gone elsewhere.
    """

    given: Gradient
    value: tf.Tensor
    call: int
    place: int
    graph: tf.Graph
    num_uses: int = 0
    is_checked: bool = True

    def went_straight(self, returned: set[int], graph: tf.Graph) -> bool:
        """Whether it has gone into one optimizer at most, and nowhere else.

        Args:
            returned: ids of what the step returns.
            graph: of the step. In those of branches and functions, what nobody has used may be returned.
        """
        if self.graph is None or id(self.given) in returned:
            return False
        if self.num_uses != 1 and (self.num_uses or self.graph is not graph):
            return False
        return not any(part.consumers() for part in parts(self.given))


class KeptGradients:
    """The gradients that one replica's step was given, and that are not summed yet.

    Args:
        graph: of the step.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._kept: dict[int, KeptGradient] = {}  # by the id of what was given
        self._updates: list[
            tuple[keras.optimizers.Optimizer, list[KeptGradient | None]]
        ] = []  # optimizers, and what they were given

    def add(self, kept: KeptGradient) -> None:
        """Remember a gradient."""
        self._kept[id(kept.given)] = kept

    def of(self, gradient: Gradient) -> KeptGradient | None:
        """Return what is remembered of a gradient."""
        return self._kept.get(id(gradient))

    def used(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[KeptGradient | None]
    ) -> list[KeptGradient | None]:
        """Note that an optimizer was given gradients; return those that can be summed where it was.

        Args:
            optimizer: of Keras.
            gradients: None for those that are not remembered.
        """
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        for one in gradients:
            if one is not None:
                one.num_uses += 1 if one.graph is here else 2
        self._updates.append((optimizer, gradients))
        return [None if one is None or one.graph is not here else one for one in gradients]

    def check(self, returned: Sequence[tf.Tensor]) -> None:
        """See that what was to go straight into an optimizer has gone nowhere else.

        Args:
            returned: what the step returns.

        Raises:
            StalePlan: something has.
        """
        ids = {id(value) for value in returned}
        if not all(one.went_straight(ids, self._graph) for one in self._kept.values() if one.is_checked):
            raise StalePlan

    def places_seen(self, returned: Sequence[tf.Tensor]) -> tuple[set[tuple[int, int]], frozenset[int]]:
        """Return which gradients have gone straight into an optimizer, and which optimizers accumulate others.

        Args:
            returned: what the step returns.

        Returns:
            The numbers of the call and in it, of each gradient; and ids of optimizers.
        """
        ids = {id(value) for value in returned}
        straight = {key for key, one in self._kept.items() if one.went_straight(ids, self._graph)}
        whole: set[int] = set()
        for _ in self._updates:  # what one takes from another may change what a third is given
            for optimizer, gradients in self._updates:
                inner = inner_optimizer(optimizer)
                is_mixed = any(one is None or id(one.given) not in straight for one in gradients)
                if inner.gradient_accumulation_steps and (is_mixed or id(inner) in whole):
                    whole.add(id(inner))
                if is_mixed or id(inner) in whole:
                    straight -= {id(one.given) for one in gradients if one is not None}
        return {(one.call, one.place) for key, one in self._kept.items() if key in straight}, frozenset(whole)
