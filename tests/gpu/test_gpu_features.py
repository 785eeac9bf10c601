"""What the package offers, on replicas that are GPUs."""

import contextlib
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gpu_runs
import gpus
import keras
import numpy as np
import pytest
import tensorflow as tf
from conformance.run import differences
from gpu_runs import WORDS, X, Y, copies_differ, embedding
from keras import layers
from update_runs import FUSED, NUM_STEPS, Run, equal_to_rounding, make

import keras_dist_ext as kde
from keras_dist_ext.examples import gan, linear_no_keras, sequences
from keras_dist_ext.step.reduce import shares_memory
from keras_dist_ext.strategy.packs import note_bytes_per_pack
from keras_dist_ext.training import batch_devices, distributed_step

Strategy = tf.distribute.Strategy
TAKES_LONG = pytest.mark.timeout(90 if gpus.KIND == "GPU" else 300, method="thread")


def dense(library: Any = kde, **compiled: Any) -> Any:
    """A small model; call it in scope."""
    model = library.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(2)])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", **compiled})
    return model


def trained(strategy: Strategy, callbacks: Any = (), build: Any = dense, x: Any = X, **given: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
    model.fit(
        x, Y, **{"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False, "callbacks": [*callbacks], **given}
    )
    return model


def assert_same_weights(model: Any, other: Any, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


# Replicas stay equal


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.05),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        lambda: keras.optimizers.Adagrad(0.05, gradient_accumulation_steps=2),
    ],
    ids=["SGD", "momentum", "Adam", "Adam, clipped by global norm", "Adagrad, accumulated"],
)
def test_copies_stay_equal_to_the_bit_where_gradients_are_sparse(optimizer: Any, replicas: Strategy) -> None:
    model = trained(replicas, build=lambda: embedding(kde, optimizer()), x=WORDS, epochs=10)
    assert copies_differ(model) == []


@pytest.mark.multiworker
@pytest.mark.timeout(200, method="thread")
def test_workers_stay_equal_to_the_bit_where_gradients_are_sparse(tmp_path: Path) -> None:
    for implementation in gpus.plan().implementations(num_workers=2):
        given = (str(tmp_path), implementation)
        kde.launch(2, gpu_runs.digests_of_workers, args=given, time_limit=90, quiet=True)
        assert (tmp_path / f"{implementation}0").read_text() == (tmp_path / f"{implementation}1").read_text()


