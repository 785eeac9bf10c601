"""The table: a row a behaviour, in the order of a step: batches, weights and masks, losses, optimizers, execution."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import losses, metrics, ops, optimizers
from keras.optimizers import SGD
from keras.src.trainers.data_adapters.data_adapter_utils import check_data_cardinality

from conformance import feeds
from conformance.feeds import Feed, arrays, batches, pipeline, unknown_length
from conformance.models import (
    activity_regularized,
    adds_loss,
    adds_loss_in_evaluation,
    alternating,
    attention,
    binary_classifier,
    classifier,
    cnn,
    conv_lstm,
    convolutions_in_time,
    custom_train_step,
    dense,
    embedding,
    embedding_with_mask,
    from_scratch,
    frozen_layer,
    functional_subclass,
    gan,
    gru,
    lazy_sequential,
    looked_up_words,
    lstm,
    masked_batch_norm,
    masked_lstm,
    masked_steps,
    mixed,
    nested,
    old_compute_loss,
    optional_input,
    overridden_parts,
    plain_scalar_logs,
    regularized,
    running_mean,
    sequential,
    several_flags,
    several_inputs_and_outputs,
    shared_layers,
    speech,
    subclassed,
    sums_losses,
    synchronized_batch_norm,
    tagger,
    tracker_in_call,
    unmasked_steps,
    words_and_flags,
)
from conformance.run import IN_PROCESS, WORKERS, Outcome, Row, fit_only, fit_with_batch_logs, plain, state

__all__ = ["OPTIMIZERS", "ROWS"]

Quick = partial(Row, quick=True)
"""A row of the quick run too."""


def where_none_is_taken() -> tuple[str, ...]:
    """Say under what to run rows whose arrays have None for one: Keras 3.11 takes none on one device either."""
    try:
        check_data_cardinality([np.zeros(1), None])
    except AttributeError:
        return ()
    return (*IN_PROCESS, WORKERS)


def mse(optimizer: Any = None, **more: Any) -> dict[str, Any]:
    """Compile with what most rows are compiled with."""
    return {"optimizer": optimizer or SGD(0.05), "loss": "mse", **more}


def adam(**more: Any) -> Any:
    """Adam whose epsilon keeps it from dividing rounding errors by rounding errors where a gradient is almost 0."""
    return optimizers.Adam(0.02, epsilon=1e-3, **more)


def crossentropy(**more: Any) -> dict[str, Any]:
    return {"optimizer": SGD(0.2), "loss": "sparse_categorical_crossentropy", **more}


BATCHES = [
    Row("even batches", dense, mse, arrays(num_rows=48, batch=24)),
    Quick("a partial last batch", dense, mse, arrays()),
    Quick("batches of 1 to 9 rows", dense, mse, batches(*range(1, 10))),
    Row("a first batch of 1 row", dense, mse, batches(1, 8, 8, 8)),
    Row("a first batch of 15 rows", dense, mse, batches(15, 16, 16)),
    Row("a middle batch of 1 row", dense, mse, batches(8, 8, 1, 8, 8)),
    Row("a last batch of 1 row", dense, mse, arrays(num_rows=49, batch=16)),
    Row("batches of 1 row only", dense, mse, batches(1, 1, 1, epochs=10)),
    Row("fewer rows than replicas", dense, mse, arrays(num_rows=2, batch=2, epochs=20)),
    Row("a batch larger than the data", dense, mse, arrays(num_rows=7, batch=32, epochs=20)),
]


class ValidRows(losses.Loss):
    """Gives its own mask: rows with a negative first target do not count."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = ops.mean(ops.square(y_true - y_pred), axis=-1)
        keras.src.backend.common.masking.set_keras_mask(values, y_true[:, 0] > 0)
        return values


