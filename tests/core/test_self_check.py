"""Before training, `fit` sees whether a step with code of the user's does on replicas what it does on one device."""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import placement_runs
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers, ops
from keras.optimizers import SGD, Adam, LossScaleOptimizer
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import LoopError, StepError

pytestmark = pytest.mark.checks_fit

X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
Loss = Callable[[Any, Any, Any], Any]


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def stack(cls: Any = kde.Model, *between: Any) -> Any:
    x = inputs = layers.Input((5,))
    for layer in (layers.Dense(4, activation="tanh"), *between, layers.Dense(3)):
        x = layer(x)
    return cls(inputs, x, name="net")


def of_loss(loss_of: Loss, optimizer: Callable[[], Any] = Adam, **compiled: Any) -> Callable[[], Any]:
    class Net(kde.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = loss_of(self, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def make() -> Any:
        model = stack(Net)
        model.compile(optimizer(), **compiled)
        return model

    return make


def of_metric(cls: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        model = stack()
        model.compile("sgd", "mse", metrics=[cls()])
        return model

    return make


def of_layer(cls: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        model = stack(kde.Model, cls())
        model.compile(SGD(0.1), "mse")
        return model

    return make


def of_layers_and_loss(cls: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        model = stack(kde.Model, cls())
        model.compile("adam", lambda y, p: squares(y, p))
        return model

    return make


class Peak(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="peak")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_pred))))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.largest)


class LastRow(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="last_row")
        self.row = tf.Variable(tf.zeros([3]), trainable=False)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.row.assign(y_pred[-1])

    def result(self) -> Any:
        return tf.reduce_sum(self.row)

    def reset_state(self) -> None:
        self.row.assign(tf.zeros([3]))


