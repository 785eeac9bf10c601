"""What Keras calls for each execution: programs as its train, test and predict functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.adapters import check_epoch_iterator
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.data.graph_checks import as_data_errors
from keras_dist_ext.messages import warn
from keras_dist_ext.step.means import UnknownExponents
from keras_dist_ext.step.plain_calls import NotPlain
from keras_dist_ext.step.reducers import CannotCompile, CannotLoop
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.execution import Execution, PredictFunction, RunKind
from keras_dist_ext.training.failed_steps import explain_failed_prediction, explain_failure
from keras_dist_ext.training.prediction import PredictProgram, concat_outputs
from keras_dist_ext.training.program import StepProgram
from keras_dist_ext.training.self_check import check_metrics, check_prediction, check_step, has_rows_to_check
from keras_dist_ext.training.step_errors import explain
from keras_dist_ext.training.step_exponents import ignore_loss_exponents, learn_loss_exponents
from keras_dist_ext.training.step_planning import MISSING, make_plan, prepare

__all__ = ["CoordinatorProgram", "StepRunner", "predictor"]


class StepRunner:
    """Keras' ``train_function`` or ``test_function``: it takes an ``Execution``, or an iterator of batches.

    Args:
        program: that makes the steps.
    """

    def __init__(self, program: StepProgram | CoordinatorProgram) -> None:
        self.program = program
        self._has_compared = False
        self._checks_late = False  # has its step checked after its first run

    def __call__(self, iterator: Execution | Iterator[StepData]) -> TensorNest:
        """Run the steps of an execution, or one step on the next batch; return the logs."""
        with _running(self.program.strategy):
            return self._run(iterator)

    def _run(self, iterator: Execution | Iterator[StepData]) -> TensorNest:
        program, runtime = self.program, self.program.model.replica_runtime
        check: Callable[[], str | None] = _nothing
        if isinstance(iterator, Execution):
            run_steps = functools.partial(_run, program, iterator)
            first_batch: Callable[[], StepData] = functools.cache(iterator.reader.peek)
            check = functools.partial(_check, program, first_batch)
        else:
            check_epoch_iterator()
            batch = tree.map_structure(_as_tensor, next(iterator))
            self._compare_first_batch(batch)
            run_steps = functools.partial(_run_on_batch, program, batch)
            first_batch = functools.partial(_given, batch)
            is_known = program.kind in runtime.checked and not _may_not_be_plain(program)
            if not is_known and has_rows_to_check(batch):
                check = functools.partial(_check, program, first_batch)
        if isinstance(program, StepProgram):
            program.step.first_batch = first_batch
        try:
            if isinstance(program, StepProgram):
                _plan(program)
            if program.kind == "train":
                runtime.scatter_accumulators()
            is_late = check is not _nothing and not self._checks_late and _only_runs_eagerly(program)
            if is_late:
                self._checks_late = True
                first_batch()  # for afterwards
            unseen = None if is_late else check()
            while True:
                try:
                    with as_data_errors():
                        logs = run_steps()
                    unseen = check() if is_late else unseen
                    if unseen is not None:  # only now: what goes wrong in training is said first
                        warn(unseen)
                    return logs
                except _UNPREPARED as unprepared:  # raised while tracing, before any step is made
                    assert isinstance(program, StepProgram)
                    _prepare(program, unprepared)
                    if isinstance(unprepared, NotPlain):
                        unseen = check()
                except Exception as error:
                    explained = _explained(program, error)
                    if explained is None:
                        raise
                    raise explained from error
        finally:
            if isinstance(program, StepProgram):
                program.step.first_batch = None

    def _compare_first_batch(self, batch: StepData) -> None:
        """See once that all workers call ``train_on_batch`` and ``test_on_batch`` with the same rows."""
        workers = workers_of(self.program.strategy)
        if workers is not None and not self._has_compared:
            self._has_compared = True
            workers.compare_batch(batch)


_UNPREPARED = (*MISSING, CannotCompile, CannotLoop)


def _check(program: StepProgram | CoordinatorProgram, first_batch: Callable[[], StepData]) -> str | None:
    """See whether steps do what one device does; return why that could not be seen."""
    if isinstance(program, CoordinatorProgram):
        return check_metrics(program.model)
    with _waiting(program.strategy, f"the check of {_NAMES[program.kind]}"):  # of which one may fail on some rows
        return check_step(program.step, first_batch, functools.partial(_prepare, program), _UNPREPARED)


def _explained(program: StepProgram | CoordinatorProgram, error: Exception) -> Exception | None:
    """Say why a step cannot be traced for replicas, or has failed there, where TensorFlow does not tell what to do."""
    if not isinstance(program, StepProgram) or not program.step.is_split:
        return None
    name, of_loop = f"{program.model.name}.{program.kind}_step", program.step.takes_check == "TrainLoop"
    return explain(name, error, of_loop=of_loop) or explain_failure(program.step, error)


def _only_runs_eagerly(program: StepProgram | CoordinatorProgram) -> bool:
    """Whether a step could not be traced in a scratch graph, so that it makes its variables in its first run."""
    if not isinstance(program, StepProgram) or not program.is_eager:
        return False
    return program.step.is_split and not program.step.plan.is_checked


def _may_not_be_plain(program: StepProgram | CoordinatorProgram) -> bool:
    """Whether a step was taken for plain, and so was not checked, which another batch may show it is not."""
    return isinstance(program, StepProgram) and bool(program.step.plan.is_plain)


def _nothing() -> None:
    """Check nothing."""


def _plan(program: StepProgram) -> None:
    """Know what a step of the user's does, or one that runs eagerly, before it is traced to be run, or runs."""
    step = program.step
    if not step.is_split:
        return
    known = program.model.replica_runtime.loss_exponents
    if program.is_eager and program.kind not in known:  # an eager step has its batch when it meets the loss
        try:
            learn_loss_exponents(step)
        except Exception:  # code that only runs eagerly, and may have no such loss
            ignore_loss_exponents(step)
        prepare(step, UnknownExponents())
    if not step.plan.is_made and (program.is_eager or (step.is_of_user and not step.plan.is_plain)):
        make_plan(step)