WEIGHTS_AND_MASKS = [
    Row("sample weights", dense, mse, arrays(weights=feeds.row_weights)),
    Row(
        "sample weights of a metric",
        dense,
        lambda: mse(metrics=["mae"], weighted_metrics=["mae", metrics.MeanSquaredError(name="weighted")]),
        arrays(weights=feeds.row_weights),
    ),
    Row(
        "sample weights all 0 in a batch", dense, mse, arrays(weights=lambda n, _: np.repeat([0.0, 1.0], [12, n - 12]))
    ),
    Row("sample weights of time steps", unmasked_steps, mse, arrays(feeds.padded_steps, weights=feeds.step_weights)),
    Row("class weights", classifier, crossentropy, arrays(feeds.labels, class_weight={0: 1, 1: 3, 2: 0.5, 3: 0})),
    Row(
        "class weights of one-hot labels",
        classifier,
        lambda: {"optimizer": SGD(0.2), "loss": "categorical_crossentropy", "weighted_metrics": ["accuracy"]},
        arrays(feeds.one_hot_labels, class_weight={0: 1, 1: 3, 2: 0.5, 3: 2}),
    ),
    Quick("masked time steps", masked_steps, mse, arrays(feeds.padded_steps)),
    Row(
        "masked time steps with weights",
        masked_steps,
        lambda: mse(metrics=["mae"], weighted_metrics=["mse"]),
        arrays(feeds.padded_steps, weights=feeds.step_weights),
    ),
    Row(
        "masked tokens",
        tagger,
        lambda: {
            "optimizer": SGD(0.2),
            "loss": losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["sparse_categorical_accuracy"],
        },
        arrays(feeds.tags),
    ),
    Row("a mask of the loss's own", dense, lambda: mse(loss=ValidRows()), arrays()),
    Row(
        "ignored classes",
        tagger,
        lambda: {"optimizer": SGD(0.2), "loss": losses.SparseCategoricalCrossentropy(True, ignore_class=0)},
        arrays(feeds.tags),
    ),
]


def reduced(reduction: str | None) -> Callable[[], dict[str, Any]]:
    # A sum over 8 rows is 8 times a mean, and a sum over time steps more.
    rate = 0.005 if reduction in ("sum", None) else 0.05
    return lambda: mse(SGD(rate), loss=losses.MeanSquaredError(reduction=reduction))


REDUCTIONS = [
    Row(f"loss reduction {reduction}{of}", build, reduced(reduction), serve, quick=reduction in quick)
    for of, build, serve, quick in (
        ("", dense, arrays(), ("sum",)),
        (", weighted", dense, arrays(weights=feeds.row_weights), ("mean_with_sample_weight",)),
        (", masked", masked_steps, arrays(feeds.padded_steps), ()),
        (
            ", masked and weighted",
            masked_steps,
            arrays(feeds.padded_steps, weights=feeds.step_weights),
            ("mean_with_sample_weight",),
        ),
    )
    for reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", None)
]

BOTH = {"value": "mse", "label": losses.SparseCategoricalCrossentropy(from_logits=True)}

LOSSES = [
    Row("several losses", several_inputs_and_outputs, lambda: mse(loss=BOTH), arrays(feeds.dicts)),
    Row(
        "several losses with weights, and metrics",
        several_inputs_and_outputs,
        lambda: mse(
            loss=BOTH,
            loss_weights={"value": 0.3, "label": 2.0},
            metrics={"value": ["mae"], "label": ["accuracy"]},
        ),
        arrays(feeds.dicts),
    ),
    Row(
        "several losses with sample weights of their own",
        several_inputs_and_outputs,
        lambda: mse(loss=BOTH, weighted_metrics={"value": ["mae"], "label": []}),
        arrays(
            feeds.dicts,
            weights=lambda n, seed: {"value": feeds.row_weights(n, seed), "label": feeds.row_weights(n, seed + 1)},
        ),
    ),
    Row(
        "one output without a loss",
        several_inputs_and_outputs,
        lambda: mse(loss={"value": "mse", "label": None}),
        arrays(feeds.dicts),
    ),
    Row(
        "a function as loss",
        dense,
        lambda: mse(loss=lambda y, y_pred: ops.mean(ops.abs(y - y_pred), axis=-1)),
        arrays(weights=feeds.row_weights),
    ),
    Row("a function as loss that gives a scalar", dense, lambda: mse(loss=scalar_loss), arrays()),
    Row("Huber loss", dense, lambda: mse(loss="huber"), arrays()),
    Row("regularizers", regularized, mse, arrays()),
    Row("an activity regularizer", activity_regularized, mse, arrays()),
    Row("add_loss of a mean", adds_loss(ops.mean), mse, arrays()),
    Row("add_loss of a sum", adds_loss(ops.sum), lambda: mse(SGD(0.01)), arrays()),
    Row("add_loss of a tf.reduce_sum", adds_loss(tf.reduce_sum), lambda: mse(SGD(0.01)), arrays()),
    Row("add_loss of a sum, in evaluation alone", adds_loss_in_evaluation, lambda: mse(SGD(0.01)), arrays()),
    Row("add_loss of a sum, in a train_step of the user's own", sums_losses, lambda: mse(SGD(0.01)), arrays()),
    Row("Dice loss over all rows", several_flags, lambda: mse(SGD(0.5), loss="dice"), arrays(feeds.flags)),
    Row(
        "Dice loss of each class of 1 to 9 rows",
        several_flags,
        lambda: mse(SGD(0.5), loss=losses.Dice(axis=(0,))),
        batches(*range(1, 10), make=feeds.flags),
    ),
    Row("Tversky loss", several_flags, lambda: mse(SGD(0.5), loss=losses.Tversky(0.3, 0.7)), arrays(feeds.flags)),
    Row(
        "CTC loss of 1 to 9 rows",
        speech,
        lambda: mse(SGD(0.02), loss="ctc"),
        batches(*range(1, 10), make=feeds.spellings),
    ),
    Row("add_loss without another loss", adds_loss(ops.mean), lambda: mse(loss=None), arrays()),
]