def test_copies_stay_equal_to_the_bit_with_metrics_clipping_and_mixed_precision(replicas: Strategy) -> None:
    def build() -> Any:
        model = kde.Sequential(
            [keras.Input((8,)), layers.Dense(32, "relu", dtype="mixed_float16"), layers.Dense(2, dtype="float32")]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1))
        model.compile(optimizer, "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
        return model

    model = trained(replicas, build=build, epochs=10)
    assert copies_differ(model) == []


def test_replicas_with_a_card_each_are_summed_by_nccl(replicas: Strategy) -> None:
    options = replicas.extended._communication_options  # private: it is told nowhere else
    is_by_nccl = gpus.KIND == "GPU" and gpus.plan().sums_by_nccl(replicas.num_replicas_in_sync)
    assert options.implementation.name == ("NCCL" if is_by_nccl else "RING")


def test_gradients_summed_a_pack_at_a_time_are_those_of_one_gpu(replicas: Strategy) -> None:
    expected = trained(gpus.strategy(1))
    note_bytes_per_pack(replicas, 100)
    try:
        model = trained(replicas, build=lambda: dense(steps_per_execution=1))  # whose graph has no loop around a step
    finally:
        note_bytes_per_pack(replicas, 0)
    sums = [
        op
        for graph in model.train_function.program.graphs()
        for op in graph.get_operations()
        if op.type == "CollectiveReduceV2"
    ]
    assert len(sums) > replicas.num_replicas_in_sync or shares_memory(replicas)
    assert_same_weights(model, expected)
    assert copies_differ(model) == []


@pytest.mark.parametrize("option", ["plain", "weight decay", "average", "loss scale"])
@pytest.mark.parametrize("name", FUSED)
def test_a_hundred_updates_by_fused_ops_are_those_of_keras_on_a_gpu(name: str, option: str) -> None:
    with tf.device(gpus.names(1)[0]):
        ours, theirs = Run(make(name, option)), Run(make(name, option))
        ours.steps(0, NUM_STEPS, is_fused=True)
        theirs.steps(0, NUM_STEPS, is_fused=False)
    assert FUSED[name][1] in ours.kinds
    equal_to_rounding(ours.state(), theirs.state())


# Batches


@pytest.mark.parametrize("length", ["known", "unknown"])
def test_each_gpu_is_sent_its_rows_ahead_and_trains_as_one_gpu(
    length: str, replicas: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_devices, "LEAST_BYTES", 0)
    dealt, split_of = [], distributed_step.split_of

    def noted(batch: Any, **given: Any) -> Any:
        dealt.append(isinstance(batch, distributed_step.Dealt))
        return split_of(batch, **given)

    monkeypatch.setattr(distributed_step, "split_of", noted)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    if length == "unknown":
        data = data.filter(lambda *_: True)
    results = []
    for strategy in (gpus.strategy(1), replicas):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = dense()
        history = model.fit(data, epochs=3, verbose=0).history["loss"]
        results.append([np.array(history), *model.get_weights(), np.array(model.evaluate(data, verbose=0))])
    assert differences(*results, 1e-5) == []
    assert any(dealt) == (gpus.KIND == "GPU")


# Replicas without rows


def of_all_kinds(library: Any) -> Any:
    """A model of layers whose kernels are those of cuDNN, or care how many rows there are; call it in scope."""
    image, sequence = keras.Input((8, 8, 3)), keras.Input((6, 4))
    of_image = [
        layers.Conv2D(2, 3, activation="relu"),
        layers.Conv2DTranspose(2, 3),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(2, 3),
        layers.MaxPooling2D(),
        layers.AveragePooling2D(2),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.BatchNormalization(synchronized=True),
        layers.GroupNormalization(1),
    ]
    of_sequence = [
        layers.GRU(3),
        layers.LSTM(3, return_sequences=True),
        layers.Conv1D(2, 2, padding="causal"),
        layers.Conv1DTranspose(2, 2),
        layers.SeparableConv1D(2, 2),
        layers.MaxPooling1D(),
        layers.LayerNormalization(),
    ]
    of_masked = [layers.LSTM(3), layers.Bidirectional(layers.GRU(3)), layers.SimpleRNN(3)]
    masked = layers.Masking()(sequence)
    outputs = [layer(image) for layer in of_image] + [layer(sequence) for layer in of_sequence]
    outputs += [layer(masked) for layer in of_masked] + [layers.MultiHeadAttention(2, 2)(sequence, sequence)]
    model = library.Model([image, sequence], layers.Dense(2)(layers.concatenate(list(map(layers.Flatten(), outputs)))))
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model


def few_rows(num: int = 5) -> tuple[Any, Any]:
    """Images, and sequences of which some are padded, and targets."""
    random = np.random.default_rng(2)
    images, sequences = random.normal(size=(num, 8, 8, 3)), random.normal(size=(num, 6, 4))
    sequences[::2, 4:] = 0
    return [images.astype("float32"), sequences.astype("float32")], random.normal(size=(num, 2)).astype("float32")


@TAKES_LONG
def test_layers_of_every_kind_train_where_a_gpu_has_no_rows(two: Strategy) -> None:
    x, y = few_rows()
    models = []
    for library, scope in ((keras, contextlib.nullcontext()), (kde, two.scope())):
        keras.utils.set_random_seed(3)
        with scope:
            models.append(of_all_kinds(library))
        models[-1].fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)  # the second batch has one row
    assert differences(models[0].get_weights(), models[1].get_weights(), 1e-5) == []
    expected, found = (model.predict([part[:1] for part in x], verbose=0) for model in models)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_batch_normalization_stays_finite_where_a_gpu_has_no_rows(two: Strategy) -> None:
    (x, _), y = few_rows()
    with two.scope():
        model = kde.Sequential([keras.Input((8, 8, 3)), layers.BatchNormalization(), layers.Flatten(), layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


# Seeds and virtual replicas


def masks(strategy: Strategy, seed: int) -> np.ndarray[Any, Any]:
    with strategy.scope():
        dropout = layers.Dropout(0.5)

    def step(replica: kde.Replica, batch: Any) -> dict[str, tf.Tensor]:
        return {"masks": dropout(batch, training=True)}

    loop = kde.TrainLoop(step, parts={"dropout": dropout}, reduce={"masks": "concat"}, strategy=strategy)
    data = tf.data.Dataset.from_tensor_slices(np.ones((16, 32), "float32")).batch(16)
    loop.fit(data, epochs=1, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
    return np.asarray(loop.rows()["masks"])


def test_each_gpu_draws_masks_of_its_own_the_same_at_every_run(two: Strategy) -> None:
    drawn = masks(two, 42)
    assert not np.array_equal(drawn[:8], drawn[8:])
    assert np.array_equal(drawn, masks(two, 42))
    assert not np.array_equal(drawn, masks(two, 43))


@pytest.mark.multiworker
@pytest.mark.timeout(260, method="thread")
def test_virtual_replicas_give_the_same_bits_on_one_two_and_four_gpus(tmp_path: Path) -> None:
    for num_gpus in (1, 2, 4):
        kde.launch(1, gpu_runs.virtual, args=(num_gpus, str(tmp_path)), time_limit=180, quiet=True)
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text() == (tmp_path / "4").read_text()


# One device's run, and 16 bits


def drawing(library: Any) -> Any:
    """A model that draws random numbers and has the statistics of its batch; call it in scope."""
    inputs = keras.Input((8, 8, 3))
    hidden = layers.BatchNormalization(momentum=0.8)(layers.Conv2D(4, 3, activation="relu")(inputs))
    hidden = layers.Dropout(0.3)(layers.Flatten()(hidden))
    return library.Model(inputs, layers.Dense(2)(layers.GaussianNoise(0.2)(hidden)))


@pytest.mark.parametrize("num_rows", [61, 49], ids=["a batch of 13", "a batch of one"])
def test_exact_replicas_draw_and_normalize_as_stock_keras_does_on_one_gpu(replicas: Strategy, num_rows: int) -> None:
    x = np.random.default_rng(4).normal(size=(num_rows, 8, 8, 3)).astype("float32")
    models = []
    for library, scope, given in (
        (keras, tf.device(gpus.names(1)[0]), {"jit_compile": False}),  # XLA draws other numbers
        (kde, replicas.scope(), {"exact": True}),
    ):
        keras.utils.set_random_seed(3)
        with scope:
            models.append(drawing(library))
            models[-1].compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **given)
            models[-1].fit(x, Y[:num_rows], batch_size=16, epochs=3, verbose=0, shuffle=False)
    assert differences(models[0].get_weights(), models[1].get_weights(), 2e-5) == []
    assert copies_differ(models[1]) == []


def test_gradients_in_16_bits_are_refused(two: Strategy) -> None:
    refused = pytest.raises(kde.errors.StrategyError, match="2 replicas that are GPUs")
    with two.scope(), contextlib.nullcontext() if gpus.KIND == "CPU" else refused:
        dense(gradient_compression="bfloat16")


# XLA


def of_images(library: Any) -> Any:
    """A model of Keras' own code alone; call it in scope."""
    model = library.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("num_rows", [61, 49], ids=["a batch of 13", "a batch of one"])
def test_auto_compiles_what_each_gpu_computes_and_trains_as_stock_keras_on_one(
    replicas: Strategy, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_xla, compiled = distributed_step.compiled_step, []
    monkeypatch.setattr(distributed_step, "compiled_step", lambda *given: compiled.append(given[1]) or by_xla(*given))
    x = np.random.default_rng(4).normal(size=(num_rows, 8, 8, 3)).astype("float32")
    results = []
    for library, scope in ((keras, tf.device(gpus.names(1)[0])), (kde, replicas.scope())):
        keras.utils.set_random_seed(3)
        with scope:
            model = of_images(library)
        with tf.device(gpus.names(1)[0]) if library is keras else contextlib.nullcontext():
            model.fit(x, Y[:num_rows], batch_size=16, epochs=3, verbose=0, shuffle=False)
            logs = model.evaluate(x, Y[:num_rows], batch_size=16, verbose=0)
            results.append([*model.get_weights(), np.array(logs), model.predict(x, verbose=0)])
    assert differences(*results, 2e-5) == []
    assert copies_differ(model) == []
    assert compiled == ([] if gpus.KIND == "CPU" else ["train", "test"])


def test_what_sums_over_replicas_while_it_is_computed_runs_without_xla_and_without_a_word(two: Strategy) -> None:
    def build() -> Any:
        model = kde.Sequential(
            [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(synchronized=True), layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = trained(two, build=build)
    assert [str(w.message) for w in caught if "XLA" in str(w.message)] == []
    assert copies_differ(model) == []


class Count(keras.metrics.Metric):
    """Counts rows in whole numbers."""

    def __init__(self) -> None:
        super().__init__(name="count")
        self.total = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.shape(y_true)[0])

    def result(self) -> Any:
        return self.total


def test_what_collectives_of_gpus_do_not_carry_is_added_up(replicas: Strategy) -> None:
    def build(library: Any = kde) -> Any:
        model = library.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(2, dtype="bfloat16")])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Count()], jit_compile=False)
        return model

    expected = trained(gpus.strategy(1), build=lambda: build(keras))
    model = trained(replicas, build=build)
    assert copies_differ(model) == []
    assert model.history.history["count"] == expected.history.history["count"] == [61, 61, 61]
    np.testing.assert_allclose(model.history.history["loss"], expected.history.history["loss"], rtol=2e-2)