def _run(program: StepProgram | CoordinatorProgram, execution: Execution) -> TensorNest:
    """Run steps, and say so to who has launched this process."""
    heartbeat.steps_begin(program.kind, execution.first, execution.num_steps)
    with _watched(program, execution):
        logs = execution.run(program)
    heartbeat.steps_end(execution.num_made)
    return logs


def _run_on_batch(program: StepProgram | CoordinatorProgram, batch: StepData) -> TensorNest:
    with _waiting(program.strategy, f"{program.kind}_on_batch"):
        return program.on_batch(batch)


def _watched(
    program: StepProgram | CoordinatorProgram, execution: Execution
) -> contextlib.AbstractContextManager[None]:
    """Have steps in which workers wait for each other watched."""
    last = execution.first + execution.num_steps - 1
    return _waiting(program.strategy, f"steps {execution.first} to {last} of {_NAMES[program.kind]}")


_NAMES = {"train": "training", "test": "evaluation", "predict": "prediction"}


def _waiting(strategy: tf.distribute.Strategy, what: str) -> contextlib.AbstractContextManager[None]:
    workers = workers_of(strategy)
    return contextlib.nullcontext() if workers is None else workers.watch.waiting(what)


def _running(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Have the other workers know of an error."""
    workers = workers_of(strategy)
    return contextlib.nullcontext() if workers is None else workers.watch.running()


def _prepare(program: StepProgram, unprepared: Exception) -> None:
    """Make good what tracing a step has found missing."""
    if isinstance(unprepared, MISSING):
        prepare(program.step, unprepared)
    elif isinstance(unprepared, CannotLoop):
        program.make_single_steps()
    else:
        if program.model.jit_compile:  # else "auto" has chosen XLA
            warn(
                f"jit_compile=True: '{program.model.name}' has a loss with a mask or sample weights, or a layer, that "
                "sums over replicas while it is computed, which XLA cannot compile; the step runs without XLA."
            )
        program.step.without_xla()


def predictor(program: PredictProgram | CoordinatorProgram) -> PredictFunction:
    """Return Keras' ``predict_function``: it takes a list, of an ``Execution`` or of batches."""

    def run(batches: Sequence[Execution] | Sequence[StepData]) -> TensorNest:
        execution = batches[0]
        if isinstance(execution, Execution):
            heartbeat.steps_begin("predict", execution.first, execution.num_steps)
            batches = list(execution.batches())
            last = execution.first + len(batches) - 1
            of_worker = execution.reader.is_of_worker
            outputs = on_batches(batches, f"steps {execution.first} to {last} of prediction", of_worker=of_worker)
            heartbeat.steps_end(execution.num_made)
            return outputs
        check_epoch_iterator()
        return on_batches([tree.map_structure(_as_tensor, batch) for batch in batches], "predict_on_batch")

    def on_batches(batches: Sequence[StepData], what: str, *, of_worker: bool = False) -> TensorNest:
        with _running(program.strategy), _waiting(program.strategy, what):
            unseen = check_prediction(program, batches[0]) if isinstance(program, PredictProgram) and batches else None
            try:
                with as_data_errors():
                    outputs = program.on_batches(batches, of_worker=of_worker)
            except Exception as error:
                explained = None
                if isinstance(program, PredictProgram) and batches:
                    explained = explain_failed_prediction(program, batches[0], error)
                if explained is None:
                    raise
                raise explained from error
        if unseen is not None:
            warn(unseen)
        return outputs

    return run


def _given(batch: StepData) -> StepData:
    return batch


def _as_tensor(value: TensorNest) -> TensorNest:
    return None if value is None else tf.convert_to_tensor(value) if not tf.is_tensor(value) else value


class CoordinatorProgram:
    """Steps that the workers of a ParameterServerStrategy make, each on its own batch."""

    def __init__(self, model: keras.Model, kind: RunKind) -> None:
        self.model = model
        self.kind = kind
        self.strategy = model.distribute_strategy
        self._coordinator = model.replica_runtime.coordinator

    def run(self, reader: BatchReader, num_steps: int) -> tuple[int, TensorNest]:
        """Hand out up to ``num_steps`` steps; return how many there were, and the logs of those that are done."""
        return self._hand_out(iter(reader), num_steps)

    def _hand_out(self, batches: Iterator[StepData], num_steps: int) -> tuple[int, TensorNest]:
        made = getattr(self._coordinator, self.kind)(batches, num_steps)
        return made, self._coordinator.logs()

    def on_batch(self, batch: StepData) -> TensorNest:
        """Run one step and wait for it."""
        self._hand_out(iter([batch]), 1)
        return self._coordinator.join()

    def on_batches(self, batches: Sequence[StepData], *, of_worker: bool = False) -> TensorNest:
        """Predict each batch and concatenate the outputs along the rows."""
        return concat_outputs(list(self._coordinator.predict(batches)))