class FirstRow(LastRow):
    """The first replica has what one device has."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.row.assign(y_pred[0])


class MeanSize(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="mean_size")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(y_pred)))
        self.count.assign_add(ops.cast(ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return self.total / self.count


class Bank(layers.Layer):
    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(8, shape[-1]), initializer="zeros", trainable=False, name="rows")

    def call(self, x: Any) -> Any:
        self.rows.assign(ops.concatenate([x, self.rows[: -ops.shape(x)[0]]]))
        return x


class Centred(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


class Noisy(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return x * keras.random.uniform(ops.shape(x), seed=self.seeds)


class RunningPeak(layers.Layer):
    """State that one step from zero leaves as one device does."""

    def build(self, shape: Any) -> None:
        self.peak = self.add_weight(shape=(), initializer="zeros", trainable=False, name="peak")

    def call(self, x: Any) -> Any:
        self.peak.assign(ops.maximum(self.peak, ops.mean(ops.square(x))))
        return x


def pairs(net: Any, y: Any, p: Any) -> Any:
    p = tf.math.l2_normalize(p, -1)
    own = tf.range(tf.shape(p)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, 5.0 * tf.matmul(p, p, transpose_b=True)))


@tf.function
def sum_and_mean(y: Any, p: Any) -> Any:
    return tf.reduce_sum(squares(y, p)) + tf.reduce_mean(squares(y, p))


def by_own_weights(net: Any, y: Any, p: Any) -> Any:
    weights = tf.abs(y[:, 0])
    return tf.reduce_sum(weights * squares(y, p)) / tf.reduce_sum(weights)


def by_replicas(net: Any, y: Any, p: Any) -> Any:
    return tf.reduce_mean(squares(y, p)) / net.distribute_strategy.num_replicas_in_sync


LOSS = r"the gradient of dense.*\(by .*%\).*the log loss .*A loss must be a mean or a sum over the examples at hand"
STATE = r"the state .*rows \(by .*State that is assigned from examples becomes the mean"
METRIC = r"differs in the log {} \(by .*What a metric keeps must add up over replicas"
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "a contrastive loss": (of_loss(pairs), LOSS),
    "a maximum": (of_loss(lambda net, y, p: tf.reduce_max(squares(y, p))), LOSS),
    "a root of a mean": (of_loss(lambda net, y, p: tf.sqrt(tf.reduce_mean(squares(y, p)))), LOSS),
    "a sum and a mean in one term": (of_loss(lambda net, y, p: sum_and_mean(y, p)), LOSS),
    "a mean by weights of its own": (of_loss(by_own_weights), LOSS),
    "a loss divided by the replicas": (of_loss(by_replicas), LOSS),
    "a layer that takes a mean of the batch": (of_layer(Centred), LOSS),
    "a memory bank": (of_layer(Bank), STATE),
    "a running maximum of means": (of_layer(RunningPeak), STATE.replace("rows", "peak")),
    "a contrastive loss, run eagerly": (of_loss(pairs, run_eagerly=True), LOSS),
    "a running maximum": (of_metric(Peak), METRIC.format("peak")),
    "a variable that holds rows": (of_metric(LastRow), METRIC.format("last_row")),
}


def mean(net: Any, y: Any, p: Any) -> Any:
    return tf.reduce_mean(squares(y, p))


def scaled(net: Any, y: Any, p: Any) -> Any:
    return net.optimizer.scale_loss(mean(net, y, p))


def mixed_up(net: Any, y: Any, p: Any) -> Any:
    """Of each example with another one, by shares of a beta distribution."""
    one, other = (tf.random.gamma([tf.shape(y)[0], 1], 0.2) for _ in range(2))
    share, order = one / (one + other), tf.random.shuffle(tf.range(tf.shape(y)[0]))
    return tf.reduce_mean(squares(share * y + (1.0 - share) * tf.gather(y, order), p))


ALIKE: dict[str, Callable[[], Any]] = {
    "rows that are shuffled, and gamma numbers": of_loss(mixed_up),
    "a mean, run eagerly": of_loss(mean, run_eagerly=True),
    "a mean": of_loss(mean),
    "a sum": of_loss(lambda net, y, p: tf.reduce_sum(squares(y, p)), lambda: SGD(0.1, momentum=0.9)),
    "clipping": of_loss(mean, lambda: Adam(global_clipnorm=0.1)),
    "accumulation": of_loss(mean, lambda: Adam(gradient_accumulation_steps=3)),
    "a loss scale": of_loss(scaled, lambda: LossScaleOptimizer(SGD(0.1))),
    "XLA": of_loss(mean, jit_compile=True),
    "virtual replicas": of_loss(mean, virtual_replicas=4),
    "a metric that adds up": of_metric(MeanSize),
    "noise": of_layer(Noisy),
    "dropout": of_layers_and_loss(lambda: layers.Dropout(0.5)),
    "unsynchronized batch statistics": of_layers_and_loss(layers.BatchNormalization),
}


def fitted(make: Callable[[], Any], strategy: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
    model.fit(data(), shuffle=False, verbose=0)
    return model


def said_of(make: Callable[[], Any], strategy: Any) -> list[str]:
    """Return what fit says of a model, of all that is said meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(make, strategy)
    return [str(one.message) for one in caught if "does not train on" in str(one.message)]


@pytest.mark.parametrize(
    "name",
    rotating(
        DIFFERENT,
        [
            "a contrastive loss",
            "a memory bank",
            "a running maximum",
            "a loss divided by the replicas",
            "a contrastive loss, run eagerly",
        ],
    ),
)
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_what_differs_is_named_with_what_to_do(strategies, name, kind):
    make, message = DIFFERENT[name]
    (said,) = said_of(make, strategies.get(kind))
    assert re.search(message, said)


@pytest.mark.parametrize(
    "weights",
    rotating([[3, 1, 3, 1, 2, 4, 3, 3], [1, 1, 1, 1, 1, 1, 5, 5]], [[3, 1, 3, 1, 2, 4, 3, 3]]),
)
def test_rows_that_happen_to_be_alike_on_all_replicas_hide_no_mean_by_weights_of_its_own(mirrored, weights):
    """As the numbers of words of sentences may be: equal on average over the first two rows, and the next three."""

    class Masked(kde.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, weights = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights * squares(y, self(x))) / tf.reduce_sum(weights)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with mirrored.scope():
        net = Masked([layers.Input((5,)), layers.Dense(3)], name="net")
        net.compile("sgd")
    with pytest.warns(UserWarning, match="'net' does not train on 2 replicas as on one device"):
        net.fit(X[:8], Y[:8], sample_weight=np.array(weights, "float32"), shuffle=False, verbose=0)


@pytest.mark.parametrize("name", rotating(ALIKE, ["a sum", "noise", "a metric that adds up"]))
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_nothing_is_said_of_what_is_alike(strategies, name, kind):
    assert said_of(ALIKE[name], strategies.get(kind)) == []


