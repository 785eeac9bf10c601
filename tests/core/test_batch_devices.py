"""Batches are on GPUs one step before they are needed, each replica's rows on its own, and nothing goes back.

No GPU is needed: one or two of the logical CPUs are taken for some.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import resume_runs as runs
import tensorflow as tf
from cases import rotating
from executed_graphs import graphs_executed_by
from strategies import Strategies

import keras_dist_ext as kde
from keras_dist_ext.strategy.pick import pick_strategy
from keras_dist_ext.training import batch_devices, batch_reader
from keras_dist_ext.training.batch_devices import BatchTargets

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*shuffle=True.*was passed, but will be ignored"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

GPU = "/job:localhost/replica:0/task:0/device:CPU:1"
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = np.arange(24, dtype="int32") % 2


@pytest.fixture
def take_for_gpus(monkeypatch: pytest.MonkeyPatch, strategies: Strategies) -> None:
    """Take CPU:1 and CPU:2 for GPUs."""
    strategies.get("one_device")
    monkeypatch.setattr(batch_devices, "_is_gpu", lambda device: device.endswith(("CPU:1", "CPU:2")))
    monkeypatch.setattr(batch_devices, "LEAST_BYTES", 0)


@pytest.fixture
def gpu(take_for_gpus: None) -> tf.distribute.Strategy:
    """One replica, on what is taken for a GPU."""
    return pick_strategy("one_device", devices=["CPU:1"], environ={}).strategy


@pytest.fixture
def two_gpus(take_for_gpus: None) -> tf.distribute.Strategy:
    """Two replicas, each on what is taken for a GPU."""
    return pick_strategy("mirrored", devices=["CPU:1", "CPU:2"], environ={}).strategy


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> tf.distribute.Strategy:
    """One replica or two, as the parameter says."""
    return request.getfixturevalue({1: "gpu", 2: "two_gpus"}[request.param])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs of what loops send ahead, as they are traced."""
    seen = []
    original = batch_devices.BatchDevices.sent_ahead

    def note(self: Any, spec: Any) -> Any:
        ahead = original(self, spec)
        if ahead.shapes:
            seen.append(spec)
        return ahead

    monkeypatch.setattr(batch_devices.BatchDevices, "sent_ahead", note)
    return seen


def net(cls: Any = keras.Sequential, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    return model


def ours(strategy: tf.distribute.Strategy, **compiled: Any) -> Any:
    with strategy.scope():
        return net(kde.Sequential, **compiled)


class Pulls:
    """A dataset from a generator, which counts what was asked of it."""

    def __init__(self, num_batches: int | None, fails_at: int | None = None) -> None:
        self.num_batches, self.fails_at, self.num_pulled, self.num_begun = num_batches, fails_at, 0, 0

    def dataset(self) -> tf.data.Dataset:
        spec = tf.TensorSpec((None, 3)), tf.TensorSpec((None,), tf.int32)
        return tf.data.Dataset.from_generator(self._batches, output_signature=spec)

    def _batches(self) -> Iterator[Any]:
        self.num_begun += 1
        number = 0
        while self.num_batches is None or number < self.num_batches:
            if number == self.fails_at:
                raise ValueError("no such batch")
            self.num_pulled += 1
            at = number % 5 * 4
            yield X[at : at + 3 + number % 2], Y[at : at + 3 + number % 2]
            number += 1


def batched(*leaves: Any, repeats: int | None = 1) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(leaves).batch(5).repeat(repeats)


CASES = {
    "of known length, the last batch smaller": lambda: (batched(X, Y), {}),
    "endless": lambda: (batched(X, Y, repeats=None), {"steps_per_epoch": 7}),
    "of unknown length": lambda: (batched(X, Y).filter(lambda *_: True), {}),
    "longer than an epoch": lambda: (batched(X, Y, repeats=3), {"steps_per_epoch": 4}),
    "arrays": lambda: (X, {"y": Y, "batch_size": 7, "shuffle": False}),
    "arrays with class weights": lambda: (X, {"y": Y, "batch_size": 7, "shuffle": False, "class_weight": {0: 3}}),
    "sample weights": lambda: (batched(X, Y, X[:, 0] ** 2), {}),
    "one step an execution": lambda: (batched(X, Y, repeats=None), {"steps_per_epoch": 7, "steps_per_execution": 1}),
    "two steps an execution": lambda: (batched(X, Y), {"steps_per_execution": 2}),
}  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
@pytest.mark.parametrize("case", rotating(CASES, ["endless"], slow=["of known length, the last batch smaller"]))
def test_fit_and_evaluate_give_the_numbers_of_keras(case: str, gpus: tf.distribute.Strategy, sent: list[Any]) -> None:
    data, arguments = CASES[case]()
    compiled = {name: arguments.pop(name) for name in ("steps_per_execution",) if name in arguments}
    of_test = {"steps": 3} if "steps_per_epoch" in arguments else {}
    results = []
    known = batched(X, Y) if case == "of unknown length" else data  # of others, Keras counts a step too many
    for model, given in ((net(steps_per_execution=1), known), (ours(gpus, **compiled), data)):
        history = model.fit(given, epochs=3, verbose=0, **arguments).history["loss"]
        test = model.evaluate(given, arguments.get("y"), verbose=0, **of_test)
        results.append([*history, test, *[weight.ravel() for weight in model.get_weights()]])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    assert bool(sent) == (case != "one step an execution")


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, [True, True, False, False]), (2, [True, False, False, False])])
def test_a_small_batch_is_sent_in_its_step(num_gpus: int, expected: list[bool]) -> None:
    devices = batch_devices.BatchDevices("/device:CPU:0", BatchTargets([GPU] * num_gpus, num_replicas=num_gpus))
    labels = tf.TensorSpec((None,), tf.int64)

    def is_sent(*shape: int | None) -> bool:
        return bool(devices.sent_ahead((tf.TensorSpec(shape), labels)).shapes)

    shapes = (256, 32, 32, 3), (None, 512), (None, 511), (32, 8)
    assert [is_sent(*shape) for shape in shapes] == expected


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
@pytest.mark.parametrize("num_batches", rotating([6, None], [6]))
def test_nothing_is_read_that_no_step_uses(num_batches: int | None, gpus: tf.distribute.Strategy) -> None:
    reads = Pulls(num_batches)
    ours(gpus).fit(reads.dataset(), epochs=2, verbose=0, steps_per_epoch=None if num_batches else 6)
    assert reads.num_begun == (2 if num_batches else 1)
    assert reads.num_pulled == 12 if num_batches else 12 <= reads.num_pulled < 24  # tf.data draws some ahead


