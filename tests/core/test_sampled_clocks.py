"""On GPUs the clocks of some steps are read, and no other step has the host wait for what a GPU computes.

No GPU is needed: logical CPUs are taken for some.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from executed_graphs import graphs_executed_by
from recording import Recording
from strategies import Strategies

import keras_dist_ext as kde
from keras_dist_ext.step import step_buffer, step_clocks
from keras_dist_ext.step.step_buffer import BufferedSteps
from keras_dist_ext.step.untimed_steps import with_all_clocks
from keras_dist_ext.strategy.pick import pick_strategy
from keras_dist_ext.training import batch_devices, step_loops

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*shuffle=True.*was passed, but will be ignored"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
GPUS = ("CPU:1", "CPU:2")
X = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture
def take_for_gpus(monkeypatch: pytest.MonkeyPatch, strategies: Strategies) -> None:
    """Take CPU:1 and CPU:2 for GPUs, of which two steps of four are timed, and CPU:0 for their host."""
    strategies.get("one_device")
    monkeypatch.setattr(batch_devices, "_is_gpu", lambda device: device.endswith(GPUS))
    monkeypatch.setattr(batch_devices, "LEAST_BYTES", 0)
    monkeypatch.setattr(step_loops, "TIMED_EVERY", 4)
    for module in (step_buffer, step_clocks):
        monkeypatch.setattr(module, "cpu_beside", lambda device: HOST)


def strategy_of(num_replicas: int) -> Any:
    name = "one_device" if num_replicas == 1 else "mirrored"
    return pick_strategy(name, devices=list(GPUS[:num_replicas]), environ={}).strategy


def net(num_replicas: int, **compiled: Any) -> Any:
    with strategy_of(num_replicas).scope():
        keras.utils.set_random_seed(3)
        model = kde.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False, **compiled)
    return model


def batches(length: str = "known") -> tf.data.Dataset:
    with tf.device("/device:CPU:3"):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        return data if length == "known" else data.filter(lambda x, y: True)


# What is recorded


@pytest.mark.parametrize("num_replicas", rotating([1, 2], [2]))
@pytest.mark.parametrize("length", rotating(["known", "unknown"], ["unknown"]))
@pytest.mark.parametrize("steps", rotating([1, 5, 50], [], slow=[5]))
def test_losses_are_those_of_all_steps_and_times_add_up(
    steps: int, length: str, num_replicas: int, take_for_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recording = net(num_replicas, steps_per_execution=steps), Recording(gradient_norm=True)
    began = time.perf_counter()
    history = model.fit(batches(length), epochs=2, verbose=0, callbacks=[recording]).history
    seconds = time.perf_counter() - began
    sampled = recording.of()
    with monkeypatch.context() as patched:
        patched.setattr(batch_devices, "_is_gpu", lambda device: False)
        model = net(num_replicas, steps_per_execution=steps)
        assert model.fit(batches(length), epochs=2, verbose=0, callbacks=[recording]).history == history
    timed = recording.of()
    for name in ("loss", "examples", "gradient_norm"):
        np.testing.assert_allclose(getattr(sampled, name), getattr(timed, name), rtol=1e-6)
    assert sampled.examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2] * 2
    for name in ("input_seconds", "compute_seconds", "sync_seconds"):
        assert (getattr(sampled, name) >= 0).all()
    assert 0 < sampled.step_seconds.sum() + sampled.host_seconds < seconds


COMPILED: dict[str, dict[str, Any]] = {
    "virtual replicas": {"virtual_replicas": 4},
    "accumulated": {"optimizer": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)},
    "loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))},
    "eager": {"run_eagerly": True},
}


@pytest.mark.rotating
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", COMPILED)
def test_losses_weighted_by_examples_are_the_loss_in_history(name: str, num_replicas: int, take_for_gpus: None) -> None:
    options = dict(COMPILED[name])
    make_optimizer = options.pop("optimizer", lambda: "sgd")
    with strategy_of(num_replicas).scope():
        keras.utils.set_random_seed(3)
        model = kde.Sequential([keras.Input((6,)), keras.layers.Embedding(9, 2), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile(make_optimizer(), "mse", jit_compile=False, steps_per_execution=5, **options)
    recording = Recording(gradient_norm=True)
    data = batches().map(lambda x, y: (tf.abs(x), y))
    history = model.fit(data, verbose=0, callbacks=[recording]).history
    records = recording.of()
    assert records.examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2]
    mean = np.nansum(records.loss * records.examples) / records.examples.sum()
    assert mean == pytest.approx(history["loss"][0], rel=1e-5)
    assert records.gradient_norm is not None
    assert np.isfinite(records.gradient_norm).all()


@pytest.mark.rotating
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gpu_without_a_strategy_is_recorded(is_compiled: bool, take_for_gpus: None) -> None:
    recording = Recording(gradient_norm=True)
    data = batches()
    with tf.device(GPUS[0]):  # where TensorFlow would place all that no device was named for
        keras.utils.set_random_seed(3)
        model = kde.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=is_compiled, steps_per_execution=5)
        history = model.fit(data, verbose=0, callbacks=[recording]).history
    assert model.train_function.program.step.gpus
    records = recording.of()
    assert records.examples[:, 0].tolist() == [8, 8, 8, 8, 8, 8, 2]
    mean = (records.loss * records.examples).sum() / records.examples.sum()
    assert mean == pytest.approx(history["loss"][0], rel=1e-5)
    assert (records.step_seconds > 0).all()


@pytest.mark.rotating
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_evaluation_and_validation_are_recorded(num_replicas: int, take_for_gpus: None) -> None:
    model, recording = net(num_replicas, steps_per_execution=5), Recording(gradient_norm=True)
    history = model.fit(batches(), validation_data=batches(), verbose=0, callbacks=[recording]).history
    assert len(recording.of()) == 7
    validation = recording.of("test")
    count = validation.examples > 0
    mean = (validation.loss[count] * validation.examples[count]).sum() / validation.examples.sum()
    assert mean == pytest.approx(history["val_loss"][0], rel=1e-5)


@pytest.mark.rotating
def test_steps_of_an_execution_that_failed_are_not_taken_for_those_of_the_next(take_for_gpus: None) -> None:
    def torn() -> Iterator[Any]:
        for i in range(4):
            yield X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]
        raise ValueError("torn")

    specs = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    model, recording = net(1, steps_per_execution=3), Recording(gradient_norm=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="torn"):
        model.fit(tf.data.Dataset.from_generator(torn, output_signature=specs), verbose=0, callbacks=[recording])
    assert len(recording.of()) == 3  # what was whole
    model.fit(batches(), verbose=0, callbacks=[recording])
    records = recording.of()
    assert records.examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2]
    assert (records.step_seconds < 60).all()


@pytest.mark.rotating
def test_a_loop_and_a_guard_leave_records_too(take_for_gpus: None) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        weights, optimizer = tf.Variable(tf.ones([6, 1])), keras.optimizers.SGD(0.01)

    def step(replica: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = replica.mean_loss(tf.square(x @ weights - y)[:, 0])
        optimizer.apply(tape.gradient(loss, [weights]), [weights])
        return {"loss": loss}

    recording = Recording(gradient_norm=True)
    loop = kde.TrainLoop(
        step,
        parts={"kernel": weights, "optimizer": optimizer},
        reduce={"loss": "mean"},
        steps_per_execution=5,
        strategy=strategy,
    )
    loop.fit(batches(), epochs=1, verbose=0, callbacks=[recording, kde.NonFinite()])
    assert recording.of().examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2]


@pytest.mark.rotating
def test_a_slow_replica_computes_longer_in_all_steps(take_for_gpus: None) -> None:
    class Slow(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            replica = getattr(tf.distribute.get_replica_context(), "replica_id_in_sync_group", 0)

            def wait(x: Any, replica: Any) -> Any:
                time.sleep(0.03 * int(replica))
                return x

            # Without state, or TensorFlow would call it for one replica after the other.
            waited = tf.grad_pass_through(lambda x: tf.numpy_function(wait, [x, replica], tf.float32, stateful=False))
            return self.head(tf.ensure_shape(waited(x), x.shape))

    with strategy_of(2).scope():
        model = Slow()
        model.compile("sgd", "mse", steps_per_execution=6)
    recording = Recording(gradient_norm=True)
    model.fit(X[:48], Y[:48], batch_size=8, epochs=2, verbose=0, callbacks=[recording])
    records = recording.of()
    later = slice(6, None)
    assert (records.compute_seconds[later, 1] > 0.02).all()
    quick, slow = np.median(records.compute_seconds[later], axis=0)
    assert quick < 0.5 * slow
    assert np.median(records.sync_seconds[later, 0]) > 0.5 * (slow - quick)  # it waits for the other


# What steps have whose clocks were not read

NAN = float("nan")


def steps_of(begin: Any, ready: Any, computed: Any, end: Any) -> BufferedSteps:
    columns = [np.array(values, float) for values in (end, computed)]
    zeros = np.zeros_like(columns[0])
    return BufferedSteps(*columns, zeros, zeros, None, np.array(begin, float), np.array(ready, float), zeros[:, 0])


def test_steps_between_two_clocks_take_the_same_time_but_for_their_batch() -> None:
    found = with_all_clocks(
        steps_of(
            begin=[10, 11, 12, 30],
            ready=[10, 16, 12, 31],  # the second waits for 5 s
            computed=[[NAN] * 2, [NAN] * 2, [25, 26], [33, 35]],
            end=[[NAN] * 2, [NAN] * 2, [30, 30], [38, 40]],
        ),
        [0],
        [3],
        np.array([NAN]),
    )
    np.testing.assert_allclose(found.end, [[15, 15], [25, 25], [30, 30], [38, 40]])
    np.testing.assert_allclose(found.begin, [10, 15, 25, 30])
    np.testing.assert_allclose(found.batch_ready, [10, 20, 25, 31])
    of_others = np.array([2 / 9, 4 / 9])  # of what the last step took, without a second for its batch
    np.testing.assert_allclose(found.computed - found.batch_ready[:, None], [*[5 * of_others] * 3, [2, 4]])


def test_an_execution_that_ended_early_has_the_shares_of_those_before() -> None:
    found = with_all_clocks(
        steps_of(
            begin=[1, 10, 11],
            ready=[1, 10, 11],
            computed=[[2], [NAN], [NAN]],
            end=[[5], [NAN], [NAN]],
        ),
        [0, 1],
        [0, 2],
        np.array([NAN, 18]),
    )
    np.testing.assert_allclose(found.end[:, 0], [5, 14, 18])
    np.testing.assert_allclose(found.computed[:, 0], [2, 11, 15])


def test_where_no_step_was_timed_all_is_computing() -> None:
    found = with_all_clocks(steps_of([1, 2], [1, 2], [[NAN], [NAN]], [[NAN], [NAN]]), [0], [1], np.array([5]))
    np.testing.assert_allclose(found.computed, found.end)
    np.testing.assert_allclose(found.end[:, 0], [3, 5])


# What the host waits for


def body_of_loop(model: Any, data: tf.data.Dataset, **arguments: Any) -> tf.Graph:
    """The graph of a loop's body, of a model that trains with these arguments."""
    model.fit(data, verbose=0, **arguments)
    (graph,) = model.train_function.program.graphs()
    (loop,) = [op for op in graph.get_operations() if op.type == "While"]
    name = loop.get_attr("body").name
    return graph._get_function(name).graph


