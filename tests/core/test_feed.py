"""Steps are handed out a share of a second at a time; every batch is used once, in order, and counted right."""

import gc
import re
import threading

import keras
import numpy as np
import odd_batch_runs
import pytest
import tensorflow as tf
from cases import rotating
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Strategies
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import DataError
from keras_dist_ext.training import epoch_data
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.execution import Execution
from keras_dist_ext.training.execution_sizer import ExecutionSizer
from keras_dist_ext.training.program import StepProgram

TARGET = 0.12  # seconds


# ExecutionSizer


def test_a_fixed_pace_ignores_the_clock():
    sizer = ExecutionSizer(7)
    for seconds in (0.0, 1e-9, 100.0):
        sizer.record(7, seconds)
        assert sizer.num_steps == 7
    assert not sizer.follows_clock


def test_a_pace_that_follows_the_clock_starts_with_one_step_and_grows_to_its_target():
    sizer, made = ExecutionSizer(), []
    assert sizer.follows_clock
    for _ in range(8):
        made.append(sizer.num_steps)
        sizer.record(sizer.num_steps, sizer.num_steps / 1024)
    assert made == [1, 1, 8, 64, 122, 122, 122, 122]


def test_the_first_execution_was_compiled_and_does_not_count():
    sizer = ExecutionSizer()
    sizer.record(1, 1e-6)
    assert sizer.num_steps == 1


def test_an_execution_without_steps_does_not_count():
    sizer = ExecutionSizer()
    sizer.record(1, 5.0)
    sizer.record(0, 0.0)
    sizer.record(0, 100.0)
    assert sizer.num_steps == 1
    sizer.record(1, 0.001)
    assert sizer.num_steps == 8


def test_an_execution_too_short_for_the_clock_grows_too():
    sizer = ExecutionSizer()
    sizer.record(1, 1.0)
    sizer.record(1, 0.0)
    assert sizer.num_steps == 8


@given(st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=40))
@example([1e-6] * 6 + [10.0] * 3)
def test_executions_never_keep_being_longer_than_their_target(step_seconds):
    """Steps of changing length: an execution is too long once, when they grow, and the next one fits."""
    sizer, before = ExecutionSizer(), None
    for seconds in step_seconds:
        num_steps = sizer.num_steps
        assert num_steps >= 1
        if before is not None and seconds <= before[1]:
            assert num_steps == 1 or num_steps * seconds <= TARGET * 1.001
        if before is not None:
            assert num_steps <= 8 * before[0]
        sizer.record(num_steps, num_steps * seconds)
        before = num_steps, seconds


def test_another_target_is_aimed_at():
    sizer = ExecutionSizer(seconds=1.0)
    for _ in range(6):
        sizer.record(sizer.num_steps, sizer.num_steps * 0.1)
    assert sizer.num_steps == 10


# EpochData


class Program(StepProgram):
    """Notes what a compiled loop would be given, in its place: the batches of each execution, and how they came."""

    def __init__(self):
        self.executions = []

    def on_iterator(self, iterator, num_steps, one_step=False):
        self.executions.append([int(next(iterator)[0]) for _ in range(int(num_steps))])

    def on_optional(self, ahead, iterator, num_steps, one_step=False):
        self.executions.append([])
        while len(self.executions[-1]) < int(num_steps) and ahead.has_value():
            self.executions[-1].append(int(ahead.get_value()[0]))
            ahead = iterator.get_next_as_optional()
        return len(self.executions[-1]), ahead, bool(ahead.has_value()), None


def make_data(dataset, num_steps=3, **arguments):
    runtime = kde.Sequential([keras.layers.Dense(1)]).replica_runtime
    data = EpochData(runtime, "train", ExecutionSizer(num_steps), x=dataset, steps_per_execution=1, **arguments)
    data.is_built_for = True
    return data


def run_epochs(data, num_epochs=1):
    """Run epochs as Keras' loops do; return for each the (first, last) step that was announced, and what was used."""
    epochs = []
    for _ in range(num_epochs):
        program, announced, made = Program(), [], []
        for first, last, execution in data:
            announced.append((first, last))
            execution.run(program)
            made.append(data.last_step)
        epochs.append((announced, made, program.executions))
    return epochs


