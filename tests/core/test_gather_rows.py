"""Steps get the rows of all replicas: losses, states and metrics that compare examples are those of one device."""

import functools

import keras
import numpy as np
import pytest
import row_runs
import tensorflow as tf
from cases import rotating
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext._keras.variables import components
from keras_dist_ext.step import logs, reduce, reducers

X = row_runs.VIEWS[0]
DEFAULT = tf.distribute.get_strategy()


@functools.cache
def on_one_device(size=7, static=False, losses=tuple(row_runs.LOSSES)):
    return row_runs.train(row_runs.make(keras, DEFAULT, losses=losses), size=size, static=static)


def assert_close(ours, stock):
    for one, other in zip(ours, stock, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture
def collective(monkeypatch, mirrored):
    """Two replicas that take each other for strangers, as GPUs and workers are."""
    for module in (reduce, reducers, logs):
        monkeypatch.setattr(module, "shares_memory", lambda strategy: False)
    return mirrored


CASES = {
    "two losses": ("mirrored2", {"losses": ("sum of all", "both")}, {}),
    "mirrored2": ("mirrored2", {}, {}),
    "mirrored3": ("mirrored3", {}, {}),
    "mirrored4": ("mirrored4", {}, {}),
    "even rows on mirrored4, as constants": ("mirrored4", {}, {"size": 8, "static": True}),
    "a scaled loss": ("mirrored2", {"scales": True}, {}),
    "even rows, as constants": ("mirrored2", {}, {"size": 6, "static": True}),
    "uneven rows, as constants": ("mirrored2", {}, {"size": 7, "static": True}),
    "batches that TensorFlow splits": ("mirrored3", {"losses": ("sum of all", "both")}, {"splits": True}),
    "4 virtual replicas on 1": ("one_device", {"virtual_replicas": 4}, {}),
    "4 virtual replicas on 2": ("mirrored2", {"virtual_replicas": 4}, {}),
}


@pytest.mark.parametrize("case", rotating(CASES, ["two losses"], slow=["4 virtual replicas on 2"]))
def test_losses_states_and_metrics_of_all_rows_are_those_of_one_device(strategies, case):
    kind, made, data = CASES[case]
    data = dict(data)
    ours = row_runs.make(kde, strategies.get(kind), **made)
    losses = {"losses": made["losses"]} if "losses" in made else {}
    splits = data.pop("splits", False)
    assert_close(row_runs.train(ours, splits=splits, **data), on_one_device(**data, **losses))
    for variable in ours.weights:
        for copy in components(variable):
            np.testing.assert_array_equal(copy.numpy(), components(variable)[0].numpy(), err_msg=variable.path)


@pytest.mark.slow
def test_rows_are_gathered_by_collectives_one_step_at_a_time(collective):
    losses = ("sum of all", "both")
    ours = row_runs.make(kde, collective, losses=losses)
    assert_close(row_runs.train(ours), on_one_device(losses=losses))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            data,
            marks=[
                on_two_workers(row_runs.train_on_workers, data),
                pytest.mark.rotating if data == "even" else pytest.mark.slow,
            ],
        )
        for data in row_runs.OF_WORKERS
    ],
)
def test_workers_have_the_rows_of_all(values, data):
    given = row_runs.OF_WORKERS[data]
    for history, weights in values:
        assert_close((history, weights), on_one_device(losses=row_runs.OF_WORKERS_LOSSES, **given))


# What is gathered


class Everyone(keras.layers.Layer):
    """Gives each example those of all."""

    def call(self, x):
        everyone = kde.gather_rows(x)
        own = tf.zeros_like(kde.row_indices(next(iter(x.values()))))
        return {key: tf.gather(value[None], own) for key, value in everyone.items()}


def seen_by_each(strategy, x, size=7):
    """What each example of a batch has seen, [examples, examples of the batch, ...] for each name."""

    class Net(kde.Model):
        def __init__(self):
            super().__init__()
            self.everyone = Everyone()

        def call(self, x):
            return self.everyone(x)

    with strategy.scope():
        net = Net()
        net.compile()
    return net.predict_on_batch(x)


