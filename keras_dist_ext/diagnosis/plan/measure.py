"""Measure what a step of one replica costs: by the doctor's clocks in a short run, then by timing parts in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.optimizers import optimized_variables
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import FitArgument
from keras_dist_ext.cluster.cores import num_cores
from keras_dist_ext.data.iterators import release_iterator
from keras_dist_ext.data.pipeline import inspect
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.data.stage_times import measure
from keras_dist_ext.diagnosis.doctor.bounded_run import diagnose
from keras_dist_ext.diagnosis.doctor.interventions import Conditions
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.step_costs import sizes_to_measure
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import Finding
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.training.snapshot import kept_pass, kept_state

__all__ = ["measure_one_replica"]

_SECONDS = 6.0  # that rounds of steps may take together
_INPUT_SECONDS, _INPUT_PASSES = 0.5, 4  # of reading the data by itself
_MOST_STEPS = 200  # of an execution
_UPDATE_SECONDS, _UPDATE_ROUNDS = 0.02, 7  # of a round, at least


def measure_one_replica(
    model: keras.Model,
    dataset: tf.data.Dataset,
    replicas: Sequence[int],
    *,
    num_steps: int,
    callbacks: Sequence[keras.callbacks.Callback],
    fit_arguments: dict[str, FitArgument],
) -> Measurements:
    """Return what steps of a model on one device cost, and leave it bit for bit as it was.

    Args:
        model: of ours, under no strategy.
        dataset: of batches, which can be read again.
        replicas: numbers of replicas to predict for, which say how many examples steps are timed with.
        num_steps: to train for.
        callbacks: of the run, to be timed.
        fit_arguments: others of `fit`.

    Raises:
        MonitorError: no step could be timed.
        DataError: the dataset has no batch.
    """
    report = diagnose(
        model, dataset, num_steps=num_steps, interventions=False, callbacks=callbacks, shuffle=False, **fit_arguments
    )
    times, setting = report.examination.times, report.examination.setting
    if times is None or not times.blocks:
        raise MonitorError(f"'{model.name}' made too few steps to measure them. Give num_steps, or more data.")
    with kept_pass(dataset):
        batch_size = _rows_of_first(dataset)
        by_itself, findings = _read_by_itself(dataset)
        steps, peaks, cores_busy, update = _time_steps(model, dataset, sizes_to_measure(batch_size, replicas))
    waiting = times.input_seconds / times.num_steps
    device = setting.accelerators[0] if setting.accelerators else setting.devices[0]
    return Measurements(
        model=model.name,
        device=device,
        batch_size=batch_size,
        steps=steps,
        update=update,
        host=tuple(block.host_seconds / max(1, block.num_steps) for block in times.blocks),
        input=by_itself,
        input_hidden=_hidden(float(np.median(by_itself)), waiting, times.step() - waiting),
        run_seconds=times.step(),
        gradient_bytes=setting.gradient_bytes,
        num_gradients=max(1, len(model.trainable_variables)),
        state_bytes=sum(_num_bytes(variable) for variable in _state_of(model)),
        peak_bytes=peaks,
        cores_busy=cores_busy,
        num_cores=num_cores(),
        findings=_findings_a_step(report, findings),
    )


def _hidden(input_seconds: float, waiting: float, busy: float) -> float:
    """Return the share of making input that passes while steps compute, where both could have been at once.

    Args:
        input_seconds: that a batch takes by itself.
        waiting: for it, in a step.
        busy: the rest of the step.
    """
    at_once = min(input_seconds, busy)
    if at_once < 0.02 * busy:  # too little to tell
        return 1.0
    return min(1.0, max(0.0, (input_seconds - waiting) / at_once))


def _rows_of_first(dataset: tf.data.Dataset) -> int:
    held = [iter(dataset.take(1))]
    rows = int(num_rows(next(held[0])))
    release_iterator(held)
    return rows


def _read_by_itself(dataset: tf.data.Dataset) -> tuple[tuple[float, ...], list[Finding]]:
    """Return the seconds of a batch that nothing is done beside, and what slows it down, in seconds a batch."""
    seen = inspect(dataset, seconds=_INPUT_SECONDS)
    samples = [seen.times.batch_seconds]
    begin = time.perf_counter()
    while len(samples) < _INPUT_PASSES and time.perf_counter() - begin < _INPUT_PASSES * _INPUT_SECONDS:
        times = measure(dataset, 50, _INPUT_SECONDS)
        samples.append(None if times is None else times.batch_seconds)
    known = [sample for sample in samples if sample is not None] or [seen.times.first_seconds]  # of one batch alone
    found = [_scaled(finding, 1 / max(1, seen.times.num_batches)) for finding in seen.findings]
    return tuple(known), found


def _findings_a_step(report: Report, of_pipeline: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return all findings, each code once, with seconds a step: those of the pipeline as it is by itself."""
    assert report.examination.times is not None
    factor = 1 / max(1, report.examination.times.num_steps)
    found = {finding.code: _scaled(finding, factor) for finding in report.findings}
    return tuple({**found, **{finding.code: finding for finding in of_pipeline}}.values())


