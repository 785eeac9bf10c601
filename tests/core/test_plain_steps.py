"""A step of the user's that only hands on what Keras computes is Keras' own step: no trace aside, and no check."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers
from strategies import strategies
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import StepError
from keras_dist_ext.step import plain_calls
from keras_dist_ext.training import building, plain_steps, runners, step_planning

pytestmark = pytest.mark.checks_fit

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(22, 5)).astype("float32")
Y = RANDOM.normal(size=(22, 3)).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2.0, size=22).astype("float32")
Step = Callable[[Any, Any], Any]


def of_the_guide(self: Any, data: Any) -> Any:
    x, y = data[:2]
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    for metric in self.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, y_pred)
    return {metric.name: metric.result() for metric in self.metrics}


def with_metrics_of_compile(self: Any, data: Any) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
    variables = self.trainable_weights
    self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))  # noqa: B905 - as people write it
    return self.compute_metrics(x, y, y_pred, sample_weight)


def with_a_loss_of_its_own(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        y_pred = self(x)
        loss = self.own_loss(y, y_pred)
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    self.own_tracker.update_state(loss)
    self.own_metric.update_state(y, y_pred)
    return {"own": self.own_tracker.result(), "mae": self.own_metric.result()}


def for_a_scaled_loss(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def of_the_last_layer(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    variables = self.layers[-1].trainable_variables
    self.optimizer.apply(tape.gradient(loss, variables), variables)
    return self.get_metrics_result()


def weighted(self: Any, data: Any) -> Any:
    x, y, sample_weight = data
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    for metric in self.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, y_pred, sample_weight=sample_weight)
    return self.get_metrics_result()


def returning_its_loss(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    self.own_metric.update_state(y, y_pred)
    return {"own": loss, "mae": self.own_metric.result(), "again": loss}


PLAIN: dict[str, Step] = {
    step.__name__.replace("_", " "): step
    for step in (
        of_the_guide,
        with_metrics_of_compile,
        with_a_loss_of_its_own,
        for_a_scaled_loss,
        of_the_last_layer,
        weighted,
        returning_its_loss,
    )
}


def scales_its_loss(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = 3.0 * self.compute_loss(y=y, y_pred=self(x, training=True))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def computes_its_loss(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def changes_its_outputs(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=tf.tanh(self(x, training=True)))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def clips_its_gradients(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
    self.optimizer.apply(gradients, self.trainable_variables)
    return self.get_metrics_result()


def measures_a_gradient(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    gradients = tape.gradient(loss, self.trainable_variables)
    self.own_tracker.update_state(gradients[0])
    self.optimizer.apply(gradients, self.trainable_variables)
    return {"own": self.own_tracker.result()}


def returns_its_outputs(self: Any, data: Any) -> Any:
    of_the_guide(self, data)
    return {"own": tf.reduce_mean(self(data[0]))}


def calls_its_model_twice(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def updates_twice(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    return self.get_metrics_result()


def descends_by_itself(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    variables = self.layers[-1].trainable_variables
    for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
        variable.assign_sub(0.1 * gradient)
    return self.get_metrics_result()


def counts_in_a_variable(self: Any, data: Any) -> Any:
    self.own_count.assign_add(1.0)
    return of_the_guide(self, data)


def has_a_function(self: Any, data: Any) -> Any:
    self.own_function(data[0])
    return of_the_guide(self, data)


def draws(self: Any, data: Any) -> Any:
    tf.random.uniform([3])
    return of_the_guide(self, data)


def catches_all_errors(self: Any, data: Any) -> Any:
    with contextlib.suppress(BaseException):
        tf.reduce_max(data[0])
    return of_the_guide(self, data)


def gives_numbers_of_its_own_to_a_metric(self: Any, data: Any) -> Any:
    logs = of_the_guide(self, data)
    self.own_tracker.update_state(tf.reduce_mean(data[0]))
    return {**logs, "own": self.own_tracker.result()}


def calls_a_layer_by_itself(self: Any, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self.layers[-1](self.layers[1](x)))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


def prints(self: Any, data: Any) -> Any:
    tf.print("")
    return of_the_guide(self, data)


OTHERS: dict[str, Step] = {
    step.__name__.replace("_", " "): step
    for step in (
        scales_its_loss,
        computes_its_loss,
        changes_its_outputs,
        clips_its_gradients,
        measures_a_gradient,
        returns_its_outputs,
        calls_its_model_twice,
        updates_twice,
        descends_by_itself,
        counts_in_a_variable,
        has_a_function,
        draws,
        catches_all_errors,
        gives_numbers_of_its_own_to_a_metric,
        calls_a_layer_by_itself,
        prints,
    )
}


def make(base: Any, step: Step, *between: Any, **compiled: Any) -> Any:
    """A model with a step, in Keras' classes or ours, with what the steps above ask for."""

    class Net(base):  # type: ignore[misc]  # of any type
        train_step = step

    keras.utils.set_random_seed(11)
    outputs = inputs = keras.Input((5,))
    for layer in (functools.partial(layers.Dense, 4, activation="tanh"), *between, functools.partial(layers.Dense, 3)):
        outputs = layer()(outputs)
    model = Net(inputs, outputs, name="net")
    for name in sorted(set(OWN).intersection(step.__code__.co_names)):  # on all workers alike
        setattr(model, name, OWN[name]())
    metrics = ["mae"] if step in (of_the_guide, with_metrics_of_compile, weighted) else None
    model.compile(**{"optimizer": keras.optimizers.Adam(0.02), "loss": "mse", "metrics": metrics, **compiled})
    return model