def scalar_loss(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y - y_pred))


QUICK_OPTIMIZERS = (
    "momentum",
    "Adam",
    "clipping by global norm",
    "gradient accumulation over 4 of 6 steps",
    "LossScaleOptimizer",
)

OPTIMIZERS = [
    Row(name, dense, lambda make=make: mse(make()), arrays(), act=fit_only, quick=name in QUICK_OPTIMIZERS)
    for name, make in {
        "momentum": lambda: SGD(0.02, momentum=0.9),
        "Nesterov momentum": lambda: SGD(0.02, momentum=0.9, nesterov=True),
        "SGD with weight decay": lambda: SGD(0.05, weight_decay=0.1),
        "Adam": adam,
        "AMSGrad": lambda: adam(amsgrad=True),
        "AdamW": lambda: optimizers.AdamW(0.02, epsilon=1e-3, weight_decay=0.1),
        "RMSprop": lambda: optimizers.RMSprop(0.01, epsilon=1e-3),
        "Adagrad": lambda: optimizers.Adagrad(0.05, epsilon=1e-3),
        "Nadam": lambda: optimizers.Nadam(0.02, epsilon=1e-3),
        "Adafactor": lambda: optimizers.Adafactor(0.02),
        "Lamb": lambda: optimizers.Lamb(0.02, epsilon=1e-3),
        "Ftrl": lambda: optimizers.Ftrl(0.05),
        "clipping by value": lambda: SGD(0.1, clipvalue=0.1),
        "clipping by norm": lambda: SGD(0.1, clipnorm=0.2),
        "clipping by global norm": lambda: SGD(0.1, global_clipnorm=0.3),
        "Adam clipped by global norm": lambda: adam(global_clipnorm=0.3),
        "EMA": lambda: SGD(0.05, use_ema=True, ema_momentum=0.8),
        "EMA that overwrites every 5 steps": lambda: SGD(
            0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5
        ),
        "gradient accumulation over 2 steps": lambda: SGD(0.05, gradient_accumulation_steps=2),
        "gradient accumulation over 4 of 6 steps": lambda: SGD(0.05, gradient_accumulation_steps=4),
        "gradient accumulation over 5 of 24 steps": lambda: SGD(0.05, gradient_accumulation_steps=5),
        "accumulation, Adam and clipping": lambda: adam(gradient_accumulation_steps=3, clipnorm=0.2),
        "accumulation and EMA": lambda: SGD(
            0.05, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
        ),
        "a fixed loss scale factor": lambda: SGD(0.05, loss_scale_factor=128.0),
        "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
            SGD(0.05), initial_scale=64, dynamic_growth_steps=5
        ),
        "LossScaleOptimizer of Adam": lambda: optimizers.LossScaleOptimizer(adam(), dynamic_growth_steps=5),
        "an exponential schedule": lambda: SGD(optimizers.schedules.ExponentialDecay(0.1, 5, 0.8)),
        "a piecewise schedule": lambda: SGD(optimizers.schedules.PiecewiseConstantDecay([7, 15], [0.1, 0.05, 0.01])),
        "a cosine schedule of Adam": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.05, 20), epsilon=1e-3),
    }.items()
] + [
    Quick(
        "LossScaleOptimizer that overflows",
        dense,
        # 64 times a gradient of about 1 overflows float32 until the scale has come down from 2^127: steps are skipped.
        # XLA, which stock Keras uses on a GPU, multiplies the constants first, and skips one step fewer there.
        lambda: mse(
            optimizers.LossScaleOptimizer(SGD(0.05 / 64), initial_scale=2.0**127),
            loss_weights=64.0,
            jit_compile=False,
        ),
        arrays(),
        act=fit_only,
    ),
    Row(
        "a learning rate set by a callback",
        dense,
        mse,
        arrays(callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))]),
    ),
    Row(
        "a schedule over data of unknown length",
        dense,
        lambda: mse(SGD(optimizers.schedules.ExponentialDecay(0.1, 5, 0.8))),
        unknown_length(),
        on_one_device={"serve": arrays(epochs=3)},
    ),
    Row("sparse gradients", embedding, mse, arrays(feeds.tokens)),
    Row("sparse gradients and momentum", embedding, lambda: mse(SGD(0.05, momentum=0.9)), arrays(feeds.tokens)),
    Row("sparse gradients and Adam", embedding, lambda: mse(adam()), arrays(feeds.tokens)),
    Row("sparse gradients, clipped", embedding, lambda: mse(SGD(0.1, clipnorm=0.2)), arrays(feeds.tokens)),
    Row(
        "sparse gradients, clipped by global norm",
        embedding,
        lambda: mse(SGD(0.1, global_clipnorm=0.3)),
        arrays(feeds.tokens),
    ),
    Row(
        "sparse gradients, accumulated",
        embedding,
        lambda: mse(SGD(0.1, gradient_accumulation_steps=4)),
        arrays(feeds.tokens),
    ),
    Row(
        "a constraint",
        lambda lib: lib.Sequential(
            [keras.layers.Input((5,)), keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.7))]
        ),
        mse,
        arrays(),
    ),
    Row("a frozen layer", frozen_layer, mse, arrays()),
]

