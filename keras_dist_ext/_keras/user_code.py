"""Tell whether a model has code of the user's in its step: methods, layers, losses and metrics that are not Keras'."""

from __future__ import annotations

from collections.abc import Iterator

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import compile_arguments, overrides

__all__ = ["compiled_parts", "has_user_code", "has_user_layers", "is_users", "runs_user_code"]


def has_user_code(model: keras.Model, kind: str) -> bool:
    """Whether a step of a kind runs code that is neither Keras' nor ours, in layers, losses, metrics or methods."""
    if any(overrides(model, name) for name in ("_".join((kind, "step")), "compute_loss", "compute_metrics")):
        return True
    return has_user_layers(model) or any(map(is_users, _compiled(model)))


def has_user_layers(model: keras.Model) -> bool:
    """Whether a model runs code that is neither Keras' nor ours when it is called."""
    return any(is_users(type(layer).call) or isinstance(layer, _OF_CODE) for layer in flat_layers(model))


_OF_CODE = (keras.layers.Lambda, keras.layers.TFSMLayer, keras.layers.JaxLayer)  # which run what they are given


def _compiled(model: keras.Model) -> Iterator[object]:
    """Yield what losses and metrics of ``compile`` run (losses/losses.py, metrics/reduction_metrics.py)."""
    for one in compiled_parts(model):
        if isinstance(one, keras.Loss | keras.Metric):
            yield from _run_by(one)
        else:
            yield one


def compiled_parts(model: keras.Model) -> Iterator[object]:
    """Yield the losses and metrics of ``compile``, by name given ones too; None for those that Keras finds out."""
    given = compile_arguments(model) if model.compiled else {}
    getters = {"loss": keras.losses.get, "metrics": keras.metrics.get, "weighted_metrics": keras.metrics.get}
    for kind, get in getters.items():
        for one in tree.flatten(given.get(kind)):
            if isinstance(one, str):
                one = None if one in _SHORT_NAMES else get(one)
            yield one


def runs_user_code(one: keras.Loss | keras.Metric) -> bool:
    """Whether a loss or metric runs code that is neither Keras' nor ours."""
    return any(map(is_users, _run_by(one)))


def _run_by(one: keras.Loss | keras.Metric) -> tuple[object, ...]:
    return type(one), getattr(one, "fn", None), getattr(one, "_fn", None)


_SHORT_NAMES = ("accuracy", "acc", "crossentropy", "ce")  # trainers/compile_utils.py finds out which are meant


def is_users(code: object) -> bool:
    """Whether code, a class or a function, is neither Keras' nor ours."""
    root = str(getattr(code, "__module__", None) or "").split(".")[0]
    return code is not None and root not in ("keras", "keras_dist_ext")