def numbers(count=None):
    """One-element batches 0, 1, 2, ... of known length, or endless."""
    return (tf.data.Dataset.range(count) if count is not None else tf.data.Dataset.counter()).batch(1)


def of_unknown_length(count):
    return tf.data.Dataset.range(count).filter(lambda _: True).batch(1)


def test_an_epoch_of_known_length_is_cut_into_executions():
    ((announced, made, used),) = run_epochs(make_data(numbers(8)))
    assert announced == [(0, 2), (3, 5), (6, 7)]
    assert made == [2, 5, 7]
    assert used == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_the_last_step_of_unknown_length_is_the_one_that_was_made():
    ((announced, made, used),) = run_epochs(make_data(of_unknown_length(8)))
    assert announced == [(0, 2), (3, 5), (6, 8)]  # nobody can know before
    assert made == [2, 5, 7]
    assert used == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("make", [numbers, of_unknown_length])
def test_the_end_of_an_epoch_makes_no_empty_execution(make):
    ((announced, _made, used),) = run_epochs(make_data(make(6)))
    assert announced == [(0, 2), (3, 5)]
    assert used == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("make", [numbers, of_unknown_length])
def test_every_epoch_begins_at_the_beginning(make):
    epochs = run_epochs(make_data(make(4)), num_epochs=3)
    assert [used for _, _, used in epochs] == [[[0, 1, 2], [3]]] * 3


def test_steps_per_epoch_go_on_through_one_iterator():
    epochs = run_epochs(make_data(numbers(), steps_per_epoch=5), num_epochs=3)
    assert [announced for announced, _, _ in epochs] == [[(0, 2), (3, 4)]] * 3  # steps are counted in each epoch
    assert [used for _, _, used in epochs] == [
        [[0, 1, 2], [3, 4]],
        [[5, 6, 7], [8, 9]],
        [[10, 11, 12], [13, 14]],
    ]


@pytest.mark.parametrize("make", [numbers, of_unknown_length])
def test_data_that_runs_out_before_steps_per_epoch_warns_and_begins_again(make):
    data = make_data(make(7), steps_per_epoch=5)
    assert run_epochs(data)[0][2] == [[0, 1, 2], [3, 4]]
    with pytest.warns(UserWarning, match="Your input ran out of data; interrupting training"):
        assert run_epochs(data)[0][2] == [[5, 6]]
    assert run_epochs(data)[0][2] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("make", [numbers, of_unknown_length])
def test_data_that_runs_out_with_the_epoch_begins_again_without_a_warning(make):
    epochs = run_epochs(make_data(make(5), steps_per_epoch=5), num_epochs=2 if make is numbers else 1)
    assert [used for _, _, used in epochs] == [[[0, 1, 2], [3, 4]]] * len(epochs)


@pytest.mark.parametrize("make", [numbers, of_unknown_length])
def test_an_empty_dataset_is_an_error(make):
    with pytest.raises(DataError, match=re.escape("The dataset has no batch: there is nothing to compute.")):
        run_epochs(make_data(make(0)))


def test_an_execution_is_given_once():
    data = make_data(numbers(3))
    _, _, execution = next(iter(data))
    assert next(execution) is execution
    with pytest.raises(StopIteration):
        next(execution)


def test_batches_of_an_execution_are_counted_as_they_are_taken():
    data = make_data(of_unknown_length(4))
    taken = []
    for _first, _last, execution in data:
        taken.append([int(batch[0]) for batch in execution.batches()])
        assert execution.num_made == len(taken[-1])
    assert taken == [[0, 1, 2], [3]]


def test_specs_have_any_number_of_rows_and_read_no_data():
    def generate():
        raise AssertionError("the data was read")
        yield

    signature = (tf.TensorSpec((8, 3)), {"label": tf.TensorSpec((8,), tf.int32)})
    data = make_data(tf.data.Dataset.from_generator(generate, output_signature=signature))
    assert data.dataset.batch_spec == (tf.TensorSpec((None, 3)), {"label": tf.TensorSpec((None,), tf.int32)})


class Peers:
    """Other workers, who have batches left."""

    @staticmethod
    def sum(values):
        return [value + 1 for value in values]


