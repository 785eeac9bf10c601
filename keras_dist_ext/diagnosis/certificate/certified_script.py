"""Certify the model that a training script is about to train: run it up to its first `fit`, as often as needed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import tensorflow as tf
from rich.console import Console

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import patched
from keras_dist_ext.diagnosis.certificate.certifiable import check_strategy
from keras_dist_ext.diagnosis.certificate.certificate import Certificate
from keras_dist_ext.diagnosis.certificate.certification import certify
from keras_dist_ext.diagnosis.first_fit import FirstFit, run_to_first_fit
from keras_dist_ext.errors import CertificateError
from keras_dist_ext.strategy.scope import describe_strategy
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


def _run(path: str, args: Sequence[str]) -> FirstFit:
    return run_to_first_fit(path, args, "certify", CertificateError)
