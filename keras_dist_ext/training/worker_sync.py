"""Keep the workers of a run alike: equal state when it begins, an end after the same epoch, files from the chief."""

from __future__ import annotations

import concurrent.futures
import functools
import zlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import initial_epoch, set_initial_epoch
from keras_dist_ext.aliases import Logs
from keras_dist_ext.errors import WorkersError
from keras_dist_ext.messages import warn
from keras_dist_ext.step.pass_through import PassThrough
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.run_callback import Callbacks, RunCallback, callbacks_in

__all__ = ["WorkerSync", "callbacks_of_worker", "own_callback", "without_collectives"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def _is_for_chief(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback writes files that only the chief may write."""
    return isinstance(callback, _WRITERS)


class WorkerSync(RunCallback):
    """The last callback of each worker: begins with the chief's state, and ends all workers after the same epoch.

    Args:
        workers: of the run.
        differing: says what differs between replicas, over all workers, or that nothing does (None).
    """

    def __init__(self, workers: Workers, differing: Callable[[], str | None]) -> None:
        super().__init__()
        self._workers = workers
        self._differing = differing

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Take over what a callback, or the program, of the chief has restored."""
        model = self.model
        own = initial_epoch(model)
        epoch, restored = self._workers.broadcast([float(own or 0), float(own is not None)])
        if restored:  # by a callback of the chief, such as BackupAndRestore
            set_initial_epoch(model, int(epoch))
            self._broadcast_state()
            return
        differing = self._differing()
        if differing is not None:
            self._broadcast_state()
            if self._workers.is_chief:
                warn(
                    f"{differing} Workers train one model, so all continue with the values of the first worker. Load "
                    "or set equal values on all workers."
                )

    def _broadcast_state(self) -> None:
        model = self.model
        generators = [generator.state for generator in model.replica_seeds.generators(with_global=True)]
        made = [variable for _, optimizer in optimizers(model) for variable in optimizer.variables]
        plain = [v for layer in flat_layers(model) for _, v in raw_variables(layer) if v.dtype.is_floating]
        self._workers.broadcast_state([*model.weights, *made, *plain, *generators])
        model.replica_seeds.load({"run": self._workers.broadcast(model.replica_seeds.run)})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End training on all workers where one has asked for it; see that their learning rates are equal."""
        workers = self._workers
        self.model.replica_runtime.agree_on_stop()
        rates = {name: _learning_rate(optimizer) for name, optimizer in optimizers(self.model)}
        if workers.all_equal(zlib.crc32(str([f"{rate:.5g}" for rate in rates.values()]).encode())):
            return
        everywhere = np.zeros([workers.num_workers, len(rates)])
        everywhere[workers.index] = list(rates.values())
        everywhere = np.reshape(workers.sum(everywhere.ravel()), everywhere.shape)
        differs = ~np.isclose(everywhere, everywhere[:1], rtol=1e-5, atol=0, equal_nan=True)
        for worker, place in np.argwhere(differs):
            raise WorkersError(
                f"The learning rate of {list(rates)[place]} is {everywhere[worker, place]:g} on worker {worker} and "
                f"{everywhere[0, place]:g} on worker 0 after epoch {epoch + 1}, so that they train different models. "
                "Callbacks must set it on all workers, to the same values."
            )


def _learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(optimizer.learning_rate)))


_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # older versions of Keras have none


def callbacks_of_worker(callbacks: Callbacks, workers: Workers) -> list[keras.callbacks.Callback]:
    """The callbacks that this worker runs: those that write files are for the chief.

    Raises:
        WorkersError: one of them can run neither on the chief only nor on all workers.
    """
    callbacks = callbacks_in(callbacks)
    if any(isinstance(callback, _ORBAX) for callback in callbacks):
        raise WorkersError(
            "OrbaxCheckpoint is among the callbacks of several workers. All of them would write into one folder and "
            "break each other's checkpoints, and the chief cannot write by itself: Keras reads the metrics' values for "
            "it, which all workers have to add up together. Save with ModelCheckpoint, or with kde.Resume to continue "
            "after a crash."
        )
    return [
        ChiefOnlyCallback(c) if _is_for_chief(c) else c for c in callbacks if workers.is_chief or not _is_for_chief(c)
    ]


def own_callback(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return the user's callback, which may be wrapped to be run by this worker only."""
    return callback.callback if isinstance(callback, ChiefOnlyCallback) else callback


class ChiefOnlyCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that one worker runs by itself: what it assigns must not wait for the others.

    TensorFlow broadcasts an assignment to variables like ``optimizer.iterations``, which BackupAndRestore loads; and
    the first value of any variable made in scope, as Keras makes some to look at them while it saves.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.callback = callback
        for name in dir(keras.callbacks.Callback):
            if name.startswith(("on_", "set_")):
                setattr(self, name, without_collectives(getattr(callback, name)))


def without_collectives(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a method as one worker may call it by itself: in no scope, and assigning to its own copies only."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with intercept(PassThrough()):
            return method(*args, **kwargs)

    def outside_of_scopes(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not tf.distribute.has_strategy():
            return call(*args, **kwargs)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a scope is the thread's
            return thread.submit(call, *args, **kwargs).result()

    return outside_of_scopes
