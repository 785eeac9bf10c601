"""Variables that a step makes are made outside of its graph: what Keras and TensorFlow do that this stands on."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from strategies import strategies

from keras_dist_ext._keras.creation import make_variables_outside, one_replica
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.strategies import strategy_of_variable
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.variables import components
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.step.pass_through import PassThrough


@contextlib.contextmanager
def traced(strategy):
    """Trace what one replica does, into a graph that nothing runs."""
    with scratch_graph("test"), one_replica(strategy, 0), make_variables_outside(), intercept(PassThrough()):
        yield


@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored2"])
def test_what_is_made_while_a_replica_is_traced_is_there_afterwards(kind):
    strategy = strategies.get(kind)
    with traced(strategy):
        layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=3))
        layer(tf.compat.v1.placeholder(tf.float32, [None, 4]))
        of_tensor = tf.Variable(tf.ones([3]) * 2.0)
        seeded = keras.random.SeedGenerator(5)
    expected = keras.initializers.GlorotUniform(seed=3)((4, 2))
    for copy in components(layer.kernel):
        np.testing.assert_array_equal(copy.numpy(), expected)
    np.testing.assert_array_equal(of_tensor.numpy(), [2, 2, 2])
    assert seeded.state.numpy()[0] == 5
    for variable in (layer.kernel, of_tensor, seeded.state):
        own = strategy_of_variable(variable)
        assert own is (None if kind == "default" else strategy)
    assert layer.kernel.path == f"{layer.name}/kernel"


@pytest.mark.parametrize("make", [lambda x: tf.Variable(x[0]), lambda x: keras.Variable(lambda *_, **__: x[0], (4,))])
def test_what_is_made_of_the_batch_is_refused(make):
    with traced(strategies.get("mirrored2")), pytest.raises(ScopeError, match="of a value that it computes from the"):
        make(tf.compat.v1.placeholder(tf.float32, [None, 4]))


def test_names_that_keras_counts_go_on_from_those_made_in_a_step():
    with traced(strategies.get("default")):
        names = [keras.layers.Dense(1).name, keras.Variable(0.0).name]
    assert keras.layers.Dense(1).name not in names
    assert keras.Variable(0.0).name not in names
