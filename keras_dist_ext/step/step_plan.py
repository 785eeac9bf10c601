"""What is known of a step before it is traced to be run, from a scratch graph that never runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.step.drawn_shapes import NotedDraw
from keras_dist_ext.step.means import BatchExponents

__all__ = ["GradientCall", "OtherLogs", "StalePlan", "StepPlan", "Unplanned"]


class Unplanned(Exception):
    """A step has come to gradients, and it is not known yet what becomes of them."""


class StalePlan(Exception):
    """A step does something else with its gradients than it did when it was traced in a scratch graph."""


class OtherLogs(Exception):
    """A step has other numbers in its logs than those that the loop it is traced for was made for."""


@dataclasses.dataclass(frozen=True)
class GradientCall:
    """What becomes of the gradients that one call of a tape returns.

    Attributes:
        are_shared: for each source, whether it is the same on all replicas, so that its gradients are summed.
        go_straight: for each, whether the gradient goes as it is into one optimizer, in the graph where it was made,
            and nowhere else: the optimizer's update sums it.
    """

    are_shared: tuple[bool, ...]
    go_straight: tuple[bool, ...]

    @classmethod
    def of(cls, sources: Sequence[Variable], *, go_straight: bool = False) -> GradientCall:
        """Return what is true of gradients of variables, if nothing else is known."""
        shared = tuple(isinstance(source, tf.Variable | keras.Variable) for source in sources)
        return cls(shared, tuple(is_shared and go_straight for is_shared in shared))


class StepPlan:
    """What was learned of a step of one kind.

    Attributes:
        exponents: of its scalars in the batch size.
        is_plain: whether it is taken for one that hands on what Keras computes, and nothing else (see ``plain_calls``);
            None where nobody has asked. It needs no plan.
        is_made: whether the step was traced in a scratch graph, or was tried to.
        is_checked: whether it was, and what optimizers and weights get is known to be the same on all replicas.
        calls: of tapes, in their order.
        are_own: for each call of ``reduce``, for each of its values, whether it is one replica's own.
        shared_state: ids of variables that are assigned the same on all replicas.
        whole_accumulators: ids of optimizers that accumulate gradients which are global already.
        reduces_in: branches and loops of the graph in which replicas add up, and
        inlined: functions of TensorFlow in which they do; both as ``branches.identity_of`` knows them.
        pools_results: whether the step computes with the results of metrics, so that they are those of all replicas.
        extra: what its logs hold that no metric does, of each local replica; None where that is not known.
        draws: the random numbers that it draws; None where that is not known (see ``drawn_shapes``).
        called_hooks: the hooks that Keras and TensorFlow have called in it (see ``hook_checks``).
    """

    def __init__(self) -> None:
        self.exponents = BatchExponents()
        self.draws: Sequence[NotedDraw] | None = None
        self.is_plain: bool | None = None
        self.is_made = False
        self.is_checked = False
        self.calls: Sequence[GradientCall] = ()
        self.are_own: Sequence[Sequence[bool]] = ()
        self.shared_state: frozenset[int] = frozenset()
        self.whole_accumulators: frozenset[int] = frozenset()
        self.reduces_in: frozenset[Hashable] = frozenset()
        self.inlined: frozenset[Hashable] = frozenset()
        self.pools_results = False
        self.extra: Sequence[tf.TensorSpec] | None = None
        self.called_hooks: set[str] = set()

    def call(self, number: int, sources: Sequence[Variable]) -> GradientCall:
        """Return what becomes of the gradients of a call, the first having the number 0.

        Raises:
            Unplanned: the step is to be traced in a scratch graph first.
        """
        if not self.is_made:
            raise Unplanned
        if number < len(self.calls) and len(self.calls[number].are_shared) == len(sources):
            return self.calls[number]
        return GradientCall.of(sources)

    def expect(self, extra: Sequence[tf.Tensor]) -> None:
        """See that a loop was made for what the logs of its step hold, which may be other things on other batches.

        Args:
            extra: what they hold that no metric does, of each local replica.

        Raises:
            OtherLogs: it was not; it is known now.
        """
        if self.extra is not None and [value.dtype for value in extra] != [spec.dtype for spec in self.extra]:
            self.extra = [tf.TensorSpec(value.shape, value.dtype) for value in extra]
            raise OtherLogs

    def sum_at_once(self) -> None:
        """Have all gradients summed where they are made."""
        self.calls = [GradientCall(call.are_shared, (False,) * len(call.are_shared)) for call in self.calls]
