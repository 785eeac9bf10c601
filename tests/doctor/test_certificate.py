"""A certificate names what makes a strategy train otherwise than one device, and passes what trains the same."""

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from conformance import feeds, models
from conformance.rows import ROWS, adam, mse
from conformance.run import SEED, Row, warnings_of
from keras import layers, losses, metrics
from keras.optimizers import SGD
from keras.src.backend.tensorflow import random as tf_random
from rich.console import Console

import keras_dist_ext as kde
from keras_dist_ext import cli
from keras_dist_ext.diagnosis.certificate.certificate import Certificate
from keras_dist_ext.diagnosis.certificate.certification import _Certification, certify
from keras_dist_ext.diagnosis.certificate.certified_script import certify_script, print_certificate
from keras_dist_ext.diagnosis.certificate.draws import Draws
from keras_dist_ext.diagnosis.certificate.global_batches import global_batches
from keras_dist_ext.diagnosis.certificate.training_run import TrainingRun, bounds_of_tensorflow
from keras_dist_ext.diagnosis.first_fit import FirstFit
from keras_dist_ext.findings import Finding
from keras_dist_ext.step import global_draws

Strategy = tf.distribute.Strategy
Build = Callable[[], keras.Model]
SEEDS = kde.ReplicaSeeds(42, draws="global")


def compiled(model: models.Build, library: models.Library, **arguments: Any) -> Build:
    def build() -> keras.Model:
        made = model(library)
        made.compile(**(mse() | arguments))
        return made

    return build


def codes(certificate: Certificate) -> list[str]:
    return [finding.code for finding in certificate.findings]


def regression(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return feeds.regression(rows, 1)


def dropout(library: models.Library) -> keras.Model:
    return library.Sequential(
        [layers.Input((5,)), layers.Dense(64, activation="tanh"), layers.Dropout(0.3), layers.Dense(3)]
    )


weighted_mean = losses.MeanSquaredError(reduction="mean_with_sample_weight")

# Faults 8 to 12 of stock Keras: what is trained on what, the finding, what its text names, and what ours may have.
FAULTS: dict[str, tuple[models.Build, dict[str, Any], tuple[Any, ...], str, str, list[str]]] = {
    "8, a partial last batch": (
        models.dense,
        {},
        regression(45),
        "uneven-batch",
        r"5 examples split into \[3, 2\]",
        [],
    ),
    "9, a mask": (
        models.masked_steps,
        {},
        feeds.padded_steps(32, 1),
        "local-mask-count",
        r"'mse' divides by what one replica counts of the mask.*\n.*the mask comes from masking",
        [],
    ),
    "9, sample weights": (
        models.dense,
        {"loss": weighted_mean},
        (*regression(32), feeds.row_weights(32, 1)),
        "local-weight-count",
        "'mean_squared_error' divides by what one replica counts of the sample weights",
        [],
    ),
    "10, an empty replica": (
        models.batch_norm_first,
        {},
        regression(17),
        "empty-replica",
        r"BatchNormalization \(.*batch_normalization.*\) divides by no examples.*\n.*1 example split into \[1, 0\]",
        ["local-batch-statistics"],
    ),
    "11, moving statistics": (
        models.batch_norm_first,
        {},
        regression(16),
        "state-drifts",
        "batch_normalization.*/moving_mean",
        ["local-batch-statistics"],
    ),
    "12, dropout": (dropout, {}, regression(16), "same-draws", "same random numbers: .*dropout", []),
}


ALONE = ["9, sample weights", "10, an empty replica", "12, dropout"]  # run lines that no other test runs


@pytest.mark.parametrize("fault", rotating(FAULTS, [], slow=["9, a mask", *ALONE]))
def test_a_fault_of_stock_keras_is_named_and_ours_passes(fault: str, mirrored: Strategy) -> None:
    model, arguments, data, code, words, allowed = FAULTS[fault]
    keras.utils.set_random_seed(SEED)
    stock = certify(compiled(model, keras, **arguments), mirrored, data, steps=6, batch_size=8)
    assert not stock.is_equivalent
    (found,) = [finding for finding in stock.findings if finding.code == code]
    assert set(codes(stock)) <= {code, "uneven-batch", "local-batch-statistics", "state-drifts"}
    assert re.search(words, str(found)), str(found)
    assert "kde.Model" in found.fix

    ours = certify(compiled(model, kde, **arguments), mirrored, data, steps=6, batch_size=8, allow=allowed)
    assert ours.is_equivalent, str(ours)
    assert [finding.code for finding in ours.allowed] == allowed
    assert allowed or max(gap.relative for gap in ours.deviations) < 1e-5


class NeedsRows(layers.Layer):
    """Fails without rows, as oneDNN's convolutions do."""

    def call(self, x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0])]):
            return tf.identity(x)


def needs_rows(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), NeedsRows(), layers.BatchNormalization(), layers.Dense(3)])


@pytest.mark.slow
def test_a_step_that_fails_without_rows_is_named_and_so_is_what_was_off_before(mirrored: Strategy) -> None:
    stock = certify(compiled(needs_rows, keras), mirrored, regression(17), steps=3, batch_size=8)
    assert codes(stock) == ["empty-replica", "local-batch-statistics", "state-drifts"], str(stock)
    assert "step 3, 1 example split into [1, 0]; steps in which all replicas had examples did not fail" in str(stock)


