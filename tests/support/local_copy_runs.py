"""A model of two workers that one of them copies, to evaluate and predict by itself."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = X[:, :1]
FIT = {"batch_size": 4, "shuffle": False, "verbose": 0}


class Net(keras.Model):  # type: ignore[misc]
    """A subclass, with moving statistics."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body, self.norm, self.head = (
            keras.layers.Dense(units, "tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        )

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(self.body(x), training=training))


def make(library: Any, strategy: Any = None) -> Any:
    keras.utils.set_random_seed(3)
    kind = Net if library is keras else type("Net", (Net, library.Model), {"__module__": __name__})
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = kind(4)
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        model(X[:1])
    return model


def of_chief(strategy: Any, folder: Any) -> Any:
    """The chief alone evaluates and predicts, with a copy, in a callback too; then both train and evaluate on."""
    import keras_dist_ext as kde

    is_chief = strategy.cluster_resolver.task_id == 0
    model, alone = make(kde, strategy), []

    class Alone(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if is_chief:
                alone.append(kde.local_copy(self.model).evaluate(X[:9], Y[:9], verbose=0))

    model.fit(X, Y, callbacks=[Alone()], **FIT)
    if is_chief:
        copy = kde.local_copy(model)
        alone += [copy.predict(X[:7], verbose=0), copy.evaluate(X[:5], Y[:5], verbose=0)]
    history = model.fit(X, Y, **FIT).history
    return alone, history, model.evaluate(X, Y, batch_size=4, verbose=0)