@pytest.mark.parametrize("num_replicas", rotating([1, 2], [2]))
def test_no_op_of_the_host_depends_on_what_a_gpu_computes_in_the_same_step(
    num_replicas: int, take_for_gpus: None
) -> None:
    body = body_of_loop(net(num_replicas, steps_per_execution=7), batches(), callbacks=[Recording(gradient_norm=True)])
    on_gpu = {op.name for op in body.get_operations() if op.device.endswith(GPUS)}
    returned = {value.op.name for value in body.outputs}  # when a step has ended
    on_host = [op for op in body.get_operations() if op.device.endswith(("CPU:0", "CPU:3")) and op.name not in returned]
    assert {"Timestamp", "ResourceScatterUpdate"} <= {op.type for op in on_host}

    def first_on_gpu(op: tf.Operation) -> str | None:
        seen, left = {op.name}, [op]
        while left:
            current = left.pop()
            tells = current.type == "EnsureShape" and is_of_shapes(current)  # what was given to a GPU, not computed
            for before in (*(value.op for value in current.inputs), *(() if tells else current.control_inputs)):
                if before.name not in seen:
                    if before.name in on_gpu and not is_of_shapes(before):
                        return str(before.name)
                    seen.add(before.name)
                    left.append(before)
        return None

    assert {op.name: found for op in on_host if (found := first_on_gpu(op))} == {}
    assert sum(op.type == "If" and op.name in on_gpu for op in body.get_operations()) == 2 * num_replicas


