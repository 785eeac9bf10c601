"""What ``compile`` was given, as a saved model holds it."""

from __future__ import annotations

from typing import Any

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Config
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.training.check_mode import note_mode, read_mode

__all__ = ["add_own_arguments", "read_arguments"]


def read_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of ``kde.Model.compile`` in a config that a model was saved with."""
    arguments: dict[str, Any] = keras.saving.deserialize_keras_object(config)
    if arguments.get("steps_per_execution") == 1:  # how "auto" is saved, so that stock Keras can load it
        arguments["steps_per_execution"] = "auto"
    return {**arguments, "virtual_replicas": VirtualReplicas.read_from(config), "check": read_mode(config)}


def add_own_arguments(config: Config | None, model: keras.Model) -> Config | None:
    """Return Keras' config of what a model was compiled with, and with what it was given beyond Keras' arguments."""
    runtime = model.replica_runtime
    if not config or (model.virtual_replicas is None and runtime.check is True):
        return config
    if isinstance(config.get("optimizer"), str):  # in whose config ours is noted
        with runtime.in_scope():
            optimizer = keras.optimizers.get(config["optimizer"])
        config = {**config, "optimizer": keras.saving.serialize_keras_object(optimizer)}
    config = note_mode(config, runtime.check)
    return config if model.virtual_replicas is None else model.virtual_replicas.noted_in(config)
