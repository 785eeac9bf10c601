"""Restore the global state of Keras and TensorFlow after a trial, so that the next one starts as the first did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from keras_dist_ext._keras import keras

__all__ = ["restored_global_state", "capture_keras_settings"]


@contextlib.contextmanager
def restored_global_state() -> Iterator[None]:
    """Restore, at the end of a `with`, the global settings of Keras and TensorFlow that code within it may change.

    Random generators keep their state (trials should differ), and so does what TensorFlow cannot undo, such as
    `enable_op_determinism`.
    """
    restore = capture_keras_settings()
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


def capture_keras_settings() -> Callable[[], None]:
    """Return a function that restores the present global settings of Keras.

    keras-tuner calls `clear_session` before each build, which resets some of them: models would be float32 where the
    user has set mixed precision, and the progress bar would be on again.
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
