"""Before training, make one step on a few rows both on one device and on replicas, and report what differs.

Only for models with code of the user's in their steps, or with layers, losses or metrics that may join examples of a
batch, and those compiled with ``exact=True``; likewise before evaluation, in ``fit`` or by itself, and prediction,
where their steps may do other things than those of training. What was reported once is not said again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.row_wise import has_row_wise_layers
from keras_dist_ext._keras.user_code import has_user_layers, is_users
from keras_dist_ext.aliases import StepData
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.errors import StepError
from keras_dist_ext.messages import warn
from keras_dist_ext.step.logs import leaf_metrics
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.batch_split import is_per_replica
from keras_dist_ext.training.comparable_steps import CannotCompare, FailsOnFew
from keras_dist_ext.training.deviation_report import describe, describe_unseen
from keras_dist_ext.training.deviations import Deviation
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.execution import RunKind
from keras_dist_ext.training.few_rows import rows_of_chief, unlike_rows
from keras_dist_ext.training.prediction import PredictProgram
from keras_dist_ext.training.prediction_comparison import compare_predictions
from keras_dist_ext.training.runtime import ReplicaRuntime
from keras_dist_ext.training.step_comparison import Prepare, compare_step, state_added_up, sums_on_read

__all__ = ["check_metrics", "check_prediction", "check_step", "has_rows_to_check"]


_MORE = 16  # examples for each replica, where a step cannot be made on a few


def check_step(
    step: DistributedStep,
    first_batch: Callable[[], StepData],
    prepare: Prepare,
    unprepared: tuple[type[Exception], ...],
) -> str | None:
    """Once after a model was compiled, see whether a kind of step does on replicas what it does on one device.

    Args:
        step: that is about to be made.
        first_batch: returns the first batch, without taking it.
        prepare: makes good what tracing a step has found missing.
        unprepared: the exceptions that it takes.

    Returns:
        Why that could not be seen, to be said once the step was made; None where it could, or nothing is to be seen.

    Raises:
        StepError: it does not, and the model is compiled to have that be an error.
    """
    model, kind = step.model, step.kind
    runtime = model.replica_runtime
    if not runtime.check or kind in runtime.checked:
        return None
    runtime.checked.add(kind)
    num_replicas = step.num_step_replicas
    is_of_keras = bool(step.plan.is_plain or not step.has_code_to_check) and not runtime.exact
    if num_replicas == 1 or is_of_keras or (kind == "test" and _tells_nothing_new(step)):
        return None

    def compare(rows: StepData) -> list[Deviation]:
        return compare_step(step, rows, prepare, unprepared)

    return _check(model, kind, num_replicas, first_batch, compare, given_to=step.takes_check)


def check_prediction(program: PredictProgram, batch: StepData) -> str | None:
    """Once after a model was compiled, see whether it predicts on replicas what it predicts on one device.

    Only where the step of prediction is the user's own, or layers are that neither training nor evaluation has run.

    Args:
        program: that is about to run.
        batch: the first one.

    Returns:
        As ``check_step``.

    Raises:
        StepError: as there.
    """
    model, runtime = program.model, program.model.replica_runtime
    num_replicas = program.strategy.num_replicas_in_sync
    if not runtime.check or "predict" in runtime.checked or num_replicas == 1 or not has_rows_to_check(batch):
        return None
    if not all(layer.built for layer in flat_layers(model)):  # or weights would begin as the check draws them
        return None
    runtime.checked.add("predict")
    is_known = not has_user_layers(model) and has_row_wise_layers(model)
    is_known = is_known or bool(runtime.checked & {"train", "test"})
    if is_known and not program.is_of_user:
        return None
    compare = functools.partial(compare_predictions, program)
    return _check(model, "predict", num_replicas, lambda: batch, compare, given_to=program.takes_check)


def _check(
    model: keras.Model,
    kind: RunKind,
    num_replicas: int,
    first_batch: Callable[[], StepData],
    compare: Callable[[StepData], list[Deviation]],
    *,
    given_to: str,
) -> str | None:
    """Compare on a few rows, and report what was not reported before; see ``check_step``."""
    runtime = model.replica_runtime
    workers = workers_of(runtime.strategy)
    try:
        if isinstance(runtime.strategy, tf.distribute.TPUStrategy):
            raise CannotCompare("it runs on a TPU")
        rows = _few_rows(first_batch(), 2 * num_replicas + 1, runtime.strategy, workers)
        if rows is None:
            return None
        try:
            found = _unreported(compare(rows), runtime)
        except FailsOnFew:  # perhaps not on some more: the hardest ones of a batch may be many
            more = (
                None if workers is not None else _few_rows(first_batch(), _MORE * num_replicas, runtime.strategy, None)
            )
            if more is None or int(num_rows(more)) <= int(num_rows(rows)):
                raise
            rows = more
            found = _unreported(compare(rows), runtime)
    except CannotCompare as why:
        if ("reason", str(why)) in runtime.reported:
            return None
        runtime.reported.add(("reason", str(why)))
        return describe_unseen(model.name, kind, num_replicas, str(why), given_to=given_to)
    count = int(num_rows(rows))
    message = ""
    if found:
        message = describe(
            model.name,
            kind,
            num_replicas,
            count,
            found,
            given_to=given_to,
            added_up=state_added_up(model),
            sums_on_read=sums_on_read(model),
        )
    if workers is not None:
        message = workers.broadcast_bytes(message.encode()).decode()
    if message and (runtime.check == "raise" or runtime.exact):
        runtime.checked.discard(kind)  # the next run is none that was found right
        raise StepError(message)
    runtime.reported.update((deviation.part, deviation.name) for deviation in found)
    if message:
        warn(message)
    return None


def has_rows_to_check(batch: StepData) -> bool:
    """Whether a batch that is given by itself has rows for a check; where not, the next one may have them."""
    return is_per_replica(batch) or int(num_rows(batch)) > 1


def _tells_nothing_new(step: DistributedStep) -> bool:
    """Whether steps of evaluation compute what was seen in those of training, or nothing that can be compared."""
    if not step.logs_are_compared:
        return True
    is_own = any(overrides(step.model, name) for name in ("train_step", "test_step", "compute_loss"))
    return "train" in step.model.replica_runtime.checked and not is_own


def _unreported(deviations: Sequence[Deviation], runtime: ReplicaRuntime) -> list[Deviation]:
    """Return the deviations that no warning has named since the model was compiled, whatever kind of step has them.

    The gradients of a loss, and the log of a loss, are of one cause.
    """
    has_loss = any(part == "gradient" for part, _ in runtime.reported)
    return [
        deviation
        for deviation in deviations
        if (deviation.part, deviation.name) not in runtime.reported
        and not (has_loss and deviation.part == "metric" and "loss" in deviation.name)
    ]


def check_metrics(model: keras.Model) -> str | None:
    """Once after a model was compiled for parameter servers, return what is to be said of metrics of the user's own.

    Each step is one worker's, on a whole batch, so all else is as on one device.
    """
    runtime = model.replica_runtime
    if not runtime.check or runtime.checked:
        return None
    runtime.checked |= {"train", "test"}
    names = [metric.name for metric in leaf_metrics(model) if is_users(type(metric))]
    if not names:
        return None
    return (
        f"Whether the metrics of '{model.name}' that are your own ({', '.join(names)}) add up over the workers of a "
        "ParameterServerStrategy, as sums and counts do, was not checked: a maximum, or kept examples, do not. If you "
        "know that they do, `compile(check=False)` says so."
    )


def _few_rows(batch: StepData, count: int, strategy: tf.distribute.Strategy, workers: Workers | None) -> StepData:
    """Return rows of a batch, of the chief's where there are workers; None where there are not two."""
    rows = unlike_rows(batch, count, strategy)
    has_few = rows is None or int(num_rows(rows)) < 2
    if workers is not None:
        has_few = workers.sum([float(has_few)])[0] > 0
    if has_few:
        return None
    return rows if workers is None else rows_of_chief(rows, workers)
