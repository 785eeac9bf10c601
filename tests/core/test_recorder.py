"""Every step of every replica is recorded, inside of executions too, and adds up to what Keras logs."""

from __future__ import annotations

import collections
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from made_up_clock import MadeUpClock
from recording import Recording

import keras_dist_ext as kde
from keras_dist_ext.step import recorder as recorder_module
from keras_dist_ext.step import step_buffer as buffer_module
from keras_dist_ext.step.recorder import Recorder, StepNote
from keras_dist_ext.step.stats import ReplicaStats, StepRecords, join_records, summarize
from keras_dist_ext.step.step_buffer import BufferedSteps, BufferSlice, ReplicaRecord, StepBuffer, StepRecord
from keras_dist_ext.training import program as program_module

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + RNG.normal(size=(50, 1))).astype("float32")


class OwnMetric(kde.Model):
    """A train_step of its own, that feeds a metric called loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean("loss")

    def call(self, x: Any) -> Any:
        return self.head(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


class ComputesLoss(OwnMetric):
    """A train_step that calls compute_loss and feeds a metric of another name."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.mean.update_state(loss)
        return {"total": self.mean.result()}


class Logs(OwnMetric):
    """A train_step that returns its loss as it is."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def dense(strategy: Any, model: Any = None, **arguments: Any) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        net = (model or (lambda: kde.Sequential([keras.Input((6,)), keras.layers.Dense(1)])))()
        make_optimizer = arguments.pop("optimizer", lambda: keras.optimizers.SGD(0.01))
        net.compile(make_optimizer(), "mse", **arguments)
    return net


def batches(num_rows: int = 50, wait: Callable[[int], None] = lambda i: None) -> Iterator[tuple[Any, Any]]:
    for i in range(0, num_rows, 8):
        wait(i // 8)
        yield X[i : min(i + 8, num_rows)], Y[i : min(i + 8, num_rows)]


def dataset(num_rows: int = 50, wait: Callable[[int], None] = lambda i: None) -> tf.data.Dataset:
    signature = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(lambda: batches(num_rows, wait), output_signature=signature)


COMPILED: dict[str, dict[str, Any]] = {
    "auto": {},
    "1 step an execution": {"steps_per_execution": 1},
    "3 steps an execution": {"steps_per_execution": 3},
    "50 steps an execution": {"steps_per_execution": 50},
    "eager": {"run_eagerly": True},
    "Adam, clipped": {"optimizer": lambda: keras.optimizers.Adam(clipnorm=1.0)},
    "accumulated": {"optimizer": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)},
    "loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))},
    "custom step, metric": {"model": OwnMetric},
    "custom step, compute_loss": {"model": ComputesLoss},
    "virtual replicas": {"virtual_replicas": 4},
}


@pytest.mark.parametrize("kind", rotating(["default", "mirrored2", "mirrored4"], ["mirrored2"]))
@pytest.mark.parametrize(
    "name", rotating(COMPILED, ["auto", "eager", "accumulated", "custom step, compute_loss", "virtual replicas"])
)
@pytest.mark.parametrize("data", rotating(["arrays", "of unknown length"], ["arrays"]))
def test_losses_weighted_by_examples_add_up_to_the_loss_in_history(
    name: str, kind: str, data: str, strategies: Any
) -> None:
    net, recording = dense(strategies.get(kind), **COMPILED[name]), Recording()
    given = {"x": X, "y": Y, "batch_size": 8} if data == "arrays" else {"x": dataset()}
    history = net.fit(**given, verbose=0, shuffle=False, callbacks=[recording]).history
    records = recording.of()
    num_replicas = strategies.get(kind).num_replicas_in_sync
    assert records.loss.shape == (7, num_replicas)  # 50 rows: 7 batches, the last of 2
    assert records.examples.sum(axis=1).tolist() == [8] * 6 + [2]
    logged = history.get("loss", history.get("total"))[0]
    if "custom" in name:  # these metrics count every batch alike, also the one of two rows
        steps = [summarize(records.steps(i, i + 1), step=i, wall_time=0.0).mean_loss for i in range(7)]
        assert np.mean(steps) == pytest.approx(logged, rel=1e-5)
    else:
        assert summarize(records, step=7, wall_time=0.0).mean_loss == pytest.approx(logged, rel=1e-5)
    if num_replicas > 1 and name != "virtual replicas":
        assert len(np.unique(records.loss[0])) == num_replicas  # each its own


def test_a_loss_that_is_only_returned_is_recorded(mirrored: Any) -> None:
    net, recording = dense(mirrored, model=Logs), Recording()
    net.fit(X[:16], Y[:16], batch_size=16, verbose=0, shuffle=False, callbacks=[recording])
    fresh = dense(mirrored, model=Logs)
    errors = np.square(fresh.predict(X[:16], verbose=0) - Y[:16]).reshape(2, 8).mean(axis=1)
    np.testing.assert_allclose(recording.of().loss[0], errors, rtol=1e-5)


@pytest.mark.parametrize("policy", rotating(["mixed_float16", "mixed_bfloat16"], ["mixed_float16"]))
def test_mixed_precision_is_recorded(policy: str, mirrored: Any) -> None:
    def net() -> Any:
        return kde.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype=policy)])

    recording = Recording(gradient_norm=True)
    model = dense(mirrored, model=net)
    history = model.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording]).history
    records = recording.of()
    assert summarize(records, step=7, wall_time=0.0).mean_loss == pytest.approx(history["loss"][0], rel=1e-3)
    assert records.gradient_norm is not None
    assert np.isfinite(records.gradient_norm).all()


def test_a_compiled_step_is_recorded() -> None:
    recording = Recording(gradient_norm=True)
    net = dense(tf.distribute.get_strategy(), jit_compile=True)
    history = net.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording]).history
    records = recording.of()
    assert summarize(records, step=7, wall_time=0.0).mean_loss == pytest.approx(history["loss"][0], rel=1e-5)
    assert records.gradient_norm is not None
    assert (records.gradient_norm > 0).all()


@pytest.mark.parametrize(
    "arguments",
    rotating([{}, {"run_eagerly": True}, {"steps_per_execution": 3}], [{"steps_per_execution": 3}]),
    ids=str,
)
def test_evaluation_is_recorded_as_such(arguments: Any, mirrored: Any) -> None:
    net, recording = dense(mirrored, **arguments), Recording()
    loss = net.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[recording])
    assert recording.recorder.fetch("train") is None
    assert summarize(recording.of("test"), step=0, wall_time=0.0).mean_loss == pytest.approx(loss, rel=1e-5)


def test_validation_inside_of_fit_is_recorded_apart(mirrored: Any) -> None:
    net, recording = dense(mirrored), Recording()
    history = net.fit(
        X, Y, batch_size=8, validation_data=(X[:20], Y[:20]), validation_batch_size=5, verbose=0, callbacks=[recording]
    ).history
    assert len(recording.of("train")) == 7
    validation = recording.of("test")
    assert len(validation) == 4
    assert summarize(validation, step=7, wall_time=0.0).mean_loss == pytest.approx(history["val_loss"][0], rel=1e-5)


def test_a_replica_without_examples_has_no_loss(strategies: Any) -> None:
    net, recording = dense(strategies.get("mirrored4")), Recording(gradient_norm=True)
    history = net.fit(X[:9], Y[:9], batch_size=8, verbose=0, shuffle=False, callbacks=[recording]).history
    records = recording.of()
    assert records.examples.tolist() == [[2, 2, 2, 2], [0, 0, 0, 1]]
    assert np.isnan(records.loss[1]).tolist() == [True, True, True, False]
    assert records.gradient_norm is not None
    assert np.isnan(records.gradient_norm[1]).tolist() == [True, True, True, False]
    assert summarize(records, step=2, wall_time=0.0).mean_loss == pytest.approx(history["loss"][0], rel=1e-5)


@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], ["mirrored2"]))
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, lambda rate: scaled(rate)])
def test_the_norm_is_that_of_the_replicas_own_gradients(kind: str, optimizer: Any, strategies: Any) -> None:
    strategy = strategies.get(kind)
    net, recording = dense(strategy, optimizer=lambda: optimizer(0.01)), Recording(gradient_norm=True)
    kernel, bias = dense(strategy).get_weights()
    net.fit(X[:12], Y[:12], batch_size=12, verbose=0, shuffle=False, callbacks=[recording])
    expected = []
    for rows in np.split(np.arange(12), strategy.num_replicas_in_sync):
        error = 2 * (X[rows] @ kernel + bias - Y[rows]) / len(rows)
        expected.append(np.sqrt(np.sum((X[rows].T @ error) ** 2) + np.sum(error) ** 2))
    records = recording.of()
    assert records.gradient_norm is not None
    np.testing.assert_allclose(records.gradient_norm[0], expected, rtol=1e-4)


def scaled(rate: float) -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))


@pytest.mark.parametrize("steps", rotating([1, 3, "auto"], [1]))
@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], ["mirrored2"]))
def test_waiting_for_input_is_told_from_computing(
    kind: str, steps: Any, strategies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MadeUpClock(monkeypatch, ("training.batch_reader", "training.execution"))
    strategy = strategies.get(kind)
    reads_of_step = 1 + 2 * strategy.num_replicas_in_sync  # when it began; when each has computed, and updated
    ends = {1: [1, 2, 3, 4, 5, 6], 3: [3, 6], "auto": [1, 2]}[steps]  # of executions, whose end is read, too

    def wait(batch: int) -> None:  # until the step before is over, which runs while its successor's batch is read
        clock.advance(1 / 64, after_reads=batch * reads_of_step + sum(end < batch for end in ends))

    net, recording = dense(strategy, steps_per_execution=steps), Recording()
    net.fit(dataset(wait=wait), verbose=0, callbacks=[recording])
    records = recording.of()
    assert clock.num_reads == 7 * reads_of_step + len(ends) + 1
    assert records.input_seconds.tolist() == records.step_seconds.tolist() == [1 / 64] * 7
    assert not records.compute_seconds.any()
    assert not records.sync_seconds.any()
    assert records.host_seconds == 0.0


@pytest.mark.parametrize("is_dealt", rotating([False, True], [True]), ids=["a dataset", "rows dealt before"])
@pytest.mark.parametrize("slowest", rotating([0, 1], [1]))
def test_a_slow_replica_computes_and_the_others_wait_for_it(
    slowest: int, is_dealt: bool, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MadeUpClock(monkeypatch)
    num_calls = itertools.count()

    class Slow(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            replica = 0 if context is None else context.replica_id_in_sync_group

            def wait(x: Any, replica: Any) -> Any:
                if replica == slowest:  # once the step has begun, its batch is there, and the other one has computed
                    clock.advance(1.0, after_reads=6 * next(num_calls) + 3)
                return x

            # Without state, or TensorFlow would call it for one replica after the other.
            waited = tf.grad_pass_through(lambda x: tf.numpy_function(wait, [x, replica], tf.float32, stateful=False))(
                x
            )
            return self.head(tf.ensure_shape(waited, x.shape))

    def rows_of_replica(context: Any) -> tf.data.Dataset:
        sizes = tf.data.Dataset.from_tensor_slices([5, 3]).repeat()  # another number on each: steps are made alone
        rows = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).repeat()
        return tf.data.Dataset.zip(sizes, rows.batch(5)).map(lambda n, batch: (batch[0][:n], batch[1][:n]))

    net, recording = dense(mirrored, model=Slow), Recording()
    data = (
        {"x": mirrored.distribute_datasets_from_function(rows_of_replica), "steps_per_epoch": 5}
        if is_dealt
        else {"x": X[:40], "y": Y[:40], "batch_size": 8}
    )
    net.fit(**data, verbose=0, callbacks=[recording])
    records = recording.of()
    assert clock.num_reads == 5 * 6
    assert records.step_seconds.tolist() == [1.0] * 5
    assert records.compute_seconds[:, slowest].tolist() == records.sync_seconds[:, 1 - slowest].tolist() == [1.0] * 5
    assert records.compute_seconds[:, 1 - slowest].tolist() == records.sync_seconds[:, slowest].tolist() == [0.0] * 5
    assert records.input_seconds.tolist() == [0.0] * 5
    assert records.host_seconds == 0.0


@pytest.mark.parametrize("kind", ["default", "mirrored2"])
def test_steps_of_an_execution_that_failed_are_not_taken_for_those_of_the_next(kind: str, strategies: Any) -> None:
    def fails() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from itertools.islice(batches(), 4)
        raise ValueError("torn")

    signature = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    torn = tf.data.Dataset.from_generator(fails, output_signature=signature)
    net, recording = dense(strategies.get(kind), steps_per_execution=3), Recording()
    with pytest.raises(tf.errors.InvalidArgumentError, match="torn"):
        net.fit(torn, verbose=0, callbacks=[recording])
    recording.recorder.fetch("train")
    net.fit(dataset(), verbose=0, callbacks=[recording])
    assert recording.of().examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2]


def test_a_step_that_one_replica_begins_while_another_updates_begins_when_all_are_over(mirrored: Any) -> None:
    recorder, buffer = Recorder(), StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False)
    first, second = (
        [ReplicaRecord(2.0, 8, 0.1), ReplicaRecord(3.0, 7, 0.3)],
        [ReplicaRecord(8.0, 8, 0.2), ReplicaRecord(8.0, 7, 0.4)],
    )
    buffer.begin(2)
    buffer.write(StepRecord(first, [4.0, 6.0], begin=0.0, batch_ready=1.0), loops=False)
    buffer.write(StepRecord(second, [9.0, 9.0], begin=5.0, batch_ready=5.5), loops=False)
    buffer.end(2)
    recorder.add("train", buffer, 2)
    records = recorder.fetch("train")
    assert records is not None
    assert records.step_seconds.tolist() == [6, 3]
    assert records.input_seconds.tolist() == [1, 0]
    assert records.compute_seconds.tolist() == [[1, 2], [2, 2]]
    assert records.sync_seconds.tolist() == [[4, 3], [1, 1]]
    assert records.examples.tolist() == [[8, 7], [8, 7]]
    np.testing.assert_allclose(records.loss, [[0.1, 0.3], [0.2, 0.4]], rtol=1e-6)


def step_of_one_replica(begun: float) -> StepRecord:
    return StepRecord([ReplicaRecord(begun + 1.0, 8, 0.1)], [begun + 1.5], begin=begun, batch_ready=begun + 0.25)


@pytest.mark.parametrize("num_fetches", [1, 3])
def test_time_between_executions_is_the_hosts_or_that_of_who_waited_for_a_batch(
    num_fetches: int, mirrored: Any
) -> None:
    recorder, buffer = Recorder(), StepBuffer(["CPU:0"], gradient_norm=False)
    records = []
    for begun, end, waited in ((10.0, 13.0, ()), (15.0, 17.0, (1.0, 0.25)), (17.5, None, ())):
        buffer.begin(1)
        buffer.write(step_of_one_replica(begun), loops=False)
        buffer.end(1)
        recorder.add("train", buffer, 1, end, *waited)
        if num_fetches == 3:
            records.append(recorder.fetch("train"))
    whole = join_records([part for part in records or [recorder.fetch("train")] if part is not None])
    assert whole.input_seconds.tolist() == [0.25, 0.25 + 1.0 + 1.5, 0.25 + 0.5]  # ahead: from 11.5 to 13, 16.5 to 17
    assert whole.host_seconds == (15.0 - 1.0 - 0.25 - 13.0) + (17.5 - 17.0)
    assert whole.compute_seconds.tolist() == [[0.75]] * 3
    assert whole.sync_seconds.tolist() == [[0.5], [0.5 + 0.25], [0.5]]  # other workers' batches came later


def test_executions_are_fetched_when_as_many_wait_as_the_buffer_has_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_STEPS", 2)
    recorder, buffer = Recorder(), StepBuffer(["CPU:0"], gradient_norm=False)
    num_reads: list[int] = []
    read = buffer.read
    monkeypatch.setattr(buffer, "read", lambda: (num_reads.append(1), read())[1])
    for place in range(5):
        buffer.begin(1)
        buffer.write(step_of_one_replica(10.0 * place), loops=False)
        buffer.end(1)
        recorder.add("train", buffer, 1)
        recorder.add("train", buffer, 0)  # the data had ended: an execution without a step is none
        assert len(num_reads) == (place + 1) // 2
    assert recorder.num_pending("train") == 5
    records = recorder.fetch("train")
    assert records is not None
    assert records.compute_seconds.tolist() == [[0.75]] * 5
    assert recorder.fetch("train") is None


def test_inside_of_a_step_of_a_tpu_nothing_is_timed() -> None:
    for on_tpu, is_timed in ((True, False), (False, True)):
        note = StepNote(on_tpu=on_tpu)
        note.loss(0, tf.constant(0.5))
        note.gradients(0, [tf.ones((2,))], 1.0)
        note.end(0, tf.constant(8), {})
        record = note.record()
        assert np.isfinite(record.computed) == is_timed
        assert (int(record.examples), float(record.loss)) == (8, 0.5)


@pytest.mark.parametrize("num_fetches", [1, 3])
def test_an_execution_of_one_step_records_when_the_next_batch_was_there(num_fetches: int) -> None:
    recorder, buffer = Recorder(), StepBuffer(["CPU:0"], gradient_norm=False)
    records = []
    for begun, end in ((10.0, 13.0), (14.0, None), (18.0, 19.0)):
        record = step_of_one_replica(begun)
        buffer.begin(1)
        buffer.write(record if end is None else record._replace(batch_ready=begun, execution_end=end), loops=False)
        buffer.end(1)
        recorder.add("train", buffer, 1)
        if num_fetches == 3:
            records.append(recorder.fetch("train"))
    whole = join_records([part for part in records or [recorder.fetch("train")] if part is not None])
    assert whole.input_seconds.tolist() == [0, 0.25 + 1.5, 0]  # the second waited from 11.5 to 13, while it was read
    assert whole.compute_seconds.tolist() == [[1.0], [0.75], [1.0]]
    assert whole.sync_seconds.tolist() == [[0.5]] * 3
    assert whole.host_seconds == (14.0 - 13.0) + (18.0 - 15.5)


@pytest.mark.parametrize("num_fetches", [1, 2])
def test_what_is_between_epochs_is_no_time_of_either(num_fetches: int) -> None:
    recorder, buffer = Recorder(), StepBuffer(["CPU:0"], gradient_norm=False)
    records = []
    for begun, end, waited in ((10.0, 13.0, 0.0), (55.0, None, 1.0)):
        recorder.begin()
        buffer.begin(1)
        buffer.write(step_of_one_replica(begun), loops=False)
        buffer.end(1)
        recorder.add("train", buffer, 1, end, waited)
        if num_fetches == 2:
            records.append(recorder.fetch("train"))
    whole = join_records([part for part in records or [recorder.fetch("train")] if part is not None])
    assert whole.input_seconds.tolist() == [0.25, 0.25 + 1.0]
    assert whole.host_seconds == 0.0


def test_nothing_is_read_before_it_is_fetched_epochs_may_end_as_they_like(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = []
    original = StepBuffer.read
    monkeypatch.setattr(StepBuffer, "read", lambda buffer: (num_reads.append(1), original(buffer))[1])
    net, recording = dense(mirrored), Recording()
    net.fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[recording])
    assert not num_reads
    assert len(recording.of()) == 35
    assert len(num_reads) == 1


@pytest.mark.rotating
def test_runs_are_fetched_together_though_only_one_of_them_has_norms_that_another_wants(mirrored: Any) -> None:
    net, recording = dense(mirrored), Recording()
    net.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording])
    net.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording, Recording(gradient_norm=True)])
    records = recording.of()
    assert records.gradient_norm is None
    assert records.examples.sum(axis=1).tolist() == [8, 8, 8, 8, 8, 8, 2] * 2
    assert (records.step_seconds < 60).all()
    assert (records.input_seconds >= 0).all()


def test_what_is_recorded_of_a_replica_stays_beside_it_until_the_execution_is_over(mirrored: Any) -> None:
    net, recording = dense(mirrored, steps_per_execution=3), Recording()
    recorded = {}

    class Look(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            (graph,) = net.train_function.program.graphs()
            (loop,) = [op for op in graph.get_operations() if op.type == "While"]
            body = graph.as_graph_def().library.function
            nodes = next(f for f in body if f.signature.name == loop.get_attr("body").name).node_def
            for op in ("Timestamp", "ResourceScatterUpdate"):
                recorded[op] = collections.Counter(node.device[-5:] for node in nodes if node.op == op)

    net.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording, Look()])
    assert recorded["ResourceScatterUpdate"] == {"CPU:0": 1, "CPU:1": 1}
    assert recorded["Timestamp"] == {"CPU:0": 4, "CPU:1": 2}  # the first: also when it began, when its batch was there


def execute(buffer: StepBuffer, first: int, num_steps: int, *, gradient_norm: bool, fails: bool = False) -> Any:
    """Leave records that count from ``first`` on, in a loop in a graph."""

    @tf.function
    def loop() -> None:
        for i in tf.range(num_steps):
            number = tf.cast(first + i, tf.float64)
            of = [number, number + 1000.0]
            replicas = [ReplicaRecord(*(n + 10.0 * k for k in range(1, 4 + gradient_norm))) for n in of]
            buffer.write(StepRecord(replicas, of, -number, number / 4, number / 8), loops=True)
        tf.debugging.Assert(not fails, ["torn"])

    buffer.begin(num_steps)
    loop()
    buffer.end(num_steps)
    return buffer.last(num_steps)


def expected_steps(first: int, num_steps: int, *, gradient_norm: bool) -> BufferedSteps:
    number = (first + np.arange(num_steps)).astype("float64")
    of = number[:, None] + [0.0, 1000.0]
    norm = of + 40.0 if gradient_norm else None
    return BufferedSteps(of, of + 10.0, of + 20.0, of + 30.0, norm, -number, number / 4, number / 8)


@pytest.mark.parametrize("counts", rotating([[1], [64], [65, 3], [3, 0, 200], [50, 14, 1]], [[3, 0, 200]]), ids=str)
@pytest.mark.parametrize("gradient_norm", rotating([False, True], [True]))
def test_each_execution_has_its_steps_in_order_and_none_of_those_that_failed(
    gradient_norm: bool, counts: list[int], mirrored: Any
) -> None:
    buffer = StepBuffer(["CPU:0", "CPU:1"], gradient_norm=gradient_norm)
    slices, first = [], 0
    for round_ in range(2):
        for count in counts:
            with pytest.raises(tf.errors.InvalidArgumentError, match="torn"):
                execute(buffer, 7, 5, gradient_norm=gradient_norm, fails=True)
            slices.append((first, execute(buffer, first, count, gradient_norm=gradient_norm)))
            first += count
        if round_ == 0:
            assert slices[-1][1].steps.end.shape == (counts[-1], 2)
    check_steps(slices, gradient_norm=gradient_norm)


def check_steps(slices: Sequence[tuple[int, BufferSlice]], *, gradient_norm: bool) -> None:
    """See whether executions have records that count from the numbers with them on."""
    for first, part in slices:
        expected = expected_steps(first, part.num_steps, gradient_norm=gradient_norm)
        for found, wanted in zip(part.steps, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def counts_of(buffer: StepBuffer) -> list[int]:
    """How many records each replica has in a buffer."""
    return [int(tape.length.value()) for tape in buffer._replicas]


def test_records_are_read_before_there_is_no_room_for_more(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "MAX_STEPS", 10)
    buffer = StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False)
    slices, left = [], []
    for first, num_steps in ((0, 4), (4, 4), (8, 4), (12, 6), (18, 10)):
        slices.append((first, execute(buffer, first, num_steps, gradient_norm=False)))
        left.append(counts_of(buffer)[1])
    assert left == [4, 8, 4, 10, 10]
    slices.append((28, execute(buffer, 28, 1, gradient_norm=False)))
    check_steps(slices, gradient_norm=False)


def test_a_slice_is_extended_only_by_steps_that_follow_directly(mirrored: Any) -> None:
    buffer, others = (StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False) for _ in range(2))
    whole, ends = execute(buffer, 0, 2, gradient_norm=False), execute(others, 0, 2, gradient_norm=False)
    execute(buffer, 2, 3, gradient_norm=False)
    assert not ends.extend(buffer, 3)
    assert not whole.extend(buffer, 2)  # one step between
    assert whole.extend(buffer, 3)
    later = execute(buffer, 5, 2, gradient_norm=False)
    assert whole.extend(buffer, 2)
    check_steps([(0, whole), (5, later), (0, ends)], gradient_norm=False)
    execute(buffer, 7, 2, gradient_norm=False)
    assert not whole.extend(buffer, 2)  # what was before has been read
    assert not later.extend(buffer, 2)
    check_steps([(0, whole), (5, later), (7, buffer.last(2))], gradient_norm=False)


def test_what_is_kept_of_executions_is_nothing_for_the_collector_of_garbage(mirrored: Any) -> None:
    recorder, buffer = Recorder(), StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        buffer.begin(1)
        buffer.end(1)
        recorder.add("train", buffer, 1, None, 0.1)
    assert len(gc.get_objects()) < before + 100


def test_records_that_are_missing_are_told_and_not_waited_for(mirrored: Any) -> None:
    buffer = StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False)
    execute(buffer, 0, 3, gradient_norm=False)
    buffer.begin(2)
    buffer.end(2)
    part = buffer.last(2)
    with pytest.raises(RuntimeError, match=r"Of 5 steps, replicas have left the records of \[3, 3\].*report it"):
        _ = part.steps
    check_steps([(5, execute(buffer, 5, 3, gradient_norm=False))], gradient_norm=False)


def test_what_was_read_stays_in_the_buffer_until_it_is_full(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "MAX_STEPS", 10)
    buffer = StepBuffer(["CPU:0", "CPU:1"], gradient_norm=False)
    left, first = [], 0
    for num_steps in (4, 4, 2, 3, 8, 10):
        check_steps([(first, execute(buffer, first, num_steps, gradient_norm=False))], gradient_norm=False)
        first += num_steps
        left.append(counts_of(buffer)[1])
    assert left == [4, 8, 10, 3, 8, 10]


@pytest.mark.rotating
def test_an_execution_has_at_most_as_many_steps_as_the_buffer_holds(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "MAX_STEPS", 3)
    for given in ({"x": X, "y": Y, "batch_size": 8}, {"x": dataset()}):
        net, recording = dense(mirrored, steps_per_execution=50), Recording()
        history = net.fit(**given, verbose=0, shuffle=False, callbacks=[recording]).history
        records = recording.of()
        assert records.examples.sum(axis=1).tolist() == [8] * 6 + [2]
        assert summarize(records, step=7, wall_time=0.0).mean_loss == pytest.approx(history["loss"][0], rel=1e-5)


def test_two_recorders_of_one_run_fetch_when_each_likes(mirrored: Any) -> None:
    often, seldom = Recording(gradient_norm=True), Recording()
    fetched = []

    class Fetch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            fetched.append(often.of())

    net = dense(mirrored, steps_per_execution=2)
    net.fit(X, Y, batch_size=8, verbose=0, callbacks=[often, seldom, Fetch()])
    assert [len(part) for part in fetched] == [2, 2, 2, 1]
    parts, whole = join_records(fetched), seldom.of()
    for name in ("loss", "examples", "compute_seconds", "sync_seconds"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert parts.gradient_norm is not None
    assert whole.gradient_norm is None
    assert parts.host_seconds == pytest.approx(whole.host_seconds)


def test_without_a_recorder_no_clock_is_read(mirrored: Any) -> None:
    net = dense(mirrored)
    net.train_on_batch(X[:8], Y[:8])
    net.fit(X, Y, batch_size=8, verbose=0)
    graphs = net.train_function.program.graphs()
    assert len(graphs) == 2
    for graph in graphs:
        assert 'op: "Timestamp"' not in str(graph.as_graph_def())


def test_records_follow_from_fit_to_fit_and_nothing_is_recorded_without_a_recorder(mirrored: Any) -> None:
    net, recording = dense(mirrored), Recording()
    net.fit(X, Y, batch_size=8, verbose=0, callbacks=[recording])
    net.fit(X, Y, batch_size=8, verbose=0)
    assert len(recording.of()) == 7
    net.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[recording])
    assert recording.recorder.num_pending("train") == 14
    assert len(recording.of()) == 14
    assert recording.recorder.fetch("train") is None


@pytest.mark.rotating
def test_recording_does_not_change_what_is_trained(strategies: Any) -> None:
    for kind in ("default", "mirrored2"):
        weights = []
        for callbacks in ([], [Recording(gradient_norm=True)]):
            net = dense(strategies.get(kind))
            net.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
            weights.append(net.get_weights())
        for plain, recorded in zip(*weights, strict=True):
            np.testing.assert_array_equal(plain, recorded)


# What records come to


def records_of(loss: Any, examples: Any, *, compute: Any = None) -> StepRecords:
    examples = np.array(examples, np.int64)
    compute = np.ones(examples.shape) if compute is None else np.array(compute, float)
    return StepRecords(
        kind="train",
        loss=np.array(loss, float),
        examples=examples,
        gradient_norm=None,
        input_seconds=np.full(len(examples), 0.5),
        compute_seconds=compute,
        sync_seconds=compute.max(axis=1, keepdims=True) - compute + 0.25,
        host_seconds=1.0,
    )


def test_stats_weight_by_examples_and_leave_out_who_had_none() -> None:
    nan = float("nan")
    records = records_of([[1.0, 2.0], [3.0, nan]], [[1, 3], [1, 0]], compute=[[1, 2], [1, 2]])
    stats = summarize(records, step=9, wall_time=5.0)
    assert stats.loss.tolist() == [2.0, 2.0]
    assert stats.examples.tolist() == [2, 3]
    assert stats.mean_loss == pytest.approx((1 + 6 + 3) / 5)
    assert stats.seconds == pytest.approx(2 * (0.5 + 2 + 0.25) + 1.0)
    assert stats.examples_per_second.sum() == pytest.approx(5 / stats.seconds)
    assert stats.step_seconds.tolist() == [2.75, 2.75]
    assert stats.input_share == pytest.approx(1 / stats.seconds)
    assert stats.scaling_efficiency == pytest.approx(5 / stats.seconds / (2 * 1.0))


def test_stats_of_no_examples_at_all_are_not_a_number() -> None:
    stats = summarize(records_of([[float("nan")]], [[0]]), step=1, wall_time=0.0)
    assert isinstance(stats, ReplicaStats)
    assert np.isnan(stats.loss[0])
    assert np.isnan(stats.mean_loss)
    assert np.isnan(stats.scaling_efficiency)


def test_records_can_be_cut_and_joined_again() -> None:
    whole = records_of(np.arange(8.0).reshape(4, 2), np.arange(8).reshape(4, 2))
    again = join_records([whole.steps(0, 1), whole.steps(1, 4)])
    assert len(whole.steps(1, 4)) == 3
    assert again.host_seconds == whole.host_seconds
    for name in ("loss", "examples", "input_seconds", "compute_seconds", "sync_seconds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