DIFFERENT_ON_WORKERS = {
    **DIFFERENT,
    "a variable that holds the first row": (of_metric(FirstRow), METRIC.format("last_row")),  # as on the chief
}


def said_on_workers(strategy: Any, folder: Any, name: str) -> list[str]:
    makers = {of: make for of, (make, _) in DIFFERENT_ON_WORKERS.items()} | ALIKE
    return said_of(makers[name], strategy)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[on_two_workers(said_on_workers, name), pytest.mark.rotating])
        for name in (*DIFFERENT_ON_WORKERS, *ALIKE)
    ],
)
def test_so_it_is_on_two_workers(values, name):
    for said in values:
        assert len(said) == (name in DIFFERENT_ON_WORKERS)
        assert all(re.search(DIFFERENT_ON_WORKERS[name][1], one) for one in said)


# Batches that are given by themselves


def said_on_batches(model: Any, call: str, sizes: Iterable[int]) -> list[list[str]]:
    """Return what each call says of steps on replicas."""
    said = []
    for size in sizes:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(model, call)(X[:size], Y[:size])
        said.append([str(one.message) for one in caught if " on 2 replicas as on one device" in str(one.message)])
    return said


def of_compiled_loss(loss: Any, **compiled: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = stack()
        model.compile("sgd", loss, **compiled)
        return model

    return make


ON_BATCHES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "training by a contrastive loss": (of_loss(pairs), "train_on_batch", "'net' does not train on.*" + LOSS),
    "a running maximum": (of_metric(Peak), "train_on_batch", METRIC.format("peak")),
    "evaluation by a maximum": (
        of_compiled_loss(lambda y, p: tf.reduce_max(squares(y, p))),
        "test_on_batch",
        r"'net' is not evaluated on.*differs in the log loss.*A loss must be a mean or a sum over the examples at hand",
    ),
    "evaluation by a running maximum": (of_metric(Peak), "test_on_batch", METRIC.format("peak")),
}


@pytest.mark.parametrize(
    "name", rotating(ON_BATCHES, ["evaluation by a maximum"], slow=["training by a contrastive loss"])
)
def test_batches_that_are_given_by_themselves_are_checked_once_from_the_first_of_several_examples(mirrored, name):
    make, call, message = ON_BATCHES[name]
    with mirrored.scope():
        model = make()
    none, (said,), *others = said_on_batches(model, call, (1, 8, 8, 5))
    assert none == []
    assert others == [[], []]
    assert re.search(message, said)


def fits(model: Any) -> None:
    model.fit(X, Y, batch_size=8, verbose=0)


def trains_on_batch(model: Any) -> None:
    model.train_on_batch(X, Y)


@pytest.mark.parametrize("run", rotating([fits, trains_on_batch], [fits]))
def test_a_warning_points_at_the_line_that_has_called(mirrored, run):
    with mirrored.scope():
        model = of_metric(Peak)()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    (one,) = [one for one in caught if "does not train on" in str(one.message)]
    assert one.filename == __file__
    assert one.lineno == run.__code__.co_firstlineno + 1


def test_evaluation_is_not_checked_where_training_has_told_it_all(mirrored):
    with mirrored.scope():
        model = of_metric(Peak)()
    ((said,),) = said_on_batches(model, "train_on_batch", [8])
    assert re.search(METRIC.format("peak"), said)
    assert said_on_batches(model, "test_on_batch", [8]) == [[]]


@pytest.mark.parametrize("call", rotating(["train_on_batch", "test_on_batch"], ["train_on_batch"]))
def test_check_of_a_batch_by_itself_is_an_error_or_nothing_if_asked_for(mirrored, call):
    loss = lambda y, p: tf.reduce_max(squares(y, p))  # noqa: E731
    with mirrored.scope():
        model = of_compiled_loss(loss, check="raise")()
    before = model.get_weights()
    for _ in range(2):
        with pytest.raises(StepError, match="on 2 replicas as on one device. One step on 5 examples"):
            getattr(model, call)(X[:8], Y[:8])
    assert all(map(np.array_equal, before, model.get_weights()))
    with mirrored.scope():
        model.compile("sgd", loss, check=False)
    assert said_on_batches(model, call, [8]) == [[]]