OWN: dict[str, Callable[[], Any]] = {
    "own_loss": keras.losses.MeanSquaredError,
    "own_tracker": lambda: keras.metrics.Mean(name="own"),
    "own_metric": lambda: keras.metrics.MeanAbsoluteError(name="own_mae"),
    "own_count": lambda: tf.Variable(0.0, trainable=False),
    "own_function": lambda: tf.function(lambda x: x + 1.0),
}


def fit(model: Any, step: Step, size: int = 8) -> dict[str, Any]:
    data = (X, Y, WEIGHTS) if step is weighted else (X, Y)
    history = model.fit(tf.data.Dataset.from_tensor_slices(data).batch(size), epochs=2, verbose=0).history
    return {**history, **{f"weight {i}": np.asarray(w) for i, w in enumerate(model.trainable_variables)}}


@functools.cache
def on_one_device(step: Step, size: int = 8) -> dict[str, Any]:
    return fit(make(keras.Model, step), step, size)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


def is_plain(model: Any, kind: str = "train") -> bool | None:
    return model.replica_runtime.plans[kind].is_plain


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with steps besides training, in its order."""
    done: list[str] = []

    def noting(what: str, function: Any) -> Any:
        def noted(*args: Any) -> Any:
            done.append(what)
            return function(*args)

        return noted

    for module in (runners, step_planning):
        monkeypatch.setattr(module, "make_plan", noting("plan", step_planning.make_plan))
    from keras_dist_ext.training import self_check

    monkeypatch.setattr(self_check, "compare_step", noting("check", self_check.compare_step))
    return done


@pytest.fixture
def any_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the trace alone tell what is plain."""
    monkeypatch.setattr(plain_steps, "_only_calls", lambda step, cls: True)


@pytest.mark.parametrize("name", rotating(PLAIN, ("of the guide", "with a loss of its own")))
def test_it_is_traced_once_and_does_what_one_device_does(name: str, aside: list[str]) -> None:
    step = PLAIN[name]
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, step)
    found = fit(model, step)
    assert aside == []
    assert is_plain(model)
    compare(found, on_one_device(step))


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    rotating([(name, kind, size) for name in PLAIN for kind in ("mirrored3", "mirrored4") for size in (7, 8)], ()),
)
def test_so_it_does_on_more_replicas_and_where_some_have_no_examples(name: str, kind: str, size: int) -> None:
    step = PLAIN[name]
    with strategies.get(kind).scope():
        model = make(kde.Model, step)
    compare(fit(model, step, size), on_one_device(step, size))
    assert is_plain(model)


def losses() -> dict[str, Callable[[], Any]]:
    return {
        "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
        "mean with sample weight": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        "Dice": keras.losses.Dice,
        "Huber": keras.losses.Huber,
        "cosine": lambda: keras.losses.CosineSimilarity(axis=-1),
        "crossentropy": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    }


@pytest.mark.parametrize(
    ("name", "loss"),
    rotating([(name, loss) for name in ("of the guide", "with a loss of its own") for loss in losses()], ()),
)
def test_whatever_loss_of_keras_it_has(name: str, loss: str) -> None:
    step = PLAIN[name]

    def run(base: Any) -> tuple[Any, Any]:
        model = make(base, step, loss=losses()[loss]())
        if step is with_a_loss_of_its_own:
            model.own_loss = losses()[loss]()
        return fit(model, step, 7), model

    with strategies.get("mirrored2").scope():
        found, model = run(kde.Model)
    assert is_plain(model)
    compare(found, run(keras.Model)[0])