@pytest.mark.slow
def test_a_step_of_ours_that_fails_without_rows_is_named_alone(mirrored: Strategy) -> None:
    def build() -> keras.Model:
        return compiled(lambda lib: lib.Sequential([layers.Input((5,)), NeedsRows(), layers.Dense(3)]), kde)()

    ours = certify(build, mirrored, regression(9), steps=2, batch_size=8)
    assert codes(ours) == ["empty-replica"], str(ours)
    assert ours.drift is None


def convolutions(library: models.Library) -> keras.Model:
    rest = [layers.BatchNormalization(), layers.GlobalAveragePooling2D(), layers.Dense(3)]
    return library.Sequential([layers.Input((6, 6, 2)), layers.Conv2D(4, 3), *rest])


@pytest.mark.slow
def test_convolutions_without_rows_pass_with_ours_alone(mirrored: Strategy) -> None:
    """With stock Keras they end the step where TensorFlow runs them by oneDNN, and give NaN elsewhere."""
    images = np.random.default_rng(0).normal(size=(17, 6, 6, 2)).astype("float32")
    data = images, images[:, 0, 0, :1] * np.ones(3, "float32")
    stock = certify(compiled(convolutions, keras), mirrored, data, steps=3, batch_size=8)
    assert {"empty-replica", "local-batch-statistics", "state-drifts"} <= set(codes(stock)), str(stock)
    assert "1 example split into [1, 0]" in str(stock.findings[0])
    ours = certify(compiled(convolutions, kde), mirrored, data, 3, batch_size=8, allow=["local-batch-statistics"])
    assert ours.is_equivalent, str(ours)


@pytest.mark.slow
def test_batch_normalization_passes_when_it_is_synchronized(mirrored: Strategy) -> None:
    build = compiled(models.synchronized_batch_norm, kde)
    assert certify(build, mirrored, regression(45), steps=6, batch_size=16).is_equivalent


@pytest.mark.rotating
def test_stock_keras_passes_where_it_is_right(mirrored: Strategy) -> None:
    certificate = certify(compiled(models.dense, keras, metrics=["mae"]), mirrored, regression(32), 4, batch_size=8)
    assert certificate.is_equivalent, str(certificate)
    assert {gap.part for gap in certificate.deviations} == {"gradient", "weights", "optimizer", "metric"}
    assert {gap.name for gap in certificate.deviations if gap.part == "metric"} == {"loss", "mae"}


# Faults of a user's own


def unscaled(library: models.Library) -> keras.Model:
    """Takes the mean of a replica's rows, which the optimizer adds up."""
    return models.from_scratch(library)


def scaled_twice(library: models.Library) -> keras.Model:
    class ScalesTwice(library.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                loss /= tf.distribute.get_strategy().num_replicas_in_sync
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"mine": loss}

    inputs = layers.Input((5,))
    return ScalesTwice(inputs, layers.Dense(3)(inputs))


def mean_of_valid(y_true: Any, y_pred: Any) -> Any:
    valid = tf.cast(y_true[:, 0] > 0, tf.float32)
    return tf.reduce_sum(valid * tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)) / (tf.reduce_sum(valid) + 1.0)


class Centered(layers.Layer):
    """Takes away the mean of the rows at hand."""

    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(x, axis=0)


def centered(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), Centered(name="centered"), layers.Dense(3)])


class NumpyNoise(layers.Layer):
    """Draws by numpy: a constant of each trace."""

    def call(self, x: Any) -> Any:
        return x * np.random.uniform(0.5, 1.5)


def numpy_noise(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), NumpyNoise(), layers.Dense(3)])


class FirstRow(metrics.Metric):
    """Remembers one number that cannot be added up."""

    def __init__(self, name: str | None = "first_row") -> None:
        super().__init__(name=name)
        self.seen = self.add_variable((), initializer="zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(tf.cast(tf.shape(y_pred)[0], tf.float32) ** 2)

    def result(self) -> Any:
        return self.seen + 0.0


class RunningMax(layers.Layer):
    """Assigns what is no mean over rows."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.seen = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any) -> Any:
        self.seen.assign(tf.reduce_max(x, axis=0))
        return x


def running_max(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), RunningMax(name="max"), layers.Dense(3)])


class MovesItself(layers.Layer):
    """Assigns a trainable weight from the rows at hand."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.offset = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="offset")

    def call(self, x: Any) -> Any:
        self.offset.assign(tf.reduce_mean(x, axis=0))
        return x


def moves_itself(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), MovesItself(name="moves"), layers.Dense(3)])


class Eager(SGD):
    """Goes further, the more replicas there are."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate * tf.distribute.get_strategy().num_replicas_in_sync)


class Forgets(SGD):
    """Keeps another momentum, the more replicas there are, which only the next step uses."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        momentum = self.momentums[self._get_variable_index(variable)]
        self.assign(momentum, momentum * (1.0 + 0.001 * (tf.distribute.get_strategy().num_replicas_in_sync - 1)))


