"""Certify the model that a training script is about to train: run it up to its first `fit`, as often as needed."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

import tensorflow as tf
from rich.console import Console

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.adapters import make_data_adapter
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.models import intercept_fit
from keras_dist_ext.aliases import FitArgument, FitData, UserFunction
from keras_dist_ext.data.sources import DEFAULT_BATCH_SIZE
from keras_dist_ext.diagnosis.certificate.certifiable import check_strategy
from keras_dist_ext.diagnosis.certificate.certificate import Certificate
from keras_dist_ext.diagnosis.certificate.certification import certify
from keras_dist_ext.errors import CertificateError
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.callbacks import ReplicaSeeds
from keras_dist_ext.training.model import Model
from keras_dist_ext.whole_files import write_whole

__all__ = ["certify_script", "print_certificate"]


def certify_script(path: str, args: Sequence[str] = (), *, steps: int = 10, allow: Collection[str] = ()) -> Certificate:
    """Certify what a script trains in its first `fit`, with that data, under the strategy of that model.

    The script runs three times from its start to that call, and never beyond: as it is; with the strategy's scope
    entered already; and with all of its scopes left out, to build the model for one device.

    Args:
        path: the script.
        args: its command line arguments.
        steps: how many steps to make.
        allow: codes of findings that do not count.

    Returns:
        The certificate, see ``certify``.

    Raises:
        CertificateError: the script never calls `fit`, trains on one device, or with data or a model that
            cannot be certified.
        Exception: whatever the script raises before.
    """
    reached = _run(path, args)
    strategy = reached.model.distribute_strategy
    check_strategy(strategy)
    if strategy.num_replicas_in_sync == 1:
        raise CertificateError(
            f"{path} trains '{reached.model.name}' under {describe_strategy(strategy)}, on one device: there is "
            "nothing to compare. If a strategy was meant, build the model inside `with strategy.scope():`."
        )

    def build_model() -> keras.Model:
        with patched(tf.distribute.Strategy, "scope", lambda self: contextlib.nullcontext(self)):
            return _run(path, args).model

    return certify(
        build_model, strategy, reached.data(), steps, batch_size=reached.batch_size, allow=allow, seeds=reached.seeds
    )


def print_certificate(certificate: Certificate, json: str | None = None) -> int:
    """Print a certificate, and write it to a file, if given; return the exit code: 0 if it is equivalent, else 1."""
    Console().print(certificate)
    if json is not None:
        write_whole(json, certificate.to_json() + "\n")
    return 0 if certificate.is_equivalent else 1


class _Reached(BaseException):
    """Leaves a script at its call of `fit`. No Exception, which a script might catch."""

    def __init__(self, model: keras.Model, given: Mapping[str, FitArgument]) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def data(self) -> FitData:
        """What `certify` takes as data: batches as `fit` makes them, in their order."""
        x, y, weights, of_classes = (self.given.get(name) for name in ("x", "y", "sample_weight", "class_weight"))
        is_arrays = not isinstance(x, tf.data.Dataset) and all(hasattr(leaf, "shape") for leaf in tree.flatten(x))
        if y is None and of_classes is None and not is_arrays:
            return x
        adapter = make_data_adapter(x, y, weights, batch_size=self.batch_size, shuffle=False, class_weight=of_classes)
        self._source = adapter  # what Python functions in its dataset belong to
        return adapter.get_tf_dataset()

    @property
    def seeds(self) -> ReplicaSeeds | None:
        """By which replicas draw what one device draws, if they do."""
        given = self.given.get("callbacks") or ()
        callbacks = tree.flatten(getattr(given, "callbacks", given))
        return next((c for c in callbacks if isinstance(c, ReplicaSeeds) and c.draws == "global"), None)

    @property
    def batch_size(self) -> int:
        """Of arrays."""
        return self.given.get("batch_size") or DEFAULT_BATCH_SIZE


def _run(path: str, args: Sequence[str]) -> _Reached:
    """Run a script up to its first `fit`."""

    def stop(fit: UserFunction, model: keras.Model, *given: object, **named: object) -> None:
        raise _Reached(model, dict(inspect.signature(fit).bind(model, *given, **named).arguments))

    try:
        with _as_main(path, args), intercept_fit(stop, [keras.Model, Model]):
            runpy.run_path(path, run_name="__main__")
    except _Reached as reached:
        return reached
    except SystemExit as ended:
        raise CertificateError(f"{path} ended with exit code {ended.code} before it called `fit`.") from ended
    raise CertificateError(f"{path} ended without a call of `fit`: there is nothing to certify.")


@contextlib.contextmanager
def _as_main(path: str, args: Sequence[str]) -> Iterator[None]:
    argv, places = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [path, *args], [os.path.dirname(os.path.abspath(path))]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places