def plain_on_workers(strategy: Any, folder: Any, name: str) -> Any:
    with strategy.scope():
        model = make(kde.Model, PLAIN[name])
    return fit(model, PLAIN[name], 7), is_plain(model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[on_two_workers(plain_on_workers, name), pytest.mark.rotating(turns=4)])
        for name in PLAIN
    ],
)
def test_so_it_does_on_two_workers(name: str, values: Any) -> None:
    for found, plain in values:
        assert plain
        compare(found, on_one_device(PLAIN[name], 7))


@pytest.mark.parametrize("name", rotating(OTHERS, ("catches all errors",), slow=("clips its gradients",)))
def test_a_step_that_does_anything_else_is_planned_and_checked(name: str, aside: list[str], any_code: None) -> None:
    step = OTHERS[name]
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step that cannot be compared: the numbers are, below
        found = fit(model, step)
    assert aside[:2] == ["plan", "check"] or aside == ["plan"]
    assert is_plain(model) is False
    compare(found, on_one_device(step))


def test_what_the_code_of_a_step_shows_costs_no_trace() -> None:
    def may_be_plain(step: Step) -> bool:
        with strategies.get("mirrored2").scope():
            return plain_steps.may_be_plain(make(kde.Model, step), "train")

    assert all(map(may_be_plain, PLAIN.values()))
    assert {name for name, step in OTHERS.items() if may_be_plain(step)} == {
        "measures a gradient",
        "calls its model twice",
        "updates twice",
        "calls a layer by itself",
    }


def test_a_wrong_step_that_was_taken_for_plain_is_an_error_all_the_same(any_code: None) -> None:
    def of_the_largest(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_max(tf.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.get_metrics_result()

    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_the_largest)
        model.compile("sgd", "mse", check="raise")
    with pytest.raises(StepError, match="gradients"):
        fit(model, of_the_largest)
    assert is_plain(model) is False


def layer_of_the_users() -> Any:
    class Halve(layers.Layer):
        def call(self, x: Any) -> Any:
            return 0.5 * x

    return Halve()


@pytest.mark.parametrize(
    ("between", "compiled"),
    [
        ((), {"loss": lambda y, y_pred: keras.losses.mean_squared_error(y, y_pred)}),
        pytest.param((layer_of_the_users,), {}, marks=pytest.mark.rotating),
        pytest.param((lambda: layers.Lambda(lambda x: 0.5 * x),), {}, marks=pytest.mark.rotating),
        pytest.param((), {"metrics": [lambda *of: keras.losses.mean_squared_error(*of)]}, marks=pytest.mark.rotating),
        pytest.param((), {"run_eagerly": True}, marks=pytest.mark.rotating),
        pytest.param((), {"exact": True}, marks=pytest.mark.rotating),
    ],
    ids=["a loss", "a layer", "a Lambda", "a metric", "eagerly", "exact"],
)
def test_it_is_plain_only_if_all_that_it_calls_is_keras_own(between: Any, compiled: Any, aside: list[str]) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_the_guide, *between, **compiled)
    fit(model, of_the_guide)
    assert aside[:2] == ["plan", "check"]
    assert not is_plain(model)


NOT_ROW_WISE: dict[str, Callable[[], dict[str, Any]]] = {
    "an activation": lambda: {"between": lambda: layers.Dense(4, activation=lambda x: x / tf.reduce_max(x))},
    "an activity regularizer": lambda: {"between": lambda: layers.Dense(4, activity_regularizer=tf.reduce_max)},
    "an operation": lambda: {"between": lambda: lambda h: h - keras.ops.mean(h, axis=0, keepdims=True)},
    "Softmax": lambda: {"between": lambda: layers.Softmax(axis=0)},
    "UnitNormalization": lambda: {"between": lambda: layers.UnitNormalization(axis=-2)},
    "a loss's axis": lambda: {"loss": keras.losses.CosineSimilarity(axis=0)},
    "Circle": lambda: {"loss": keras.losses.Circle()},
    "circle": lambda: {"loss": "circle"},
    "a metric's axis": lambda: {"metrics": [keras.metrics.CosineSimilarity(axis=0)]},
    "a wrapped function": lambda: {"metrics": [keras.metrics.MeanMetricWrapper(lambda y, p: tf.reduce_max(y - p))]},
}