def _scaled(finding: Finding, factor: float) -> Finding:
    return dataclasses.replace(finding, seconds=None if finding.seconds is None else finding.seconds * factor)


def _time_steps(
    model: keras.Model, dataset: tf.data.Dataset, sizes: Sequence[int]
) -> tuple[dict[int, tuple[float, ...]], dict[int, int], float, tuple[float, ...]]:
    """Return seconds of steps by examples, memory by examples, cores that were busy, and seconds of updates."""
    with kept_state(model):
        model.replica_runtime.recorders = ()
        conditions = Conditions(model, 2)
        whole = dataset.take(1).cache()
        conditions.add("pace", whole)
        many = conditions.many("pace")
        for size in sizes:
            batch = whole if size == sizes[-1] else dataset.take(1).unbatch().batch(size).take(1).cache()
            conditions.add(str(size), batch, num_steps=min(_MOST_STEPS, round(many * sizes[-1] / size)))
        made = [size for size in sizes if str(size) not in conditions.skipped]
        if not made:
            raise MonitorError(f"Steps of '{model.name}' could not be timed: {conditions.skipped[str(sizes[-1])]}")
        peaks = {size: peak for size in made for peak in _peak_of(conditions, str(size))}
        begin, busy = time.perf_counter(), time.process_time()
        trials = conditions.measure(_SECONDS)
        cores_busy = (time.process_time() - busy) / max(1e-9, time.perf_counter() - begin)
        update = _time_updates(model)
    return {size: trials.seconds[str(size)] for size in made}, peaks, cores_busy, update


def _peak_of(conditions: Conditions, name: str) -> Iterator[int]:
    """Yield the most bytes of the first GPU that an execution takes; nothing where there is none."""
    if not tf.config.list_logical_devices("GPU"):
        return
    with contextlib.suppress(ValueError, tf.errors.OpError):  # of allocators that keep no count
        tf.config.experimental.reset_memory_stats("GPU:0")
        conditions.run(name)
        yield int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


def _time_updates(model: keras.Model) -> tuple[float, ...]:
    """Return the seconds of an update of all weights, round by round; 0 where no optimizer of the model's is known."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built or not model.trainable_variables:
        return (0.0,)
    variables = optimized_variables(optimizer)

    def update(count: tf.Tensor, gradients: list[tf.Tensor]) -> tf.Tensor:
        def make_one(number: tf.Tensor) -> tf.Tensor:
            optimizer.apply(gradients, variables)
            return number + 1

        return tf.while_loop(lambda number: number < count, make_one, [tf.constant(0)])

    run = in_graph(update)
    gradients = [tf.zeros(variable.shape, variable.dtype) for variable in variables]

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        run(tf.constant(count), gradients)
        np.asarray(variables[-1])  # waits for the device
        return (time.perf_counter() - begin) / count

    seconds(1)  # traces
    count = 1 + round(_UPDATE_SECONDS / max(1e-6, seconds(1)))
    return tuple(seconds(min(1000, count)) for _ in range(_UPDATE_ROUNDS))


def _state_of(model: keras.Model) -> list[Variable]:
    """Return the weights and what the optimizer keeps, each once."""
    optimizer = getattr(model, "optimizer", None)
    held = [*model.variables, *([] if optimizer is None else optimizer.variables)]
    return list({id(variable): variable for variable in held}.values())


def _num_bytes(variable: Variable) -> int:
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)
