"""What guards a step: which of its variables are put back, and when weights may be updated."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.step.nan_guard import GRADIENTS, LOSS, BadStep, Guard, ReplicaGuard, StepGuard

NAN = tf.constant(float("nan"))


def guard(most_in_a_row: int = 8) -> Guard:
    made = Guard(2)
    made.begin(most_in_a_row)
    return made


def bad(step: StepGuard, *, loss: Any = NAN, gradient: Any = NAN, scale: Any = None, rows: int = 4) -> Any:
    """What replica 1 finds, with a loss scale if there is one."""
    one = ReplicaGuard(step, 1, 2, rows)
    one.batch, one.losses = tf.ones((4, 1)), [loss]
    optimizer = None if scale is None else type("Scaled", (), {"dynamic_scale": tf.Variable(scale)})
    return one.found([gradient], optimizer)


@pytest.mark.parametrize("traced", [False, True], ids=["an eager step", "in a function that an eager step calls"])
def test_floats_are_what_they_were_when_they_were_noted_first(traced: bool) -> None:
    made, noted, counter, other = guard(), tf.Variable(1.0), tf.Variable(1), tf.Variable(1.0)
    step = made.step()

    def assign() -> None:
        for value in (np.nan, 5.0):
            step.note(noted)
            noted.assign(value)
        step.note(counter)
        counter.assign(5)
        other.assign(5.0)

    (tf.function(assign, autograph=False) if traced else assign)()
    step.keep(bad(step))
    step.end()
    assert [float(variable) for variable in (noted, counter, other)] == [1, 5, 5]
    assert made.look() == ([BadStep(0, (0, LOSS | GRADIENTS))], 1, False)


def test_gradients_that_overflow_by_a_loss_scale_are_its_own_matter_down_to_a_scale_of_one() -> None:
    step = guard().step()
    found = [np.any(bad(step, loss=tf.constant(1.0), scale=scale)) for scale in (None, 2.0, 1.0)]
    assert found == [True, False, True]
    assert np.any(bad(step, scale=2.0))  # a loss is not scaled


def test_a_replica_without_examples_finds_nothing() -> None:
    assert not np.any(bad(guard().step(), rows=0))


def test_weights_may_be_updated_until_a_step_finds_something_and_again_in_the_next() -> None:
    made = guard(most_in_a_row=1)
    step = made.step()
    nothing = tf.zeros((3, 2))
    assert step.allows()
    assert step.may_update(nothing)
    assert not step.may_update(bad(step))
    step.keep(bad(step))
    assert not step.allows()
    assert step.may_update(nothing)  # by another optimizer
    step.end()
    assert step.allows()
    for _ in range(2):  # one more in a row than there may be
        step = made.step()
        step.keep(bad(step))
        step.end()
    assert not made.step().allows()
    assert made.look()[2]


def test_a_loss_of_another_graph_is_not_looked_at() -> None:
    made = guard()
    with tf.Graph().as_default():
        elsewhere = tf.constant(float("nan"))

    @tf.function(autograph=False)
    def found() -> tuple[Any, Any]:
        outside, step = tf.constant(float("nan")), made.step()

        def in_branch() -> tuple[Any, Any]:
            fine = tf.constant(1.0)
            return tuple(bad(step, loss=loss, gradient=fine) for loss in (outside, elsewhere))

        return tf.cond(tf.random.uniform([]) < 2.0, in_branch, in_branch)

    around, other = found()
    assert np.any(around)
    assert not np.any(other)