# A gradient is summed in the layer's dtype on each replica: 2^-11 (float16) or 2^-8 (bfloat16) of rounding for each of
# the 24 steps, of which some cancels.
HALF, BRAIN = 3e-3, 2e-2

PRECISION = [
    Quick("mixed_float16", mixed("mixed_float16", dense), mse, arrays(), tolerance=HALF),
    Row("mixed_float16 and Adam", mixed("mixed_float16", dense), lambda: mse(adam()), arrays(), tolerance=HALF),
    Row(
        "mixed_float16 without loss scale",
        mixed("mixed_float16", dense),
        lambda: mse(auto_scale_loss=False),
        arrays(),
        tolerance=HALF,
    ),
    Row(
        "mixed_float16 CNN",
        mixed("mixed_float16", cnn),
        # With the initial scale of 2^15, rounding decides whether the first gradients fit into float16.
        lambda: mse(optimizers.LossScaleOptimizer(SGD(0.02), initial_scale=2.0**8)),
        arrays(feeds.images),
        tolerance=HALF,
    ),
    Row("mixed_bfloat16", mixed("mixed_bfloat16", dense), mse, arrays(), tolerance=BRAIN),
    Row(
        "mixed_bfloat16 with sample weights",
        mixed("mixed_bfloat16", dense),
        mse,
        arrays(weights=feeds.row_weights),
        tolerance=BRAIN,
    ),
    Row("float64", mixed("float64", dense), mse, arrays(), tolerance=1e-6),
]

MAE = {"metrics": ["mae"]}

EXECUTION = [
    *(
        Row(
            f"{steps} steps an execution",
            dense,
            lambda steps=steps: mse(steps_per_execution=steps, **MAE),
            arrays(num_rows=61, validation_data=feeds.regression(21, 5)),
            act=fit_with_batch_logs,
            quick=steps == 3,
        )
        for steps in (1, 2, 3, 50)
    ),
    Row(
        "3 steps an execution over data of unknown length",
        dense,
        lambda: mse(steps_per_execution=3),
        unknown_length(61),
        on_one_device={"serve": arrays(num_rows=61, epochs=3)},
    ),
    Row(
        "5 steps an execution over 6 of endless data",
        dense,
        lambda: mse(steps_per_execution=5),
        pipeline(lambda rows: rows.repeat().batch(8), steps_per_epoch=6),
        on_one_device={"compile": mse},  # Keras would make 10 steps an epoch: twice 5
    ),
    Row("4 steps an execution of 1 to 9 rows", dense, lambda: mse(steps_per_execution=4), batches(*range(1, 10))),
    Row(
        "3 steps an execution and accumulation",
        dense,
        lambda: mse(SGD(0.05, gradient_accumulation_steps=4), steps_per_execution=3),
        arrays(),
    ),
    Row("jit_compile", dense, lambda: mse(jit_compile=True), arrays(), warns=".*jit_compile"),
    Row(
        "jit_compile and 3 steps an execution",
        dense,
        lambda: mse(jit_compile=True, steps_per_execution=3),
        arrays(),
        warns=".*jit_compile",
    ),
    Row(
        "jit_compile of a CNN", cnn, lambda: mse(adam(), jit_compile=True), arrays(feeds.images), warns=".*jit_compile"
    ),
    Row("run_eagerly", dense, lambda: mse(run_eagerly=True, **MAE), arrays(epochs=2)),
    Row(
        "run_eagerly with masks and Adam",
        masked_steps,
        lambda: mse(adam(), run_eagerly=True),
        arrays(feeds.padded_steps, epochs=2),
    ),
    Row(
        "run_eagerly, 3 steps an execution",
        dense,
        lambda: mse(run_eagerly=True, steps_per_execution=3),
        arrays(epochs=2),
    ),
]


