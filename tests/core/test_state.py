"""State that layers assign is the same on all replicas, however the layer goes about it, and whoever else trains."""

import random
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers, ops
from tensorflow.python.distribute import distribute_utils

import keras_dist_ext as kde
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.variables import components
from keras_dist_ext.training.snapshot import kept_state

X = np.random.default_rng(0).normal(size=(26, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def assert_replicas_agree(variables: Any) -> None:
    for variable in variables:
        first, *others = (copy.numpy() for copy in components(variable))
        assert np.isfinite(first).all(), variable.name
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=variable.name)


@pytest.mark.rotating
def test_a_call_that_is_a_tf_function_agrees_in_every_loop_that_is_traced(strategies):
    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = layers.BatchNormalization(momentum=0.5), layers.Dense(1)

        @tf.function
        def call(self, x: Any, training: bool = False) -> Any:
            return self.head(self.norm(x, training=training))

    net = Net(strategy=strategies.get("mirrored3"))
    net.compile("sgd", "mse")
    net.fit(X, Y, batch_size=8, verbose=0)
    assert_replicas_agree(net.variables)
    before = net.norm.moving_mean.numpy()
    net.train_on_batch(X[:7], Y[:7])  # another loop, in which TensorFlow would use the same trace again
    assert_replicas_agree(net.variables)
    assert not np.allclose(before, net.norm.moving_mean.numpy())


class OwnOptimizer(kde.Model):
    """Updates by an optimizer that the first step builds, and that begins with other numbers than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(1)
        self.own = {"head": keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25)}

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.own["head"].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_a_model_is_left_as_it_was_with_an_optimizer_that_was_built_meanwhile(mirrored):
    with mirrored.scope():
        net = OwnOptimizer()
        net.compile(loss="mse")
    net(X)
    before = [copy.numpy().tobytes() for variable in net.variables for copy in components(variable)]
    drawn = random.getstate(), np.random.get_state()[1].tobytes()
    with kept_state(net):
        net.fit(X, Y, batch_size=8, verbose=0)
        random.random()
        np.random.random()
    assert [copy.numpy().tobytes() for variable in net.variables for copy in components(variable)] == before
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == drawn
    assert vars(net).get("history") is None
    (accumulators,) = {(copy.numpy().min(), copy.numpy().max()) for v in _accumulators(net) for copy in components(v)}
    assert accumulators == (0.25, 0.25)


def _accumulators(net: OwnOptimizer) -> list[Any]:
    return [variable for variable in net.own["head"].variables if "accumulator" in variable.path]


class Remembers(layers.Layer):
    """Keeps the mean of what it saw last, also in prediction."""

    def build(self, input_shape: Any) -> None:
        self.seen = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="seen")
        self.counts = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="counts")

    def call(self, x: Any) -> Any:
        self.seen.assign(ops.mean(x, axis=0))
        self.counts.assign_add(1)
        return x


@pytest.mark.parametrize("run_eagerly", rotating([False, True], [False]))
def test_state_that_is_assigned_in_predict_is_that_of_one_device(strategies, run_eagerly):
    with strategies.get("mirrored3").scope():
        layer = Remembers()
        net = kde.Sequential([keras.Input((3,)), layer, layers.Dense(1)])
    net.compile("sgd", "mse", run_eagerly=run_eagerly)
    net.fit(X[:22], Y[:22], batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.seen.numpy(), X[16:22].mean(axis=0), rtol=1e-5)
    net.predict(X, batch_size=8, verbose=0)
    assert_replicas_agree(net.variables)
    np.testing.assert_allclose(layer.seen.numpy(), X[24:].mean(axis=0), rtol=1e-5)
    assert int(layer.counts) == 3 + 4


@pytest.mark.rotating
def test_threads_train_models_of_one_strategy_at_once(strategies):
    def train(strategy: Any, number: int, found: dict[int, Any]) -> None:
        with strategy.scope():
            inputs = keras.Input((3,))
            net = kde.Model(inputs, layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs)))
            net.compile(keras.optimizers.SGD(0.05 * number, gradient_accumulation_steps=2), "mse")
        net.set_weights([np.full(weight.shape, 0.1) for weight in net.get_weights()])
        net.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        found[number] = net.get_weights()

    one_by_one: dict[int, Any] = {}
    at_once: dict[int, Any] = {}
    numbers = (1, 2, 3)
    for number in numbers:
        train(strategies.get("mirrored2"), number, one_by_one)
    running = [
        threading.Thread(target=train, args=(strategies.get("mirrored2"), number, at_once), daemon=True)
        for number in numbers
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(100)
    for number in numbers:
        for one, other in zip(one_by_one[number], at_once[number], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow
def test_tensorflow_told_to_run_functions_eagerly_gives_the_same(mirrored):
    class Net(kde.Model):
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "rows": tf.shape(data[0])[0], "rate": self.optimizer.learning_rate}

    def history() -> dict[str, list[float]]:
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            inputs = keras.Input((3,))
            net = Net(inputs, layers.Dense(1)(inputs))
        net.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return net.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history

    compiled = history()
    tf.config.run_functions_eagerly(True)
    try:
        eagerly = history()
    finally:
        tf.config.run_functions_eagerly(False)
    assert sorted(compiled) == sorted(eagerly) == ["loss", "mae", "rate", "rows"]
    for name, values in compiled.items():
        np.testing.assert_allclose(values, eagerly[name], rtol=1e-5, err_msg=name)
    assert compiled["rows"] == [2, 2]


def test_callbacks_whose_methods_are_called_like_ours_are_left_alone(mirrored):
    class Mine(keras.callbacks.Callback):
        def prepare(self, model: Any) -> None:
            raise AssertionError("not meant for fit")

        def meet(self, callbacks: Any, feed: Any) -> None:
            raise AssertionError("not meant for fit")

        def on_run_prepare(self, model: Any) -> None:
            raise AssertionError("not meant for fit")

        def release(self) -> None:
            raise AssertionError("not meant for fit")

        def on_execution_end(self) -> None:
            raise AssertionError("not meant for fit")

    net = kde.Sequential([keras.Input((3,)), layers.Dense(1)], strategy=mirrored)
    net.compile("sgd", "mse")
    assert len(net.fit(X, Y, callbacks=[Mine()], verbose=0).history["loss"]) == 1


class Hooks(kde.RunCallback):
    """Notes which hooks are called, and the executions, in their order."""

    supports_multi_step = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_run_prepare(self, model: Any) -> None:
        self.seen.append(("prepare", model.built))

    def on_run_begin(self, callbacks: Any, data: Any) -> None:
        self.seen.append(("run begin", self.model.built, self in callbacks, data.num_batches))

    def on_before_train_begin(self, callbacks: Any) -> None:
        self.seen.append("before train begin")

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append("train begin")

    def on_after_train_begin(self) -> None:
        self.seen.append("after train begin")

    def on_after_epoch_begin(self) -> None:
        self.seen.append("after epoch begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("batch end", batch))

    def on_execution_end(self) -> None:
        self.seen.append("execution end")

    def on_after_epoch_end(self, epoch: int) -> None:
        self.seen.append(("after epoch end", epoch))

    def on_after_train_end(self) -> None:
        self.seen.append("after train end")

    def on_run_end(self) -> None:
        self.seen.append("run end")


def test_hooks_of_a_run_callback_are_called_in_order(mirrored):
    net = kde.Sequential([layers.Dense(1)], strategy=mirrored)
    net.compile("sgd", "mse", steps_per_execution=2)
    hooks = Hooks()
    net.fit(X[:12], Y[:12], batch_size=4, callbacks=[hooks], verbose=0)
    assert hooks.seen == [
        ("prepare", False),
        ("run begin", True, True, 3),
        "before train begin",
        "train begin",
        "after train begin",
        "after epoch begin",
        ("batch end", 1),
        "execution end",
        ("batch end", 2),
        "execution end",
        ("after epoch end", 0),
        "after train end",
        "run end",
    ]
    hooks.seen.clear()
    net.evaluate(X, Y, callbacks=[hooks], verbose=0)
    net.predict(X, callbacks=[hooks], verbose=0)
    assert hooks.seen == [("prepare", True), ("run begin", True, True, 1), "run end", ("prepare", True), "run end"]


def test_a_run_that_breaks_off_ends_for_its_callbacks_too(mirrored):
    class Breaks(kde.RunCallback):
        def on_train_begin(self, logs: Any = None) -> None:
            raise RuntimeError("broken")

    net = kde.Sequential([layers.Dense(1)], strategy=mirrored)
    net.compile("sgd", "mse")
    hooks = Hooks()
    with pytest.raises(RuntimeError, match="broken"):
        net.fit(X, Y, callbacks=[hooks, Breaks()], verbose=0)
    assert hooks.seen[-1] == "run end"


@pytest.mark.slow
def test_numbers_are_read_from_variables_as_on_one_device(mirrored):
    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((float(self.model.optimizer.learning_rate), int(self.model.optimizer.iterations)))

    seen: list[tuple[float, int]] = []
    net = kde.Sequential([keras.Input((3,)), layers.Dense(1)], strategy=mirrored)
    net.compile(keras.optimizers.SGD(0.25), "mse")
    net.fit(X, Y, batch_size=13, epochs=2, callbacks=[Reads()], verbose=0)
    assert seen == [(0.25, 2), (0.25, 4)]


def test_logs_may_be_vectors_where_the_length_of_data_is_unknown(strategies):
    class Net(kde.Model):
        def test_step(self, data: Any) -> Any:
            x, y = data
            y_pred = self(x)
            return {"loss": tf.reduce_mean(tf.square(y - y_pred)), "predicted": y_pred}

    with strategies.get("one_device").scope():
        inputs = keras.Input((3,))
        net = Net(inputs, layers.Dense(1)(inputs))
        net.compile("sgd")
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda *_: True)
    logs = net.evaluate(batches, return_dict=True, verbose=0)
    np.testing.assert_allclose(logs["predicted"], net.predict(X[24:], verbose=0), rtol=1e-6)


ON_READ = tf.VariableSynchronization.ON_READ


class Seen(layers.Layer):
    """Counts examples in a variable of which each replica holds its own part."""

    def __init__(self, aggregation: Any = tf.VariableAggregation.SUM, initial: int = 0, dtype: str = "float32") -> None:
        super().__init__()
        self.count = tf.Variable(
            tf.cast(initial, dtype),
            trainable=False,
            synchronization=ON_READ,
            aggregation=aggregation,
            name="examples_seen",
        )

    def call(self, x: Any) -> Any:
        self.count.assign_add(tf.cast(tf.shape(x)[0], self.count.dtype))
        return x


class MeanSize(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="mean_size")
        sums = {"trainable": False, "synchronization": ON_READ, "aggregation": tf.VariableAggregation.SUM}
        self.total, self.count = tf.Variable(0.0, **sums), tf.Variable(0.0, **sums)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.abs(y_pred)))
        self.count.assign_add(tf.cast(tf.size(y_pred), tf.float32))

    def result(self) -> Any:
        return self.total / self.count

    def reset_state(self) -> None:
        self.total.assign(0.0)
        self.count.assign(0.0)


def functional(library: Any, seen: Any) -> Any:
    inputs = layers.Input((3,))
    return library.Model(inputs, layers.Dense(1)(seen(inputs)))


def built_later(library: Any, seen: Any) -> Any:
    return library.Sequential([seen, layers.Dense(1)])


@pytest.mark.parametrize("make", rotating([functional, built_later], [functional]))
def test_sums_of_which_each_replica_holds_a_part_are_those_of_one_device(mirrored, make):
    values = []
    for library, strategy in ((keras, tf.distribute.get_strategy()), (kde, mirrored)):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            seen = Seen()
            model = make(library, seen)
            model.compile("sgd", "mse", metrics=[MeanSize()])
        history = model.fit(X[:25], Y[:25], batch_size=8, shuffle=False, verbose=0).history  # one in the last batch
        evaluated = model.evaluate(X[:9], Y[:9], batch_size=8, verbose=0)
        values.append([history["mean_size"], evaluated, seen.count.read_value(), *model.get_weights()])
    assert float(values[1][2]) == 25 + 9
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Began(keras.metrics.Metric):
    """A sum that does not begin at zero, and is reset to what it began with."""

    def __init__(self, dtype: str) -> None:
        super().__init__(name="began", dtype=dtype)
        self.total = self.add_variable((), initializer="ones", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + ops.cast(ops.shape(y_true)[0], self.total.dtype))

    def result(self) -> Any:
        return self.total

    def reset_state(self) -> None:
        self.total.assign(1)


def counted_from_five(library: Any, strategy: Any, dtype: str, folder: Any) -> list[float]:
    """What two sums are that do not begin at zero, wherever that can be seen."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        seen = Seen(initial=5, dtype=dtype)
        model = functional(library, seen)
        metric = Began(dtype)
        model.compile("sgd", "mse", metrics=[metric])
    found = [seen.count.numpy(), metric.total.numpy()]
    found += model.fit(X[:25], Y[:25], batch_size=8, shuffle=False, verbose=0).history["began"]
    found += [seen.count.numpy(), metric.total.numpy()]
    checkpoint = tf.train.Checkpoint(seen=seen.count)
    path = checkpoint.write(str(folder / "seen"))
    seen.count.assign(tf.cast(7, dtype))
    found += [seen.count.numpy(), *model.evaluate(X[:9], Y[:9], verbose=0)[1:], seen.count.numpy()]
    seen.count.assign_add(tf.cast(4, dtype))
    found.append(seen.count.numpy())
    seen.count.assign_sub(tf.cast(1, dtype))
    found.append(seen.count.numpy())
    checkpoint.read(path).assert_consumed()
    return [float(np.asarray(value)) for value in [*found, seen.count.numpy()]]


@pytest.mark.parametrize("dtype", rotating(["float32", "int32"], [], slow=["int32"]))
@pytest.mark.parametrize("name", rotating(["mirrored2", "mirrored3"], ["mirrored3"]))
def test_a_sum_over_replicas_begins_is_assigned_and_restored_as_on_one_device(strategies, tmp_path, name, dtype):
    stock = counted_from_five(keras, tf.distribute.get_strategy(), dtype, tmp_path)
    assert stock[:2] == [5.0, 1.0]
    assert counted_from_five(kde, strategies.get(name), dtype, tmp_path) == stock


@pytest.mark.rotating
def test_a_sum_that_does_not_begin_at_zero_resumes_as_it_was(mirrored, tmp_path):
    def counted(**arguments: Any) -> float:
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            seen = Seen(initial=5)
            model = functional(kde, seen)
            model.compile("sgd", "mse")
        model.fit(X[:25], Y[:25], batch_size=8, verbose=0, callbacks=[kde.Resume(tmp_path)], **arguments)
        return float(seen.count.numpy())

    assert counted(epochs=1) == 30.0
    assert counted(epochs=2) == 55.0


def test_sums_of_stock_models_are_those_of_tensorflow(mirrored):
    with mirrored.scope():
        seen, metric = Seen(initial=5, dtype="int32"), Began("float32")
        functional(keras, seen).compile("sgd", "mse", metrics=[metric])
    assert [int(part) for part in seen.count.values] == [5, 5]
    assert float(metric.total.numpy()) == 2.0
    seen.count.assign(7)
    assert [int(part) for part in seen.count.values] == [3, 3]


def test_a_sum_that_was_made_before_the_package_was_there_is_an_error_with_the_fix(mirrored):
    make = distribute_utils.create_mirrored_variable
    with mirrored.scope(), patched(distribute_utils, "create_mirrored_variable", make.__wrapped__):
        seen = Seen(initial=5)
        model = functional(kde, seen)
        model.compile("sgd", "mse")
    assert float(seen.count.numpy()) == 10.0
    with pytest.raises(kde.ScopeError, match="holds the whole value of .*seen.*/count, .* or assign its value in"):
        model.fit(X, Y, verbose=0)
    seen.count.assign(5.0)
    model.fit(X, Y, verbose=0)
    assert float(seen.count.numpy()) == 5.0 + 26


class OfOwnStep(kde.Model):
    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen, self.head = seen, layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.seen(x))

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("make", "error"),
    rotating(
        [(functional, kde.ScopeError), (built_later, kde.ScopeError), (lambda _, seen: OfOwnStep(seen), kde.LoopError)],
        [],
    ),
)
def test_parts_of_which_nothing_makes_one_value_are_refused_with_the_fix(mirrored, make, error):
    def fitted():
        with mirrored.scope():
            model = make(kde, Seen(tf.VariableAggregation.NONE))
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)

    with pytest.raises(error, match=r"'examples_seen' is made with [^']* Make it with aggregation=.*SUM for counts"):
        fitted()
