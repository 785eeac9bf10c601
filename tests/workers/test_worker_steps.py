"""What a worker of a ParameterServerStrategy runs, traced and run here, in one process and without a cluster."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.errors import StrategyError
from keras_dist_ext.training.parameter_server.worker_steps import WorkerSteps


class Difference(keras.Model):
    """Take its two inputs as a tuple, or by name."""

    def call(self, inputs: Any) -> Any:
        whole, part = (inputs["whole"], inputs["part"]) if isinstance(inputs, dict) else inputs
        return whole - part


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value + 0.0


ONE, THREE = tf.ones([2, 1]), 3 * tf.ones([2, 1])


def steps_of(model: keras.Model, kind: str, **compile_arguments: Any) -> WorkerSteps:
    model.compile(**compile_arguments)
    model._symbolic_build(data_batch=((THREE, ONE), ONE))
    return WorkerSteps(model, kind)


def totals(steps: WorkerSteps, batches: list[Any], at_most: int) -> list[float]:
    """The sum that the metric `loss` of each call has counted."""
    return [float(function(*args)[0][0]) for function, args in steps.calls(batches, at_most)]


def test_batches_of_equal_shapes_but_another_structure_are_not_run_as_the_first_ones() -> None:
    steps = steps_of(Difference(), "test", loss="mse")
    by_place, by_name = ((THREE, ONE), ONE), ({"whole": THREE, "part": ONE}, ONE)
    assert totals(steps, [by_place] * 2, 2) == totals(steps, [by_name] * 2, 2) == [4.0]
    assert totals(steps, [by_place, by_name], 2) == [2.0, 2.0]


def test_neighbours_of_equal_shapes_travel_together_up_to_the_share_of_a_worker() -> None:
    steps = steps_of(Difference(), "test", loss="mse")
    whole, part = ((THREE, ONE), ONE), ((THREE[:1], ONE[:1]), ONE[:1])
    assert totals(steps, [whole, whole, whole, part], 2) == [4.0, 2.0, 1.0]


def test_a_metric_that_does_not_add_up_stands_in_the_way_of_evaluation_but_not_of_prediction() -> None:
    outputs = steps_of(Difference(), "predict", loss="mse", metrics=[Largest()]).predict(((THREE, ONE),))
    np.testing.assert_array_equal(outputs, 2 * np.ones([2, 1]))
    message = (
        "The metric variable 'largest/value' has aggregation='mean'. .* Write the metric so that its state adds up."
    )
    with pytest.raises(StrategyError, match=message):
        steps_of(Difference(), "test", loss="mse", metrics=[Largest()])