class Differs(SGD):
    """Keeps another momentum on the second replica."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        momentum = self.momentums[self._get_variable_index(variable)]
        is_second = "CPU:1" in tf.identity(learning_rate).device
        self.assign(momentum, momentum * (1.001 if is_second else 1.0))


class Doubles(layers.Dense):
    """Has another gradient, the more replicas there are."""

    def call(self, x: Any) -> Any:
        y = super().call(x)
        return y + (tf.distribute.get_strategy().num_replicas_in_sync - 1) * (y - tf.stop_gradient(y))


def namesakes(library: models.Library) -> keras.Model:
    class Namesakes(library.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Doubles(3, name="same"), layers.Dense(3, name="same")

        def call(self, x: Any) -> Any:
            return self.second(tf.stop_gradient(x)) + self.first(x)

    return Namesakes()


PLANTED: dict[str, tuple[models.Build, models.Library, Callable[[], dict[str, Any]], str, str]] = {
    "state assigned in call, stock": (models.running_mean, keras, dict, "state-drifts", "running_mean.*/mean"),
    "a loss over valid rows, stock": (models.dense, keras, lambda: {"loss": mean_of_valid}, "local-loss", "'mean_of_v"),
    "a loss over valid rows, ours": (models.dense, kde, lambda: {"loss": mean_of_valid}, "local-loss", "'mean_of_vali"),
    "a train_step that adds means up": (unscaled, keras, dict, "scaled-gradient", "is 2 times .* train_step of Net"),
    "a train_step that scales twice, stock": (
        scaled_twice,
        keras,
        dict,
        "scaled-gradient",
        "is 0.5 times .*divided by the number of replicas twice.*train_step of ScalesTwice",
    ),
    "a train_step that scales, ours": (
        scaled_twice,
        kde,
        dict,
        "scaled-gradient",
        "is 0.5 times .*(\n.*)*write train_step and losses as for one device",
    ),
    "rows that interact, ours": (centered, kde, dict, "rows-interact", r"layers of your own: .*centered \(Centered\)"),
    "numpy in call": (numpy_noise, keras, dict, "uncontrolled-draws", "does not repeat its own step"),
    "state that is no mean, ours": (running_max, kde, dict, "state-differs", "Replicas agree on state .*max/seen"),
    "weights assigned in call": (moves_itself, keras, dict, "replicas-differ", "different weights: .*moves/offset"),
    "an optimizer that counts replicas": (
        models.dense,
        keras,
        lambda: {"optimizer": Eager(0.05)},
        "update-differs",
        r"Equal gradients make other weights: look at the optimizer \(Eager\)",
    ),
    "an optimizer that counts replicas in what it keeps": (
        models.dense,
        keras,
        lambda: {"optimizer": Forgets(0.05, momentum=0.9)},
        "optimizer-differs",
        "leave the optimizer otherwise.*momentums of .*kernel",
    ),
    "an optimizer that keeps other state on each replica": (
        models.dense,
        keras,
        lambda: {"optimizer": Differs(0.05, momentum=0.9)},
        "replicas-differ",
        "Replicas keep different state of the optimizer: .*momentums of .*kernel",
    ),
    "one of two layers of the same name": (namesakes, keras, dict, "scaled-gradient", "same/(kernel|bias) is"),
    "a metric that cannot be added up": (
        models.dense,
        kde,
        lambda: {"metrics": [FirstRow()]},
        "metric-differs",
        "logged differently: first_row",
    ),
    "a metric that Keras names by another number on each side": (
        models.dense,
        kde,
        lambda: {"metrics": ["mae", FirstRow(name=None)]},
        "metric-differs",
        "logged differently: first_row",
    ),
}


@pytest.mark.checks_fit  # which says nothing: the certificate does
@pytest.mark.parametrize("fault", rotating(PLANTED, list(PLANTED)[::4]))
def test_a_planted_fault_is_named(fault: str, mirrored: Strategy) -> None:
    model, library, arguments, code, words = PLANTED[fault]

    def build() -> keras.Model:
        return compiled(model, library, **arguments())()

    certificate = certify(build, mirrored, regression(32), steps=2, batch_size=16)
    assert codes(certificate) == [code], str(certificate)
    assert re.search(words, str(certificate.findings[0])), str(certificate)


# What stock Keras dies of is a finding, too.
CRASHES: dict[str, tuple[Callable[[], dict[str, Any]], int, str]] = {
    "3, a first batch of 15 rows": (dict, 15, "fit-averages-a-batch"),
    "5, steps_per_execution": (lambda: {"steps_per_execution": 2}, 16, "steps-per-execution"),
    "6, gradient accumulation": (
        lambda: {"optimizer": SGD(0.05, gradient_accumulation_steps=2)},
        16,
        "reduction-in-a-condition",
    ),
    "7, jit_compile": (lambda: {"jit_compile": True}, 16, "jit-compile"),
}


@pytest.mark.parametrize("crash", rotating(CRASHES, list(CRASHES)[::2], slow=["5, steps_per_execution"]))
def test_what_stock_keras_dies_of_is_named(crash: str, mirrored: Strategy) -> None:
    arguments, rows, code = CRASHES[crash]

    def build() -> keras.Model:
        return compiled(models.dense, keras, **arguments())()

    certificate = certify(build, mirrored, regression(rows), steps=2, batch_size=16)
    assert codes(certificate)[0] == code, str(certificate)


# Clean models


def everything(library: models.Library) -> keras.Model:
    """Most kinds of layers in one model: random ones, normalization, attention."""
    inputs = layers.Input((4, 3))
    x = layers.GaussianNoise(0.1)(inputs)
    x = layers.Dense(4, activation="tanh")(x)
    x = layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x)
    x = layers.BatchNormalization(synchronized=True)(layers.LayerNormalization()(x))
    x = layers.SpatialDropout1D(0.2)(x)
    return library.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(layers.GlobalAveragePooling1D()(x)))


def recurrent(library: models.Library) -> keras.Model:
    """Takes long to trace, and its attention's biases cancel in what follows."""
    inputs = layers.Input((4, 3))
    x = layers.LSTM(4, return_sequences=True, recurrent_dropout=0.2)(layers.GaussianNoise(0.1)(inputs))
    x = layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x)
    x = layers.BatchNormalization(synchronized=True)(layers.LayerNormalization()(x))
    return library.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


