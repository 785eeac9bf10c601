"""Losses, metrics and logs of a user's own may be means or sums over the rows: on replicas, too."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from conformance.feeds import dataset_of, regression
from keras import layers, ops
from keras.optimizers import SGD

import keras_dist_ext as kde
from keras_dist_ext.errors import DataError

ROWS = 5  # of a batch, which three replicas do not share evenly


def squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(tf.square(y - y_pred), axis=-1)


def rows(x: Any) -> Any:
    return tf.cast(tf.shape(x)[0], tf.float32)


EACH = keras.losses.MeanSquaredError(reduction=None)
TOTAL = keras.losses.MeanSquaredError(reduction="sum")

LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a mean": lambda net, y, p: tf.reduce_mean(squares(y, p)),
    "a sum": lambda net, y, p: tf.reduce_sum(squares(y, p)),
    "a sum of Keras": lambda net, y, p: TOTAL(y, p),
    "a vector": lambda net, y, p: squares(y, p),
    "a sum and a penalty on weights": lambda net, y, p: tf.reduce_sum(squares(y, p)) + sum(net.losses),
    "Python's sum of sums": lambda net, y, p: sum([tf.reduce_sum(squares(y, p)), TOTAL(y, p)]),
    "a mean less a sum": lambda net, y, p: tf.reduce_mean(squares(y, p)) - 0.01 * tf.reduce_sum(p),
    "a sum over the rows of a batch": lambda net, y, p: tf.reduce_sum(squares(y, p)) * (1.0 / ROWS),
    "a sum of Keras over the rows at hand": lambda net, y, p: TOTAL(y, p) / rows(y),
    "a sum of shares": lambda net, y, p: tf.reduce_sum(squares(y, p) / rows(y)),
    "a sum over an unstacked shape": lambda net, y, p: (
        tf.reduce_sum(squares(y, p)) / tf.cast(tf.unstack(tf.shape(y))[0], tf.float32)
    ),
    "a sum over a gathered shape": lambda net, y, p: (
        tf.reduce_sum(squares(y, p)) / tf.cast(tf.gather(tf.shape(y), 0), tf.float32)
    ),
    "a sum over the product of a shape": lambda net, y, p: (
        tf.reduce_sum(squares(y, p)) / tf.cast(tf.reduce_prod(tf.shape(y)[:1]), tf.float32)
    ),
    "TensorFlow's average": lambda net, y, p: tf.nn.compute_average_loss(EACH(y, p)),
    "TensorFlow's average over a batch, and its penalty": lambda net, y, p: (
        tf.nn.compute_average_loss(EACH(y, p), global_batch_size=ROWS)
        + tf.nn.scale_regularization_loss(sum(net.losses))
    ),
}


def with_step_of_its_own(
    lib: Any, loss_of: Callable[[Any, Any, Any], Any], *hidden: Callable[[], Any], is_scaled: bool = False
) -> Any:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mean_loss = keras.metrics.Mean(name="mean_loss")
            self.weighed = keras.metrics.Mean(name="weighed")
            self.total_loss = keras.metrics.Sum(name="total_loss")
            self.num_rows = keras.metrics.Sum(name="num_rows")
            self.num_steps = keras.metrics.Sum(name="num_steps")

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, y, self(x, training=True))
                minimized = self.optimizer.scale_loss(loss) if is_scaled else loss
            gradients = tape.gradient(minimized, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            logged = tf.reduce_sum(loss)
            self.mean_loss.update_state(logged)
            self.weighed.update_state(logged, sample_weight=2.0)
            self.total_loss.update_state(logged)
            self.num_rows.update_state(tf.shape(x)[0])
            self.num_steps.update_state(1.0)
            of_metrics = {metric.name: metric.result() for metric in self.metrics if metric.name != "loss"}
            return {**of_metrics, "loss_of_batch": logged, "rows_of_batch": tf.shape(x)[0]}

    x = inputs = layers.Input((5,))
    for make in hidden:
        x = make()(x)
    return Net(inputs, layers.Dense(3, kernel_regularizer="l2")(x))


class Computes:
    """Puts `compute_loss` over Keras' own."""

    @staticmethod
    def of(lib: Any, loss_of: Callable[[Any, Any, Any], Any]) -> Any:
        class Net(lib.Model):  # type: ignore[name-defined, misc]
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
                return loss_of(self, y, y_pred)

        inputs = layers.Input((5,))
        return Net(inputs, layers.Dense(3, kernel_regularizer="l2")(inputs))


def plain(lib: Any, loss_of: Any = None) -> Any:
    inputs = layers.Input((5,))
    return lib.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(inputs))


def fitted(make: Callable[[Any], Any], strategy: Any, data: Any, **compiled: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    if strategy is None:
        model = make(keras)
    else:
        with strategy.scope():
            model = make(kde)
    model.compile(**{"optimizer": SGD(0.005), **compiled})
    history = model.fit(data, epochs=2, verbose=0).history
    return {**history, **{f"weight {i}": w for i, w in enumerate(model.get_weights())}}


def assert_equal(make: Callable[[Any], Any], strategies: Any, data: Any, **compiled: Any) -> None:
    expected = fitted(make, None, data, **compiled)
    found = fitted(make, strategies.get("mirrored3"), data, **compiled)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-5, err_msg=name)


