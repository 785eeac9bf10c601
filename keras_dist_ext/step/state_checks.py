"""Check that private state of Keras and TensorFlow that the numbers of several replicas depend on is where it was.

``step.hook_checks`` checks that hooks are called. State that is read, or set for a while, could have moved in a newer
release, without any error. So each is tried once in a process: something public must change it, or depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.datasets import (
    calls_python,
    dataset_graph,
    generator_states,
    seeds_of_random_ops,
    with_seeds,
)
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.models import tracks_loss
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.tapes import is_differentiated, may_be_differentiated
from keras_dist_ext._keras.tracing import functions_of_op, in_branch, scratch_graph, state_of_thread
from keras_dist_ext._keras.user_code import has_user_code
from keras_dist_ext.step.hook_uses import TriedStep

__all__ = ["STATES", "State"]


class State(NamedTuple):
    """Private state that is read or set in Keras or TensorFlow.

    Attributes:
        what: its description.
        file: of Keras or TensorFlow that holds it.
        is_found: whether it is still there; called outside of all graphs and scopes.
    """

    what: str
    file: str
    is_found: Callable[[], bool]

    def __str__(self) -> str:
        return f"{self.what} ({self.file})"


def _draws_by_generator() -> bool:
    generator = keras.random.SeedGenerator(1)
    with use_global_seed_generator(generator):
        before = generator.state.numpy().tolist()
        keras.random.uniform((1,))
        return bool(generator.state.numpy().tolist() != before)


def _keeps_thread_state() -> bool:
    with keras.StatelessScope() as scope:
        return any(value is scope for value in state_of_thread().values())


def _tracks_loss() -> bool:
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")], name="hook_checks")
    net.compile("sgd", "mse", metrics=["mae"])
    of_loss, *_ = net.metrics  # keras.Model documents it as the first
    return tracks_loss(net, of_loss)


def _knows_functions_of_metrics() -> bool:
    def knows(metric: keras.Metric) -> bool:
        net = keras.Sequential([keras.Input((1,))], name="hook_checks")
        net.compile("sgd", "mse", metrics=[metric])
        return has_user_code(net, "train")

    return knows(keras.metrics.MeanMetricWrapper(len)) and not knows(keras.metrics.MeanSquaredError())


def _knows_tapes() -> bool:
    value = tf.ones(())
    before = is_differentiated([value]) or may_be_differentiated()
    with tf.GradientTape() as tape:
        tape.watch(value)
        return not before and is_differentiated([value]) and may_be_differentiated()


def _knows_branches() -> bool:
    found = []
    with scratch_graph("hook_checks") as graph:

        def note(value: tf.Tensor) -> tf.Tensor:
            found.append(in_branch(graph))
            return value

        number = tf.constant(0) + 1
        tf.cond(number > 0, lambda: note(number), lambda: note(number))
        tf.while_loop(lambda n: note(n) < 2, lambda n: note(n) + 1, (number,))
        return len(found) == 4 and all(found) and not in_branch(graph)


def _knows_functions() -> bool:
    with scratch_graph("hook_checks") as graph:
        number = tf.constant(0) + 1
        tf.cond(number > 0, lambda: number, lambda: -number)
        tf.while_loop(lambda n: n < 2, lambda n: n + 1, (number,))
        tf.function(lambda n: n + 1, autograph=False)(number)
        found = sorted(filter(None, (len(functions_of_op(op)) for op in graph.get_operations())))
        return found == ([2, 2] if tf.config.functions_run_eagerly() else [1, 2, 2])


def _converts_slices() -> bool:
    step = TriedStep()
    with scratch_graph("hook_checks"), intercept(step):
        tf.convert_to_tensor(tf.IndexedSlices(tf.ones((1,)), tf.constant([0]), tf.constant([2])))
    return step.converts_slices


def _seeds_datasets() -> bool:
    generator, numbers = keras.random.SeedGenerator(1), tf.data.Dataset.range(2)
    # All have seeds: without one they would draw one, of the numbers that the user's code is to get.
    for shuffled in (numbers.shuffle(2, seed=1), tf.data.Dataset.random(seed=1).shuffle(2, seed=1)):
        graph = dataset_graph(shuffled)
        if graph is None or with_seeds(shuffled, graph, 1, same_passes=True) is shuffled:
            return False
    draw = tf.autograph.experimental.do_not_convert(
        lambda n: (tf.random.uniform((), seed=5), keras.random.uniform((), seed=generator))
    )
    mapped = numbers.map(draw)
    graph = dataset_graph(mapped)
    has_seeds = graph is not None and seeds_of_random_ops(graph) == [5] and len(generator_states(graph)) == 1
    return has_seeds or (graph is not None and calls_python(graph))


STATES = [
    State("the generator of draws without a seed", "keras/src/random/seed_generator.py", _draws_by_generator),
    State("the state of a thread", "keras/src/backend/common/global_state.py", _keeps_thread_state),
    State("the metrics of losses", "keras/src/trainers/trainer.py", _tracks_loss),
    State("functions of metrics", "keras/src/metrics/reduction_metrics.py", _knows_functions_of_metrics),
    State("what tapes record", "tensorflow/python/eager/record.py", _knows_tapes),
    State("graphs of branches", "tensorflow/python/ops/control_flow_v2_func_graphs.py", _knows_branches),
    State("functions of a graph", "tensorflow/python/framework/ops.py", _knows_functions),
    State("how slices become a tensor", "tensorflow/python/framework/indexed_slices.py", _converts_slices),
    State("seeds in the graph of a dataset", "tensorflow/python/data/ops/dataset_ops.py", _seeds_datasets),
]