CLEAN: dict[str, tuple[models.Build, Callable[[], dict[str, Any]], Callable[[int, int], tuple[Any, Any]]]] = {
    "dense": (models.dense, dict, feeds.regression),
    "everything": (everything, lambda: {"optimizer": adam(), "metrics": ["mae"]}, feeds.sequences),
    "recurrent": (recurrent, lambda: {"optimizer": adam()}, feeds.sequences),
    "masks": (models.masked_steps, lambda: {"optimizer": adam()}, feeds.padded_steps),
}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("dense", "mirrored2"),
        pytest.param("everything", "mirrored2", marks=pytest.mark.slow),
        pytest.param("masks", "mirrored4", marks=pytest.mark.slow),
        *(pytest.param("everything", kind, marks=pytest.mark.rotating) for kind in ("mirrored3", "mirrored4")),
        *(pytest.param("recurrent", kind, marks=pytest.mark.rotating) for kind in ("mirrored2", "mirrored3")),
    ],
)
def test_clean_models_pass_with_a_partial_batch_and_an_empty_replica(model: str, kind: str, strategies: Any) -> None:
    build, arguments, make = CLEAN[model]

    def built() -> keras.Model:
        return compiled(build, kde, **arguments())()

    certificate = certify(built, strategies.get(kind), make(17, 1), steps=3, batch_size=8)
    assert certificate.is_equivalent, str(certificate)
    assert certificate.largest is not None
    assert 0 < certificate.largest.excess < 1
    assert certificate.drift is not None
    assert certificate.drift < 1e-5
    assert {drawn.is_equal for drawn in certificate.draws} <= {False}
    assert len(certificate.draws) == {"everything": 3, "recurrent": 3}.get(model, 0)


# These train otherwise than by `fit`, on other data than their feed has for it.
NOT_BY_FIT = ("train on batch with weights", "train on batch of dicts", "predict several outputs")


class Undefined(metrics.MeanSquaredError):
    """Is what R2 of one row is."""

    def result(self) -> Any:
        return super().result() * float("nan")


@pytest.mark.slow
def test_a_metric_that_is_no_number_on_one_device_is_no_fault(mirrored: Strategy) -> None:
    def build() -> keras.Model:
        return compiled(models.dense, kde, metrics=[Undefined(name="undefined"), "mae"])()

    certificate = certify(build, mirrored, regression(32), steps=2, batch_size=16)
    assert certificate.is_equivalent, str(certificate)
    assert certificate.num_steps == 2
    assert {gap.name for gap in certificate.deviations if gap.part == "metric"} == {"loss", "undefined", "mae"}


@pytest.mark.slow
def test_a_gradient_that_cancels_is_rounding(strategies: Any) -> None:
    """The bias before a normalization has none: what is left is the rounding of large numbers."""

    def build() -> keras.Model:
        model = kde.Sequential(
            [layers.Input((5,)), layers.Dense(6), layers.BatchNormalization(synchronized=True), layers.Dense(3)]
        )
        model.compile(SGD(0.01), "mse")
        return model

    x, y = regression(44)
    certificate = certify(build, strategies.get("mirrored3"), (100 + 10 * x, y), steps=4, batch_size=11)
    assert certificate.is_equivalent, str(certificate)


