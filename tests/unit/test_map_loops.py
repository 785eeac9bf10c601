"""Loops over the examples of a batch: found in the step's graph, and told where going round alone takes long."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from test_diagnose import HEALTHY, times

from keras_dist_ext.diagnosis.doctor.examination import Examination, MapLoops
from keras_dist_ext.diagnosis.doctor.map_loops import find_map_loops
from keras_dist_ext.diagnosis.doctor.rules import judge

LOOPS = MapLoops(("each",), 64, 1e-4)  # 6.4 ms of a step of 20 ms


def test_a_loop_over_examples_says_what_its_turns_take_and_what_does_without_them() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), map_loops=LOOPS)).findings
    assert (finding.code, finding.seconds) == ("loop-in-step", pytest.approx(80 * 0.0064))
    assert finding.evidence == (
        "`tf.map_fn` in each, 64 turns a step; one that computes nothing takes 100 µs here, forward and back: 6.4 ms "
        "of the 18 ms that a step computes, at least"
    )
    assert "`tf.vectorized_map(f, x)` instead of `tf.map_fn(f, x)`" in finding.fix


@pytest.mark.parametrize(
    ("turn_seconds", "given", "is_found"),
    [
        (8e-5, {}, True),
        (7.7e-5, {}, False),  # less than a quarter of the time
        (1e-5, {"step": 0.001, "compute": 0.0009, "input_": 0.0, "sync": 5e-5, "host": 5e-5}, False),  # less than 1 ms
    ],
)
def test_a_loop_whose_turns_take_little_is_no_finding(turn_seconds: float, given: Any, is_found: bool) -> None:
    loops = dataclasses.replace(LOOPS, turn_seconds=turn_seconds)
    assert ("loop-in-step" in judge(Examination(HEALTHY, times(**given), map_loops=loops)).codes) == is_found


def looped(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape, tf.name_scope("net/each"):
        tape.watch(x)
        value = tf.reduce_sum(tf.map_fn(lambda row: 2.0 * row, x)) + tf.reduce_sum(tf.map_fn(lambda row: row, x[0]))
    return tape.gradient(value, x)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (looped, (("each",), 32 + 3)),  # the batch's rows, and three of something else
        (
            lambda x: tf.while_loop(lambda i: i < 9, lambda i: (i + 1,), [0])[0] + tf.reduce_sum(tf.cast(x, tf.int32)),
            None,
        ),
        (lambda x: tf.vectorized_map(lambda row: 2.0 * row, x), None),
    ],
)
def test_loops_of_map_fn_are_found_with_their_turns(step: Any, expected: Any) -> None:
    graph = tf.function(step).get_concrete_function(tf.TensorSpec([None, 3])).graph
    loops = find_map_loops([graph], ["each"], "CPU:0", 32)
    assert (None if loops is None else (loops.layers, loops.num_turns)) == expected
    assert loops is None or loops.turn_seconds > 0
