"""Look into a layer: its sublayers, variables, metrics, losses and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from keras.src.backend.common.name_scope import current_path

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.backend import masking
from keras_dist_ext.aliases import TensorNest

__all__ = [
    "copy_mask",
    "seed_generators",
    "preserve_losses",
    "get_layer_losses",
    "set_layer_losses",
    "layer_losses",
    "clear_losses",
    "call_with_training",
    "attributes",
    "flat_layers",
    "needs_build",
    "child_layers",
    "own_metrics",
    "own_variables",
    "current_layer_path",
]


def copy_mask(source: tf.Tensor, target: tf.Tensor) -> None:
    """Give a tensor the mask that Keras keeps at another (keras/src/backend/common/masking.py)."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)


def seed_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """A layer's own generators, without those of the layers in it (keras/src/layers/layer.py)."""
    return list(layer._seed_generators)


@contextlib.contextmanager
def preserve_losses(model: keras.Model) -> Iterator[None]:
    """Keep what layers were given to ``add_loss`` while other replicas of the model use the same lists (layer.py)."""
    kept = get_layer_losses(model)
    yield
    set_layer_losses(kept)


def get_layer_losses(model: keras.Model) -> list[tuple[keras.Layer, list[tf.Tensor], set[int]]]:
    """What each layer was given to ``add_loss`` since the model was last called (keras/src/layers/layer.py)."""
    return [(layer, list(layer._losses), set(layer._loss_ids)) for layer in model._flatten_layers()]


def set_layer_losses(losses: Sequence[tuple[keras.Layer, list[tf.Tensor], set[int]]]) -> None:
    """Put back what ``get_layer_losses`` has returned (keras/src/layers/layer.py)."""
    for layer, given, ids in losses:
        layer._losses[:] = given
        layer._loss_ids.clear()
        layer._loss_ids.update(ids)


def layer_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """What a layer itself was given to ``add_loss`` since it was last called (keras/src/layers/layer.py)."""
    return list(layer._losses)


def clear_losses(layer: keras.Layer) -> None:
    """Forget what a layer and those in it were given to ``add_loss`` (keras/src/layers/layer.py)."""
    layer._clear_losses()


def call_with_training(layer: keras.Layer, inputs: TensorNest, *, training: bool) -> TensorNest:
    """Call a layer or model, with ``training`` where it takes it, as Keras does (backend/tensorflow/trainer.py)."""
    return layer(inputs, training=training) if layer._call_has_training_arg else layer(inputs)


def attributes(tracked: object) -> list[tuple[str, object]]:
    """The attributes of a layer, model or optimizer, without TensorFlow's list of what it tracks, which repeats them.

    tensorflow/python/trackable/base.py keeps it in attributes that begin with `_self_`.
    """
    return [(name, value) for name, value in vars(tracked).items() if not name.startswith("_self_")]


def flat_layers(layer: keras.Layer) -> list[keras.Layer]:
    """A layer or model, and all layers in it, each once (keras/src/layers/layer.py, `_flatten_layers`)."""
    return list(layer._flatten_layers())


def needs_build(layer: keras.Layer) -> bool:
    """Whether a layer may have variables to make when it is first called: not if it has Keras' own, empty `build`.

    keras/src/utils/python_utils.py, `default`, marks it, and layers/layer.py wraps it.
    """
    return not layer.built and not getattr(layer.build, "_is_default", False)


def child_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer or model holds itself (keras/src/layers/layer.py, `_flatten_layers`)."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_metrics(layer: keras.Layer) -> list[keras.Metric]:
    """The metrics that a layer tracks as its attributes, without those of `compile` (keras/src/layers/layer.py)."""
    return list(layer._metrics)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The weights and seed states of a layer, without those of the layers in it (keras/src/layers/layer.py)."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def current_layer_path() -> str:
    """The path of the layer that this thread is calling, empty outside of all (backend/common/name_scope.py)."""
    return str(current_path())