def any_rows() -> tf.data.Dataset:
    return dataset_of([ROWS, 1, 3, 7], regression)


def static_rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression(15, 1)).batch(ROWS, drop_remainder=True)


@pytest.mark.parametrize("name", rotating(LOSSES, ["a sum of Keras over the rows at hand"]))
def test_a_train_step_of_its_own_trains_on_sums_and_means_as_on_one_device(strategies, name):
    assert_equal(lambda lib: with_step_of_its_own(lib, LOSSES[name]), strategies, any_rows())


@pytest.mark.parametrize("name", rotating(LOSSES, []))
def test_so_it_does_where_the_number_of_rows_is_a_constant_of_the_graph(strategies, name):
    assert_equal(lambda lib: with_step_of_its_own(lib, LOSSES[name]), strategies, static_rows())


def synchronized() -> Any:
    return layers.BatchNormalization(synchronized=True)


def below() -> Any:
    """A layer to which gradients come through sums over replicas."""
    return layers.Dense(4)


THROUGH_SUMS = {
    **{name: LOSSES[name] for name in ("a sum", "a vector", "a mean", "a sum and a penalty on weights")},
    "a loss that sums over replicas": lambda net, y, p: keras.losses.Dice()(tf.sigmoid(y), tf.sigmoid(p)),
    "a mean that Keras' optimizer scales": LOSSES["a mean"],
}


@pytest.mark.parametrize(
    ("name", "run_eagerly"),
    rotating(
        [*((name, False) for name in THROUGH_SUMS), ("a mean", True), ("a sum", True)],
        [],
        slow=[("a mean", True)],
    ),
)
def test_so_it_does_through_layers_that_sum_over_replicas(strategies, name, run_eagerly):
    make = lambda lib: with_step_of_its_own(lib, THROUGH_SUMS[name], below, synchronized, is_scaled="scales" in name)  # noqa: E731
    assert_equal(make, strategies, dataset_of([7, 8, 5], regression), run_eagerly=run_eagerly)


@pytest.mark.parametrize("name", rotating(["a sum", "a vector", "a mean"], []))
def test_so_it_does_eagerly(strategies, name):
    make = lambda lib: with_step_of_its_own(lib, LOSSES[name])  # noqa: E731
    assert_equal(make, strategies, static_rows(), run_eagerly=True)


def test_a_sum_and_a_penalty_that_nobody_can_tell_apart_eagerly_are_refused(mirrored):
    make = lambda lib: with_step_of_its_own(lib, LOSSES["a sum and a penalty on weights"])  # noqa: E731
    with pytest.raises(DataError, match="mixes sum- and mean-reduced loss terms.*compile without run_eagerly"):
        fitted(make, mirrored, static_rows(), run_eagerly=True)


@pytest.mark.parametrize("data", rotating([any_rows, static_rows], [static_rows]))
@pytest.mark.parametrize("name", rotating(["a sum", "a vector"], ["a sum"]))
def test_a_compute_loss_of_its_own_may_be_a_sum(strategies, name, data):
    assert_equal(lambda lib: Computes.of(lib, LOSSES[name]), strategies, data())


@pytest.mark.parametrize("data", rotating([any_rows, static_rows], [any_rows]))
def test_a_function_as_loss_or_metric_may_give_a_sum(strategies, data):
    def total(y: Any, y_pred: Any) -> Any:
        return ops.sum(ops.square(y - y_pred))

    assert_equal(plain, strategies, data(), loss=total, metrics=[total, "mae"])


@pytest.mark.slow
def test_losses_of_a_model_inside_are_those_of_one_device(strategies):
    class Adds(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * ops.sum(ops.square(x)))
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    def make(lib: Any) -> Any:
        class Outer(lib.Model):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = lib.Sequential([layers.Input((5,)), layers.Dense(3, kernel_regularizer="l2"), Adds()])

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self.inner(x, training=True)
                    loss = tf.reduce_mean(squares(y, y_pred)) + sum(self.inner.losses)
                gradients = tape.gradient(loss, self.inner.trainable_variables)
                self.optimizer.apply(gradients, self.inner.trainable_variables)
                return {"loss": loss}

            def call(self, x: Any) -> Any:
                return self.inner(x)

        return Outer()

    assert_equal(make, strategies, any_rows())
    assert_equal(make, strategies, static_rows())


@pytest.mark.slow
def test_a_gradient_of_inputs_is_left_alone(strategies):
    """As in a gradient penalty: what is differentiated is no loss."""

    def penalized(net: Any, y: Any, y_pred: Any) -> Any:
        x = tf.concat([y, y_pred[:, :2]], axis=1)
        with tf.GradientTape() as inner:
            inner.watch(x)
            scores = net(x)
        norms = tf.norm(inner.gradient(scores, x), axis=1)
        return tf.reduce_mean(squares(y, y_pred)) + 0.1 * tf.reduce_mean(tf.square(norms - 1.0))

    assert_equal(lambda lib: with_step_of_its_own(lib, penalized), strategies, any_rows())


@pytest.mark.rotating
def test_a_scalar_weight_divides_a_weighted_mean_as_on_one_device(strategies):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def weighed(net: Any, y: Any, y_pred: Any) -> Any:
        return 0.1 * loss(y, y_pred, sample_weight=tf.constant(2.0))

    assert_equal(lambda lib: with_step_of_its_own(lib, weighed), strategies, any_rows())