@pytest.mark.parametrize(
    "rows",
    [
        tf.constant([[1.0, 2.0]]),
        tf.ragged.constant([[1, 2]]),
        tf.ragged.constant([[[1, 2], [3]]]),
        tf.ragged.constant([[[1, 2], [3, 4]]], ragged_rank=1),
        tf.sparse.from_dense([[0, 1, 2]]),
    ],
    ids=["dense", "ragged", "ragged twice", "ragged, then dense", "sparse"],
)
def test_a_worker_that_has_run_out_gives_batches_without_rows_of_the_same_kind(rows):
    reader = BatchReader(tf.data.Dataset.from_tensors({"x": rows}), 1, Peers())
    batch, none = reader.next_batch()["x"], reader.next_batch()["x"]
    assert tf.type_spec_from_value(batch).most_specific_common_supertype([tf.type_spec_from_value(none)]) is not None
    concat = tf.sparse.concat if isinstance(batch, tf.SparseTensor) else lambda axis, values: tf.concat(values, axis)
    np.testing.assert_array_equal(as_dense(concat(0, [batch, none])), as_dense(rows))


def test_nobody_waits_for_an_iterator_that_takes_long_to_end():
    may_end, ended = threading.Event(), []

    class Slow:
        element_spec = tf.TensorSpec([None])

        def __iter__(self):
            return self

        def __next__(self):
            return tf.zeros([1])

        def __del__(self):
            ended.append(may_end.wait(60))

    BatchReader(Slow(), 2**40, on_tpu=True).close()
    assert ended == []
    may_end.set()
    wait_for_iterators()
    assert ended == [True]


def wait_for_iterators():
    for thread in threading.enumerate():
        if thread.name == "dropped iterator":
            thread.join(60)


def as_dense(value):
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return value.to_tensor() if isinstance(value, tf.RaggedTensor) else value


# In fit


def dense(strategy, **arguments):
    with strategy.scope():
        net = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        net.compile(keras.optimizers.SGD(0.01), "mse", **arguments)
    return net


@pytest.mark.parametrize("kind", rotating(Strategies.KINDS, ["mirrored2"]))
def test_the_data_is_let_go_when_a_run_ends(kind, strategies):
    strategy = strategies.get(kind)
    events = []

    def rows():
        try:
            while True:
                yield tf.ones([8, 1]), tf.ones([8, 1])
        finally:
            events.append("let go")

    net = dense(strategy)
    data = tf.data.Dataset.from_generator(rows, output_signature=(tf.TensorSpec([8, 1]),) * 2)
    gc.disable()  # what is let go only as garbage is too late
    try:
        net.fit(data, steps_per_epoch=2, validation_data=data, validation_steps=1, verbose=0)
        wait_for_iterators()
        events.append("fit is over")
        net.evaluate(data, steps=1, verbose=0)
        net.predict(data, steps=1, verbose=0)
        wait_for_iterators()
    finally:
        gc.enable()
    assert events == ["let go"] * 2 + ["fit is over"] + ["let go"] * 2


class Reads:
    """A pipeline that counts how often it was started, and which elements were drawn."""

    def __init__(self, num_batches=None):
        self.num_batches = num_batches
        self.starts = 0
        self.drawn = 0

    def dataset(self):
        def generate():
            self.starts += 1
            i = 0
            while self.num_batches is None or i < self.num_batches:
                self.drawn += 1
                yield np.full((4, 1), i, "float32"), np.full((4, 1), i, "float32")
                i += 1

        spec = tf.TensorSpec((None, 1))
        return tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))


def test_a_pipeline_is_started_once_an_epoch(mirrored):
    reads, validation = Reads(5), Reads(2)
    dense(mirrored).fit(reads.dataset(), validation_data=validation.dataset(), epochs=3, verbose=0)
    assert (reads.starts, reads.drawn) == (3, 15)
    assert (validation.starts, validation.drawn) == (3, 6)


def test_an_endless_pipeline_is_started_once_a_fit(mirrored):
    reads = Reads()
    dense(mirrored).fit(reads.dataset(), steps_per_epoch=4, epochs=3, verbose=0)
    assert reads.starts == 1
    assert 12 <= reads.drawn < 24  # tf.data draws some ahead, as many as it likes


