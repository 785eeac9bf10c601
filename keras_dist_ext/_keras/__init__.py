"""The one door to Keras, and to what Keras, TensorFlow and keras-tuner do not document.

Every other module says ``from keras_dist_ext._keras import keras``. Whatever is private upstream is a function of one
of the modules here, which names the upstream file that it stands on; ``tests/upstream`` fails when one of them changes.
Written against Keras 3.15.1, TensorFlow 2.21.0 and keras-tuner 1.4.8.

- ``hooks``, ``layer_hooks``: what Keras' code does while the step of a replica is traced (``interception`` sends it)
- ``random``, ``variables``, ``losses``, ``optimizers``, ``layers``, ``models``, ``saving``: parts of a model
- ``datasets``, ``adapters``: its data
- ``callbacks``: what watches it
- ``tracing``: its graphs
- ``strategies``, ``cluster``: where it runs
- ``keras_tuner``: what searches it
"""

from __future__ import annotations

import os

from keras_dist_ext.errors import BackendError

if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() not in ("0", "", "false"):
    raise BackendError(
        "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (tf_keras); keras_dist_ext is built on Keras 3. "
        "Unset TF_USE_LEGACY_KERAS before TensorFlow is imported."
    )

import keras

if keras.backend.backend() != "tensorflow":
    raise BackendError(
        f"Keras runs on the backend {keras.backend.backend()!r}; tf.distribute needs 'tensorflow'. "
        'Set KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json, before Keras is imported.'
    )

__all__ = ["keras", "tree"]

tree = keras.tree
