"""Run a script up to its first call of `fit`, and take over what it was to train there."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.adapters import make_data_adapter
from keras_dist_ext._keras.models import intercept_fit
from keras_dist_ext.aliases import FitArgument, FitData, UserFunction
from keras_dist_ext.data.sources import DEFAULT_BATCH_SIZE
from keras_dist_ext.training.callbacks import ReplicaSeeds
from keras_dist_ext.training.model import Model

__all__ = ["FirstFit", "run_to_first_fit"]


class FirstFit:
    """A call of `fit` that a script was about to make.

    Attributes:
        model: that it was to train.
        given: the arguments, by name.
    """

    def __init__(self, model: keras.Model, given: Mapping[str, FitArgument]) -> None:
        self.model = model
        self.given = given

    def data(self) -> FitData:
        """Return what `certify` takes as data: batches as `fit` makes them, in their order."""
        x, y, weights, of_classes = (self.given.get(name) for name in ("x", "y", "sample_weight", "class_weight"))
        is_arrays = not isinstance(x, tf.data.Dataset) and all(hasattr(leaf, "shape") for leaf in tree.flatten(x))
        if y is None and of_classes is None and not is_arrays:
            return x
        adapter = make_data_adapter(x, y, weights, batch_size=self.batch_size, shuffle=False, class_weight=of_classes)
        self._source = adapter  # what Python functions in its dataset belong to
        return adapter.get_tf_dataset()

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Those of the call; of a CallbackList, what is in it."""
        given = self.given.get("callbacks") or ()
        return list(tree.flatten(getattr(given, "callbacks", given)))

    @property
    def seeds(self) -> ReplicaSeeds | None:
        """By which replicas draw what one device draws, if they do."""
        return next((c for c in self.callbacks if isinstance(c, ReplicaSeeds) and c.draws == "global"), None)

    @property
    def batch_size(self) -> int:
        """Of arrays."""
        return self.given.get("batch_size") or DEFAULT_BATCH_SIZE


class _Reached(BaseException):
    """Leaves a script at its call of `fit`. No Exception, which a script might catch."""

    def __init__(self, fit: FirstFit) -> None:
        super().__init__()
        self.fit = fit


def run_to_first_fit(path: str, args: Sequence[str], purpose: str, error: type[Exception]) -> FirstFit:
    """Run a script up to its first `fit`.

    Args:
        path: the script.
        args: its command line arguments.
        purpose: what it is run for, as "certify".
        error: which to raise where it calls none.
    """

    def stop(fit: UserFunction, model: keras.Model, *given: object, **named: object) -> None:
        raise _Reached(FirstFit(model, dict(inspect.signature(fit).bind(model, *given, **named).arguments)))

    try:
        with _as_main(path, args), intercept_fit(stop, [keras.Model, Model]):
            runpy.run_path(path, run_name="__main__")
    except _Reached as reached:
        return reached.fit
    except SystemExit as ended:
        raise error(f"{path} ended with exit code {ended.code} before it called `fit`.") from ended
    raise error(f"{path} ended without a call of `fit`: there is nothing to {purpose}.")


@contextlib.contextmanager
def _as_main(path: str, args: Sequence[str]) -> Iterator[None]:
    argv, places = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [path, *args], [os.path.dirname(os.path.abspath(path))]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places
