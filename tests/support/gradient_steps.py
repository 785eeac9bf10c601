"""Steps that do something with their gradients before, or instead of, giving them to an optimizer."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["STEPS", "X", "Y", "batches", "on_workers", "trained"]

X = np.random.default_rng(0).normal(size=(29, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")

Step = Callable[[Any, Any, Any], dict[str, Any]]


def batches(size: int = 9) -> tf.data.Dataset:
    """Batches of 9, 9, 9 and 2 rows."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def even_batches() -> tf.data.Dataset:
    """Three batches of 8 rows, as Python knows."""
    return tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(8, drop_remainder=True)


DATA: dict[str, Callable[[], tf.data.Dataset]] = {
    "uneven": batches,
    "even": even_batches,
    "one in the last": lambda: batches(7),
}


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def gradients_of(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    return loss, tape.gradient(loss, model.trainable_variables)


def update(model: Any, gradients: Any) -> None:
    model.optimizer.apply(gradients, model.trainable_variables)


def straight(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"l": loss}


def clipped_by_value(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    update(model, [tf.clip_by_value(g, -0.05, 0.05) for g in gradients])
    return {"l": loss}


def clipped_by_norm(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    update(model, [tf.clip_by_norm(g, 0.1) for g in gradients])
    return {"l": loss, "norm": tf.linalg.global_norm(gradients)}


def clipped_sum(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x, training=True) - y))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 2.0)
    update(model, gradients)
    return {"norm": norm}