class CountsReplicas(layers.Layer):
    """Has a gradient of 0 on one device, and of something far below rounding on more."""

    def build(self, _: Any) -> None:
        self.offset = self.add_weight(name="offset", shape=(5,), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + 1e-12 * (tf.distribute.get_strategy().num_replicas_in_sync - 1) * self.offset


class EagerAdam(keras.optimizers.Adam):
    """Goes further, the more replicas there are."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate * tf.distribute.get_strategy().num_replicas_in_sync)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "found"), [(keras.optimizers.Adam, []), (EagerAdam, ["update-differs"])])
def test_whole_steps_that_adam_makes_of_rounding_are_rounding(
    optimizer: Any, found: list[str], mirrored: Strategy
) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([layers.Input((5,)), CountsReplicas(name="counts"), layers.Dense(3)])
        model.compile(optimizer(0.05, epsilon=1e-20), "mse")
        return model

    certificate = certify(build, mirrored, regression(32), steps=3, batch_size=8)
    assert codes(certificate) == found, str(certificate)
    (offset,) = [gap for gap in certificate.deviations if gap.part == "weights" and "counts" in gap.name]
    assert offset.absolute > 0.04
    assert offset.is_beyond is bool(found)


@pytest.mark.slow
def test_synchronized_statistics_of_inputs_far_from_0_are_named(mirrored: Strategy) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([layers.Input((5,)), layers.BatchNormalization(synchronized=True), layers.Dense(3)])
        model.compile(SGD(0.01), "mse")
        return model

    x, y = regression(48)
    certificate = certify(build, mirrored, (300 + x, y), steps=2, batch_size=16)
    assert codes(certificate) == ["imprecise-statistics"], str(certificate)
    assert re.search(r"BatchNormalization \(\S+\) computes statistics with too few digits", str(certificate))


TABLE = [row for row in ROWS if row.quick and row.under and row.name not in NOT_BY_FIT]


@pytest.mark.rotating(turns=3)
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        pytest.param(row, kind, id=f"{row.name}-{kind}")
        for row, kind in zip(TABLE, itertools.cycle(["mirrored2", "mirrored4"]), strict=False)
    ],
)
def test_rows_of_the_conformance_table_pass(row: Row, kind: str, strategies: Any) -> None:
    fit = dict(row.serve(None).fit)
    is_array = not isinstance(fit["x"], tf.data.Dataset | keras.utils.PyDataset) and fit.get("y") is not None
    arrays = tuple(fit[name] for name in ("x", "y", "sample_weight") if fit.get(name) is not None)

    def build() -> keras.Model:
        model = row.build(kde)
        model.compile(**row.compile())
        return model

    data, rows = arrays if is_array else fit["x"], fit.get("batch_size") or 32
    with warnings_of(row):
        certificate = certify(build, strategies.get(kind), data, steps=4, batch_size=rows)
    assert certificate.is_equivalent, str(certificate)


# What it says, and what it refuses


def test_it_is_printed_and_written_as_json(mirrored: Strategy) -> None:
    certificate = certify(compiled(models.dense, keras), mirrored, regression(9), steps=2, batch_size=8)
    console = Console(width=200, file=io.StringIO())
    console.print(certificate)
    text = console.file.getvalue()
    assert "not what one device trains, 1 finding." in text
    assert "uneven-batch: A batch that does not split evenly" in text
    assert "deviation from one device" in text

    console = Console(width=80, file=io.StringIO())  # no name is cut off in a narrow terminal
    console.print(certificate)
    assert "…" not in console.file.getvalue()

    read = json.loads(certificate.to_json())
    assert read["is_equivalent"] is False
    assert read["rows"] == [[4, 4], [1, 0]]
    assert [finding["code"] for finding in read["findings"]] == ["uneven-batch"]
    assert {gap["part"] for gap in read["deviations"] if gap["is_beyond"]} == {"gradient"}


def test_what_random_ops_drew_is_a_table_and_no_deviation_is_none() -> None:
    draws = (
        Draws("drop", 1, 64, 0.5, is_equal=False, rate=0.25, kept=0.75),
        Draws("noise", 2, 32, 1.0, is_equal=True),
    )
    made = Certificate("net", "MirroredStrategy (2 replicas)", 0, (), (), draws, ())
    assert str(made) == "'net' under MirroredStrategy (2 replicas), 0 steps: equivalent to one device."
    console = Console(width=200, file=io.StringIO())
    console.print(made)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["drop", "1", "64", "50.0%", "0.750", "0.750"] in rows
    assert ["noise", "2", "32", "100.0%"] in rows


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda s: (compiled(models.dense, keras), s, 5), "takes a tf.data.Dataset"),
        (lambda s: (compiled(models.dense, keras), s, tf.data.Dataset.from_tensors(1).take(0)), "holds no batch"),
        (lambda s: (compiled(models.dense, keras), s, regression(8)[0]), "takes a tf.data.Dataset"),
        (lambda s: (compiled(models.dense, keras)(), s, regression(8)), "takes a function that builds and compiles"),
        (
            lambda s: (compiled(models.dense, keras), kde.StrategyChoice(s, "mirrored", ""), regression(8)),
            r"got .*; it has one: `StrategyChoice\.strategy`\.",
        ),
        (lambda s: (lambda: models.dense(keras), s, regression(8)), "a certificate needs a compiled Keras model"),
        (
            lambda s: (lambda: compiled(models.dense, kde)() if not s.scope() else in_scope(s), s, regression(8)),
            "by it",
        ),
        (
            lambda s: (
                compiled(models.dense, keras),
                tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
                regression(8),
            ),
            "has replicas elsewhere. Certify with a MirroredStrategy",
        ),
        (
            lambda s: (compiled(models.dense, keras, loss=lambda y, p: p * np.nan), s, regression(8)),
            "The single-device reference",
        ),
    ],
)
def test_what_cannot_be_certified_is_refused(give: Any, words: str, mirrored: Strategy) -> None:
    with pytest.raises(kde.CertificateError, match=words):
        certify(*give(mirrored), steps=1)


def fails(where: str, of: str) -> Build:
    """Return what builds a model that fails on one device, or on replicas: when it is built, or in a step."""

    class Failing(kde.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            fail("step")
            return super().train_step(data)

    def fail(part: str) -> None:
        is_one = tf.distribute.get_strategy().num_replicas_in_sync == 1
        if part == where and (of == "both" or is_one == (of == "one device")):
            raise ValueError("no luck here")

    def build() -> keras.Model:
        fail("building")
        inputs = layers.Input((5,))
        model = Failing(inputs, layers.Dense(3)(inputs))
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    return build


@pytest.mark.parametrize("where", ["building", "step"])
def test_what_fails_under_the_strategy_alone_is_a_finding(where: str, mirrored: Strategy) -> None:
    certificate = certify(fails(where, "replicas"), mirrored, regression(8), steps=1, seeds=SEEDS)
    (found,) = certificate.findings
    assert found.code == "does-not-run"
    begin = {"building": "Building the model", "step": "A step"}[where]
    assert found.what.startswith(f"{begin} ends with ValueError under MirroredStrategy (2 replicas).")
    assert "no luck here" in found.evidence
    assert (certificate.num_steps, certificate.seed, certificate.draws) == (0, None, ())


@pytest.mark.slow
def test_what_fails_with_seeds_alone_is_a_finding_and_on_one_device_an_error(mirrored: Strategy) -> None:
    def seeded(of: str) -> list[Finding]:
        certification = _Certification(fails("step", of), mirrored, [tuple(map(tf.constant, regression(8)))], SEEDS)
        certification._rows.append((4, 4))  # as if it had been compared without
        certification._run_seeded(SEEDS)
        return certification._findings

    (found,) = seeded("replicas")
    assert found.what.startswith("A step with seeds ends with ValueError under MirroredStrategy (2 replicas).")
    with pytest.raises(kde.CertificateError, match="The model fails on one device.*no luck here"):
        seeded("both")


@pytest.mark.parametrize("where", ["building", "step"])
def test_what_fails_on_one_device_has_no_certificate(where: str, mirrored: Strategy) -> None:
    words = {"building": "The model cannot be built on one device", "step": "The model fails on one device"}[where]
    with pytest.raises(kde.CertificateError, match=f"{words}, so nothing says what is right: .*no luck here"):
        certify(fails(where, "both"), mirrored, regression(8), steps=1)


class Updates(kde.Model):  # type: ignore[misc]
    """Has an optimizer that its first step builds, and may fail in it."""

    fails_on: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.head, self.own = layers.Dense(3), {"head": SGD(0.05, momentum=0.9)}

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        if tf.distribute.get_strategy().num_replicas_in_sync in self.fails_on:
            raise ValueError("no luck here")
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.own["head"].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def updates(*fails_on: int) -> Build:
    def build() -> keras.Model:
        model = Updates()
        model(np.zeros((1, 5)))
        model.fails_on = fails_on  # the numbers of replicas
        model.compile(loss="mse")
        return model

    return build


@pytest.mark.slow
def test_an_optimizer_that_a_step_builds_is_compared_from_its_first_step(mirrored: Strategy) -> None:
    certificate = certify(updates(), mirrored, regression(8), steps=1)
    assert certificate.is_equivalent, str(certificate)
    assert {"optimizer", "weights"} <= {deviation.part for deviation in certificate.deviations}
    assert {deviation.step for deviation in certificate.deviations} == {1}


@pytest.mark.slow
def test_a_step_that_fails_before_optimizers_are_built_fails_where_it_does(mirrored: Strategy) -> None:
    (found,) = certify(updates(2), mirrored, regression(8), steps=1).findings
    assert (found.code, "no luck here" in found.evidence) == ("does-not-run", True)
    with pytest.raises(kde.CertificateError, match="The model fails on one device, .*: ValueError: .*no luck here"):
        certify(updates(1), mirrored, regression(8), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("library", [keras, kde], ids=["stock", "ours"])
def test_a_model_whose_optimizer_is_built_is_certified_like_any(library: models.Library, mirrored: Strategy) -> None:
    def build() -> keras.Model:  # as one that was loaded with its optimizer
        model = compiled(models.dense, library)()
        model.optimizer.build(model.trainable_variables)
        return model

    certificate = certify(build, mirrored, regression(8), steps=1)
    assert certificate.is_equivalent, str(certificate)
    assert "gradient" in {deviation.part for deviation in certificate.deviations}


@pytest.mark.slow
def test_steps_from_where_one_device_is_no_longer_finite_are_left_out(mirrored: Strategy) -> None:
    def build() -> keras.Model:
        return compiled(models.dense, keras, optimizer=SGD(1e30))()

    certificate = certify(build, mirrored, regression(32), steps=4, batch_size=8)
    assert certificate.num_steps < 4


def test_two_models_that_are_not_alike_are_refused(mirrored: Strategy) -> None:
    units = iter((6, 7))

    def build() -> keras.Model:
        model = keras.Sequential([layers.Input((5,)), layers.Dense(next(units)), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(kde.CertificateError, match="built another model on one device than under MirroredStrategy"):
        certify(build, mirrored, regression(8), steps=1)


class Raw(layers.Layer):  # type: ignore[misc]
    """Keeps variables of TensorFlow's own."""

    def __init__(self) -> None:
        super().__init__(name="raw")
        options = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ}
        self.seen = tf.Variable(0.0, **options, aggregation=tf.VariableAggregation.SUM)
        self.count = tf.Variable(0, trainable=False)

    def call(self, x: Any) -> Any:
        return x


