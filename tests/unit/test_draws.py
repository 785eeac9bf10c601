"""Which random numbers have a dimension of examples, and which cannot be drawn as one device draws them."""

import random
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.errors import SeedError
from keras_dist_ext.step import draws
from keras_dist_ext.step.draw_refusals import HostDraws, refuse_model
from keras_dist_ext.step.drawn_shapes import NotedDraw, has_examples, static_shape
from keras_dist_ext.step.draws import RandomStreams
from keras_dist_ext.step.global_draws import GlobalDraws, of_any_number
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.reducers import RowRange


def noted(few: Any, many: Any, kind: str = "normal") -> NotedDraw:
    """What was drawn on 2 rows, and on 420."""
    return NotedDraw(kind, (tf.TensorShape(few), tf.TensorShape(many)))


OF_EXAMPLES = noted([2, 3], [420, 3])


def test_the_first_dimension_is_that_of_examples_if_it_is_their_number_in_both_traces() -> None:
    assert has_examples(OF_EXAMPLES, tf.TensorShape([None, 3]), of_one_batch=False)
    assert not has_examples(noted([2, 3], [2, 3]), tf.TensorShape([2, 3]), of_one_batch=False)


# By what is wrong: the draws on few and many rows, what is known of the shape in training, and the message.
UNKNOWN: dict[str, tuple[NotedDraw, Any, str]] = {
    "rank in training": (OF_EXAMPLES, None, "the number of dimensions of .* is unknown"),
    "rank before": (noted(None, [420, 3]), [None, 3], r"is unknown.*\(tf.ensure_shape\)"),
    "two of examples": (noted([2, 2], [420, 420]), [None, None], "another that depends on the examples"),
    "last of examples": (noted([3, 2], [3, 420]), [3, None], "that is not the first"),
    "ranks differ": (noted([2], [420, 3]), [None], "may have a dimension of examples"),
    "rows known": (OF_EXAMPLES, [4, 3], r"have the shape \(2, 3\) where the number of rows is known"),
    "other size": (OF_EXAMPLES, [None, 5], "draws otherwise where it is not"),
    "other rank": (OF_EXAMPLES, [None, 3, 1], "draws otherwise where it is not"),
    "length by replica": (OF_EXAMPLES, [None, None], "sizes that may differ between replicas.*global batch"),
}


@pytest.mark.parametrize("wrong", UNKNOWN)
def test_shapes_that_do_not_tell_are_refused_with_what_to_do(wrong: str) -> None:
    before, static, message = UNKNOWN[wrong]
    with pytest.raises(SeedError, match=f'^draws="global": .*{message}'):
        has_examples(before, tf.TensorShape(static), of_one_batch=False)


def test_a_length_that_one_batch_has_in_all_parts_is_no_matter() -> None:
    assert has_examples(OF_EXAMPLES, tf.TensorShape([None, None]), of_one_batch=True)


def test_of_a_shape_of_unknown_length_nothing_is_known() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 3])], autograph=False)
    def known(shape: Any, x: Any) -> Any:
        assert static_shape(shape).rank is None
        assert static_shape(tf.shape(x)).as_list() == [None, 3]
        return shape

    known.get_concrete_function()


def test_rows_of_a_batch_are_of_any_number_and_all_else_in_it_stays() -> None:
    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.float32)], autograph=False)
    def batch(ragged: Any) -> Any:
        given = (tf.ones([4, 2]), tf.constant(1.0), None, "text", ragged)
        found = of_any_number(given)
        assert found[0].shape.as_list() == [None, 2]
        assert all(one is other for one, other in zip(found[1:], given[1:], strict=True))
        return found[0]

    batch.get_concrete_function()


# In a graph


def global_draws(*before: NotedDraw) -> GlobalDraws:
    rows = SimpleNamespace(range=RowRange(0, 2, 4), are_of_one_batch=True)
    return GlobalDraws("net", rows, before, lambda value: value)


def draw(streams: GlobalDraws, shape: Any = (2, 3), kind: str = "normal") -> Any:
    given = {"shape": tf.constant(shape), "counter": tf.zeros([2], tf.uint64), "dtype": tf.float32}
    return streams.draw(kind, given, lambda shape, counter, **_: tf.random.stateless_normal(shape, [1, 2]))


def test_other_draws_than_those_of_the_scratch_graphs_are_refused() -> None:
    constant = noted([2, 3], [2, 3])
    message = "a step of 'net' draws other random numbers where the number of rows is known"
    with tf.Graph().as_default():
        streams = global_draws(constant)
        assert draw(streams).shape == (2, 3)
        streams.check()
        with pytest.raises(SeedError, match=message):  # one more
            draw(streams)
        with pytest.raises(SeedError, match=message):
            draw(global_draws(constant), kind="uniform")
        with pytest.raises(SeedError, match=message):  # one less
            global_draws(constant).check()