class SumOfSquares(metrics.Metric):
    """A metric of the user's own: state that adds up, and a result that is not linear in it."""

    def __init__(self, name: str = "rms") -> None:
        super().__init__(name=name)
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")
        self.rows = self.add_variable(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        squares = ops.mean(ops.square(y_true - y_pred), axis=-1)
        weight = ops.ones_like(squares) if sample_weight is None else ops.cast(sample_weight, squares.dtype)
        self.total.assign_add(ops.sum(squares * weight))
        self.rows.assign_add(ops.sum(weight))

    def result(self) -> Any:
        return ops.sqrt(ops.divide_no_nan(self.total, self.rows))


class MeanAndDeviation(metrics.Metric):
    """A metric whose result is a dict."""

    def __init__(self, name: str = "moments") -> None:
        super().__init__(name=name)
        names = "total", "squares", "rows"
        self.sums = [self.add_variable(shape=(), initializer="zeros", name=name) for name in names]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.mean(y_true - y_pred, axis=-1)
        for total, values in zip(self.sums, (errors, ops.square(errors), ops.ones_like(errors)), strict=True):
            total.assign_add(ops.sum(values))

    def result(self) -> Any:
        total, squares, rows = self.sums
        mean = total / rows
        return {"error": mean, "deviation": ops.sqrt(squares / rows - ops.square(mean))}


def binary(*names: Any, **more: Any) -> dict[str, Any]:
    return {"optimizer": SGD(0.2), "loss": "binary_crossentropy", "metrics": list(names), **more}


METRICS = [
    Row(
        "accuracy",
        classifier,
        lambda: crossentropy(metrics=["accuracy", metrics.SparseTopKCategoricalAccuracy(2)]),
        arrays(feeds.labels),
    ),
    Row(
        "AUC, precision and recall",
        binary_classifier,
        lambda: binary("accuracy", metrics.AUC(20), metrics.Precision(), metrics.Recall()),
        arrays(feeds.binary_labels, validation_data=feeds.binary_labels(21, 5)),
        act=fit_with_batch_logs,
    ),
    Row(
        "weighted AUC",
        binary_classifier,
        lambda: binary(weighted_metrics=[metrics.AUC(20), "accuracy"]),
        arrays(feeds.binary_labels, weights=feeds.row_weights),
        act=fit_with_batch_logs,
    ),
    Row(
        "confusion counts",
        binary_classifier,
        lambda: binary(metrics.TruePositives(), metrics.FalseNegatives(), metrics.SpecificityAtSensitivity(0.5, 20)),
        arrays(feeds.binary_labels),
    ),
    Row(
        "F1 score and mean IoU",
        classifier,
        lambda: {
            "optimizer": SGD(0.2),
            "loss": "categorical_crossentropy",
            "metrics": [metrics.F1Score(average="macro"), metrics.OneHotMeanIoU(4)],
        },
        arrays(feeds.one_hot_labels),
    ),
    Row(
        "R2, RMSE and cosine",
        dense,
        lambda: mse(metrics=[metrics.R2Score(), metrics.RootMeanSquaredError(), metrics.CosineSimilarity()]),
        arrays(),
        act=fit_with_batch_logs,
    ),
    Row("a custom metric", dense, lambda: mse(metrics=[SumOfSquares()]), arrays(), act=fit_with_batch_logs),
    Row(
        "a custom metric, weighted",
        dense,
        lambda: mse(weighted_metrics=[SumOfSquares()]),
        arrays(weights=feeds.row_weights),
    ),
    Row("a function as metric", dense, lambda: mse(metrics=[scalar_loss, "mae"]), arrays(num_rows=48, batch=12)),
    Row(
        "metrics of masked steps",
        masked_steps,
        lambda: mse(metrics=["mae"]),
        arrays(feeds.padded_steps),
        act=fit_with_batch_logs,
    ),
    Row("logs of every batch", dense, lambda: mse(**MAE), batches(1, 8, 3, 8, 2), act=fit_with_batch_logs),
    Row(
        "logs of every batch, of a metric with several results",
        custom_train_step,
        lambda: mse(metrics=[MeanAndDeviation()]),
        arrays(),
        act=fit_with_batch_logs,
    ),
    Row("a metric updated in call", tracker_in_call, mse, arrays()),
]


def on_batches(model: keras.Model, feed: Feed) -> Outcome:
    """Train, test and predict batch by batch, as a loop of the user's own does."""
    train, test, predict = [], [], []
    for x, y in feeds.split(feeds.regression(24, 1), [8, 5, 1, 3, 7]):
        train.append(model.train_on_batch(x, y, return_dict=True))
        test.append(model.test_on_batch(x, y))
        predict.append(model.predict_on_batch(x))
    return plain({"train": train, "test": test, "predict": predict, **state(model)})


def on_weighted_batches(model: keras.Model, feed: Feed) -> Outcome:
    train, test = [], []
    for (x, y), weight in zip(
        feeds.split(feeds.labels(24, 1), [8, 5, 1, 3, 7]),
        feeds.split(feeds.row_weights(24, 1), [8, 5, 1, 3, 7]),
        strict=True,
    ):
        train.append(model.train_on_batch(x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5, 3: 2.0}))
        train.append(model.train_on_batch(x, y, sample_weight=weight, return_dict=True))
        test.append(model.test_on_batch(x, y, sample_weight=weight, return_dict=True))
    return plain({"train": train, "test": test, **state(model)})


