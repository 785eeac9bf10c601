"""A step that fails on what a replica has of a batch, and not on the whole, is told from one that just fails."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import keras
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext._keras.adapters import TFDatasetAdapter
from keras_dist_ext.errors import DataError
from keras_dist_ext.training.comparable_steps import CannotCompare, FailsOnFew, comparable
from keras_dist_ext.training.failed_steps import explain_failed_prediction, explain_failure
from keras_dist_ext.training.run_dataset import RunDataset

OF_FEW = tf.errors.InvalidArgumentError(None, None, "input must have at least k columns")


def model() -> Any:
    made = kde.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="net")
    made.compile("sgd", "mse")
    return made


def step_of(batch: Any, *, num_replicas: int = 2, spec: Any = None) -> Any:
    """A step that takes the two largest of its rows, which one row has not."""
    made = model()
    made.replica_runtime.batch_spec = spec

    def two_largest(rows: Any, num_replicas: int = 1) -> Any:
        return tf.math.top_k(tf.transpose(rows), 2)

    plan = types.SimpleNamespace(exponents=types.SimpleNamespace(assuming_means=contextlib.nullcontext))
    tried = types.SimpleNamespace(without_xla=lambda: None, run_on_first_replica=two_largest, plan=plan)
    return types.SimpleNamespace(
        model=made,
        kind="train",
        num_step_replicas=num_replicas,
        first_batch=batch,
        untraced_copy=lambda: tried,
        is_eager=False,
    )


@pytest.mark.parametrize("spec", [None, tf.TensorSpec([None, 2])], ids=["of the first batch", "of any"])
def test_the_least_batch_that_replicas_cannot_take_is_named(spec: Any) -> None:
    error = explain_failure(step_of(lambda: tf.ones([3, 2]), spec=spec), OF_FEW)
    assert "The step 'net.train_step' needs more examples than a replica may have" in str(error)
    assert "One device makes it on a batch of 2, and 2 replicas do not, some of which have 1 each" in str(error)
    assert "gather them first, by kde.gather_rows" in str(error)


def test_a_batch_of_another_size_is_tried_too() -> None:
    step = step_of(lambda: tf.ones([3, 2]))
    step.untraced_copy().run_on_first_replica = lambda rows, *_: tf.reshape(rows, [-1, 3])
    error = explain_failure(step, OF_FEW)
    assert "One device makes it on a batch of 3, and 2 replicas do not, some of which have 1 each" in str(error)


def test_what_has_failed_of_something_else_is_not_explained(mirrored: Any) -> None:
    def no_data() -> Any:
        raise OSError("the data is gone")

    data = tf.errors.InvalidArgumentError(None, None, "Detected at node IteratorGetNext defined at (most recent call")
    batch = tf.ones([3, 2])
    assert explain_failure(step_of(lambda: batch, num_replicas=1), OF_FEW) is None
    assert explain_failure(step_of(lambda: batch), DataError("it is known")) is None
    assert explain_failure(step_of(lambda: batch), data) is None
    for without in (None, no_data, lambda: None):
        assert explain_failure(step_of(without), OF_FEW) is None
    step = step_of(lambda: batch)
    step.untraced_copy().run_on_first_replica = lambda rows, *_: tf.py_function(lambda given: given, [rows], tf.float32)
    assert explain_failure(step, OF_FEW) is None  # what Python does cannot be undone
    program: Any = types.SimpleNamespace(strategy=mirrored)
    assert explain_failed_prediction(program, (batch,), DataError("it is known")) is None


# Steps that are compared


def test_a_random_number_that_cannot_be_made_alike_for_all_rows_is_named() -> None:
    with (
        pytest.raises(
            CannotCompare, match=r"made alike for all examples \(stateless_parameterized_truncated_normal\)$"
        ),
        comparable(model(), tf.ones([3, 2])),
    ):
        tf.random.stateless_parameterized_truncated_normal([2], [1, 2])


def test_a_step_that_fails_on_few_rows_says_on_how_many_and_of_what() -> None:
    with (
        pytest.raises(FailsOnFew, match=r"^it fails on 3 examples \(ZeroDivisionError: by zero\)$"),
        comparable(model(), tf.ones([3, 2])),
    ):
        raise ZeroDivisionError("by zero\nand more")


def test_the_data_of_a_tpu_is_distributed_by_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tf.data.Dataset.range(4).batch(2)
    strategy = object.__new__(tf.distribute.TPUStrategy)
    monkeypatch.setattr("keras_dist_ext.training.run_dataset.workers_of", lambda _: None)
    monkeypatch.setattr(type(strategy), "experimental_distribute_dataset", lambda self, data: ["distributed", data])
    dataset = RunDataset(TFDatasetAdapter(given), strategy, None, None)
    assert dataset.is_on_tpu
    assert dataset.given is given
    assert dataset.read == ["distributed", given]