def test_rows_of_unknown_number_are_not_drawn_under_xla() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def compiled(x: Any) -> Any:
        rows = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, 3])
        with pytest.raises(SeedError, match="a step that XLA compiles, which does not draw by rows.*jit_compile=False"):
            global_draws(OF_EXAMPLES).draw("normal", {"shape": tf.shape(rows)}, lambda: None)
        return x

    compiled.get_concrete_function(tf.ones([2, 3]))


# By what is done with a number for each of two rows, and whether that may move a row to another replica.
USED = {
    "sorted": (lambda numbers: tf.argsort(-numbers), True),
    "ranked": (lambda numbers: tf.math.top_k(tf.cast(2.0 * numbers + 1.0, tf.float64), 1).values, True),
    "the largest": (lambda numbers: tf.argmax(numbers), True),
    "summed": (lambda numbers: tf.argmax(tf.stack([tf.reduce_sum(numbers), 0.0])), False),
    "added": (lambda numbers: numbers - 1.0, False),
}


@pytest.mark.parametrize("use", USED)
def test_numbers_by_which_rows_are_sorted_are_refused(use: str) -> None:
    do, is_refused = USED[use]
    with tf.Graph().as_default():
        streams = global_draws(noted([2], [420]))
        given = {"shape": tf.shape(tf.raw_ops.PlaceholderWithDefault(input=tf.ones([2]), shape=[None]))}
        given |= {"counter": tf.zeros([2], tf.uint64), "dtype": tf.float32}
        do(streams.draw("normal", given, lambda shape, counter, **_: tf.random.stateless_normal(shape, [1, 2])))
        if not is_refused:
            streams.check()
            return
        with pytest.raises(SeedError, match="'net' shuffles its examples by keras.random.shuffle, or sorts one random"):
            streams.check()


# What is refused of a model, and in its code


def test_xla_and_layers_that_distort_all_images_alike_are_refused_by_name(mirrored: Any) -> None:
    model = SimpleNamespace(jit_compile=True, distribute_strategy=mirrored)
    with pytest.raises(SeedError, match="jit_compile=True, and XLA does not draw by rows"):
        refuse_model(model, [])
    model.jit_compile = False
    refuse_model(model, [keras.layers.Dropout(0.5)])
    elastic = keras.layers.RandomElasticTransform(name="bent", data_format="channels_last")
    with pytest.raises(SeedError, match="the layer 'bent' is a RandomElasticTransform, which distorts all images"):
        refuse_model(model, [keras.layers.Dropout(0.5), elastic])


@pytest.mark.parametrize("library", [random, np.random])
def test_numbers_of_python_and_numpy_are_noticed(library: Any) -> None:
    host = HostDraws()
    host.refuse("net")
    library.random()
    with pytest.raises(SeedError, match="'net' draws random numbers of Python or NumPy while it is traced"):
        host.refuse("net")


# The streams of a replica


def streams(replica: Any, **seeds: Any) -> RandomStreams:
    model = SimpleNamespace(name="net", replica_seeds=SimpleNamespace(**seeds))
    return RandomStreams(model, SimpleNamespace(num_replicas=2, replica_id=replica), None, StepObserver())


def test_ops_of_tensorflow_are_refused_where_one_device_draws_and_left_to_a_tpu() -> None:
    with pytest.raises(SeedError, match="'net' draws by an op of tf.random, which keeps its own place"):
        streams(1, draws="global", root=1).op_seeds(None, lambda seed: (1, 2))
    of_tpu = streams(tf.constant(1), draws="replica", root=1)
    assert of_tpu.op_seeds(5, lambda seed: (seed, 2)) == (5, 2)
    assert streams(1, draws="replica", root=1).op_seeds(None, lambda seed: (1, 2)) != (1, 2)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"), [("uniform", tf.float64, (3,)), ("normal", tf.float32, None)], ids=["float64", "shape"]
)
def test_xla_draws_by_itself_what_is_not_known_how_to_draw_as_without_it(
    kind: str, dtype: Any, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "in_xla", lambda: True)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def drawn(sizes: Any) -> Any:
        given = {"shape": sizes if shape is None else shape, "dtype": dtype}
        given |= {"key": tf.zeros([1], tf.uint64), "counter": tf.zeros([2], tf.uint64), "alg": 1}
        of_replica = streams(1, draws="replica", root=1)
        return of_replica.draw(kind, given, lambda shape, counter: tf.fill(tf.convert_to_tensor(shape), 7.0))

    assert drawn([3]).numpy().tolist() == [7, 7, 7]
