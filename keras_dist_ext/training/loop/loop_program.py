"""The compiled loop over a step that is a function, and how many of its steps are made at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.errors import LoopError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.logs import pooled_state
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.execution_sizer import ExecutionSizer
from keras_dist_ext.training.prediction import concat_replicas

__all__ = ["DeclaredStep", "OneStepWhereKept"]


class OneStepWhereKept(ExecutionSizer):
    """Makes one step at a time where its values are kept for all rows."""

    def __init__(self, sizer: ExecutionSizer, keeps: Callable[[], bool]) -> None:
        super().__init__()
        self._sizer = sizer
        self._keeps = keeps

    @property
    def num_steps(self) -> int:
        """Steps of the next execution."""
        return 1 if self._keeps() else self._sizer.num_steps

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps is tuned."""
        return self._sizer.follows_clock

    def record(self, num_steps: int, seconds: float) -> None:
        """Take note of how long an execution took."""
        self._sizer.record(num_steps, seconds)


class DeclaredStep(DistributedStep):
    """A step that is a function; its logs are what was declared."""

    def __init__(self, model: DistributedModel, kind: Kind, kept: Sequence[str]) -> None:
        super().__init__(model, kind)
        self._logs.are_plain = True
        self.exponents = None  # a step was examined: what it differentiates is a mean
        self._plan.is_made = True  # as far as it was examined
        self._kept = kept

    has_code_to_check = True
    adds_own_losses = True
    takes_check = "TrainLoop"
    logs_are_compared = False  # what is declared may say how many replicas there are

    def untraced_copy(self) -> DistributedStep:
        """See ``DistributedStep``."""
        return DeclaredStep(self.model, self.kind, self._kept)

    def run_user_step(self, step: ReplicaStep, batch: StepData) -> tuple[None, list[tf.Tensor]]:
        """Run the step; return what is kept of it for all rows."""
        values = self._user_step(batch)
        if step.note is not None:
            step.note.end(step.replica_id, num_rows(batch), values)
        step.finish({})
        step.end(list(values.values()))
        return None, [values[name] for name in self._kept]

    def logs(self, extra: Sequence[tf.Tensor]) -> TensorNest:
        """Compute what was declared, and gather what is kept for all rows."""
        with pooled_state(self.model, self.strategy):
            logs = self.model.get_metrics_result()
        num_local = len(self.devices)
        for place, name in enumerate(self._kept):
            parts = _of_one_width(name, extra[place * num_local : (place + 1) * num_local])
            logs[name] = concat_replicas(self.strategy, regroup(parts) if self.num_replicas > 1 else parts[0])
        return logs


def _of_one_width(name: str, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """See that the rows of all replicas have the same shape."""
    first, *others = parts
    message = (
        f"{name!r} is kept for all rows, and rows of different replicas have different shapes, so they cannot be one "
        "array. Pad them to one shape in the step, as tf.pad does."
    )
    if all(part.shape[1:].is_fully_defined() for part in parts):
        if any(part.shape[1:] != first.shape[1:] for part in others):
            raise LoopError(message)
        return list(parts)
    checks = [tf.debugging.assert_equal(tf.shape(part)[1:], tf.shape(first)[1:], message) for part in others]
    with tf.control_dependencies(checks):
        return [first, *map(tf.identity, others)]
