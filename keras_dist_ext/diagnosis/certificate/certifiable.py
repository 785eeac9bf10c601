"""Check whether a model under a strategy can be compared with one device."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.errors import CertificateError, StrategyError
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["check_certifiable", "check_strategy"]


def check_strategy(strategy: object) -> None:
    """See whether a strategy's replicas can be compared.

    Raises:
        CertificateError: they are not all in this process, or it is no strategy.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise CertificateError(
            "Under ParameterServerStrategy each worker makes steps of its own, at its own pace, so that no two runs "
            "are equal, and none is that of one device. What a step computes can be certified with a MirroredStrategy."
        )
    try:
        given = checked_strategy(strategy)
    except StrategyError as error:
        raise CertificateError(str(error)) from None
    if given is None:
        raise CertificateError("strategy must be a tf.distribute.Strategy, got None.")
    is_mirrored = isinstance(given, tf.distribute.MirroredStrategy)
    is_far = isinstance(given, tf.distribute.MultiWorkerMirroredStrategy)
    if given.num_replicas_in_sync > 1 and (not is_mirrored or is_far):
        raise CertificateError(
            f"A certificate compares what all replicas hold, in one process, and {describe_strategy(given)} has "
            "replicas elsewhere. Certify with a MirroredStrategy of as many replicas, which on a CPU are "
            f'`kde.pick_strategy("mirrored", num_replicas={given.num_replicas_in_sync})`: steps are the same.'
        )


def check_certifiable(build_model: object, strategy: object) -> None:
    """See whether two models can be built, one of them under a strategy whose replicas can be compared.

    Raises:
        CertificateError: they cannot, or this is inside of a scope.
    """
    if isinstance(build_model, keras.Model) or not callable(build_model):
        raise CertificateError(
            "certify takes a function that builds and compiles a model as build_model, and got "
            f"{type(build_model).__name__}: it builds one for one device, and another in the strategy's scope."
        )
    check_strategy(strategy)
    if tf.distribute.has_strategy():
        raise CertificateError(
            "certify was called inside a strategy's scope, where no model can be built for one device. Leave the scope."
        )