KINDS = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "uint16", "int32", "uint32", "int64", "bool"]
NUMBERS = {kind: tf.cast(tf.constant([[0, 1], [1, 3], [0, 7], [100, 5], [1, 0]]), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored3", "mirrored4"], ["mirrored3"]))
def test_rows_of_any_kind_are_gathered_in_a_structure(strategies, kind):
    values = {**NUMBERS, "words": tf.constant(["a", "b", "c", "d", "e"])}
    for size in (5, 1):  # with one example, replicas have none
        given = {name: value[:size] for name, value in values.items()}
        for name, seen in seen_by_each(strategies.get(kind), given).items():
            assert len(seen) == size
            for everyone in seen:
                np.testing.assert_array_equal(np.asarray(everyone), np.asarray(given[name]), err_msg=name)


def test_numbers_of_any_kind_are_gathered_by_collectives_and_words_are_refused(collective):
    for name, seen in seen_by_each(collective, NUMBERS).items():
        assert seen.dtype == NUMBERS[name].dtype or NUMBERS[name].dtype.is_floating  # a layer casts these
        for everyone in seen:
            np.testing.assert_array_equal(np.asarray(everyone), np.asarray(NUMBERS[name]), err_msg=name)
    with pytest.raises(kde.DataError, match="gather_rows was given strings, and between workers or GPUs only numbers"):
        seen_by_each(collective, {"words": tf.constant(["a", "b", "c"])})


def test_outside_of_a_step_and_on_one_device_rows_are_what_was_given(mirrored):
    x = {"x": X, "none": None}
    assert kde.gather_rows(x) is x
    with mirrored.scope():
        assert kde.gather_rows(x) is x
    np.testing.assert_array_equal(kde.row_indices(X), np.arange(22))


def test_a_function_on_every_replica_gathers_too(mirrored):
    def place_and_sum(x):
        rows = kde.gather_rows({"x": x})["x"]
        return tf.stack([kde.row_indices(x), tf.cast(tf.reduce_sum(rows) + 0.0 * x, tf.int32)], 1)

    x = np.arange(5, dtype="float32")
    found = kde.gather(kde.per_replica(place_and_sum, mirrored)(x), mirrored)
    np.testing.assert_array_equal(found, [[i, 10] for i in range(5)])


def in_a_step(strategy, function, x=X, **arguments):
    class Net(kde.Model):
        def call(self, x):
            return x

        def train_step(self, x):
            return {"value": function(x)}

    with strategy.scope():
        net = Net()
        net.compile(**arguments)
    return net.fit(x, batch_size=7, shuffle=False, verbose=0).history


def test_rows_are_gathered_in_branches_and_loops_of_the_graph_but_not_of_a_tape(mirrored):
    def many(x):
        return tf.reduce_sum(kde.gather_rows(x))

    def in_branch(x):
        return tf.cond(tf.reduce_sum(kde.gather_rows(x)) < 1e9, lambda: many(x), lambda: 0.0)

    def in_loop(x):
        return tf.while_loop(lambda i, total: i < 2, lambda i, total: (i + 1, total + many(x)), (0, 0.0))[1]

    def in_branch_of_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = in_branch(x)
        return tf.reduce_sum(tape.gradient(loss, x))

    expected = X[21:].sum()  # of the last batch
    np.testing.assert_allclose(in_a_step(mirrored, in_branch)["value"], expected, rtol=1e-5)
    np.testing.assert_allclose(in_a_step(mirrored, in_loop)["value"], 2 * expected, rtol=1e-5)
    with pytest.raises(kde.LoopError, match="gather_rows, a sum .* inside of .* a branch or loop in the graph"):
        in_a_step(mirrored, in_branch_of_tape)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rows_that_are_not_those_of_the_batch_are_refused(mirrored, run_eagerly):
    def two_views(x):
        return tf.reduce_sum(kde.gather_rows(tf.concat([x, x], 0)))

    message = "gather_rows was given a tensor of the shape .* 5., which has not one row for each example of the batch"
    with pytest.raises(kde.DataError, match=message):
        in_a_step(mirrored, two_views, run_eagerly=run_eagerly)
    static = tf.data.Dataset.from_tensor_slices(X).batch(4, drop_remainder=True)
    with pytest.raises(kde.DataError, match=r"of the shape \(4, 5\), which has not one row"):
        in_a_step(mirrored, two_views, static)


def test_what_has_no_rows_or_is_not_dense_is_refused(mirrored):
    with pytest.raises(kde.DataError, match=r"gather_rows was given a tensor of the shape \(\), which has no rows"):
        in_a_step(mirrored, lambda x: kde.gather_rows(tf.reduce_sum(x)))
    with pytest.raises(kde.DataError, match=r"given a RaggedTensor, and gathers dense tensors. Make it dense"):
        in_a_step(mirrored, lambda x: tf.reduce_sum(kde.gather_rows(tf.RaggedTensor.from_tensor(x))))


# Where it is asked for


@pytest.mark.parametrize("case", rotating(row_runs.COMPILED, [], slow=["a sum of own"]))
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_losses_metrics_and_layers_of_a_compiled_model_see_all_rows(strategies, case, kind):
    y = X.sum(axis=1, keepdims=True)
    nets = [
        row_runs.compiled(lib, strategy, **row_runs.COMPILED[case])
        for lib, strategy in ((kde, strategies.get(kind)), (keras, DEFAULT))
    ]
    given = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:9], y[:9])}
    ours, stock = (net.fit(X, y, **given).history for net in nets)
    assert_close([ours], [stock])
    for one, other in zip(*(net.get_weights() for net in nets), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    ours, stock = (net.predict(X, batch_size=7, verbose=0) for net in nets)
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=on_two_workers(row_runs.train_compiled_on_workers, case)) for case in row_runs.COMPILED],
)
def test_so_they_do_on_two_workers(values, case):
    expected = row_runs.train_compiled(keras, DEFAULT, case)
    for found in values:
        assert_close(found, expected)


