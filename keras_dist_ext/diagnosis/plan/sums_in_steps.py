"""Time what summing over replicas adds to the steps of a model, with all that comes with it there.

Between two sums a step computes, so that gradients leave the caches, threads that send share cores with those that
compute, and whoever is done first waits. A sum that is timed by itself has none of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Logs
from keras_dist_ext.diagnosis.doctor.interventions import Conditions, WithoutSum
from keras_dist_ext.diagnosis.plan.links import SumTimes
from keras_dist_ext.diagnosis.plan.sums import time_sums
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.step.reduce import shares_memory
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.adoption.adopt import adopt
from keras_dist_ext.training.runtime import runtime_of
from keras_dist_ext.training.snapshot import kept_pass, kept_state

__all__ = ["time_sums_in_steps"]

_ROUNDS = 5
_EPOCH_SECONDS = 0.6  # long against what workers agree on once an epoch
_MOST_STEPS = 500
_CONDITION_SECONDS = 3.0  # that rounds in one process may take together


def time_sums_in_steps(
    model: keras.Model,
    one: keras.Model,
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset,
    *,
    batch_size: int,
    gradient_bytes: int,
    num_gradients: int,
) -> SumTimes:
    """Time what several replicas add to a step. Of several workers, every one must call it.

    Sums of next to nothing are timed by themselves, so that latency and bandwidth are told apart.

    Args:
        model: that is planned for; stays as it is.
        one: of ours, the same on one device; stays as it is.
        strategy: of at least two replicas.
        dataset: of batches, which can be read again.
        batch_size: of them.
        gradient_bytes: that a step sums.
        num_gradients: how many tensors have them.

    Raises:
        MonitorError: steps under the strategy could not be timed.
        ScopeError: the model cannot be rebuilt under the strategy.
    """
    alone = time_sums(strategy, 0, num_gradients)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_pass(dataset))
        stack.enter_context(kept_state(one))
        several = model
        if model.distribute_strategy is strategy and runtime_of(model) is not None:
            stack.enter_context(kept_state(model))
        else:
            several = _adopted(one, strategy)
        if shares_memory(strategy):
            added = _added_in_memory(several, dataset)
        else:
            share = -(-batch_size // strategy.num_replicas_in_sync)
            added = _added_to_fits(several, one, dataset, share)
    least = min(alone.seconds)
    known = {least: alone.seconds[least]} if gradient_bytes >= 4 * least else {}
    return dataclasses.replace(alone, seconds={**known, gradient_bytes: added}, in_steps=True)


def _adopted(one: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Return the model under the strategy, alike on all workers."""
    several = adopt(one, strategy)
    several.replica_runtime.batch_spec = one.replica_runtime.batch_spec
    workers = workers_of(strategy)
    if workers is not None:  # each has made its own
        workers.broadcast_state([*several.variables, *several.optimizer.variables])
    return several


def _added_in_memory(several: keras.Model, dataset: tf.data.Dataset) -> tuple[float, ...]:
    """Return what the sum adds, round by round, where replicas share the cores of a process: against steps without."""
    several.replica_runtime.recorders = ()
    batch = dataset.take(1).cache()
    conditions = Conditions(several, 2)
    conditions.add("pace", batch)
    many = conditions.many("pace")
    conditions.add("sum", batch, num_steps=many)
    conditions.add("no sum", batch, step=WithoutSum, num_steps=many)
    if conditions.skipped:
        raise MonitorError(f"Steps of '{several.name}' could not be timed: {next(iter(conditions.skipped.values()))}")
    seconds = conditions.measure(_CONDITION_SECONDS).seconds
    return tuple(max(0.0, a - b) for a, b in zip(seconds["sum"], seconds["no sum"], strict=True))


def _added_to_fits(several: keras.Model, one: keras.Model, dataset: tf.data.Dataset, share: int) -> tuple[float, ...]:
    """Return what several replicas add, round by round, against one that has a share of the batch: in `fit`, in turn.

    Of several workers each trains its own, at the same time, so that they are as much in each other's way.
    """
    whole = dataset.take(1).cache()
    part = dataset.take(1).unbatch().batch(share).take(1).cache()
    runs: Sequence[tuple[keras.Model, tf.data.Dataset]] = (
        (several, _repeated(whole)),
        (one, _repeated(part)),
    )
    for run in runs:
        _seconds_of_step(*run, num_steps=2)  # traces
    step = _agreed(several.distribute_strategy, _seconds_of_step(*runs[0], num_steps=4))
    num_steps = max(4, min(_MOST_STEPS, round(_EPOCH_SECONDS / max(1e-6, step))))
    rounds = [[_seconds_of_step(*run, num_steps=num_steps) for run in runs] for _ in range(_ROUNDS)]
    return tuple(max(0.0, with_sum - without) for with_sum, without in rounds)


def _repeated(batch: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False  # there is nothing to tune in one batch
    return batch.repeat().with_options(options)


def _seconds_of_step(model: keras.Model, data: tf.data.Dataset, num_steps: int) -> float:
    """Return the seconds of a step in the second epoch of a run, when executions are as long as they get."""
    clock = _EpochClock()
    model.fit(data, epochs=2, steps_per_epoch=num_steps, verbose=0, shuffle=False, callbacks=[clock])
    return clock.seconds / num_steps


def _agreed(strategy: tf.distribute.Strategy, seconds: float) -> float:
    """Return the mean over workers, the same on each."""
    workers = workers_of(strategy)
    return seconds if workers is None else float(workers.sum([seconds])[0]) / workers.num_workers


class _EpochClock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Knows how long the last epoch took."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start."""
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self._begin
