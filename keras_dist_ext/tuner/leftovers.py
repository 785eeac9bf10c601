"""Put back what a trial leaves behind in the process, so that the next one begins as the first did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from keras_dist_ext._keras import keras

__all__ = ["cleared", "keras_settings"]


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Restore, in the end, the global settings of Keras and TensorFlow that code may change in between.

    Left alone are random generators (trials are to differ), and what TensorFlow cannot take back, such as
    `enable_op_determinism`.
    """
    restore = keras_settings()
    eagerly, soft = tf.config.functions_run_eagerly(), tf.config.get_soft_device_placement()
    jit = tf.config.optimizer.get_jit()
    try:
        yield
    finally:
        restore()
        if tf.config.functions_run_eagerly() != eagerly:
            tf.config.run_functions_eagerly(eagerly)
        if tf.config.get_soft_device_placement() != soft:
            tf.config.set_soft_device_placement(soft)
        if tf.config.optimizer.get_jit() != jit:
            tf.config.optimizer.set_jit(jit or False)


def keras_settings() -> Callable[[], None]:
    """Return what sets Keras' global settings to what they are now.

    keras-tuner calls `clear_session` before each build, which forgets some of them: models would be float32 where
    the user has asked for mixed precision, and the progress bar would be back.
    """
    policy = keras.config.dtype_policy()
    floatx, epsilon = keras.config.floatx(), keras.config.epsilon()
    image_format = keras.config.image_data_format()
    is_interactive = keras.config.is_interactive_logging_enabled()
    filters_tracebacks = keras.config.is_traceback_filtering_enabled()

    def restore() -> None:
        keras.config.set_floatx(floatx)
        keras.config.set_epsilon(epsilon)
        keras.config.set_image_data_format(image_format)
        keras.config.set_dtype_policy(policy)
        (keras.config.enable_interactive_logging if is_interactive else keras.config.disable_interactive_logging)()
        (keras.config.enable_traceback_filtering if filters_tracebacks else keras.config.disable_traceback_filtering)()

    return restore