def on_batches_of_dicts(model: keras.Model, feed: Feed) -> Outcome:
    x, y = feeds.dicts(7, 1)
    one = keras.tree.map_structure(lambda array: array[:1], x)
    return plain(
        {
            "train": [model.train_on_batch(x, y, return_dict=True) for _ in range(10)],
            "predict": model.predict_on_batch(x),
            "predict one": model.predict_on_batch(one),
            **state(model),
        }
    )


def predict_only(model: keras.Model, feed: Feed) -> Outcome:
    return {"predict": plain(model.predict(**(feed.predict or {}), verbose=0))}


def predict_every_size(model: keras.Model, feed: Feed) -> Outcome:
    """Predict 1 to 9 rows, in batches of 4."""
    x, _ = feeds.regression(9, 1)
    return {"predict": [model.predict(x[:rows], batch_size=4, verbose=0) for rows in range(1, 10)]}


def predict_forms(model: keras.Model, feed: Feed) -> Outcome:
    x, _ = feeds.dicts(13, 1)
    one = keras.tree.map_structure(lambda array: array[:1], x)
    return {"all": model.predict(x, batch_size=4, verbose=0), "one": model.predict(one, verbose=0)}


ON_BATCH_AND_PREDICT = [
    Quick("train, test and predict on batch", dense, lambda: mse(**MAE), arrays(), act=on_batches),
    Row(
        "train on batch with weights",
        classifier,
        lambda: crossentropy(weighted_metrics=["accuracy"]),
        arrays(),
        act=on_weighted_batches,
    ),
    Row(
        "train on batch of dicts", several_inputs_and_outputs, lambda: mse(loss=BOTH), arrays(), act=on_batches_of_dicts
    ),
    Row("train on batch, lazily built", subclassed, lambda: mse(**MAE), arrays(), act=on_batches),
    Row("train on batch, eagerly", dense, lambda: mse(run_eagerly=True), arrays(), act=on_batches),
    Row(
        "train on batch with jit_compile",
        dense,
        lambda: mse(jit_compile=True),
        arrays(),
        act=on_batches,
        warns=".*jit_compile",
    ),
    Quick("predict 1 to 9 rows", dense, mse, arrays(), act=predict_every_size),
    Row("predict several outputs", several_inputs_and_outputs, mse, arrays(), act=predict_forms),
    Row("predict, 3 steps an execution", dense, lambda: mse(steps_per_execution=3), arrays(), act=predict_every_size),
    Row("predict data of unknown length", dense, mse, unknown_length(), act=predict_only),
    Row("predict time steps", unmasked_steps, mse, arrays(feeds.padded_steps), act=predict_only),
]

STATE = [
    Row("synchronized BatchNormalization", synchronized_batch_norm, mse, arrays()),
    Row("synchronized BatchNormalization of 1 to 9 rows", synchronized_batch_norm, mse, batches(*range(1, 10))),
    Row(
        "synchronized BatchNormalization, 3 steps an execution",
        synchronized_batch_norm,
        lambda: mse(steps_per_execution=3),
        arrays(),
    ),
    Quick(
        "synchronized BatchNormalization of replicas without rows",
        synchronized_batch_norm,
        mse,
        arrays(num_rows=49, batch=16),
    ),
    Row("synchronized BatchNormalization of masked steps", masked_batch_norm, mse, arrays(feeds.padded_sequences)),
    Row("state assigned in call", running_mean, mse, arrays()),
    Quick("state assigned in call of replicas without rows", running_mean, mse, batches(8, 1, 3, 8, 2)),
    Row("state assigned in call, 3 steps an execution", running_mean, lambda: mse(steps_per_execution=3), arrays()),
    Row("state assigned in call, eagerly", running_mean, lambda: mse(run_eagerly=True), arrays(epochs=2)),
]