def test_variables_of_tensorflow_are_state_that_is_compared_where_they_are_floats(mirrored: Strategy) -> None:
    def build() -> keras.Model:
        return compiled(lambda lib: lib.Sequential([layers.Input((5,)), Raw(), layers.Dense(3)]), keras)()

    run = TrainingRun(build, mirrored, tuple(map(tf.constant, regression(8))))
    names = [f"{part} {name.rpartition('/')[2]}" for part, name, _ in run.compared]
    assert names == ["weights kernel", "weights bias", "state seen"]
    run.load([value + 3.0 for value in run.state()])
    assert run.state()[2] == 3.0  # of all replicas, which add up


def in_scope(strategy: Strategy) -> keras.Model:
    with strategy.scope():
        return compiled(models.dense, kde)()


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return feeds.split(regression(21), [8, 8, 5])[index]


def in_batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (regression(45), [(4, 4), (2, 3)]),
        (in_batches(*regression(45)), [(4, 4), (2, 3)]),
        (in_batches(*regression(45)).repeat(), [(4, 4), (4, 4)]),
        (Sequence(), [(4, 4), (2, 3)]),
        (iter(feeds.split(regression(12), [3, 8, 1])), [(1, 2), (4, 4)]),
        ([regression(5)], [(2, 3), (2, 3)]),
    ],
    ids=["arrays", "tf.data", "endless tf.data", "PyDataset", "generator", "one batch"],
)
def test_the_last_batch_is_among_those_trained_on(data: Any, rows: list[Any], mirrored: Strategy) -> None:
    certificate = certify(compiled(models.dense, kde), mirrored, data, steps=2, batch_size=8)
    assert list(certificate.rows) == rows
    assert certificate.is_equivalent


