"""Batches are on the GPU one step before they are needed, and nothing but them goes there and back.

No GPU is needed: one of the logical CPUs is taken for one.
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

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*shuffle=True.*was passed, but will be ignored"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

GPU = "/job:localhost/replica:0/task:0/device:CPU:1"
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = np.arange(24, dtype="int32") % 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, strategies: Strategies) -> tf.distribute.Strategy:
    """Take CPU:1 for a GPU, and return a strategy for it."""
    strategies.get("one_device")
    monkeypatch.setattr(batch_devices, "_is_gpu", lambda device: device.endswith("CPU:1"))
    monkeypatch.setattr(batch_devices, "LEAST_BYTES", 0)
    return pick_strategy("one_device", devices=["CPU:1"], environ={}).strategy


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


@pytest.mark.parametrize("case", rotating(CASES, ["endless"], slow=["of known length, the last batch smaller"]))
def test_fit_and_evaluate_give_the_numbers_of_keras(case: str, gpu: tf.distribute.Strategy, sent: list[Any]) -> None:
    data, arguments = CASES[case]()
    compiled = {name: arguments.pop(name) for name in ("steps_per_execution",) if name in arguments}
    of_test = {"steps": 3} if "steps_per_epoch" in arguments else {}
    results = []
    known = batched(X, Y) if case == "of unknown length" else data  # of others, Keras counts a step too many
    for model, given in ((net(steps_per_execution=1), known), (ours(gpu, **compiled), data)):
        history = model.fit(given, epochs=3, verbose=0, **arguments).history["loss"]
        test = model.evaluate(given, arguments.get("y"), verbose=0, **of_test)
        results.append([*history, test, *[weight.ravel() for weight in model.get_weights()]])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    assert bool(sent) == (case != "one step an execution")


def test_a_small_batch_is_sent_in_its_step(gpu: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the least that is sent ahead
    devices = batch_devices.BatchDevices("/device:CPU:0", GPU)
    labels = tf.TensorSpec((None,), tf.int64)

    def is_sent(*shape: int | None) -> bool:
        return bool(devices.sent_ahead((tf.TensorSpec(shape), labels)).shapes)

    shapes = (256, 32, 32, 3), (None, 512), (None, 511), (32, 8)
    assert [is_sent(*shape) for shape in shapes] == [True, True, False, False]


@pytest.mark.parametrize("num_batches", rotating([6, None], [6]))
def test_nothing_is_read_that_no_step_uses(num_batches: int | None, gpu: tf.distribute.Strategy) -> None:
    reads = Pulls(num_batches)
    ours(gpu).fit(reads.dataset(), epochs=2, verbose=0, steps_per_epoch=None if num_batches else 6)
    assert reads.num_begun == (2 if num_batches else 1)
    assert reads.num_pulled == 12 if num_batches else 12 <= reads.num_pulled < 24  # tf.data draws some ahead


@pytest.mark.rotating
def test_an_error_of_the_data_is_raised_as_without_a_gpu(gpu: tf.distribute.Strategy) -> None:
    for model in (ours(Strategies().get("one_device")), ours(gpu)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no such batch"):
            model.fit(Pulls(9, fails_at=5).dataset(), verbose=0, steps_per_epoch=9)


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
    devices = batch_devices.BatchDevices("/device:CPU:0", GPU)
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
    devices = batch_devices.BatchDevices("/device:CPU:0", GPU)
    missing = tf.data.Dataset.from_tensors((1.0, None)).element_spec[1]
    ahead = devices.sent_ahead((tf.TensorSpec([None, 600]), missing))
    rows = tf.ones([2, 600])
    carried = ahead.first(lambda: (rows, tf.experimental.Optional.empty(None)))
    assert [leaf.device for leaf in carried] == [GPU]
    batch = ahead.batch(carried, lambda: None)
    np.testing.assert_array_equal(batch[0], rows)
    assert batch[1] is None


@pytest.mark.parametrize("length", rotating(["known", "unknown"], ["unknown"]))
def test_no_batch_comes_back_from_the_gpu_in_a_loop(
    length: str, gpu: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow is to place on the GPU all that no device was named for, as it does where there is one."""
    with tf.device("/device:CPU:2"):  # the data's
        data = batched(X, Y, repeats=None if length == "unknown" else 4)
    model = ours(gpu, jit_compile=False)

    def train() -> None:
        with tf.device(GPU):
            model.fit(data, steps_per_epoch=20, epochs=1, verbose=0)

    graphs = graphs_executed_by(train)
    loops = [part for graph in graphs for part in graph.partition_graphs if _loops(graph)]
    assert loops
    sends = [node for part in loops for node in part.node if node.op == "_Send" and _in_body(node)]
    variants = [node.name for node in sends if node.attr["T"].type == tf.variant.as_datatype_enum]
    assert not variants
    back = {node.attr["tensor_name"].s.decode() for node in sends if "CPU:1" in node.attr["send_device"].s.decode()
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


@pytest.mark.parametrize("data", rotating(["arrays", "longer than an epoch"], []))
def test_a_run_that_was_interrupted_goes_on_as_one_that_was_not(
    data: str, gpu: tf.distribute.Strategy, sent: list[Any], tmp_path: pathlib.Path
) -> None:
    reference = runs.run(gpu, tmp_path / "reference", data=data)
    with pytest.raises(runs.Crash):
        runs.run(gpu, tmp_path / "crashed", data=data, crash_after=8)
    resumed = runs.run(gpu, tmp_path / "crashed", data=data)
    assert resumed["resumed"] is not None
    runs.assert_same(reference, resumed)
    assert sent