@pytest.mark.rotating
def test_training_on_batches_gives_the_bits_that_it_gives_without_the_check(mirrored):
    results = []
    for check in (True, False):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = stack(kde.Model, Noisy(), layers.BatchNormalization(), layers.Dropout(0.5))
            optimizer = Adam(gradient_accumulation_steps=2)
            model.compile(optimizer, "mse", metrics=[MeanSize()], check=check)
        logs = [model.train_on_batch(X[:n], Y[:n]) for n in (8, 7, 5)]
        results.append([*logs, *model.get_weights(), *(np.asarray(v) for v in optimizer.variables)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_nothing_is_said_where_a_model_goes_on_in_the_middle_of_an_accumulation(mirrored, tmp_path):
    with mirrored.scope():
        model = stack(kde.Model)
        model.compile(Adam(gradient_accumulation_steps=3), squares)
    model.train_on_batch(X[:8], Y[:8])
    model.save(tmp_path / "model.keras")
    loaded = kde.load_model(tmp_path / "model.keras", mirrored, custom_objects={"squares": squares})
    kept = [np.asarray(v) for v in loaded.optimizer.variables]
    assert said_in(loaded, lambda model: model.fit(X[:8], Y[:8], epochs=2, verbose=0)) == []
    assert int(kept[0]) + 2 == int(np.asarray(loaded.optimizer.variables[0]))


# Validation and prediction


def said_in(model: Any, run: Callable[[Any], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    return [str(one.message) for one in caught if " on 2 replicas as on one device" in str(one.message)]


def validates(model: Any) -> None:
    model.fit(data(), validation_data=data(), epochs=2, verbose=0)


def evaluates(model: Any) -> None:
    model.evaluate(data(), verbose=0)
    model.evaluate(data(), verbose=0)


def of_test_step(log_of: Callable[[Any, Any], Any], **compiled: Any) -> Callable[[], Any]:
    class Net(kde.Model):
        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            return {"worst": log_of(y, self(x, training=False))}

    def make() -> Any:
        model = stack(Net)
        model.compile("sgd", "mse", **compiled)
        return model

    return make


def largest(y: Any, p: Any) -> Any:
    return tf.reduce_max(squares(y, p))


def of_evaluation_only() -> Any:
    """A loss that is a mean in training."""

    class Net(kde.Model):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
        ) -> Any:
            return tf.reduce_mean(squares(y, y_pred)) if training else largest(y, y_pred)

    model = stack(Net)
    model.compile("sgd")
    return model


WORST = r"'net' is not evaluated on 2 replicas as on one device. One step on 5 examples.*differs in the log worst"
VALIDATED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], list[str]]] = {
    "a maximum in test_step, in fit": (of_test_step(largest), validates, [WORST]),
    "a maximum in test_step, in evaluate": (of_test_step(largest), evaluates, [WORST]),
    "a maximum in test_step, run eagerly": (of_test_step(largest, run_eagerly=True), validates, [WORST]),
    "a mean in test_step": (of_test_step(lambda y, p: tf.reduce_mean(squares(y, p))), validates, []),
    "a loss of evaluation only": (
        of_evaluation_only,
        validates,
        [r"is not evaluated .* the log loss .*A loss must be"],
    ),
    "a loss of training, said once": (of_loss(pairs, loss="mse"), validates, ["does not train.*" + LOSS]),
    "a metric of training, said once": (of_metric(Peak), validates, [METRIC.format("peak")]),
    "a metric in evaluate": (of_metric(Peak), evaluates, ["is not evaluated .*" + METRIC.format("peak")]),
}


@pytest.mark.parametrize("name", rotating(VALIDATED, ["a maximum in test_step, in fit"]))
def test_validation_is_checked_before_its_first_step_and_nothing_is_said_twice(mirrored, name):
    make, run, messages = VALIDATED[name]
    with mirrored.scope():
        model = make()
    said = said_in(model, run)
    assert len(said) == len(messages), said
    for message, one in zip(messages, said, strict=True):
        assert re.search(message, one)


