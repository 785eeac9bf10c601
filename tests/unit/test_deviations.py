"""What replicas make and one device does not is measured, whatever of it is missing or has another form."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.training import self_check
from keras_dist_ext.training.comparable_steps import CannotCompare
from keras_dist_ext.training.deviations import SlotKind, measure
from keras_dist_ext.training.prediction_comparison import _outputs
from keras_dist_ext.training.self_check import check_step
from keras_dist_ext.training.step_comparison import _Gradients, _leaves, _suspects

LOSS = ("metric", "loss")
KERNEL = ("gradient", "kernel")
ROUNDING = 1e-5


def measured(expected: Any, found: Any, **slots: SlotKind) -> Any:
    return {(d.part, d.name): d for d in measure(expected, found, expected, {}, 1, ROUNDING, slots)}


def of(*values: Any) -> Any:
    return tuple(np.asarray(value, "float32") for value in values)


def test_a_metric_that_replicas_lack_or_have_in_another_form_is_infinitely_far() -> None:
    for found in ({}, {LOSS: of([1.0, 2.0])}):
        deviation = measured({LOSS: of(1.0)}, found)[LOSS]
        assert deviation.is_beyond
        assert deviation.absolute == np.inf


def test_a_gradient_that_replicas_do_not_make_is_not_measured() -> None:
    assert measured({KERNEL: of([1.0])}, {}) == {}


def test_a_slot_of_another_form_is_as_unsure_as_the_largest_of_its_gradient() -> None:
    """As Adafactor keeps rows and columns of squares."""
    slot = ("optimizer", "rows")
    expected = {KERNEL: of([[1.0, 1.0]]), slot: of([1.0])}
    slots = {"rows": SlotKind("row", "kernel")}
    unsure = {KERNEL: of([[1.0, 1.1]]), slot: of([1.5])}
    assert not measured(expected, unsure, **slots)[slot].is_beyond
    sure = {KERNEL: of([[1.0, 1.0]]), slot: of([1.5])}
    assert measured(expected, sure, **slots)[slot].is_beyond


def test_what_is_suspected_has_other_values_another_form_or_is_missing() -> None:
    state = ("state", "mean")
    expected = {KERNEL: of([1.0]), LOSS: of(1.0), state: of([0.0])}
    assert _suspects(expected, expected, ROUNDING) == {}
    assert KERNEL not in _suspects(expected, {LOSS: of(1.0), state: of([0.0])}, ROUNDING)
    assert LOSS in _suspects(expected, {KERNEL: of([1.0]), state: of([0.0])}, ROUNDING)
    found = _suspects(expected, expected | {state: of([0.0, 0.0])}, ROUNDING)
    assert set(found) == {state, KERNEL}  # and the gradient, to measure by


def test_logs_are_compared_however_they_are_nested_and_if_they_are_numbers() -> None:
    logs = {"losses": [tf.constant(1.0), (tf.constant(2),)], "word": tf.constant("a"), "text": "b"}
    assert {name: float(value) for name, value in _leaves(logs, "")} == {"losses/0": 1.0, "losses/1/0": 2.0}
    assert [name for name, _ in _leaves(tf.constant(1.0), "")] == ["the logs"]


def test_gradients_of_a_branch_of_the_graph_are_not_kept() -> None:
    variable = tf.Variable(1.0)
    with tf.Graph().as_default():
        gradients = _Gradients()
        kept = tf.constant(2.0)
        with tf.Graph().as_default():
            gradients.on_update([tf.constant(3.0)], [variable])
        assert gradients.of == {}
        gradients.on_update([kept, None], [variable, tf.constant(0.0)])
    assert gradients.of == {id(variable): kept}


# What is not compared


def step_under(strategy: Any, **options: Any) -> Any:
    runtime = types.SimpleNamespace(
        check=True, checked=set(), exact=False, strategy=strategy, reported=set(), replica_seeds=None
    )
    model = types.SimpleNamespace(name="net", replica_runtime=runtime)
    plan = types.SimpleNamespace(is_plain=False)
    given = {"kind": "train", "num_step_replicas": 2, "has_code_to_check": True, "takes_check": "compile"}
    return types.SimpleNamespace(model=model, plan=plan, **given | options)


def no_preparation(missing: Exception) -> None:
    raise AssertionError(missing)


def test_a_step_on_a_tpu_is_said_not_to_be_checked() -> None:
    step = step_under(object.__new__(tf.distribute.TPUStrategy))
    said = check_step(step, lambda: None, no_preparation, ())
    assert said is not None
    assert "'net'" in said
    assert "it runs on a TPU" in said
    assert check_step(step, lambda: None, no_preparation, ()) is None  # once


def test_without_rows_there_is_nothing_to_check(mirrored: Any) -> None:
    one_row = (tf.zeros([1, 2]),)
    for batch in (None, one_row):
        assert check_step(step_under(mirrored), lambda batch=batch: batch, no_preparation, ()) is None


def test_logs_that_cannot_be_compared_tell_nothing_of_an_evaluation(mirrored: Any) -> None:
    def unread() -> Any:
        raise AssertionError("a batch was read")

    step = step_under(mirrored, kind="test", logs_are_compared=False)
    assert check_step(step, unread, no_preparation, ()) is None


def test_one_reason_is_said_once_whatever_kind_of_step_has_it(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> Any:
        raise CannotCompare("it calls Python")

    monkeypatch.setattr(self_check, "compare_step", cannot)
    step = step_under(mirrored)
    batch = (tf.reshape(tf.range(10.0), [5, 2]),)
    said = check_step(step, lambda: batch, no_preparation, ())
    assert said is not None
    assert "it calls Python" in said
    step.model.replica_runtime.checked.clear()
    assert check_step(step, lambda: batch, no_preparation, ()) is None


def test_predictions_are_compared_if_they_are_numbers() -> None:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made = _outputs(model, lambda: {"word": tf.constant(["a"]), "is_it": tf.constant([True])})
    assert list(made) == [("output", "is_it")]