@pytest.mark.slow
def test_a_train_loop_keeps_rows_of_all_and_may_not_add_up_what_is_equal(mirrored):
    with mirrored.scope():
        bank = tf.Variable(tf.zeros([4, 5]), trainable=False)
        layer = keras.layers.Dense(5, kernel_initializer="ones")
        layer.build((None, 5))
    optimizer = keras.optimizers.SGD(0.1)

    def step(replica, x):
        with tf.GradientTape() as tape:
            z = kde.gather_rows(layer(x))
            loss = tf.reduce_mean(tf.math.reduce_variance(z, 0))
        weights = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        bank.assign(tf.concat([kde.gather_rows(x), bank], 0)[:4])
        return {"loss": loss}

    def loop(reduction):
        parts = {"bank": bank, "layer": layer, "optimizer": optimizer}
        return kde.TrainLoop(step, parts=parts, reduce={"loss": reduction}, strategy=mirrored)

    with pytest.raises(kde.LoopError, match="'loss' is computed from gathered rows alone, .* would count 2 times"):
        loop("sum").fit(X, batch_size=7, verbose=0)
    before = X[:7].astype("float64") @ np.ones((5, 5))
    history = loop("mean").fit(X[:7], batch_size=7, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [before.var(axis=0).mean()], rtol=1e-5)
    for copy in components(bank):
        np.testing.assert_array_equal(copy.numpy(), X[:4])
    centered = X[:7] - X[:7].mean(axis=0)
    expected = 1.0 - 0.1 * 2 / 5 * np.mean(centered[:, :, None] * (before - before.mean(axis=0))[:, None, :], axis=0)
    np.testing.assert_allclose(layer.kernel.numpy(), expected, rtol=1e-5)
