"""Say of a step that has failed on replicas that a replica had fewer examples than it needs."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import SpecNest, StepData, TensorNest
from keras_dist_ext.errors import StepError
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.training.comparable_steps import comparable, refuse_python, unoptimized
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_state
from keras_dist_ext.training.step_errors import reason_of

__all__ = ["explain_failure"]

_MOST_EXAMPLES = 64


def explain_failure(step: DistributedStep, error: Exception) -> StepError | None:
    """Return an error that says so, with the least batch on which one device makes the step and replicas do not.

    One replica tries, on zeros, without the others, which may have failed or wait for it. All is put back.

    Args:
        step: that was run.
        error: that it has raised.

    Returns:
        None where it has failed of something else, or that cannot be seen.
    """
    num_replicas, spec = step.num_step_replicas, step.model.replica_runtime.batch_spec
    if not isinstance(error, tf.errors.OpError) or step.is_eager or num_replicas == 1 or spec is None:
        return None
    node, line, reason = reason_of(error)
    if "IteratorGetNext" in node:
        return None
    try:
        found = _least_failing(step, spec, num_replicas)
    except Exception:  # of a step that cannot be tried so, or calls Python
        return None
    if found is None:
        return None
    size, of_replica = found
    has = "none" if not of_replica else f"{of_replica} each"
    return StepError(
        f"The step '{step.model.name}.{step.kind}_step' needs more examples than a replica may have{line}: {reason}. "
        f"One device makes it on a batch of {size}, and {num_replicas} replicas do not, some of which have {has}, as "
        "of the last batch of an epoch. What takes some of the examples (the hardest, a maximum, the first) must take "
        "them from those of all replicas: gather them first, by kde.gather_rows, which is also what makes it train as "
        "on one device. Or leave out such batches: batch(..., drop_remainder=True)."
    )


def _least_failing(step: DistributedStep, spec: SpecNest, num_replicas: int) -> tuple[int, int] | None:
    """Return the least batch, of some sizes, that one device takes and replicas do not, and what one of these has."""
    with comparable(step.model, _zeros(spec, 1)):
        tried = step.untraced_copy()
        tried.without_xla()
        on_one = _runner(lambda rows: tried.run_on_first_replica(rows), spec)
        on_replica = _runner(lambda rows: tried.run_on_first_replica(rows, num_replicas), spec)
        size = 1
        while size <= _MOST_EXAMPLES:
            of_replica = size // num_replicas
            if _runs(step, on_one, _zeros(spec, size)) and not _runs(step, on_replica, _zeros(spec, of_replica)):
                return size, of_replica
            size *= 2
    return None


def _runner(way: Callable[[StepData], TensorNest], spec: SpecNest) -> Callable[[StepData], TensorNest]:
    traced = in_graph(way).get_concrete_function(spec)
    refuse_python(traced.graph)
    runner: Callable[[StepData], TensorNest] = traced
    return runner


def _runs(step: DistributedStep, runner: Callable[[StepData], TensorNest], rows: StepData) -> bool:
    with kept_state(step.model), unoptimized():
        try:
            runner(rows)
        except tf.errors.OpError:
            return False
    return True


def _zeros(spec: SpecNest, num_rows: int) -> StepData:
    def of(leaf: tf.TypeSpec | None) -> TensorNest:
        if leaf is None:
            return None
        sizes = [num_rows, *(size or 1 for size in leaf.shape[1:])] if leaf.shape.rank else []
        return tf.zeros(sizes, leaf.dtype)

    return tree.map_structure(of, spec)