def clipped_vector(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
    gradients, norm = tf.clip_by_global_norm(tape.gradient(losses, model.trainable_variables), 2.0)
    update(model, gradients)
    return {"norm": norm}


def losses_in_ragged_rows(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        losses = tf.square(model(tf.concat([x, 2.0 * x], 0), training=True) - tf.concat([y, y], 0))
        ragged = tf.RaggedTensor.from_row_lengths(tf.squeeze(losses, 1), tf.fill([tf.shape(x)[0]], 2))
        targets = [0.05 * ragged, ragged / tf.cast(tf.shape(x)[0], tf.float32)]  # a sum, and a mean
    update(model, tape.gradient(targets, model.trainable_variables))
    return {"l": tf.reduce_mean(ragged.flat_values)}


def noted_after_the_update(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    update(model, tf.clip_by_global_norm(gradients, 0.1)[0])
    model.seen.assign(tf.reduce_mean(x, axis=0))
    return {"l": loss}


def a_loss_of_gathered_rows(model: Any, x: Any, y: Any) -> dict[str, Any]:
    import keras_dist_ext as kde

    with tf.GradientTape() as tape:
        predicted, wanted = kde.gather_rows([model(x, training=True), y])
        loss = keras.losses.MeanSquaredError()(wanted, predicted)
    update(model, tape.gradient(loss, model.trainable_variables))
    return {"l": loss}


def of_a_scaled_loss(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
        scaled = model.optimizer.scale_loss(loss)
    gradients, norm = tf.clip_by_global_norm(tape.gradient(scaled, model.trainable_variables), 0.4)
    update(model, gradients)
    return {"l": loss, "norm": norm}


def assigned_by_hand(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
        weight.assign_sub(0.1 * gradient + 0.01 * weight)
    return {"l": loss}


def accumulated_by_hand(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    for total, gradient in zip(model.totals, gradients, strict=True):
        total.assign_add(gradient)
    model.count.assign_add(1)

    def apply() -> int:
        update(model, [total / 2.0 for total in model.totals])
        for total in model.totals:
            total.assign(tf.zeros_like(total))
        return 1

    tf.cond(model.count % 2 == 0, apply, lambda: 0)
    return {"l": loss}


def optimizer_in_a_branch(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    tf.cond(
        model.optimizer.iterations % 2 == 0,
        lambda: (update(model, gradients), 1)[1],
        lambda: (update(model, [2.0 * g for g in gradients]), 0)[1],
    )
    return {"l": loss}


def tape_in_a_branch(model: Any, x: Any, y: Any) -> dict[str, Any]:
    def branch(factor: float) -> Callable[[], Any]:
        def run() -> Any:
            with tf.GradientTape() as tape:
                loss = factor * loss_of(model, x, y)
            update(model, tape.gradient(loss, model.trainable_variables))
            return loss

        return run

    return {"l": tf.cond(model.optimizer.iterations % 2 == 0, branch(1.0), branch(0.5))}


def tape_in_a_loop(model: Any, x: Any, y: Any) -> dict[str, Any]:
    def body(i: Any, total: Any) -> Any:
        _, gradients = gradients_of(model, x, y)
        for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.05 * gradient)
        return i + 1, total + tf.linalg.global_norm(gradients)

    return {"norm": tf.while_loop(lambda i, _: i < 3, body, (0, 0.0))[1]}


def a_function(model: Any, x: Any, y: Any) -> dict[str, Any]:
    @tf.function
    def run(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = tf.reduce_mean(tf.square(predicted - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        if norm > 0.5:
            gradients = [g * 0.5 / norm for g in gradients]
        update(model, gradients)
        model.error.update_state(y, predicted)
        return {"l": loss, "norm": norm, "error": model.error.result()}

    return run(x, y)  # type: ignore[no-any-return]


def a_function_with_a_loop(model: Any, x: Any, y: Any) -> dict[str, Any]:
    @tf.function
    def run(x: Any, y: Any) -> Any:
        total = 0.0
        for _ in tf.range(3):
            loss, gradients = gradients_of(model, x, y)
            update(model, gradients)
            total += loss
        return total

    return {"l": run(x, y)}


def branches_that_give_an_op_or_one_number(model: Any, x: Any, y: Any) -> dict[str, Any]:
    def train() -> Any:
        update(model, gradients_of(model, x, y)[1])
        return tf.group(model.count.assign_add(1))

    tf.cond(model.count < 2, train, train)

    def body(i: Any) -> Any:
        update(model, [0.5 * g for g in gradients_of(model, x, y)[1]])
        return i + 1

    num_made = tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
    half = tf.function(lambda value: 0.5 * value)  # is called twice
    return {"l": half(half(loss_of(model, x, y))), "n": tf.cast(num_made, tf.float32)}


def sharpness_aware(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    norm = tf.linalg.global_norm(gradients)
    steps = [0.05 * g / norm for g in gradients]
    for weight, step in zip(model.trainable_variables, steps, strict=True):
        weight.assign_add(step)
    _, gradients = gradients_of(model, x, y)
    for weight, step in zip(model.trainable_variables, steps, strict=True):
        weight.assign_sub(step)
    update(model, gradients)
    return {"l": loss, "norm": norm}


def surgery(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape(persistent=True) as tape:
        predicted = model(x, training=True)
        one, other = tf.reduce_mean((predicted - y) ** 2), tf.reduce_mean(tf.abs(predicted + y))
    pairs = zip(
        tape.gradient(one, model.trainable_variables), tape.gradient(other, model.trainable_variables), strict=True
    )

    def projected(a: Any, b: Any) -> Any:
        dot = tf.reduce_sum(a * b)
        return tf.cond(dot < 0, lambda: a - dot * b / (tf.reduce_sum(b * b) + 1e-9), lambda: a) + b

    update(model, [projected(a, b) for a, b in pairs])
    return {"l": one}


def learnt_to_learn(model: Any, x: Any, y: Any) -> dict[str, Any]:
    def loss(kernel: Any, bias: Any) -> Any:
        return tf.reduce_mean((tf.tanh(x @ kernel + bias)[:, :1] - y) ** 2)

    own = [model.hidden.kernel, model.hidden.bias]
    with tf.GradientTape() as outer:
        fast = [tf.convert_to_tensor(weight) for weight in own]
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(fast)
                inner = loss(*fast)
            fast = [w - 0.3 * g for w, g in zip(fast, tape.gradient(inner, fast), strict=True)]
        total = loss(*fast)
    model.optimizer.apply(outer.gradient(total, own), own)
    return {"l": total}


def penalty_on_gradients_of_weights(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as outer:
        loss, gradients = gradients_of(model, x, y)
        loss += 0.1 * tf.add_n([tf.reduce_sum(g**2) for g in gradients])
    update(model, outer.gradient(loss, model.trainable_variables))
    return {"l": loss}


def product_with_the_hessian(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as outer:
        loss, gradients = gradients_of(model, x, y)
    products = outer.gradient(
        gradients, model.trainable_variables, output_gradients=[tf.ones_like(g) for g in gradients]
    )
    update(model, [g + 0.1 * p for g, p in zip(gradients, products, strict=True)])
    return {"l": loss}


def penalty_on_gradients_of_inputs(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            predicted = model(x, training=True)
        norms = tf.norm(inner.gradient(predicted, x) + 1e-6, axis=1)
        loss = tf.reduce_mean((predicted - y) ** 2) + tf.reduce_mean((norms - 1.0) ** 2)
    update(model, tape.gradient(loss, model.trainable_variables))
    return {"l": loss}


def adversarial(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as inner:
        inner.watch(x)
        loss = loss_of(model, x, y)
    loss, gradients = gradients_of(model, x + 3.0 * inner.gradient(loss, x), y)
    update(model, gradients)
    return {"l": loss}


def of_a_structure(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    head = [model.head.kernel, model.head.bias]
    found = tape.gradient(loss, {"hidden": model.hidden.kernel, "bias": model.hidden.bias, "head": head})
    update(model, [found["hidden"], found["bias"], *found["head"]])
    return {"l": loss, "norm": tf.norm(found["hidden"])}


def of_what_is_not_connected(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model.hidden(x) ** 2)
    weights = model.trainable_variables
    some = tape.gradient(loss, weights)
    zeros = tape.gradient(loss, [weight.value for weight in weights], unconnected_gradients="zero")
    assert [gradient is None for gradient in some] == [False, False, True, True]
    update(model, [b if a is None else a + b for a, b in zip(some, zeros, strict=True)])
    return {"l": loss}


def from_above(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
    above = (predicted - y) / tf.cast(tf.shape(x)[0], tf.float32)
    gradients = tape.gradient(predicted, model.trainable_variables, output_gradients=above)
    update(model, gradients)
    return {"norm": tf.linalg.global_norm(gradients)}


def two_optimizers(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = gradients_of(model, x, y)
    update(model, [*gradients[:2], None, None])
    model.second.apply(gradients[2:], model.trainable_variables[2:])
    return {"l": loss}


def jacobian(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape(persistent=True) as tape:
        predicted = model(x, training=True)
        losses = tf.stack([tf.reduce_mean((predicted - y) ** 2), tf.reduce_mean(tf.abs(predicted))])
    update(model, [rows[0] + 0.5 * rows[1] for rows in tape.jacobian(losses, model.trainable_variables)])
    return {"l": losses[0]}


def jacobians_of_rows(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        predicted = model(x, training=True)
        loss, total = tf.reduce_mean((predicted - y) ** 2), tf.reduce_sum(predicted)
    of_each, of_all = tape.jacobian(predicted, model.hidden.bias), tape.jacobian(total, x)
    update(model, tape.gradient(loss, model.trainable_variables))
    return {"l": loss, "each": tf.reduce_mean(of_each), "all": tf.reduce_mean(of_all)}


def penalty_on_jacobians_of_inputs(model: Any, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        with tf.GradientTape(persistent=True) as inner:
            inner.watch(x)
            hidden = tf.reshape(model.hidden(x), [-1, 2, 2])
            in_order = inner.batch_jacobian(hidden, x, experimental_use_pfor=False)  # while it records
            apart = hidden[:, 0, :2] * x[:, :1]
        found = inner.batch_jacobian(apart, x)
        crossed = inner.jacobian(apart, x)  # of each example to each
        loss = loss_of(model, x, y) + tf.reduce_mean(
            tf.reduce_sum(found**2, [1, 2]) + tf.reduce_sum(crossed, [1, 2, 3])
        )
        loss += 0.1 * tf.reduce_mean(tf.reduce_max(in_order, [1, 2, 3]))
        loss += tf.reduce_mean(tf.reduce_sum(inner.batch_jacobian(hidden, tf.identity(x)) ** 2, [1, 2, 3]))
    update(model, tape.gradient(loss, model.trainable_variables))
    return {"l": loss}


def by_no_tape(model: Any, x: Any, y: Any) -> dict[str, Any]:
    import keras_dist_ext as kde

    hidden = model.hidden(x)
    error = model.head(hidden) - y
    kernel = tf.matmul(hidden, error, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
    kernel, bias = kde.reduce_gradients([kernel, tf.reduce_mean(error, axis=0)])
    model.optimizer.apply([tf.clip_by_norm(kernel, 0.2), bias], model.trainable_variables[2:])
    return {"norm": tf.norm(kernel)}


def clipped_for_each_example(model: Any, x: Any, y: Any) -> dict[str, Any]:
    import keras_dist_ext as kde

    def of_example(row: Any) -> list[Any]:
        found = gradients_of(model, row[0][None], row[1][None])[1]
        return [g * tf.minimum(1.0, 0.3 / tf.linalg.global_norm(found)) for g in found]

    clipped = tf.vectorized_map(of_example, (x, y))
    update(model, kde.reduce_gradients([tf.reduce_mean(g, axis=0) for g in clipped]))
    return {"l": loss_of(model, x, y)}


STEPS: dict[str, Step] = {
    name: step
    for name, step in list(globals().items())
    if callable(step)
    and getattr(step, "__module__", "") == __name__
    and name not in ("batches", "even_batches", "loss_of", "gradients_of", "update")
}


def network(lib: Any, step: Step, make_optimizer: Callable[[], Any]) -> Any:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(4, activation="tanh")
            self.head = keras.layers.Dense(1)
            self.seen = keras.Variable(np.zeros(3), dtype="float32", trainable=False)
            self.error = keras.metrics.RootMeanSquaredError(name="error")

        def call(self, x: Any) -> Any:
            return self.head(self.hidden(x))

        def train_step(self, data: Any) -> dict[str, Any]:
            return step(self, *data)

    net = Net()
    net.compile(make_optimizer())
    net(tf.zeros((1, 3)))
    net.optimizer.build(net.trainable_variables)
    net.second = keras.optimizers.SGD(0.05)
    net.second.build(net.trainable_variables[2:])
    net.totals = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in net.trainable_variables]
    net.count = tf.Variable(0, trainable=False)
    return net


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def trained(
    lib: Any,
    strategy: Any,
    step: Step,
    data: Any = None,
    make_optimizer: Callable[[], Any] = sgd,
    **compiled: Any,
) -> dict[str, Any]:
    """Train for two epochs; return what was logged, and the weights of each replica."""
    keras.utils.set_random_seed(3)
    if strategy is None:
        net = network(lib, step, make_optimizer)
    else:
        with strategy.scope():
            net = network(lib, step, make_optimizer)
    if compiled:
        net.compile(net.optimizer, **compiled)
    history = net.fit(batches() if data is None else data, epochs=2, verbose=0).history
    weights = [np.asarray(weight) for weight in net.get_weights()]
    copies = [
        [np.asarray(copy) for copy in (strategy or tf.distribute.get_strategy()).experimental_local_results(w.value)]
        for w in net.weights
    ]
    return {"history": history, "weights": weights, "copies": copies}


def on_workers(strategy: Any, folder: pathlib.Path, name: str, rows: str) -> dict[str, Any]:
    """What a step comes to on two workers."""
    import keras_dist_ext as kde

    return trained(kde, strategy, STEPS[name], DATA[rows]())