@pytest.mark.parametrize("name", NOT_ROW_WISE)
def test_it_is_plain_only_if_its_parts_compute_each_example_by_itself(name: str) -> None:
    given = NOT_ROW_WISE[name]()
    between = (given.pop("between"),) if "between" in given else ()
    with strategies.get("mirrored2").scope():
        assert not plain_steps.may_be_plain(make(kde.Model, of_the_guide, *between, **given), "train")


STOCK_LAYERS: tuple[Callable[[], Any], ...] = (
    lambda: layers.Dense(4, activation="gelu", kernel_regularizer="l2", kernel_constraint="max_norm"),
    lambda: layers.BatchNormalization(synchronized=True),
    lambda: layers.LayerNormalization(axis=1),
    lambda: layers.Dropout(0.1),
    lambda: layers.Softmax(),
    lambda: layers.SpectralNormalization(layers.Dense(4)),
    lambda: layers.Reshape((2, 2)),
    lambda: layers.Bidirectional(layers.LSTM(2, return_sequences=True, dropout=0.1)),
    lambda: layers.TimeDistributed(layers.Dense(4, activation=keras.activations.relu)),
    lambda: layers.Conv1D(2, 2, padding="same"),
    lambda: layers.GlobalMaxPooling1D(),
)


def test_layers_of_keras_leave_it_plain() -> None:
    with strategies.get("mirrored2").scope():
        assert plain_steps.may_be_plain(make(kde.Model, of_the_guide, *STOCK_LAYERS), "train")


def test_masks_of_keras_leave_it_plain() -> None:
    class Net(kde.Model):
        train_step = of_the_guide

    with strategies.get("mirrored2").scope():
        inputs = keras.Input((6,), dtype="int32")
        hidden = layers.LSTM(4)(layers.Embedding(5, 4, mask_zero=True)(inputs))
        model = Net(inputs, layers.Dense(3)(hidden))
        model.compile("sgd", "mse")
        assert plain_steps.may_be_plain(model, "train")


@pytest.mark.rotating
def test_a_metric_of_its_own_that_wraps_a_function_is_checked(aside: list[str]) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, with_a_loss_of_its_own)
        model.own_metric = keras.metrics.MeanMetricWrapper(lambda y, y_pred: tf.reduce_max(abs(y - y_pred)), name="own")
        with pytest.warns(match="differs in the log mae"):
            model.fit(X, Y, batch_size=8, verbose=0)
    assert aside == ["plan", "check"]


@pytest.mark.rotating
def test_a_loss_of_its_own_over_pairs_of_examples_is_checked(aside: list[str]) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, with_a_loss_of_its_own)
        model.own_loss = keras.losses.CosineSimilarity(axis=0)
        with pytest.warns(match="differs in the gradient"):
            model.fit(X, Y, batch_size=8, verbose=0)
    assert aside == ["plan", "check"]


def weighs_by_its_rows(self: Any, data: Any) -> Any:
    x, y = data[:2]
    with tf.GradientTape() as tape:
        loss = self.own_loss(y, self(x, training=True), sample_weight=x.shape[0])
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return self.get_metrics_result()


@pytest.mark.rotating
def test_a_number_that_may_be_of_rows_is_not_plain(any_code: None) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, weighs_by_its_rows)
    with pytest.warns(match="differs in the gradient"):
        model.train_on_batch(X[:8], Y[:8])
    assert is_plain(model) is False


@pytest.mark.parametrize("given", rotating([{"unconnected_gradients": "zero"}, {"output_gradients": None}], ()))
def test_a_tape_that_is_given_more_is_not_plain(given: dict[str, Any]) -> None:
    def with_more(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables, **given)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.get_metrics_result()

    with strategies.get("mirrored2").scope():
        model = make(kde.Model, with_more)
    compare(fit(model, with_more), on_one_device(with_more))
    assert is_plain(model) is False


def test_a_step_that_accumulates_gradients_is_planned_before_it_begins() -> None:
    with strategies.get("mirrored2").scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        assert not plain_steps.may_be_plain(make(kde.Model, of_the_guide, optimizer=optimizer), "train")


def of_any_data(self: Any, data: Any) -> Any:
    if len(data) < 4 and data[-1] is None:
        return of_the_guide(self, data)
    x, y = data[:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_max(tf.square(y - self(x, training=True)))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    for metric in self.metrics:
        metric.update_state(*([loss] if metric.name == "loss" else [y, self(x)]))
    return self.get_metrics_result()


def test_a_step_that_turns_out_not_to_be_plain_on_a_batch_is_checked_then(any_code: None) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_any_data, check="raise")
    model.train_on_batch(X[:8], Y[:8])
    assert is_plain(model)
    with pytest.raises(StepError, match="gradient"):
        model.train_on_batch(X[:8], Y[:8], WEIGHTS[:8])
    assert is_plain(model) is False


