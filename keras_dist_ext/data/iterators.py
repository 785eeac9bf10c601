"""Put a batch back to the iterator that it came from, and release an iterator without waiting for its threads."""

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest

__all__ = ["preceded_by", "release_iterator"]


def preceded_by(batch: TensorNest, iterator: tf.data.Iterator) -> tf.data.Dataset:
    """Return a dataset, to be read once, of a batch and of what an iterator gives from here on, not a batch ahead."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def pull(_: tf.Tensor) -> TensorNest:
        return iterator.get_next_as_optional()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def is_there(optional: tf.experimental.Optional) -> tf.Tensor:
        return optional.has_value()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def open_optional(optional: tf.experimental.Optional) -> TensorNest:
        return optional.get_value()

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    with tf.device("/device:CPU:0"):
        rest = tf.data.Dataset.range(tf.int64.max).map(pull).take_while(is_there).map(open_optional)
        return tf.data.Dataset.from_tensors(batch).concatenate(rest).with_options(options)


def release_iterator(held: list[Iterator[object]]) -> None:
    """Drop an iterator without waiting for the thread that tunes its dataset.

    That sleeps for 10 ms, then for twice as long each time, up to a minute. What is to end its sleep comes too early
    now and then: it looks whether it has to stop, is not told so yet, and sleeps on (``OptimizeLoop`` in
    tensorflow/core/framework/model.cc; cancellation.cc calls back before it says that it is cancelled). An iterator's
    destructor waits for it, and so would an epoch, for up to as long as it took.

    Args:
        held: the only reference to the iterator.
    """
    thread = threading.Thread(target=held.clear, name="dropped iterator")
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(_WAIT_SECONDS)


_WAIT_SECONDS = 0.01  # enough for nearly all else that an iterator does in the end