def test_batches_of_stock_keras_are_split_as_tensorflow_does(strategies: Any) -> None:
    """Which may leave replicas without rows, where others have two."""
    mirrored = strategies.get("mirrored3")
    for dataset in (in_batches(*regression(20)), in_batches(*regression(20)).map(lambda x, y: (x, y))):
        split = [
            tuple(len(part) for part in mirrored.experimental_local_results(x))
            for x, _ in mirrored.experimental_distribute_dataset(dataset)
        ]
        assert split[-1] == (2, 2, 0)
        assert [tuple(np.diff(bounds_of_tensorflow(rows, 3))) for rows in (8, 8, 4)] == split


@pytest.mark.slow
def test_dropout_that_keeps_another_share_is_named(mirrored: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tf_random.dropout
    monkeypatch.setattr(tf_random, "dropout", lambda inputs, rate, *args, **kw: right(inputs, rate / 2, *args, **kw))
    certificate = certify(compiled(dropout, kde), mirrored, regression(32), steps=1, batch_size=32)
    assert codes(certificate) == ["keep-rate"]
    assert "rate of 0.3" in certificate.findings[0].what


def test_parameter_servers_are_refused_since_no_two_runs_are_equal() -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    with pytest.raises(kde.CertificateError, match="no two runs are equal.*certified with a MirroredStrategy"):
        certify(compiled(models.dense, keras), strategy, regression(8))


def test_it_is_refused_inside_of_a_scope(mirrored: Strategy) -> None:
    with mirrored.scope(), pytest.raises(kde.CertificateError, match="inside a strategy's scope"):
        certify(compiled(models.dense, keras), mirrored, regression(8))


def test_of_arrays_an_optional_input_may_be_none() -> None:
    x, y = regression(8)
    (batch,) = global_batches(({"x": x, "mask": None}, y), 1, 8)
    assert batch[0]["mask"] is None
    np.testing.assert_array_equal(batch[0]["x"], x.astype("float32"))


SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf
from keras_dist_ext.strategy.pick import pick_strategy
import keras_dist_ext as kde

library = kde if sys.argv[1] == "ours" else keras
strategy = pick_strategy("mirrored", devices=["CPU:0", "CPU:1"], environ={}).strategy
with strategy.scope():
    model = library.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(9, 5))