INPUTS = [
    Row("tensors", dense, mse, arrays(convert=tf.constant)),
    Row("lists", dense, mse, arrays(num_rows=12, batch=5)),
    Row(
        "validation_data",
        dense,
        lambda: mse(**MAE),
        arrays(validation_data=feeds.regression(21, 5), validation_batch_size=6),
    ),
    Row(
        "weighted validation_data",
        dense,
        lambda: mse(weighted_metrics=["mae"]),
        arrays(validation_data=(*feeds.regression(21, 5), feeds.row_weights(21, 5)), validation_batch_size=6),
    ),
    Row("validation_split", dense, lambda: mse(**MAE), arrays(validation_split=0.3)),
    Row(
        "validation every second epoch, some steps",
        dense,
        mse,
        arrays(validation_data=feeds.regression(21, 5), validation_freq=2, validation_steps=2),
    ),
    Row("validation of unknown length", dense, mse, arrays(validation=feeds.validation_of_unknown_length)),
    Row("steps_per_epoch of arrays", dense, mse, arrays(steps_per_epoch=4)),
    Row("initial_epoch", dense, mse, arrays(initial_epoch=2)),
    Row("an input that is not given", optional_input, mse, arrays(feeds.one_of_two), under=where_none_is_taken()),
    Row(
        "sample weights of one output alone",
        several_inputs_and_outputs,
        lambda: mse(loss=BOTH, weighted_metrics={"value": ["mae"], "label": []}),
        arrays(feeds.dicts, weights=lambda n, seed: {"value": feeds.row_weights(n, seed), "label": None}),
        under=where_none_is_taken(),
    ),
    Row("tf.data", dense, mse, pipeline(lambda rows: rows.batch(8))),
    Row("tf.data without its last batch", dense, mse, pipeline(lambda rows: rows.batch(8, drop_remainder=True))),
    Row(
        "tf.data, shuffled by a seed",
        dense,
        mse,
        pipeline(lambda rows: rows.shuffle(45, seed=3, reshuffle_each_iteration=False).batch(8)),
    ),
    Row(
        "tf.data, mapped and prefetched",
        dense,
        mse,
        pipeline(lambda rows: rows.batch(8).map(lambda x, y: (2 * x, y)).prefetch(2)),
    ),
    Row(
        "tf.data with weights", dense, mse, pipeline(lambda rows: rows.map(lambda x, y: (x, y, tf.abs(x[0]))).batch(8))
    ),
    Row(
        "tf.data, unbatched and batched again",
        dense,
        mse,
        pipeline(lambda rows: rows.batch(8).unbatch().batch(7)),
        on_one_device={"serve": pipeline(lambda rows: rows.batch(7))},
    ),
    Quick("endless tf.data", dense, mse, pipeline(lambda rows: rows.repeat().batch(8), steps_per_epoch=6)),
    Row("steps_per_epoch of finite tf.data", dense, mse, pipeline(lambda rows: rows.batch(8), steps_per_epoch=2)),
    Row("tf.data of unknown length", dense, mse, unknown_length(), on_one_device={"serve": arrays(epochs=3)}),
    Row(
        "tf.data of dicts",
        several_inputs_and_outputs,
        lambda: mse(loss=BOTH),
        pipeline(lambda rows: rows.batch(8), feeds.dicts),
    ),
    Row("tf.data started once a fit", dense, mse, feeds.counted_starts()),
    Row(
        "endless tf.data started once a fit",
        dense,
        mse,
        feeds.counted_starts(endless=True, epochs=3, steps_per_epoch=6),
    ),
    Row("strings and bools", words_and_flags, mse, pipeline(lambda rows: rows.batch(8), feeds.words_and_flags)),
    Quick(
        "strings and bools, first batch uneven", words_and_flags, mse, batches(5, 8, 1, 8, make=feeds.words_and_flags)
    ),
    Row("looked up words", looked_up_words, mse, pipeline(lambda rows: rows.batch(8), feeds.words)),
    Row(
        "a generator read once",
        dense,
        mse,
        feeds.generator(8, 8, 8, 8, 5),
        on_one_device={"serve": batches(8, 8, 8, 8, 5, epochs=1)},
    ),
    Row(
        "a generator of 1 to 9 rows",
        dense,
        mse,
        feeds.generator(*range(1, 10)),
        on_one_device={"serve": batches(*range(1, 10), epochs=1)},
    ),
    Row(
        "a generator with an uneven first batch",
        dense,
        mse,
        feeds.generator(5, 8, 8, 1),
        on_one_device={"serve": batches(5, 8, 8, 1, epochs=1)},
    ),
    Row("an endless generator", dense, mse, feeds.generator(8, 8, 5, endless=True, epochs=3, steps_per_epoch=5)),
    Quick("a PyDataset", dense, mse, feeds.py_dataset(workers=1)),
    Row("a PyDataset with 2 workers", dense, mse, feeds.py_dataset(workers=2)),
    Row("a distributed dataset", dense, mse, feeds.distributed_dataset()),
    Row("a dataset made on each worker", dense, mse, feeds.dataset_from_function()),
]

