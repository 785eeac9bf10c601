"""What tracing a step finds missing is made good, in the order in which it turns up, or said why it cannot be."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.errors import DataError, SeedError, StepError
from keras_dist_ext.step.added_losses import UnknownLossExponents
from keras_dist_ext.step.drawn_shapes import UnknownDraws
from keras_dist_ext.step.means import UnknownExponents
from keras_dist_ext.step.step_plan import StalePlan
from keras_dist_ext.step.update import UnbuiltOptimizer
from keras_dist_ext.training import prediction, step_exponents, step_planning
from keras_dist_ext.training.draw_examination import learn_draws, note_draws
from keras_dist_ext.training.prediction import PredictProgram, concat_outputs, concat_replicas
from keras_dist_ext.training.step_errors import explain
from keras_dist_ext.training.step_exponents import learn_loss_exponents, learn_step_exponents, rows_of_step
from keras_dist_ext.training.step_planning import prepare

X = np.arange(12, dtype="float32").reshape(6, 2)


def step_of(**options: Any) -> Any:
    """A step as far as its preparation looks at it; what it is told is in `told`."""
    told: list[str] = []
    runtime = types.SimpleNamespace(loss_exponents={}, batch_spec=None, in_scope=contextlib.nullcontext)
    plan = types.SimpleNamespace(draws=None, sum_at_once=lambda: told.append("sum at once"))
    given = {"kind": "train", "is_of_user": True, "adds_own_losses": False, "first_batch": None, "exponents": object()}
    model = types.SimpleNamespace(name="net", replica_runtime=runtime)
    return types.SimpleNamespace(model=model, plan=plan, told=told, **given | options)


def raising(*errors: Exception | None) -> Callable[[Any], None]:
    """A function that raises an error at a call, and another one, or none, at the next."""
    left = iter(errors)

    def function(*_: Any) -> None:
        error = next(left)
        if error is not None:
            raise error

    return function


# One thing after another


def test_an_optimizer_that_a_measured_trace_needs_is_built_and_the_trace_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, missing in (("learn_step_exponents", UnknownExponents), ("learn_draws", UnknownDraws)):
        step = step_of()
        unbuilt = UnbuiltOptimizer(lambda told=step.told: told.append("built"))
        learns = raising(unbuilt, None)
        monkeypatch.setattr(step_planning, name, lambda step, learns=learns: [step.told.append("learn"), learns(step)])
        prepare(step, missing())
        assert step.told == ["learn", "built", "learn"]


def test_losses_of_layers_that_only_another_step_calls_are_taken_from_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of()
    monkeypatch.setattr(step_planning, "learn_loss_exponents", raising(NotImplementedError("Model has no call")))
    prepare(step, UnknownLossExponents())
    assert step.model.replica_runtime.loss_exponents == {"train": {}}


def test_gradients_that_go_elsewhere_too_are_summed_where_they_are_made() -> None:
    step = step_of()
    prepare(step, StalePlan())
    assert step.told == ["sum at once"]


def test_a_step_whose_draws_cannot_be_learned_is_an_error_that_says_how_it_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_planning, "learn_draws", raising(ValueError("needs 6 rows"), SeedError("it is known")))
    with pytest.raises(
        SeedError, match=r"tracing it in a scratch graph on .* examples, and there it fails \(ValueError"
    ):
        prepare(step_of(), UnknownDraws())
    with pytest.raises(SeedError, match="^it is known$"):
        prepare(step_of(), UnknownDraws())


def test_losses_of_layers_of_keras_that_cannot_be_learned_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("needs 6 rows")

    monkeypatch.setattr(step_exponents, "find_exponents", fails)
    with pytest.raises(ValueError, match="needs 6 rows"):
        learn_loss_exponents(step_of(is_of_user=False))
    step = step_of()
    learn_loss_exponents(step)
    assert step.model.replica_runtime.loss_exponents == {"train": {}}


def test_numbers_of_a_step_that_cannot_be_traced_on_any_batch_count_as_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_exponents, "learn_exponents", raising(*[ValueError("needs 6 rows")] * 2))
    learn_step_exponents(step_of(num_step_replicas=2))  # without a batch there is nothing to measure
    for missing in (UnbuiltOptimizer(lambda: None), UnknownLossExponents()):
        monkeypatch.setattr(step_exponents, "learn_exponents", raising(missing))
        with pytest.raises(type(missing)):
            learn_step_exponents(step_of(num_step_replicas=2))


# Rows to learn by


@pytest.mark.slow
@pytest.mark.parametrize("num_without", [0, 1])
def test_rows_that_workers_learn_by_are_those_of_the_chief_unless_one_has_none(
    num_without: int, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(iter(mirrored.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(6))))
    workers = types.SimpleNamespace(
        sum=lambda own: [own[0] + num_without], broadcast_bytes=lambda content: content, is_chief=True
    )
    monkeypatch.setattr(step_exponents, "workers_of", lambda _: workers)
    rows: Any = rows_of_step(step_of(first_batch=lambda: batch, strategy=mirrored))
    if num_without:
        assert rows is None
    else:
        assert len(rows) > 3  # of both replicas
        np.testing.assert_array_equal(rows, X[: len(rows)])


# Random numbers


def test_a_step_that_draws_otherwise_on_few_rows_than_on_many_is_refused() -> None:
    class Draws:
        observer: Any = None

        def run_on_first_replica(self, rows: Any) -> None:
            for kind in ("normal", "uniform")[: 1 + (rows.shape[0] > 3)]:
                self.observer.on_numbers(kind, tf.TensorShape([rows.shape[0]]))

    with pytest.raises(SeedError, match=r'draws="global": a step draws 1 times on \d+ examples and 2 times on \d+'):
        note_draws(Draws(), tf.TensorSpec([None, 2]), lambda: None)


def test_a_step_that_is_built_for_no_batch_is_tried_in_the_form_of_the_first_one() -> None:
    given: list[Any] = []

    def run(rows: Any) -> None:
        given.append(rows)

    scratch = types.SimpleNamespace(without_xla=lambda: None, run_on_first_replica=run)
    step = step_of(untraced_copy=lambda: scratch, first_batch=lambda: (tf.constant(X), None))
    learn_draws(step)
    assert step.plan.draws == []
    assert [rows[0].shape[1] for rows in given] == [2, 2]
    assert given[0][0].shape[0] != given[1][0].shape[0]
    assert [rows[1] for rows in given] == [None, None]


def test_numbers_of_the_batch_that_are_no_rows_keep_their_form() -> None:
    given: list[Any] = []

    class Draws:
        observer: Any = None

        def run_on_first_replica(self, rows: Any) -> None:
            given.append(rows)
            self.observer.on_numbers("normal", rows[0].shape)

    few, many = note_draws(
        Draws(), (tf.TensorSpec([None, None]), tf.TensorSpec([])), lambda: (tf.constant(X), tf.constant(3.0))
    )[0].shapes
    assert few[1] == many[1] == 2
    assert few[0] != many[0]
    assert all(scalar.shape.rank == 0 for _, scalar in given)


# Errors of a step


def test_replicas_that_cannot_wait_for_each_other_are_told_what_to_do() -> None:
    error = RuntimeError("`merge_call` called while defining a new graph or a tf.function.")
    explained = explain("step", error, of_loop=False)
    assert "adds up over replicas (BatchNormalization with the statistics of the global" in str(explained)
    assert "choose between its outputs with tf.where" in str(explained)


def test_a_number_that_adds_up_though_all_replicas_assign_it_is_told_what_to_do() -> None:
    error = ValueError("A non-DistributedValues value 3 cannot be reduced with the given reduce op ReduceOp.SUM.")
    explained = explain("step", error, of_loop=False)
    assert "assigns the same number on all replicas to a tf.Variable whose aggregation adds up" in str(explained)
    assert "tf.VariableAggregation.ONLY_FIRST_REPLICA" in str(explained)


def test_a_method_that_no_distributed_variable_has_is_found_in_the_line_that_calls_it() -> None:
    class Variable:
        def sparse_read(self, indices: Any) -> None:
            raise NotImplementedError

        def batch_read(self) -> None:
            raise NotImplementedError

    def error_of(call: Callable[[], None]) -> Exception:
        try:
            call()
        except NotImplementedError as error:
            line = error.__traceback__.tb_next  # type: ignore[union-attr]
            assert line is not None
            mine = types.TracebackType(None, line.tb_frame, line.tb_lasti, line.tb_lineno)
            return error.with_traceback(mine)  # TensorFlow leaves its own frames out
        raise AssertionError

    explained = explain("step", error_of(lambda: Variable().sparse_read([1])), of_loop=True)
    assert "calls sparse_read of a variable, which TensorFlow does not have for variables that each" in str(explained)
    assert explain("step", error_of(lambda: Variable().batch_read()), of_loop=True) is None


# Predicting


def predicting(strategy: Any, step: Callable[[Any], Any], *, check: Any = False) -> Any:
    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.built = True

        def predict_step(self, data: Any) -> Any:
            return step(data)

    with strategy.scope():
        model = Net()
        model.compile(check=check)
    return model


@pytest.mark.slow
def test_a_step_that_needs_a_number_of_rows_predicts_what_one_device_does(mirrored: Any) -> None:
    def step(x: Any) -> Any:
        return x * (2.0 if int(tf.get_static_value(tf.shape(x))[0]) else 1.0)

    data = tf.data.Dataset.from_tensor_slices(X).batch(6, drop_remainder=True)
    np.testing.assert_array_equal(predicting(mirrored, step).predict(data, verbose=0), 2.0 * X)


@pytest.mark.slow
@pytest.mark.checks_fit
def test_an_output_of_unknown_rank_is_taken_for_one_of_rows_and_python_said_not_to_be_checked(mirrored: Any) -> None:
    def step(x: Any) -> Any:
        return tf.numpy_function(lambda rows: 3.0 * rows, [x], tf.float32)

    with pytest.warns(UserWarning, match=r"Whether 'net' predicts .* was not checked, because .* calls Python"):
        found = predicting(mirrored, step, check=True).predict(X, batch_size=6, verbose=0)
    np.testing.assert_array_equal(found, 3.0 * X)


@pytest.mark.slow
@pytest.mark.checks_fit
def test_a_prediction_on_batches_of_a_fixed_size_draws_what_one_device_draws(mirrored: Any) -> None:
    def predicted(strategy: Any) -> Any:
        seeds = keras.random.SeedGenerator(5)
        model = predicting(strategy, lambda x: x + keras.random.normal(tf.shape(x), seed=seeds), check="raise")
        model.seeds = seeds
        data = tf.data.Dataset.from_tensor_slices(X).batch(3, drop_remainder=True)
        return model.predict(data, verbose=0, callbacks=[kde.ReplicaSeeds(3, draws="global")])

    np.testing.assert_array_equal(predicted(mirrored), predicted(tf.distribute.get_strategy()))


def test_what_a_prediction_draws_is_learned_and_an_error_of_it_explained(mirrored: Any) -> None:
    def program_of(step: Callable[[Any], Any]) -> PredictProgram:
        model = predicting(mirrored, step)
        model.replica_seeds.begin()
        return PredictProgram(model)

    def fails(x: Any) -> Any:
        raise ValueError("needs 6 rows")

    def refuses(x: Any) -> Any:
        raise StepError("it is known")

    with pytest.raises(SeedError, match=r"random numbers of a step of 'net' .* there it fails \(ValueError: needs 6 r"):
        program_of(fails)._learn_draws(tf.constant(X))
    with pytest.raises(StepError, match="^it is known$"):
        program_of(refuses)._learn_draws(tf.constant(X))


def test_outputs_of_several_batches_are_one_of_any_kind() -> None:
    sparse = concat_outputs([tf.sparse.from_dense(X[:4]), tf.sparse.from_dense(X[4:])])
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), X)
    assert concat_outputs([tf.constant(1.0), tf.constant(2.0)]).numpy().tolist() == [1.0, 2.0]
    assert concat_outputs([X]) is X


def test_strings_of_several_workers_are_an_error_with_what_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(prediction, "is_default_strategy", lambda _: False)
    monkeypatch.setattr(prediction, "local_values", lambda *_: (tf.constant(["a"]),))
    with pytest.raises(DataError, match=r"Strings of several workers cannot be concatenated: .* Return their numbers"):
        concat_replicas(strategy, None)
