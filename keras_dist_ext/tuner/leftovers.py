"""Put back what a trial leaves behind in the process, so that the next one begins as the first did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext._keras import keras

__all__ = ["cleared"]


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Restore, in the end, the global settings of Keras and TensorFlow that code may change in between.

    Left alone are random generators (trials are to differ), and what TensorFlow cannot take back, such as
    `enable_op_determinism`.
    """
    policy = keras.config.dtype_policy()
    floatx, epsilon = keras.config.floatx(), keras.config.epsilon()
    image_format = keras.config.image_data_format()
    eagerly, soft = tf.config.functions_run_eagerly(), tf.config.get_soft_device_placement()
    jit = tf.config.optimizer.get_jit()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_epsilon(epsilon)
        keras.config.set_image_data_format(image_format)
        keras.config.set_dtype_policy(policy)
        if tf.config.functions_run_eagerly() != eagerly:
            tf.config.run_functions_eagerly(eagerly)
        if tf.config.get_soft_device_placement() != soft:
            tf.config.set_soft_device_placement(soft)
        if tf.config.optimizer.get_jit() != jit:
            tf.config.optimizer.set_jit(jit or False)