def is_of_shapes(op: tf.Operation) -> bool:
    """Whether all that an op gives is an integer, which TensorFlow has on the host, or nothing."""
    return all(value.dtype == tf.int32 for value in op.outputs) and op.type not in ("If", "NoOp")


def sent_in_loop(model: Any, **arguments: Any) -> dict[tuple[bool, bool], list[str]]:
    """The names of what is sent in each step, by whether it comes from and goes to a GPU.

    TensorFlow is to place on the GPU all that no device was named for, as it does where there is one. What branches
    send that are not taken, and integers and flags, which TensorFlow has on the host, cost nothing.
    """

    def train() -> None:
        with tf.device(GPUS[0]):
            model.fit(batches(), verbose=0, **arguments)

    graphs = graphs_executed_by(train)
    found: dict[tuple[bool, bool], list[str]] = {}
    for part in (part for graph in graphs for part in graph.partition_graphs):
        for node in part.node:
            name = node.input[0] if node.op == "_Send" else ""
            is_number = tf.as_dtype(node.attr["T"].type).is_floating if name else False
            if "while/body" in name and "/then/" not in name and is_number:
                ends = (node.attr[end].s.decode().endswith(GPUS) for end in ("send_device", "recv_device"))
                found.setdefault(tuple(ends), []).append(name)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("num_replicas", rotating([1, 2], [1]))
def test_steps_whose_clocks_are_not_read_send_the_host_no_more_than_those_that_are_not_recorded(
    num_replicas: int, take_for_gpus: None
) -> None:
    from_gpu, from_host = (True, False), (False, True)
    bare = sent_in_loop(net(num_replicas, steps_per_execution=7))
    watched = sent_in_loop(net(num_replicas, steps_per_execution=7), callbacks=[Recording(gradient_norm=True)])
    assert all("/NoOp/" in name for name in bare[from_gpu]), bare  # the end of a step, for which the loop waits
    assert len(watched.get(from_gpu, [])) == len(bare.get(from_gpu, [])), (watched, bare)
    of_record, of_bare = (
        [name for name in sent[from_host] if "ResourceScatterUpdate" in name or "Group" in name]
        for sent in (watched, bare)
    )
    assert len(of_record) == len(of_bare) + 1  # that the record of what the host knows was written
    assert len(watched[from_host]) <= len(bare[from_host]) + 1  # TensorFlow groups what several edges say
