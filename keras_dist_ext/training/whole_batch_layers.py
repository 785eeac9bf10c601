"""Name layers of Keras that compute something of all examples of a batch, of which each replica has only some."""

from __future__ import annotations

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext.errors import StepError
from keras_dist_ext.messages import warn_once

__all__ = ["check_whole_batch_layers"]


def check_whole_batch_layers(model: keras.Model, kind: str, *, exact: bool) -> None:
    """Warn of layers that give other numbers on replicas than on one device, beside BatchNormalization.

    Args:
        model: of ours, on several replicas.
        kind: of its steps.
        exact: whether they are to do what one device does.

    Raises:
        StepError: there are some, and it is to be exact.
    """
    for layer in flat_layers(model):
        what = _what(layer, kind)
        if what is None:
            continue
        message = (
            f"The layer '{layer.path or layer.name}' ({type(layer).__name__}) {what}, and each replica has only some "
            "of them, so it gives other numbers than on one device. Apply it in the dataset, to whole batches: "
            "dataset.map(lambda x, y: (layer(x), y))"
        )
        if exact:
            raise StepError(f"{message}; or compile without exact=True.")
        warn_once(f"{message}.")


def _what(layer: keras.Layer, kind: str) -> str | None:
    """Say what a layer computes of the whole batch in steps of a kind; None if it does not."""
    # keras/src/layers/preprocessing/image_preprocessing/equalization.py; RandAugment has one.
    if kind == "train" and isinstance(layer, keras.layers.Equalization):
        return "spreads brightness by a histogram of all images of a batch"
    # keras/src/layers/preprocessing/mel_spectrogram.py
    if isinstance(layer, keras.layers.MelSpectrogram) and layer.power_to_db and layer.top_db < float("inf"):
        return "limits all numbers by the largest one of all examples of a batch (top_db, if it is not infinite)"
    return None
