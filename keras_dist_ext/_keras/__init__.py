"""The only package that imports Keras, and private API of Keras, TensorFlow and keras-tuner.

Every other module says ``from keras_dist_ext._keras import keras``. Each use of private API is a function, or a class
to derive from, of one of the modules here, which names the upstream file that it depends on; ``tests/upstream`` fails
when one of them changes. Written against Keras 3.15.1, TensorFlow 2.21.0 and keras-tuner 1.4.8.

In reading order:

    backend       where the parts of Keras' TensorFlow backend are
    interception  how calls of a thread in Keras' code get to the step whose replica it is tracing
    hooks         which calls: losses, metrics, optimizers, variables, random numbers
    draw_hooks    which random numbers a step draws
    layer_hooks   and those of layers
    creation      variables that a step makes, made outside of its graph
    variables     copies of a variable, and variables made elsewhere
    random        generators, and the ops that draw
    losses        weights, masks, and steps without parts
    optimizers    what they train, count and accumulate
    layers        what they hold
    models        what ``compile`` and ``fit`` know, and a model class to derive from
    user_code     whether a step has code that is not Keras'
    row_wise      which of Keras' layers, losses and metrics compute each example of a batch by itself
    saving        how Keras saves an object
    callbacks     what Keras' own look at
    adapters      the data of ``fit``
    py_datasets   and its order, of a ``PyDataset``
    datasets      graphs, iterators and shards of tf.data
    tapes         what tapes record
    loops         how often loops go round
    tracing       graphs, and how functions are traced and called
    profiles      what the profiler has written
    python_ops    functions of Python that graphs call
    strategies    replicas, and whose strategy is whose
    cluster       the coordination service, and workers
    keras_tuner   keras-tuner, and its trials
    keras_tuner_oracles  and its oracles
    oracle_checks    whether keras-tuner still calls what is replaced of an oracle
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