@pytest.mark.rotating
def test_training_with_validation_gives_the_bits_that_it_gives_without_the_check(mirrored):
    results = []
    for check in (True, False):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = of_test_step(largest, check=check)()
        said = said_in(model, lambda m: m.fit(X, Y, batch_size=7, epochs=2, validation_split=0.4, verbose=0))
        assert len(said) == check
        results.append([*model.get_weights(), *model.history.history.values()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


class FromBatch(kde.Model):
    def predict_step(self, data: Any) -> Any:
        p = self(data[0] if isinstance(data, tuple) else data, training=False)
        return {"score": p - tf.reduce_mean(p, 0)}


class Gathering(kde.Model):
    def predict_step(self, data: Any) -> Any:
        p = self(data[0] if isinstance(data, tuple) else data, training=False)
        return p - tf.reduce_mean(kde.gather_rows(p), 0)


class Seen(kde.Model):
    """Adds up what replicas have seen, each in a call that waits for the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    def predict_step(self, data: Any) -> Any:
        p = super().predict_step(data)
        self.seen.assign_add(tf.reduce_sum(p))
        return p


class Best(kde.Model):
    def predict_step(self, data: Any) -> Any:
        return tf.argmax(super().predict_step(data), -1)


def of_prediction(cls: Any, *between: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = stack(cls, *(one() for one in between))
        model.compile("sgd", "mse")
        return model

    return make


def predicts(model: Any) -> None:
    model.predict(X[:1], verbose=0)
    model.predict(X, batch_size=8, verbose=0)
    model.predict(X, batch_size=8, verbose=0)


def predicts_on_batch(model: Any) -> None:
    model.predict_on_batch(X[:7])


SCORE = r"'net' does not predict on 2 replicas as on one device. .* differs in the output score \(by .*kde.gather_rows"
PREDICTED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "a mean of the batch": (of_prediction(FromBatch), predicts, SCORE),
    "a mean of the batch, on a batch": (of_prediction(FromBatch), predicts_on_batch, SCORE),
    "a layer's mean of the batch": (of_prediction(kde.Model, Centred), predicts, "the output of predict_step"),
    "a mean of gathered rows": (of_prediction(Gathering), predicts, ""),
    "a sum of what was predicted": (of_prediction(Seen), predicts, ""),
    "the best class": (of_prediction(Best), predicts, ""),
    "noise": (of_prediction(Best, Noisy), predicts, ""),
}


@pytest.mark.parametrize("name", rotating(PREDICTED, [], slow=["a mean of the batch"]))
def test_prediction_that_depends_on_the_batch_is_named(mirrored, name):
    make, run, message = PREDICTED[name]
    with mirrored.scope():
        model = make()
    said = said_in(model, run)
    assert len(said) == bool(message), said
    assert not said or re.search(message, said[0])


@pytest.mark.rotating
def test_prediction_is_the_same_with_the_check_and_an_error_if_asked_for(mirrored):
    results = []
    for check in (True, False, "raise"):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = stack(FromBatch, Noisy())
            model.compile("sgd", "mse", check=check)
        if check == "raise":
            for _ in range(2):
                with pytest.raises(StepError, match=SCORE):
                    model.predict(X, verbose=0)
        else:
            said = said_in(model, lambda m: results.append(m.predict(X, batch_size=7, verbose=0)["score"]))
            assert len(said) == check
    np.testing.assert_array_equal(*results)


# Variables with an aggregation

ADDED_UP = "the state net/seen .* assign to net/seen, .* counts once for each: .*aggregation=tf.*ONLY_FIRST_REPLICA"
AGGREGATED: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a sum of rows, added up when read": ("SUM", "ON_READ", lambda x: tf.cast(tf.shape(x)[0], tf.float32), ""),
    "a sum of rows, added up when assigned": ("SUM", "ON_WRITE", lambda x: tf.cast(tf.shape(x)[0], tf.float32), ""),
    "a count of steps, added up when read": ("SUM", "ON_READ", lambda x: 1.0, ADDED_UP),
    "a count of steps, added up when assigned": ("SUM", "ON_WRITE", lambda x: tf.ones(()), ADDED_UP),
    "a count of steps, of the first replica": ("ONLY_FIRST_REPLICA", "ON_WRITE", lambda x: 1.0, ""),
    "a count of steps, a mean": ("MEAN", "ON_WRITE", lambda x: 1.0, ""),
    "a mean of rows, a mean when read": ("MEAN", "ON_READ", tf.reduce_mean, "the state net/seen"),
    "rows of the first replica": ("ONLY_FIRST_REPLICA", "ON_READ", tf.reduce_sum, "the state net/seen"),
}


def counting(cls: Any, name: str) -> Any:
    aggregation, synchronization, of_rows, _ = AGGREGATED[name]

    class Net(cls):
        def train_step(self, data: Any) -> dict[str, Any]:
            self.seen.assign_add(of_rows(data[0]))
            return super().train_step(data)

    model = stack(Net)
    model.seen = tf.Variable(
        0.0,
        trainable=False,
        aggregation=getattr(tf.VariableAggregation, aggregation),
        synchronization=getattr(tf.VariableSynchronization, synchronization),
    )
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("name", rotating(AGGREGATED, [], slow=["a count of steps, added up when read"]))
def test_variables_with_an_aggregation_are_checked(mirrored, name):
    message = AGGREGATED[name][-1]
    with mirrored.scope():
        model = counting(kde.Model, name)
    said = said_in(model, lambda model: model.fit(data(), verbose=0))
    assert len(said) == bool(message), said
    assert not said or re.search(message, said[0])
    assert not said or ("ONLY_FIRST" in said[0]) == (AGGREGATED[name][0] == "SUM")
    if not message:
        stock = counting(keras.Model, name)
        stock.fit(data(), verbose=0)
        np.testing.assert_allclose(model.seen.numpy(), stock.seen.numpy(), rtol=1e-6)


@pytest.mark.rotating
@pytest.mark.checks_fit
def test_a_sum_that_a_step_reads_before_it_is_added_up_is_named_with_what_to_do(mirrored):
    class Scaled(kde.Model):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
            return tf.reduce_mean(tf.square(y - y_pred)) * self.seen

    with mirrored.scope():
        model = counting(kde.Model, "a sum of rows, added up when read")
        scaled = stack(Scaled)
        scaled.seen = model.seen
        scaled.seen.assign(5.0)
        scaled.compile("sgd", "mse")
    (said,) = said_in(scaled, lambda model: model.fit(data(), verbose=0))
    assert re.search("Where the step reads net/seen, each replica has its own part .* add_weight", said)


@pytest.mark.rotating
def test_a_number_that_counts_once_or_for_each_replica_is_an_error_that_says_so(mirrored):
    AGGREGATED["unknown"] = ("SUM", "ON_WRITE", lambda x: 1.0, "")
    with mirrored.scope():
        model = counting(kde.Model, "unknown")
    with pytest.raises(LoopError, match="assigns the same number on all replicas to a tf.Variable whose aggregation"):
        model.fit(data(), verbose=0)


# What runs Python, and data that is split already


def warnings_of(make: Callable[[], Any], strategy: Any, data: Any) -> tuple[Any, list[str]]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, verbose=0)
    return model, [str(one.message) for one in caught if " on 2 replicas as on one device" in str(one.message)]


def test_a_step_that_only_runs_eagerly_is_checked_after_its_first_run_which_makes_its_variables(mirrored):
    def made(loss_of: Loss) -> Callable[[], Any]:
        class Net(kde.Model):
            num_steps = 0

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                if not hasattr(self, "dense"):
                    self.dense = layers.Dense(3)
                with tf.GradientTape() as tape:
                    loss = loss_of(self, y, self.dense(x))
                assert np.isfinite(loss.numpy())
                self.num_steps += 1
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
                return {"loss": loss}

        def make() -> Any:
            net = Net(name="net")
            net.compile(SGD(0.1), run_eagerly=True)
            return net

        return make

    model, said = warnings_of(made(mean), mirrored, data())
    assert said == []
    assert model.num_steps == 6  # one of each replica for each of 3 batches
    (said_of_it,) = warnings_of(made(pairs), mirrored, data())[1]
    assert re.search("'net' does not train on 2 replicas.*the gradient of .*dense.*kernel", said_of_it)


def test_a_step_that_calls_python_is_said_not_to_be_checked(mirrored):
    def in_python(net: Any, y: Any, p: Any) -> Any:
        return tf.reduce_mean(squares(tf.ensure_shape(tf.numpy_function(np.abs, [y], tf.float32), [None, 3]), p))

    (said,) = warnings_of(of_loss(in_python), mirrored, data())[1]
    assert re.search(
        r"Whether 'net' trains on 2 replicas as on one device was not checked, because of its step: it calls Python "
        r"\(tf.py_function, tf.numpy_function\), .* If you know that they are, `compile\(check=False\)` says so",
        said,
    )
    assert warnings_of(of_loss(in_python, check=False), mirrored, data())[1] == []


def in_a_fold(net: Any, y: Any, p: Any) -> Any:
    return tf.foldl(lambda total, value: total + value, squares(y, p))


@pytest.mark.parametrize("loss", rotating([in_a_fold, pairs], [], slow=[in_a_fold, pairs]))
def test_steps_on_data_that_tensorflow_has_split_are_measured_and_checked(mirrored, loss):
    """No graph tells that the loss is a sum; and no row is lost."""
    results, said = [], []
    for given in (data(), mirrored.experimental_distribute_dataset(data())):
        model, found = warnings_of(of_loss(loss, lambda: SGD(0.01)), mirrored, given)
        results.append(model.history.history["loss"] + model.get_weights())
        said.append(found)
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert [len(found) for found in said] == ([1, 1] if loss is pairs else [0, 0])


@pytest.mark.parametrize("loss", rotating(["mean", "pairs"], ["pairs"]))
def test_steps_of_parts_on_several_devices_are_checked(loss):
    """Each micro-batch has a part of the examples, as each replica has."""
    model = placement_runs.make()
    model.compile(SGD(0.01), {"mean": squares, "pairs": lambda y, p: pairs(None, y, p)}[loss])
    placement_runs.place(model, {"encoder": "CPU:0", "decoder": "CPU:1"}, micro_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(placement_runs.X, placement_runs.Y, batch_size=8, shuffle=False, verbose=0)
    said = [str(one.message) for one in caught if " on 2 replicas as on one device" in str(one.message)]
    assert len(said) == (loss == "pairs")
    assert all(re.search("the gradient of net/(encoder|decoder|head)", one) for one in said)


def test_metrics_of_ones_own_are_said_not_to_be_checked_under_parameter_servers():
    from keras_dist_ext.training.self_check import check_metrics

    model = of_metric(Peak)()
    model.fit(data(), verbose=0)
    model.replica_runtime.checked.clear()
    assert "your own (peak) add up over the workers of a ParameterServerStrategy" in str(check_metrics(model))
    assert check_metrics(model) is None


def state(model: Any) -> list[Any]:
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables), model.history.history["loss"]]


@pytest.mark.parametrize("layer", rotating([Noisy, Bank], [], slow=[Noisy]))
def test_all_is_put_back_bit_for_bit(mirrored, layer):
    """Training, with random numbers and state, gives the bits that it gives without the check."""
    results = []
    for check in (True, False):

        def make(check: bool = check) -> Any:
            model = stack(kde.Model, layer(), layers.BatchNormalization(), layers.Dropout(0.5))
            model.compile("adam", "mse", check=check)
            return model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(state(fitted(make, mirrored)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_check_is_an_error_if_asked_for_and_survives_saving_and_adoption(mirrored, tmp_path):
    def make(check: Any) -> Any:
        model = stack()
        model.compile("sgd", lambda y, p: tf.reduce_max(squares(y, p)), check=check)
        return model

    with mirrored.scope():
        model = make("raise")
        with pytest.raises(ValueError, match=r"Invalid check='loud'; must be True, False or 'raise'\."):
            make("loud")
    before = model.get_weights()
    with pytest.raises(StepError, match="'net' does not train on 2 replicas as on one device. One step on 5 examples"):
        model.fit(data(), shuffle=False, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))
    copy = kde.adopt(model, mirrored)
    with pytest.raises(StepError, match="made both ways"):
        copy.fit(data(), shuffle=False, verbose=0)

    for check in ("raise", False):
        with mirrored.scope():
            saved = stack()
            saved.compile("sgd", "mse", check=check)
        saved.save(tmp_path / "net.keras")
        loaded = kde.load_model(tmp_path / "net.keras", strategy=mirrored)
        assert loaded.replica_runtime.check == check
        keras.models.load_model(tmp_path / "net.keras")  # Keras itself does not look


def test_built_in_models_are_not_checked(mirrored, monkeypatch):
    from keras_dist_ext.training import self_check

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(self_check, "_few_rows", refuse)
    with mirrored.scope():
        model = stack(kde.Model, layers.BatchNormalization(), layers.Dropout(0.5))
        model.compile("adam", keras.losses.Huber(), metrics=["accuracy", "mae", keras.metrics.MeanSquaredError()])
    model.fit(data(), shuffle=False, verbose=0)


class Centred(keras.Operation):
    axis = 1  # says nothing of a class that is not Keras'

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def of_parts(of_kind: str) -> Any:
    """A model of Keras' own step and parts, which join the examples of a batch."""
    h = inputs = layers.Input((5,))
    activation = (lambda x: x / ops.max(x)) if of_kind == "activation" else "tanh"
    h = layers.Dense(4, activation=activation)(h)
    if of_kind == "operation":
        h = h - ops.mean(h, axis=0, keepdims=True)
    elif of_kind == "outer sum":
        h = ops.sum(h, axis=-1, keepdims=True) + ops.sum(h, axis=-1)
        h = ops.mean(h, axis=-1, keepdims=True)
    elif of_kind == "operation of the user's":
        h = Centred()(h)
    elif of_kind == "layer":
        h = layers.Softmax(axis=0)(h)
    model = kde.Model(inputs, layers.Dense(3)(h), name="net")
    model.compile(SGD(0.1), keras.losses.CosineSimilarity(axis=0) if of_kind == "loss" else "mse")
    return model


@pytest.mark.parametrize(
    "of_kind",
    rotating(
        ["activation", "operation", "operation of the user's", "outer sum", "layer", "loss"],
        ("operation", "activation"),
    ),
)
def test_parts_of_keras_that_join_examples_are_found(of_kind, mirrored):
    with mirrored.scope():
        model = of_parts(of_kind)
    with pytest.warns(UserWarning, match="'net' does not train on 2 replicas as on one device"):
        model.fit(data(), shuffle=False, verbose=0)


def test_arithmetic_and_reductions_of_an_example_between_layers_are_not_checked(mirrored, monkeypatch):
    from keras_dist_ext.training import self_check

    monkeypatch.setattr(self_check, "_few_rows", lambda *_: pytest.fail("it was checked"))
    h = inputs = layers.Input((5,))
    with mirrored.scope():
        h = layers.Dense(4)(h)
        h = ops.concatenate([ops.relu(h) + 2.0 * h, h], axis=-1) - ops.mean(h, axis=1, keepdims=True)
        model = kde.Model(inputs, layers.Dense(3)(h))
        model.compile("sgd", "mse")
    model.fit(data(), shuffle=False, verbose=0)


@pytest.mark.rotating
def test_the_data_is_read_as_without_the_check(mirrored):
    seen = []

    def batches() -> Any:
        for number in range(3):
            seen.append(number)
            yield X[8 * number : 8 * number + 8], Y[8 * number : 8 * number + 8]

    model = None
    with mirrored.scope():
        model = of_loss(mean)()
    model.fit(batches(), verbose=0)
    assert seen == [0, 1, 2]


def test_nothing_of_the_check_stays_in_a_tf_function(mirrored):
    """Training that runs eagerly, on batches like those of the check, calls the same functions."""

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        @tf.function
        def call(self, x):
            return x + keras.random.normal(tf.shape(x), seed=self.seeds)

    with mirrored.scope():
        model = kde.Sequential([keras.Input((5,)), Noise(), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True, check="raise")
    model.fit(X[:8], Y[:8, :1], batch_size=4, verbose=0)
    noise = model.layers[0](tf.zeros([2, 5])).numpy()
    assert (noise[0] != noise[1]).all()  # where the check draws alike for all rows


@pytest.mark.slow
def test_the_step_of_a_loop_is_checked_too(mirrored):
    """A loop weighs by rows what is differentiated in it, as a mean; no graph tells that this is a sum."""
    with mirrored.scope():
        model = stack()
        optimizer = SGD(0.1)

    def step(replica: Any, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.foldl(lambda total, value: total + value, squares(batch[1], model(batch[0], training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {}

    parts = {"net": model, "optimizer": optimizer}
    with pytest.raises(StepError, match="made both ways"):
        kde.TrainLoop(step, parts=parts, reduce={}, check="raise", strategy=mirrored).fit(data(), shuffle=False)
    loop = kde.TrainLoop(step, parts=parts, reduce={}, strategy=mirrored)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.fit(data(), shuffle=False, verbose=0)
    (said,) = [str(one.message) for one in caught if "does not train on" in str(one.message)]
    assert re.search(r"the gradient of .*dense.*A loss must be a mean or a sum .*`TrainLoop\(check=False\)`", said)
