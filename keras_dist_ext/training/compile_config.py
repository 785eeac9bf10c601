"""What ``compile`` was given, as a saved model holds it."""

from __future__ import annotations

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import CompileArgument, Config, SavePath
from keras_dist_ext.step.compression import compression_of, kind_of
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.training.batch_statistics import checked_statistics
from keras_dist_ext.training.check_mode import check_mode
from keras_dist_ext.training.compile_notes import noted_in, read_note, saved_config
from keras_dist_ext.training.runtime import ReplicaRuntime

__all__ = ["add_own_arguments", "read_arguments", "take_over_own_arguments"]


def read_arguments(config: Config) -> dict[str, CompileArgument]:
    """Return the arguments of ``kde.Model.compile`` in a config that a model was saved with."""
    arguments: dict[str, CompileArgument] = keras.saving.deserialize_keras_object(config)
    if arguments.get("steps_per_execution") == 1:  # how "auto" is saved, so that stock Keras can load it
        arguments["steps_per_execution"] = "auto"
    return {
        **arguments,
        "virtual_replicas": VirtualReplicas.read_from(config),
        "check": read_note(config, "check", True),
        "batch_statistics": read_note(config, "batch_statistics", None),
        "exact": read_note(config, "exact", False),
        "gradient_compression": read_note(config, "gradient_compression", None),
    }


def add_own_arguments(config: Config | None, model: keras.Model) -> Config | None:
    """Return Keras' config of what a model was compiled with, and with what it was given beyond Keras' arguments."""
    runtime = model.replica_runtime
    own = {name: value for name, value, default in _own(runtime) if value != default}
    if not config or (model.virtual_replicas is None and not own):
        return config
    if isinstance(config.get("optimizer"), str):  # in whose config ours is noted
        with runtime.in_scope():
            optimizer = keras.optimizers.get(config["optimizer"])
        config = {**config, "optimizer": keras.saving.serialize_keras_object(optimizer)}
    for name, value in own.items():
        config = noted_in(config, name, value)
    return config if model.virtual_replicas is None else model.virtual_replicas.noted_in(config)


def take_over_own_arguments(model: keras.Model, file: SavePath) -> None:
    """Give a model of ours, made from a stock one in a file, what the file says that Keras does not read."""
    config = saved_config(file)
    runtime = model.replica_runtime
    runtime.check = check_mode(read_note(config, "check", True))
    runtime.batch_statistics = checked_statistics(
        read_note(config, "batch_statistics", None), model.distribute_strategy
    )
    runtime.exact = bool(read_note(config, "exact", False))
    runtime.compression = compression_of(read_note(config, "gradient_compression", None))


def _own(runtime: ReplicaRuntime) -> list[tuple[str, object, object]]:
    """(name, value, default) of our arguments; beside virtual replicas, which know by themselves."""
    return [
        ("check", runtime.check, True),
        ("batch_statistics", runtime.batch_statistics, "replica"),
        ("exact", runtime.exact, False),
        ("gradient_compression", kind_of(runtime.compression), None),
    ]