model.fit(x, x[:, :3], batch_size=8, epochs=1000)
raise SystemExit("it trained")
"""


@pytest.mark.parametrize(
    ("library", "expected"), [pytest.param("stock", ["uneven-batch"], marks=pytest.mark.slow), ("ours", [])]
)
def test_a_script_is_certified_as_it_is(library: str, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert codes(certify_script(str(script), [library], steps=2)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "weights"),
    [
        pytest.param("(x, labels)", "class_weight={0: 1.0, 1: 5.0, 2: 0.5}", marks=pytest.mark.slow),
        ("(tf.data.Dataset.from_tensor_slices((x, labels)).batch(8),)", "class_weight={0: 1.0, 1: 5.0, 2: 0.5}"),
        pytest.param("(x, labels)", "sample_weight=np.arange(18.0)", marks=pytest.mark.slow),
    ],
    ids=["arrays", "tf.data", "weights of rows"],
)
def test_what_fit_makes_of_its_data_is_what_a_script_is_certified_on(data: str, weights: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    mean = "keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction='mean_with_sample_weight')"
    text = SCRIPT.replace('"mse"', mean).replace("(9, 5)", "(18, 5)")
    given = f"*{data}, {weights}"
    script.write_text(text.replace("model.fit(x, x[:, :3]", f"labels = np.arange(18) % 3\nmodel.fit({given}"))
    text = script.read_text()
    script.write_text(text if data.startswith("(x") else text.replace("batch_size=8, ", ""))
    assert codes(certify_script(str(script), ["ours"], steps=3)) == []
    found = certify_script(str(script), ["stock"], steps=3)
    assert found.rows == ((4, 4), (4, 4), (1, 1))
    assert codes(found) == ["local-weight-count"], str(found)


def test_a_script_that_trains_on_one_device_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("with strategy.scope()", "if True"))
    with pytest.raises(kde.CertificateError, match="on one device: there is nothing to compare"):
        certify_script(str(script), ["stock"])


def test_a_certificate_is_printed_and_its_exit_code_says_whether_it_is_clean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean = Certificate("net", "MirroredStrategy (2 replicas)", 1, ((1, 1),), (), (), ())
    assert print_certificate(clean) == 0
    assert "equivalent to one device" in capsys.readouterr().out
    assert print_certificate(dataclasses.replace(clean, findings=(Finding("a", "b", "c", "d"),))) == 1


def test_a_dataset_that_a_script_trains_on_is_certified_on_as_it_is() -> None:
    dataset = tf.data.Dataset.from_tensors(1.0)
    assert FirstFit(None, {"x": dataset}).data() is dataset


@pytest.mark.slow
def test_the_command_prints_a_certificate_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "train.py", tmp_path / "certificate.json"
    script.write_text(SCRIPT)
    command = ["doctor", "--certify", "--steps", "2", "--json", str(file)]
    assert cli.main([*command, str(script), "stock"]) == 1
    assert "uneven-batch" in capsys.readouterr().out
    assert json.loads(file.read_text())["num_steps"] == 2
    assert cli.main([*command, "--allow", "uneven-batch", str(script), "stock"]) == 0


@pytest.mark.slow
def test_one_code_may_be_allowed_without_a_list(mirrored: Strategy) -> None:
    certificate = certify(compiled(models.dense, keras), mirrored, regression(9), 2, batch_size=8, allow="uneven-batch")
    assert [finding.code for finding in certificate.allowed] == ["uneven-batch"]


def test_a_script_that_never_trains_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    with pytest.raises(kde.CertificateError, match="ended without a call of `fit`"):
        certify_script(str(script))


@pytest.mark.parametrize("rows", rotating([45, 32], [], slow=[45]))
def test_steps_with_dropout_are_compared_as_they_draw_if_that_is_as_on_one_device(rows: int, strategies: Any) -> None:
    found = certify(compiled(dropout, kde), strategies.get("mirrored2"), regression(rows), steps=3, seeds=SEEDS)
    assert found.is_equivalent
    assert (found.seed, found.num_steps, found.draws) == (42, 3, ())
    console = Console(file=io.StringIO(), width=200)
    console.print(found)
    assert "Replicas and one device have drawn the same random numbers, by the seed 42." in console.file.getvalue()


@pytest.mark.rotating
def test_draws_that_are_not_those_of_one_device_are_found(monkeypatch: pytest.MonkeyPatch, strategies: Any) -> None:
    monkeypatch.setattr(global_draws, "has_examples", lambda *_, **__: False)  # all replicas draw the first one's rows
    found = certify(compiled(dropout, kde), strategies.get("mirrored2"), regression(32), steps=2, seeds=SEEDS)
    assert codes(found) == ["draws-differ"]
    assert "a step is another on replicas than on one device" in str(found)


def normalized(library: models.Library) -> keras.Model:
    return library.Sequential([layers.Input((5,)), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)])


@pytest.mark.rotating
def test_draws_are_compared_beside_batch_statistics_that_are_each_replicas_own(strategies: Any) -> None:
    allow = ["local-batch-statistics"]
    build, mirrored = compiled(normalized, kde), strategies.get("mirrored2")
    found = certify(build, mirrored, regression(45), steps=3, seeds=SEEDS, allow=allow)
    assert found.is_equivalent
    assert found.seed == 42


@pytest.mark.rotating
def test_dropout_and_batch_statistics_pass_where_both_are_those_of_one_device(strategies: Any) -> None:
    build = compiled(normalized, kde, batch_statistics="global")
    found = certify(build, strategies.get("mirrored3"), regression(45), steps=3, seeds=SEEDS)
    assert found.is_equivalent, str(found)


@pytest.mark.rotating
def test_a_model_that_is_to_be_exact_is_compared_with_what_it_draws_without_seeds(strategies: Any) -> None:
    build = compiled(normalized, kde, exact=True)
    found = certify(build, strategies.get("mirrored3"), regression(45), steps=3)
    assert found.is_equivalent, str(found)
    assert found.seed == 0
    assert certify(build, strategies.get("mirrored2"), regression(45), steps=2, seeds=kde.ReplicaSeeds(9)).seed == 9


def test_seeds_by_which_sides_draw_otherwise_are_refused(strategies: Any) -> None:
    mirrored = strategies.get("mirrored2")
    with pytest.raises(kde.CertificateError, match="each replica draws its own numbers"):
        certify(compiled(dropout, kde), mirrored, regression(32), seeds=kde.ReplicaSeeds(42))
    with pytest.raises(kde.CertificateError, match="each replica draws its own numbers"):
        certify(compiled(dropout, kde), mirrored, regression(32), seeds=kde.ReplicaSeeds(42, draws="replica"))
    with pytest.raises(kde.CertificateError, match="seeds must be ReplicaSeeds.* or None, got 42"):
        certify(compiled(dropout, kde), mirrored, regression(32), seeds=42)  # type: ignore[arg-type]
    with pytest.raises(kde.CertificateError, match="stock Keras, whose replicas do not draw by ReplicaSeeds"):
        certify(compiled(dropout, keras), mirrored, regression(32), seeds=SEEDS)