@pytest.mark.rotating
def test_an_error_of_the_data_is_raised_as_without_a_gpu(gpu: tf.distribute.Strategy) -> None:
    for model in (ours(Strategies().get("one_device")), ours(gpu)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no such batch"):
            model.fit(Pulls(9, fails_at=5).dataset(), verbose=0, steps_per_epoch=9)


class Marked(kde.Model):
    """Its output is linear in the place of an example in the batch, and in what one device would draw for it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        places = tf.cast(kde.row_indices(inputs), tf.float32)[:, None]
        return self.scale(self.dropout(inputs + places, training=training))


@pytest.mark.parametrize("batch", rotating([7, 1], [7]))
def test_replicas_know_which_rows_of_the_batch_they_were_sent(
    batch: int, two_gpus: tf.distribute.Strategy, strategies: Strategies, sent: list[Any]
) -> None:
    """A batch of one row leaves a replica without any."""
    results = []
    for strategy in (strategies.get("default"), two_gpus):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Marked()
            model.compile(keras.optimizers.SGD(0.01), "mse", check=False)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)
        model.fit(data, epochs=2, verbose=0, callbacks=[kde.ReplicaSeeds(5, draws="global")])
        results.append(model.get_weights()[0])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    assert sent


@pytest.mark.parametrize("rows", rotating([None, 6], [None]))
def test_each_gpu_is_sent_its_rows_alone(rows: int | None, two_gpus: tf.distribute.Strategy, sent: list[Any]) -> None:
    """Also where the number of rows is static, and where a leaf has none, or is not for a GPU."""
    seen: list[list[Any]] = []

    class Net(kde.Model):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(3, 1), initializer="ones")

        def call(self, inputs: Any) -> Any:
            seen.append([inputs[name].shape.as_list() for name in ("x", "y_factor", "words")])
            lengths = tf.cast(tf.strings.length(inputs["words"]), "float32")
            return inputs["x"] @ self.scale * inputs["y_factor"] * lengths[:, None]

    with two_gpus.scope():
        model = Net()
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mse"], jit_compile=False, check=False)
    words = np.array(["a", "b"] * 12)
    data = tf.data.Dataset.from_tensor_slices((X, words, X[:, :1])).batch(6, drop_remainder=rows is not None)
    data = data.map(lambda x, words, y: ({"x": x, "y_factor": 2.0, "words": words}, y))
    found = model.fit(data, epochs=1, verbose=0).history
    expected = np.mean((2 * X.sum(axis=1) - X[:, 0]) ** 2)
    np.testing.assert_allclose([*found["loss"], *found["mse"]], [expected] * 2, rtol=1e-6)
    assert sent
    own = rows and rows // 2
    assert seen[-2:] == [[[own, 3], [], [own]]] * 2


@pytest.mark.parametrize("rows", [None, 5])
def test_each_gpu_gets_what_it_computes_with_and_the_host_keeps_the_rest(rows: int | None) -> None:
    targets = BatchTargets([GPU, GPU[:-1] + "2"], first=1, num_replicas=4)
    specs = {"x": tf.TensorSpec([rows, 14000]), "ids": tf.TensorSpec([None], tf.int64), "rate": tf.TensorSpec([])}
    missing = tf.data.Dataset.from_tensors((1.0, None)).element_spec[1]
    ahead = batch_devices.BatchDevices("/device:CPU:0", targets).sent_ahead((specs, missing))
    x, ids = tf.ones([5, 14000]), tf.range(5, dtype=tf.int64)
    batch = {"x": x, "ids": ids, "rate": tf.constant(0.5)}, tf.experimental.Optional.empty(None)
    carried = ahead.first(lambda: batch)
    assert len(carried) == len(ahead.shapes)
    for leaf, shape in zip(carried, ahead.shapes, strict=True):
        assert shape.is_compatible_with(leaf.shape)
    dealt = ahead.batch(carried, lambda: None)
    assert int(dealt.total) == 5
    (of_replica, none) = dealt.rows
    assert none is None
    found = [
        (name, part.device[-5:], part.numpy().tolist() if name == "ids" else part.shape.as_list())
        for name, value in sorted(of_replica.items())
        for part in value.values
    ]
    assert found == [
        ("ids", "CPU:0", [1]),
        ("ids", "CPU:0", [2]),
        ("rate", "CPU:1", []),
        ("rate", "CPU:2", []),
        ("x", "CPU:1", [1, 14000]),
        ("x", "CPU:2", [1, 14000]),
    ]


@pytest.mark.rotating
def test_where_a_replica_is_no_gpu_batches_are_read_in_their_step(
    take_for_gpus: None, monkeypatch: pytest.MonkeyPatch, sent: list[Any]
) -> None:
    mixed = pick_strategy("mirrored", devices=["CPU:1", "CPU:3"], environ={}).strategy
    ours(mixed).fit(batched(X, Y), verbose=0)
    assert not sent


@pytest.mark.rotating
def test_virtual_replicas_read_batches_in_their_step(two_gpus: tf.distribute.Strategy, sent: list[Any]) -> None:
    ours(two_gpus, virtual_replicas=4).fit(batched(X, Y), verbose=0)
    assert not sent


def test_tensors_of_different_numbers_of_rows_are_refused_where_they_are_sent_ahead(
    two_gpus: tf.distribute.Strategy, sent: list[Any]
) -> None:
    data = batched(X, Y, repeats=None).map(lambda x, y: (x, y[1:]))
    with pytest.raises(kde.errors.DataError, match=r"different numbers of rows \(x 5, y 4\)"):
        ours(two_gpus, check=False).fit(data, steps_per_epoch=4, verbose=0)
    assert sent


STAY = {
    "strings": (np.array(["a", "b"] * 12), True),
    "ragged": (tf.ragged.constant([[1.0]] * 12 + [[1.0, 2.0]] * 12), False),
    "sparse": (tf.sparse.from_dense(X), False),
    "integers": (Y.astype("int64"), True),
}


@pytest.mark.parametrize("kind", rotating(STAY, ["strings"]))
def test_what_is_of_no_use_on_a_gpu_stays_on_the_host(kind: str, gpu: tf.distribute.Strategy, sent: list[Any]) -> None:
    value, others_are_sent = STAY[kind]
    places: list[str] = []

    class Net(kde.Model):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(3, 1))

        def call(self, inputs: Any) -> Any:
            places.extend(inputs[name].device for name in ("x", "other") if hasattr(inputs[name], "device"))
            return inputs["x"] @ self.scale

    with gpu.scope():
        model = Net()
        model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(({"x": X, "other": value}, X[:, :1])).batch(6)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0]
    assert bool(sent) == others_are_sent


def test_only_plain_tensors_are_sent_ahead() -> None:
    devices = batch_devices.BatchDevices("/device:CPU:0", BatchTargets([GPU]))
    numbers = tf.TensorSpec([None, 600])  # 75 KiB of 32 rows
    missing = tf.data.Dataset.from_tensors((1.0, None)).element_spec[1]
    assert list(devices.sent_ahead((numbers, tf.OptionalSpec(None), missing)).shapes) == [numbers.shape]
    for other in (
        tf.TensorSpec(None),
        tf.TensorSpec([], tf.variant),
        tf.RaggedTensorSpec([None, None]),
        tf.SparseTensorSpec([None, 3]),
        tf.data.DatasetSpec(numbers),
    ):
        assert not devices.sent_ahead((numbers, other)).shapes


def test_what_is_missing_in_a_batch_that_was_sent_ahead_is_none() -> None:
    devices = batch_devices.BatchDevices("/device:CPU:0", BatchTargets([GPU]))
    missing = tf.data.Dataset.from_tensors((1.0, None)).element_spec[1]
    ahead = devices.sent_ahead((tf.TensorSpec([None, 600]), missing))
    rows = tf.ones([2, 600])
    carried = ahead.first(lambda: (rows, tf.experimental.Optional.empty(None)))
    assert [leaf.device for leaf in carried] == [GPU]
    batch = ahead.batch(carried, lambda: None)
    np.testing.assert_array_equal(batch[0], rows)
    assert batch[1] is None


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
@pytest.mark.parametrize("length", rotating(["known", "unknown"], ["unknown"]))
def test_no_batch_comes_back_from_the_gpu_in_a_loop(length: str, gpus: tf.distribute.Strategy) -> None:
    """TensorFlow is to place on the GPU all that no device was named for, as it does where there is one."""
    with tf.device("/device:CPU:3"):  # the data's
        data = batched(X, Y, repeats=None if length == "unknown" else 4)
    model = ours(gpus, jit_compile=False)

    def train() -> None:
        with tf.device(GPU):
            model.fit(data, steps_per_epoch=20, epochs=1, verbose=0)

    graphs = graphs_executed_by(train)
    loops = [part for graph in graphs for part in graph.partition_graphs if _loops(graph)]
    assert loops
    sends = [node for part in loops for node in part.node if node.op == "_Send" and _in_body(node)]
    variants = [node.name for node in sends if node.attr["T"].type == tf.variant.as_datatype_enum]
    assert not variants
    back = {node.attr["tensor_name"].s.decode() for node in sends
            if node.attr["send_device"].s.decode().endswith(("CPU:1", "CPU:2"))
            and node.attr["T"].type == tf.bool.as_datatype_enum}  # fmt: skip
    of_counts = {
        name for name in back if "Less" in name or "LoopCond" in name
    }  # of int32, which GPUs leave on the host
    assert back == of_counts


def _loops(graph: Any) -> bool:
    return any(node.op == "NextIteration" for part in graph.partition_graphs for node in part.node)


def _in_body(node: Any) -> bool:
    return "while/" in node.attr["tensor_name"].s.decode() and "exit" not in node.attr["tensor_name"].s.decode()


@pytest.mark.rotating
def test_what_the_user_has_put_on_the_gpu_stays_there(gpu: tf.distribute.Strategy, sent: list[Any]) -> None:
    with tf.device(GPU):
        data = batched(X, Y, repeats=None)
    iterators: list[tf.data.Iterator] = []
    original = batch_reader.BatchReader.__init__

    def note(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        iterators.append(self.iterator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_reader.BatchReader, "__init__", note)
        found = ours(gpu).fit(data, steps_per_epoch=7, epochs=2, verbose=0).history["loss"]
    assert batch_devices.device_of_iterator(iterators[0]) == GPU
    expected = net().fit(batched(X, Y, repeats=None), steps_per_epoch=7, epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert not sent


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
@pytest.mark.parametrize("data", rotating(["arrays", "longer than an epoch"], []))
def test_a_run_that_was_interrupted_goes_on_as_one_that_was_not(
    data: str, gpus: tf.distribute.Strategy, sent: list[Any], tmp_path: pathlib.Path
) -> None:
    reference = runs.run(gpus, tmp_path / "reference", data=data)
    with pytest.raises(runs.Crash):
        runs.run(gpus, tmp_path / "crashed", data=data, crash_after=8)
    resumed = runs.run(gpus, tmp_path / "crashed", data=data)
    assert resumed["resumed"] is not None
    runs.assert_same(reference, resumed)
    assert sent
