"""Where values come from: one replica's own rows, all of them, or constants."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist_ext.step.ancestry import assignments
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.metric_state import _by_metric
from keras_dist_ext.step.origins import Origins
from keras_dist_ext.step.reduce import scale


def test_what_is_marked_as_a_replicas_own_is_so_with_all_that_is_computed_from_it() -> None:
    origins = Origins()
    with tf.Graph().as_default():
        own = origins.mark_per_replica({"x": tf.constant(1.0), "n": 3}, 1)
        common = origins.note_replicated(tf.constant(2.0))
        assert own["n"] == 3
        assert [origins.kind_of(value) for value in (own["x"] + common, common * 2.0, tf.constant(1.0), 3.0)] == [
            *("own", "replicated", "constant", "constant")
        ]
        assert origins.note_own((own["x"], 3.0, None), 0)[1:] == (3.0, None)


def test_eager_values_are_as_they_are() -> None:
    origins, value = Origins(), tf.constant(1.0)
    assert origins.note_replicated(value) is value
    assert origins.note_own(value, 1) is value
    assert origins.kind_of(value) == "constant"
    assert origins.replicated_ids == set()


def test_a_variable_that_a_function_reaches_by_another_name_is_not_taken_for_one_that_is_known() -> None:
    known, other = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function(autograph=False)
    def assign() -> Any:
        known.assign(2.0)
        tf.raw_ops.AssignVariableOp(resource=tf.raw_ops.Identity(input=other.handle), value=3.0)
        return known.read_value()

    outer = tf.function(lambda: assign(), autograph=False).get_concrete_function()
    found = [one.variable for one in assignments(outer.graph)]
    assert len(found) == 1
    assert found[0] is known


def test_metrics_of_metrics_are_looked_at_one_by_one() -> None:
    class Both(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.inner = [keras.metrics.Sum(), keras.metrics.Mean()]

        @property
        def metrics(self) -> list[Any]:
            return self.inner

    alone, both = keras.metrics.Sum(), Both()
    assert [len(variables) for variables in _by_metric([alone, both])] == [1, 1, 2]


def test_slices_are_scaled_row_by_row() -> None:
    found = scale(tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1])), 0.5)
    assert found.indices.numpy().tolist() == [4, 1]
    np.testing.assert_array_equal(found.values, np.full((2, 3), 0.5))


def test_one_device_draws_by_the_generator_of_keras_itself_unless_it_has_a_stream() -> None:
    keras.utils.set_random_seed(7)
    one_device = tf.distribute.get_strategy()
    stock = global_generator_of(one_device, is_seeded=False)
    before = np.array(stock.state)
    keras.random.uniform((1,))
    assert np.any(np.array(stock.state) != before)
    apart = global_generator_of(one_device, is_seeded=True)
    assert apart is not stock
    np.testing.assert_array_equal(apart.state, stock.state)
    assert global_generator_of(one_device, is_seeded=True) is apart