few = partial(batches, *range(1, 10))
"""Batches of 1 to 9 rows: some replicas have none."""

MODELS = [
    Row("Sequential", sequential, mse, arrays()),
    Row("Sequential, lazily built", lazy_sequential, mse, arrays()),
    Row("a subclass, lazily built", subclassed, mse, arrays()),
    Row("a subclass, lazily built on 1 row", subclassed, mse, batches(1, 8, 8)),
    Row("a subclass made of inputs and outputs", functional_subclass, mse, arrays()),
    Row("nested models", nested, mse, arrays()),
    Row("shared layers", shared_layers, mse, arrays(feeds.pairs)),
    Row("several inputs and outputs", several_inputs_and_outputs, lambda: mse(adam(), loss=BOTH), arrays(feeds.dicts)),
    Row("a CNN", cnn, lambda: mse(SGD(0.02)), arrays(feeds.images)),
    Row("an LSTM", lstm, mse, arrays(feeds.sequences)),
    Row("a GRU", gru, mse, arrays(feeds.sequences)),
    Quick("a masked LSTM", masked_lstm, mse, arrays(feeds.padded_sequences)),
    Row("an Embedding with a mask", embedding_with_mask, mse, arrays(feeds.tokens)),
    Row("attention", attention, mse, arrays(feeds.sequences)),
    Row("a CNN of 1 to 9 rows", cnn, lambda: mse(SGD(0.02)), few(make=feeds.images)),
    Row("convolutions in time of 1 to 9 rows", convolutions_in_time, mse, few(make=feeds.sequences)),
    Row("a ConvLSTM of 1 to 9 rows", conv_lstm, mse, few(make=feeds.sequences)),
    Row("an LSTM of 1 to 9 rows", lstm, mse, few(make=feeds.sequences)),
    Row("a GRU of 1 to 9 rows", gru, mse, few(make=feeds.sequences)),
    Row("a masked LSTM of 1 to 9 rows", masked_lstm, mse, few(make=feeds.padded_sequences)),
    Row("an Embedding with a mask of 1 to 9 rows", embedding_with_mask, mse, few(make=feeds.tokens)),
    Row("attention of 1 to 9 rows", attention, mse, few(make=feeds.sequences)),
]


def two_optimizers() -> dict[str, Any]:
    return {
        "d_optimizer": adam(),
        "g_optimizer": SGD(0.1),
        "loss_fn": losses.BinaryCrossentropy(from_logits=True),
    }


CUSTOM_STEPS = [
    Quick("a custom train_step", custom_train_step, lambda: mse(**MAE), arrays(), act=fit_with_batch_logs),
    Row(
        "a custom train_step and accumulation",
        custom_train_step,
        lambda: mse(SGD(0.05, gradient_accumulation_steps=4)),
        arrays(),
    ),
    Row(
        "a custom train_step from scratch",
        from_scratch,
        lambda: {"optimizer": SGD(0.05)},
        arrays(),
        act=fit_with_batch_logs,
    ),
    Row(
        "a custom train_step, 3 steps an execution",
        from_scratch,
        lambda: {"optimizer": SGD(0.05), "steps_per_execution": 3},
        arrays(),
    ),
    Row("a custom train_step of 1 to 9 rows", from_scratch, lambda: {"optimizer": SGD(0.05)}, batches(*range(1, 10))),
    Row("a train_step that returns plain numbers", plain_scalar_logs, mse, arrays(), act=fit_with_batch_logs),
    Quick("overridden losses, metrics, test_step and predict_step", overridden_parts, lambda: mse(**MAE), arrays()),
    Row("compute_loss without training", old_compute_loss, mse, arrays()),
    Row("two optimizers from one tape", alternating, lambda: mse(**MAE), arrays(weights=feeds.row_weights)),
    Row("a GAN", gan, two_optimizers, arrays(feeds.noise_and_real), act=fit_only),
]


ROWS: tuple[Row, ...] = (
    *BATCHES,
    *WEIGHTS_AND_MASKS,
    *REDUCTIONS,
    *LOSSES,
    *OPTIMIZERS,
    *PRECISION,
    *EXECUTION,
    *METRICS,
    *ON_BATCH_AND_PREDICT,
    *STATE,
    *INPUTS,
    *MODELS,
    *CUSTOM_STEPS,
)