class SeenRows(kde.Model):
    """Adds up the rows that it is trained on, and their number."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x):
        return self.head(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.update_state(tf.pow(100.0, x) / 4)  # row i counts in the digits of 100^i
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("num_epochs", rotating([1, 3], [3]))
def test_elements_of_a_generator_are_used_exactly_once(mirrored, num_epochs):
    def generate():
        for i in range(3 * num_epochs):
            yield np.full((4, 1), i % 3, "float32"), np.zeros((4, 1), "float32")

    with mirrored.scope():
        net = SeenRows()
        net.compile("sgd", "mse")
    history = net.fit(generate(), steps_per_epoch=3, epochs=num_epochs, verbose=0).history
    assert history["seen"] == [10101.0] * num_epochs
    assert int(net.optimizer.iterations.numpy()) == 3 * num_epochs


class BatchEnds(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.train, self.test, self.begins = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.train.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.test.append(batch)


def test_callbacks_are_told_the_last_batch_of_unknown_length(mirrored):
    ends = BatchEnds()
    dense(mirrored, steps_per_execution=4).fit(
        Reads(10).dataset(), validation_data=Reads(6).dataset(), epochs=2, verbose=0, callbacks=[ends]
    )
    assert ends.begins == [0, 4, 8] * 2
    assert ends.train == [3, 7, 9] * 2
    assert ends.test == [3, 5] * 2


@pytest.mark.rotating
def test_the_progress_bar_of_unknown_length_ends_at_the_last_batch(mirrored, capsys):
    dense(mirrored, steps_per_execution=4).fit(Reads(10).dataset(), epochs=2, verbose=2)
    _, first, _, second = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert first.startswith("10/10 - ")
    assert second.startswith("10/10 - ")


def test_an_empty_dataset_is_an_error_of_fit_evaluate_and_predict(mirrored):
    net = dense(mirrored)
    empty = tf.data.Dataset.from_tensor_slices((np.zeros((0, 1), "float32"),) * 2).batch(4)
    for call in (net.fit, net.evaluate, net.predict):
        with pytest.raises(DataError, match="The dataset has no batch"):
            call(empty, verbose=0)


@pytest.mark.parametrize("drop_remainder", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensors_of_different_numbers_of_rows_are_refused(mirrored, drop_remainder):
    """On one device, a table may come along with each batch."""
    x = np.ones((12, 1), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x)).batch(4, drop_remainder=drop_remainder)
    batches = batches.map(lambda x, y: (x, y, {"table": tf.ones([3, 1])}))

    class Net(kde.Sequential):
        def train_step(self, data):
            x, y, extra = data
            return {"mine": tf.reduce_mean(self(x) + y) + tf.reduce_mean(extra["table"])}

    with mirrored.scope():
        net = Net([keras.Input((1,)), keras.layers.Dense(1)])
        net.compile("sgd")
    expected = r"A batch holds tensors of different numbers of rows \(x 4, y 4, sample_weight/table 3\), so it cannot"
    with pytest.raises(DataError, match=expected):
        net.fit(batches, verbose=0)


X_ONLY = {"x": np.ones((4, 1), "float32"), "table": np.arange(10, dtype="float32")}


def of_unequal_rows(rows, table):
    def batches():
        for _ in range(2):
            yield X_ONLY, np.zeros((4, 1), "float32")

    features = {"x": tf.TensorSpec((rows, 1)), "table": tf.TensorSpec((table,))}
    return tf.data.Dataset.from_generator(batches, output_signature=(features, tf.TensorSpec((rows, 1))))


KNOWN = {"none": (None, None), "all": (4, 10), "some": (None, 10)}


@pytest.mark.parametrize("known", rotating(KNOWN, ["none"]))
@pytest.mark.parametrize("run_eagerly", rotating([False, True], [False]))
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_unequal_rows_are_one_error_whenever_they_are_known(strategies, kind, known, run_eagerly):
    mirrored = strategies.get(kind)

    class Net(kde.Model):
        def __init__(self):
            super().__init__()
            self.offset = self.add_weight(shape=(1,), initializer="zeros")

        def call(self, features):
            return features["x"] * tf.reduce_sum(features["table"]) + self.offset

    with mirrored.scope():
        net = Net()
        net.compile("sgd", "mse", run_eagerly=run_eagerly)
    data, y = of_unequal_rows(*KNOWN[known]), np.zeros((4, 1), "float32")
    loop = kde.TrainLoop(
        lambda replica, batch: {"x": tf.reduce_mean(batch[0]["x"])}, parts={}, reduce={"x": "mean"}, strategy=mirrored
    )
    expected = r"A batch holds tensors of different numbers of rows \(x/table 10, x/x 4, y 4\), so it cannot be split"
    for call in (net.fit, net.evaluate, loop.fit):
        with pytest.raises(DataError, match=expected):
            call(data, verbose=0)
    for call in (net.train_on_batch, net.test_on_batch):
        with pytest.raises(DataError, match=expected):
            call(X_ONLY, y)
    for call, x in ((net.predict, data.map(lambda x, y: x)), (net.predict_on_batch, X_ONLY)):
        with pytest.raises(DataError, match=r"rows \((x/)?table 10, (x/)?x 4\), so"):
            call(x)


@pytest.mark.parametrize("rows", [4, None])
def test_a_number_that_comes_along_with_a_batch_is_the_same_on_all_replicas(mirrored, rows):
    class Scaled:
        def train_step(self, data):
            x, y, factor = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) * factor - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, "factor": factor}

    x = np.linspace(0, 1, 7, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4, drop_remainder=rows is not None)
    data = data.map(lambda x, y: (x, y, tf.constant(1.5)))
    found = []
    for lib, strategy in ((keras, tf.distribute.get_strategy()), (kde, mirrored)):
        with strategy.scope():
            net = type("Net", (Scaled, lib.Sequential), {})([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            net.set_weights([np.ones((1, 1))])
            net.compile(keras.optimizers.SGD(0.1))
        found.append([*net.fit(data, verbose=0).history.values(), net.get_weights()[0][0]])
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "known", [pytest.param(name, marks=on_two_workers(odd_batch_runs.refusals, *KNOWN[name])) for name in KNOWN]
)
def test_so_they_are_on_two_workers_and_an_output_without_rows_too(values, known):
    unequal = r"A batch holds tensors of different numbers of rows \((x/)?table 10, (x/)?x 4(, y 4)?\), so it cannot be"
    for told in values:
        for call in ("fit", "evaluate", "predict", "train_on_batch"):
            assert re.match(unequal, told[call]), call
        assert "predict: the output more has the shape (), without a dimension for" in told["an output of no row"]


class Whole(kde.Model):
    """Gives, beside its examples, what is not for each of them."""

    def __init__(self, give):
        super().__init__()
        self.scale = self.add_weight(shape=(3,), initializer="ones")
        self.give = give

    def call(self, x):
        return {"x": x, "more": self.give(self, x)}


@pytest.mark.parametrize("run_eagerly", rotating([False, True], [False]))
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_an_output_that_is_not_for_each_example_is_refused(strategies, kind, run_eagerly):
    mirrored = strategies.get(kind)
    refused = {r"\(\)": lambda net, x: tf.reduce_mean(x), r"\(3,\)": lambda net, x: net.scale + 0.0}
    for shape, give in refused.items():
        with mirrored.scope():
            net = Whole(give)
            net.compile(run_eagerly=run_eagerly)
        x = np.ones((6, 2), "float32")
        expected = rf"predict: the output more has the shape {shape}, without a dimension for the examples"
        with pytest.raises(DataError, match=expected):
            net.predict(x, batch_size=4, verbose=0)
        with pytest.raises(DataError, match=expected):
            net.predict_on_batch(x)


def test_outputs_of_several_rows_for_an_example_and_of_selected_examples_come_in_order(mirrored):
    x = np.arange(12, dtype="float32").reshape(6, 2)
    outputs = {
        "flat": (lambda net, x: tf.reshape(x, [-1]), x.ravel()),
        "selected": (lambda net, x: tf.boolean_mask(x, x[:, 0] > 3), x[x[:, 0] > 3]),
    }
    for give, expected in outputs.values():
        with mirrored.scope():
            net = Whole(give)
            net.compile()
        for found in (net.predict(x, batch_size=4, verbose=0), net.predict_on_batch(x)):
            np.testing.assert_array_equal(found["more"], expected)


def test_an_output_of_groups_of_examples_is_refused(mirrored):
    """Each replica has a part of a group that lies across two, and other groups than one device."""
    with mirrored.scope():
        net = Whole(lambda net, x: tf.math.segment_mean(x, tf.cast(x[:, 0], tf.int32)))
        net.compile()
    x = np.repeat(np.arange(4, dtype="float32"), [2, 5, 3, 4])[:, None]
    expected = "predict: the output more has 4 rows for a batch of 14 examples on one device, and 6 where each replica"
    for _ in range(2):  # and it stays so
        with pytest.raises(DataError, match=expected):
            net.predict(x, batch_size=14, verbose=0)
        with pytest.raises(DataError, match=expected):
            net.predict_on_batch(x)


def test_a_tensor_of_unknown_rank_is_refused(mirrored):
    x = np.ones((12, 1), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
    batches = batches.map(lambda x, y: (x, tf.py_function(lambda y: y, [y], tf.float32)))
    net = dense(mirrored)
    for call in (net.fit, net.evaluate):
        with pytest.raises(DataError, match=r"tensor of float32 whose number of dimensions is unknown.*ensure_shape"):
            call(batches, verbose=0)


def test_executions_follow_the_clock_in_fit(mirrored, monkeypatch):
    made = []

    class Counted(Execution):
        def __init__(self, reader, num_steps, first=1):
            super().__init__(reader, num_steps, first)
            made.append(num_steps)

        def run(self, program):
            logs = super().run(program)
            self.seconds = 0.001 * self.num_made
            return logs

    monkeypatch.setattr(epoch_data, "Execution", Counted)
    x = np.zeros((1200, 1), "float32")
    dense(mirrored).fit(x, x, batch_size=4, verbose=0)
    assert made == [1, 1, 8, 64, 120, 106]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.float32(3),), "The data, a float32, is a scalar, which has no examples"),
        (([np.ones((4, 2)), np.array(1)],), "The data, a list, holds a scalar"),
        ((np.ones((4, 2)), np.float32(1)), "The data, a float32, is a scalar"),
        ((None,), "fit was given None as x: there is no data"),
        (({},), "fit was given an empty dict as x"),
        ((tf.data.Dataset.range(4).window(2),), "elements of the dataset are datasets"),
    ],
)
def test_what_holds_no_examples_is_refused_by_name(data, message, mirrored):
    with mirrored.scope():
        model = kde.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(DataError, match=message):
        model.fit(*data, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("gives_list", [False, True], ids=["callbacks", "a CallbackList"])
def test_data_that_is_split_already_trains_eagerly_as_on_one_device(gives_list, mirrored):
    """Callbacks in a list of Keras' own are called as it has them."""

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(4)
        seen = []
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))]
        if gives_list:
            callbacks = keras.callbacks.CallbackList(callbacks, add_history=True, model=model)
        if strategy is mirrored:
            data = strategy.experimental_distribute_dataset(data)
        model.fit(data, steps_per_epoch=2, verbose=0, callbacks=callbacks)
        assert seen == [0, 1]
        return model.get_weights()

    for ours, expected in zip(trained(mirrored), trained(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.slow
def test_an_iterator_that_can_seek_is_read_from_its_place_and_not_ahead_of_the_run(mirrored):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    class Batches:
        def __init__(self):
            self.batch, self.places = 0, []

        def __next__(self):
            rows = slice(4 * (self.batch % 6), 4 * (self.batch % 6) + 4)
            self.batch += 1
            return x[rows], y[rows]

        def seek(self, batch):
            self.places.append(batch)
            self.batch = batch

    def trained(strategy, data, **given):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(*data, epochs=2, verbose=0, **given)
        return model.get_weights()

    batches = Batches()
    ours = trained(mirrored, [batches], steps_per_epoch=3)
    assert batches.places == [0]
    expected = trained(tf.distribute.get_strategy(), [x, y], batch_size=4, shuffle=False, steps_per_epoch=3)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
def test_a_model_whose_call_only_runs_eagerly_trains_as_on_one_device(mirrored):
    class Eager(kde.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1, name="head")

        def call(self, x):
            return self.head(x if x.numpy().shape[1] == 3 else x[:, :3])

    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}

    def made(strategy, is_built):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Eager()
            if is_built:
                model(x[:1])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
        return model

    def trained(strategy):
        model = made(strategy, True)
        history = model.fit(x, y, epochs=2, validation_data=(x[:5], y[:5]), **fit).history
        return [*model.get_weights(), *history.values()]

    for ours, expected in zip(trained(mirrored), trained(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
    with pytest.raises(RuntimeError, match="Please build it yourself before calling fit"):
        made(mirrored, False).fit(x, y, **fit)
