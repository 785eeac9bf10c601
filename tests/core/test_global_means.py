"""A loss or a mean by which a step scales gradients, or decides, must be that of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras.optimizers import SGD
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import LoopError

X = np.random.default_rng(0).normal(size=(9, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(9, 3)).astype("float32")
whole = kde.reduce_gradients


def same(value: Any) -> Any:
    return value


def mean(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


def descent(net: Any, x: Any, y: Any, loss_of: Callable[[Any, Any], Any] = mean) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(y, net(x, training=True))
    return loss, tape.gradient(loss, net.trainable_variables)


def scales(net: Any, x: Any, y: Any, of: Any) -> Any:
    loss, gradients = descent(net, x, y)
    net.optimizer.apply([g * of(loss) for g in gradients], net.trainable_variables)
    return loss


def decides(net: Any, x: Any, y: Any, of: Any) -> Any:
    loss, gradients = descent(net, x, y)
    factor = tf.where(of(loss) < 1.0, 1.0, 0.1)
    net.optimizer.apply([g * factor for g in gradients], net.trainable_variables)
    return loss


def skips(net: Any, x: Any, y: Any, of: Any) -> Any:
    loss, gradients = descent(net, x, y)
    tf.cond(of(loss) < 1.0, lambda: net.optimizer.apply(gradients, net.trainable_variables), lambda: None)
    return loss


def by_hand(net: Any, x: Any, y: Any, of: Any) -> Any:
    loss, gradients = descent(net, x, y)
    for variable, gradient in zip(net.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * of(loss) * gradient)
    return loss


def sets_the_rate(net: Any, x: Any, y: Any, of: Any) -> Any:
    loss, gradients = descent(net, x, y)
    net.optimizer.learning_rate.assign(0.1 * tf.minimum(of(loss), 1.0))
    net.optimizer.apply(gradients, net.trainable_variables)
    return loss


def weighs_a_loss(net: Any, x: Any, y: Any, of: Any) -> Any:
    return descends(net, x, y, lambda y, p: mean(y, p) * of(tf.stop_gradient(mean(y, p))))


def times_itself(net: Any, x: Any, y: Any, of: Any) -> Any:
    return descends(net, x, y, lambda y, p: mean(y, p) * of(mean(y, p)))


def root(net: Any, x: Any, y: Any, of: Any) -> Any:
    return descends(net, x, y, lambda y, p: tf.sqrt(of(mean(y, p))))


def overlap(net: Any, x: Any, y: Any, of: Any) -> Any:
    def loss(y: Any, p: Any) -> Any:
        return 1.0 - 2.0 * of(tf.reduce_sum(y * p)) / of(tf.reduce_sum(y * y) + tf.reduce_sum(p * p))

    return descends(net, x, y, loss)


def descends(net: Any, x: Any, y: Any, loss_of: Callable[[Any, Any], Any]) -> Any:
    loss, gradients = descent(net, x, y, loss_of)
    net.optimizer.apply(gradients, net.trainable_variables)
    return loss


STEPS = [scales, decides, skips, by_hand, sets_the_rate, weighs_a_loss, times_itself, root, overlap]
REFUSED = [scales, decides, by_hand, skips]
WARNED = [sets_the_rate, weighs_a_loss, root, overlap]


def made(library: Any, strategy: Any, step: Any, of: Any) -> Any:
    class Net(library.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"value": step(self, *data, of)}

    keras.utils.set_random_seed(1)
    with strategy.scope():
        net = Net([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)], name="net")
        net.compile(SGD(0.1))
    return net


def trained(library: Any, strategy: Any, step: Any, num_rows: int) -> Any:
    """Return the weights after batches of 4: one, four or three are in the last."""
    net = made(library, strategy, step, whole)
    net.fit(X[:num_rows], Y[:num_rows], batch_size=4, shuffle=False, verbose=0)
    return net.get_weights()


def trained_on_workers(strategy: Any, folder: Any, step: str, num_rows: int) -> Any:
    return trained(kde, strategy, globals()[step], num_rows)


@functools.cache
def on_one_device(step: Any, num_rows: int) -> Any:
    return trained(keras, tf.distribute.get_strategy(), step, num_rows)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
@pytest.mark.parametrize("num_rows", rotating([9, 8, 7], [9]))
@pytest.mark.parametrize("step", rotating(STEPS, [times_itself]))
def test_it_is_by_reduce_gradients_as_on_one_device(strategies, step, num_rows, kind):
    assert_close(trained(kde, strategies.get(kind), step, num_rows), on_one_device(step, num_rows))


@pytest.mark.parametrize(
    ("step", "num_rows"),
    [
        pytest.param(
            step, num_rows, marks=[on_two_workers(trained_on_workers, step.__name__, num_rows), pytest.mark.rotating]
        )
        for step in STEPS
        for num_rows in (9, 8, 7)
    ],
)
def test_so_it_is_on_two_workers(values, step, num_rows):
    for found in values:
        assert_close(found, on_one_device(step, num_rows))


@pytest.mark.parametrize("step", rotating(REFUSED, [scales]))
def test_updates_by_a_loss_of_ones_own_are_refused_with_what_to_write(mirrored, step):
    with pytest.raises(LoopError, match=r"loss = kde\.reduce_gradients\(loss\)"):
        made(kde, mirrored, step, same).fit(X, Y, batch_size=4, verbose=0)


@pytest.mark.checks_fit
@pytest.mark.parametrize("step", rotating(WARNED, [sets_the_rate]))
def test_what_cannot_be_refused_is_seen_with_what_to_write(mirrored, step):
    with pytest.warns(UserWarning, match=r"does not train on 2 replicas.*kde\.reduce_gradients\((loss|mean)\)"):
        made(kde, mirrored, step, same).fit(X, Y, batch_size=9, verbose=0)
