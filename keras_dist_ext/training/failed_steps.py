"""Say of a step that has failed on replicas that a replica had fewer examples than it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext.aliases import SpecNest, StepData, TensorNest
from keras_dist_ext.data.split import num_rows, without_optionals
from keras_dist_ext.errors import KerasDistError, StepError
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.update import UnbuiltOptimizer
from keras_dist_ext.training.batch_spec import any_number_of_rows
from keras_dist_ext.training.batch_split import is_per_replica
from keras_dist_ext.training.comparable_steps import comparable, refuse_python, unoptimized
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.prediction import PredictProgram
from keras_dist_ext.training.snapshot import kept_numbers, kept_state
from keras_dist_ext.training.step_errors import reason_of

__all__ = ["explain_failed_prediction", "explain_failure"]

_MOST_EXAMPLES = 64
_OF_FEW = (tf.errors.OpError, ValueError, IndexError, ZeroDivisionError)  # ValueError: where rows are known in a trace
_Way = Callable[[StepData], TensorNest]


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
    if num_replicas == 1 or not _may_be_of_few(error):
        return None
    batch = _next_batch(step)
    if spec is None and batch is None:
        return None

    def try_step() -> tuple[int, int] | None:
        tried = step.untraced_copy()
        tried.without_xla()
        ways: list[_Way] = [  # whose signatures are that of a function of rows
            lambda rows: tried.run_on_first_replica(rows),
            lambda rows: tried.run_on_first_replica(rows, num_replicas),
        ]
        with tried.plan.exponents.assuming_means():  # whether it fails does not depend on how its numbers are weighed
            return _least_failing(
                step.model, _of_any_rows(batch) if spec is None else spec, num_replicas, ways, step.is_eager, batch
            )

    return _explained(f"{step.model.name}.{step.kind}_step", error, num_replicas, try_step)


def explain_failed_prediction(program: PredictProgram, batch: StepData, error: Exception) -> StepError | None:
    """Return the same of a prediction, whose replicas add nothing up.

    Args:
        program: that has run.
        batch: that it was given.
        error: that it has raised.
    """
    num_replicas = program.strategy.num_replicas_in_sync
    if num_replicas == 1 or is_per_replica(batch) or not _may_be_of_few(error):
        return None
    given = without_optionals(batch)

    def try_step() -> tuple[int, int] | None:
        way = program.untraced_copy(given).run_on_first_replica
        is_eager = program.model.run_eagerly
        return _least_failing(program.model, _of_any_rows(given), num_replicas, [way, way], is_eager, given)

    return _explained(f"{program.model.name}.predict_step", error, num_replicas, try_step)


def _next_batch(step: DistributedStep) -> StepData | None:
    """Return the first batch, or one after it; None where that was the last, or each replica's is given."""
    try:
        batch = None if step.first_batch is None else without_optionals(step.first_batch())
    except Exception:  # the data may be what has failed
        return None
    return None if batch is None or is_per_replica(batch) else batch


def _of_any_rows(batch: StepData) -> SpecNest:
    return tree.map_structure(lambda leaf: None if leaf is None else any_number_of_rows(leaf), batch)


def _may_be_of_few(error: Exception) -> bool:
    if not isinstance(error, _OF_FEW) or isinstance(error, KerasDistError):
        return False
    return "IteratorGetNext" not in reason_of(error)[0]


def _explained(
    name: str, error: Exception, num_replicas: int, try_step: Callable[[], tuple[int, int] | None]
) -> StepError | None:
    try:
        found = try_step()
    except Exception:  # of a step that cannot be tried so, or calls Python
        return None
    if found is None:
        return None
    size, of_replica = found
    has = "none" if not of_replica else f"{of_replica} each"
    _, line, reason = reason_of(error)
    return StepError(
        f"The step '{name}' needs more examples than a replica may have{line}: {reason}. "
        f"One device makes it on a batch of {size}, and {num_replicas} replicas do not, some of which have {has}, as "
        "of the last batch of an epoch. What takes some of the examples (the hardest, a maximum, the first) must take "
        "them from those of all replicas: gather them first, by kde.gather_rows, which is also what makes it train as "
        "on one device. Or leave out such batches: batch(..., drop_remainder=True)."
    )


def _least_failing(
    model: keras.Model,
    spec: SpecNest,
    num_replicas: int,
    ways: Sequence[_Way],
    is_eager: bool,
    batch: StepData | None,
) -> tuple[int, int] | None:
    """Return the least batch, of some sizes, that one device takes and replicas do not, and what one of these has.

    Args:
        model: whose step it is.
        spec: of a batch of any size.
        num_replicas: that share a batch.
        ways: how one device makes the step, and how a replica does.
        is_eager: whether it runs as Python.
        batch: whose size is among those, if there is one.
    """
    sizes = {2**power for power in range(_MOST_EXAMPLES.bit_length())}
    if batch is not None:
        sizes.add(int(num_rows(batch)))
    with comparable(model, _zeros(spec, 1)):
        on_one, on_replica = ways if is_eager else [_runner(model, way, spec) for way in ways]
        for size in sorted(size for size in sizes if 0 < size <= _MOST_EXAMPLES):
            of_replica = size // num_replicas
            if _runs(model, on_one, _zeros(spec, size)) and not _runs(model, on_replica, _zeros(spec, of_replica)):
                return size, of_replica
    return None


def _runner(model: keras.Model, way: _Way, spec: SpecNest) -> _Way:
    try:
        traced = in_graph(way).get_concrete_function(spec)
    except UnbuiltOptimizer as unbuilt:  # the step has failed before it came to it
        with model.replica_runtime.in_scope():
            unbuilt.build()
        return _runner(model, way, spec)
    refuse_python(traced.graph)
    runner: _Way = traced
    return runner


def _runs(model: keras.Model, runner: _Way, rows: StepData) -> bool:
    with kept_state(model), kept_numbers(model), unoptimized():
        try:
            runner(rows)
        except _OF_FEW:
            return False
    return True


def _zeros(spec: SpecNest, num_rows: int) -> StepData:
    def of(leaf: tf.TypeSpec | None) -> TensorNest:
        if leaf is None:
            return None
        sizes = [num_rows, *(size or 1 for size in leaf.shape[1:])] if leaf.shape.rank else []
        return tf.zeros(sizes, leaf.dtype)

    return tree.map_structure(of, spec)