class KeepingMaximum(kde.Model):
    """Its step assigns what each replica sees of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers.Dense(2)
        self.seen = self.add_weight(shape=(2,), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        self.seen.assign(tf.maximum(self.seen, tf.reduce_max(x[:, :2], axis=0)))
        return super().train_step(data)


@pytest.mark.checks_fit
def test_fit_says_that_a_running_maximum_is_not_that_of_one_gpu(two: Strategy) -> None:
    with two.scope():
        model = KeepingMaximum()
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="seen|variable"):
        model.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False)


# Loops, bad numbers, resuming, parts


@pytest.mark.parametrize(
    "example", [gan, linear_no_keras, sequences], ids=lambda module: module.__name__.split(".")[-1]
)
def test_examples_of_loops_train_as_on_one_gpu(example: Any, replicas: Strategy) -> None:
    _, expected = example.train(gpus.strategy(1), epochs=2)
    _, found = example.train(replicas, epochs=2)
    assert list(found.history) == list(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_step_that_is_not_finite_is_left_out_on_all_gpus(replicas: Strategy) -> None:
    spoilt = X.copy()
    spoilt[16] = np.nan  # the first row of the second batch
    with pytest.warns(UserWarning, match="not finite"):
        model = trained(replicas, [kde.NonFinite("skip")], x=spoilt, epochs=1)
    keras.utils.set_random_seed(3)
    with replicas.scope():
        without = dense()
    rows = np.r_[0:16, 32:61]
    without.fit(X[rows], Y[rows], batch_size=16, epochs=1, verbose=0, shuffle=False)
    assert_same_weights(model, without, 1e-6)


def test_a_run_goes_on_where_it_was_interrupted(two: Strategy, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise Interrupted

    seeds = kde.ReplicaSeeds(7)
    expected = trained(two, [kde.ReplicaSeeds(7)], epochs=4, shuffle=True)
    with pytest.raises(Interrupted):
        trained(two, [seeds, kde.Resume(str(tmp_path / "run"), save_every=1), Interrupt()], epochs=4, shuffle=True)
    model = trained(two, [kde.ReplicaSeeds(7), kde.Resume(str(tmp_path / "run"))], epochs=4, shuffle=True)
    assert_same_weights(model, expected, 1e-6)


def test_a_part_on_another_gpu_trains_as_on_one_and_is_measured() -> None:
    keras.utils.set_random_seed(3)
    model = kde.Sequential([keras.Input((8,)), layers.Dense(256, name="first"), layers.Dense(2, name="second")])
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one-processor|parts-take-turns")  # virtual devices of one card, or of a CPU
        placement = kde.place(model, {"second": gpus.names(2)[1]})
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    keras.utils.set_random_seed(3)
    other = kde.Sequential([keras.Input((8,)), layers.Dense(256, name="first"), layers.Dense(2, name="second")])
    other.compile("sgd", "mse")
    other.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert_same_weights(model, other)
    if gpus.KIND == "GPU":
        assert "second" in str(placement.measure(X, Y))


# Whether it is right, and where the time goes


def test_the_certificate_finds_nothing_in_a_healthy_model(two: Strategy) -> None:
    certificate = kde.certify(lambda: dense(kde), two, (X, Y), steps=4, batch_size=16)
    assert certificate.is_equivalent, str(certificate)


def images(num: int = 512) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.normal(size=(num, 32, 32, 8)).astype("float32"), random.integers(0, 10, num).astype("int32")


def cnn() -> Any:
    model = kde.Sequential(
        [
            keras.Input((32, 32, 8)),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=8)
    return model


def diagnosed(strategy: Strategy, data: tf.data.Dataset, build: Any = cnn, epochs: int = 4) -> list[str]:
    with strategy.scope():
        model = build()
    doctor = kde.ParallelismDoctor()
    model.fit(data, epochs=epochs, verbose=0, callbacks=[doctor])
    codes = [finding.code for finding in doctor.report.findings]
    num_gpus = len(tf.config.list_logical_devices("GPU"))
    assert ("idle-accelerators" in codes) == (num_gpus > strategy.num_replicas_in_sync)
    return [code for code in codes if code != "idle-accelerators"]  # where there are more GPUs than replicas


@TAKES_LONG
def test_the_doctor_finds_nothing_in_a_healthy_run(two: Strategy) -> None:
    x, y = images()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128).cache().repeat(8).prefetch(2)
    assert diagnosed(two, data) == []


def test_the_doctor_finds_a_slow_map_first(two: Strategy) -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.02)
        return x

    def mapped(x: Any, y: Any) -> Any:
        slept = tf.numpy_function(slow, [x], tf.float32)
        slept.set_shape(x.shape)
        return slept, y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).map(mapped).repeat(16)
    assert diagnosed(two, data, dense)[0] in ("sequential-map", "python-map")


def test_the_doctor_finds_eager_steps(two: Strategy) -> None:
    def build() -> Any:
        model = dense()
        model.compile("adam", "mse", run_eagerly=True)
        return model

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat(8)
    assert diagnosed(two, data, build, epochs=2)[0] == "eager"


@TAKES_LONG
def test_the_times_of_a_step_add_up_and_computing_is_what_cuda_needs(two: Strategy) -> None:
    x, y = images()
    memory = kde.MemoryWriter()
    with two.scope():
        model = cnn()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128, drop_remainder=True).cache().repeat(16).prefetch(2)
    model.fit(data, epochs=3, verbose=0, callbacks=[kde.ReplicaMonitor(writers=[memory])])
    stats = memory.train[-1]
    steps = stats.num_steps * stats.step_seconds.max() + stats.host_seconds
    assert 0.9 * stats.seconds <= steps <= 1.1 * stats.seconds
    # A replica's share of a batch, on one device that has nothing else to do.
    rows, labels = tf.constant(x[:64]), tf.constant(y[:64])
    with tf.device(gpus.names(1)[0]):
        alone = cnn()

        @tf.function
        def gradients() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = alone.compute_loss(rows, labels, alone(rows, training=True))
            return [tf.reduce_sum(g) for g in tape.gradient(loss, alone.trainable_variables)]

    def synchronized() -> float:
        started = time.perf_counter()
        for _ in range(10):
            found = gradients()
        _ = [value.numpy() for value in found]
        return (time.perf_counter() - started) / 10

    gradients()
    expected = min(synchronized() for _ in range(3))
    assert 0.5 * expected <= stats.compute_seconds.mean() <= 4 * expected  # replicas share the card


def test_losses_of_replicas_are_those_that_keras_logs(replicas: Strategy) -> None:
    memory = kde.MemoryWriter()
    keras.utils.set_random_seed(3)
    with replicas.scope():
        model = dense(kde, optimizer="sgd")
    history = model.fit(X, Y, batch_size=16, verbose=0, callbacks=[kde.ReplicaMonitor(writers=[memory])])
    counts = np.concatenate([stats.examples for stats in memory.train])
    losses = np.concatenate([stats.loss for stats in memory.train])
    mean = (losses[counts > 0] * counts[counts > 0]).sum() / counts.sum()
    np.testing.assert_allclose(mean, history.history["loss"][0], rtol=1e-5)


@TAKES_LONG
def test_a_plan_predicts_from_one_gpu_what_more_would_give(two: Strategy) -> None:
    x, y = images()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128, drop_remainder=True).cache().prefetch(2)
    with two.scope():
        model = cnn()
    before = model.get_weights()
    planned = kde.plan(model, data, replicas=[1, 2, 4], network="nvlink", num_steps=30)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert planned.measured.device == gpus.names(1)[0]
    assert [point.num_replicas for point in planned.curve("fixed global batch").points] == [1, 2, 4]


# Searches and the demo


def test_a_search_tries_one_and_two_gpus(tmp_path: Path) -> None:
    def build(hp: Any) -> Any:
        return dense(kde, optimizer=keras.optimizers.Adam(hp.Choice("rate", [0.01, 0.001])))

    tuner = kde.tuner.RandomSearch(
        build,
        objective="val_loss",
        max_trials=4,
        directory=str(tmp_path),
        strategies=["one_device", "mirrored"],
        seed=1,
    )
    tuner.search(X, Y, validation_data=(X, Y), batch_size=16, epochs=2, verbose=0)
    tried = {trial.hyperparameters.values["distribution_strategy"] for trial in tuner.oracle.trials.values()}
    assert {trial.status for trial in tuner.oracle.trials.values()} == {"COMPLETED"}
    assert tried <= {"one_device", "mirrored"}


@pytest.mark.multiworker
@pytest.mark.timeout(260, method="thread")
@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_the_demo_learns(options: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keras_dist_ext", "demo", "--log-dir", str(tmp_path / "logs"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy (\d\.\d{3})", ended.stdout)]
    assert accuracies[-1:] > [0.9], ended.stdout