@pytest.mark.rotating
def test_a_step_of_data_that_keras_does_not_know_is_checked_then(any_code: None) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_any_data, check="raise")
    model.train_on_batch(X[:8], Y[:8])
    with pytest.raises(StepError, match="gradient"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y, X, Y)).batch(8), verbose=0, shuffle=False)
    assert is_plain(model) is False


def test_an_evaluation_of_its_own_is_plain_likewise(aside: list[str]) -> None:
    def test_step(self: Any, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def evaluated(base: Any) -> dict[str, float]:
        model = make(base, keras.Model.train_step)
        type(model).test_step = test_step
        scores: dict[str, float] = model.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
        assert base is keras.Model or is_plain(model, "test")
        return scores

    with strategies.get("mirrored2").scope():
        found = evaluated(kde.Model)
    assert aside == []
    compare(found, evaluated(keras.Model))


@pytest.mark.slow
def test_losses_of_layers_and_their_state_are_those_of_one_device(aside: list[str]) -> None:
    def run(base: Any) -> dict[str, Any]:
        return fit(
            make(
                base,
                of_the_guide,
                lambda: layers.ActivityRegularization(0.01),
                lambda: layers.BatchNormalization(synchronized=True),
                lambda: layers.Dense(3, kernel_regularizer="l2"),
            ),
            of_the_guide,
        )

    with strategies.get("mirrored2").scope():
        found = run(kde.Model)
    compare(found, run(keras.Model))


def test_a_model_that_trains_again_on_other_batches_stays_plain(aside: list[str]) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_the_guide)
    fit(model, of_the_guide)
    model.train_on_batch(X[:5], Y[:5])
    model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y))
    assert aside == []
    assert is_plain(model)


@pytest.mark.slow
def test_a_step_that_branches_later_is_planned_then(aside: list[str], any_code: None) -> None:
    def by_form(self: Any, data: Any) -> Any:
        if len(data) == 3:
            return weighted_by_itself(self, data)
        return of_the_guide(self, data)

    def weighted_by_itself(self: Any, data: Any) -> Any:
        x, y, sample_weight = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True), sample_weight=2.0 * sample_weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.get_metrics_result()

    def run(base: Any) -> dict[str, Any]:
        model = make(base, by_form)
        for data in ((X, Y), (X, Y, WEIGHTS)):
            model.fit(tf.data.Dataset.from_tensor_slices(data).batch(8), verbose=0)
        if base is kde.Model:
            assert aside == ["plan", "check"]
            assert is_plain(model) is False
        return {f"weight {i}": np.asarray(w) for i, w in enumerate(model.trainable_variables)}

    with strategies.get("mirrored2").scope():
        found = run(kde.Model)
    compare(found, run(keras.Model))


def test_losses_are_called_as_ever_once_no_thread_traces_any_more() -> None:
    call = keras.Loss.__call__
    model = make(keras.Model, of_the_guide)
    first, second = plain_calls.noted_calls(model), plain_calls.noted_calls(model)
    with first:
        second.__enter__()
    assert keras.Loss.__call__ is not call
    second.__exit__(None, None, None)
    assert keras.Loss.__call__ is call
    assert all("update_state" not in vars(metric) for metric in model.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("is_followed", [True, pytest.param(False, marks=pytest.mark.rotating)])
def test_logs_may_hold_other_numbers_on_other_batches(is_followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_form(self: Any, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss} if len(data) == 2 else {"own": loss, "again": loss}

    def histories(base: Any) -> list[dict[str, Any]]:
        model = make(base, by_form)
        datasets = (tf.data.Dataset.from_tensor_slices(data).batch(8) for data in ((X, Y), (X, Y, WEIGHTS), (X, Y)))
        return [model.fit(data, verbose=0).history for data in datasets]

    if not is_followed:
        monkeypatch.setattr(building, "may_be_plain", lambda *_: False)
    with strategies.get("mirrored2").scope():
        found = histories(kde.Model)
    for one, expected in zip(found, histories(keras.Model), strict=True):
        compare(one, expected)


def test_where_functions_are_told_to_run_eagerly_it_is_planned_as_any_other(aside: list[str]) -> None:
    with strategies.get("mirrored2").scope():
        model = make(kde.Model, of_the_guide)
    fit(model, of_the_guide)
    tf.config.run_functions_eagerly(True)
    try:
        model.fit(X, Y, batch_size=8, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    assert aside == ["plan"]
