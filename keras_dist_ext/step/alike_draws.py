"""Draw the same random numbers for each row of a batch, so that a step does not depend on how its rows are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from keras_dist_ext._keras.random import stateless_random_ops
from keras_dist_ext.aliases import Original, TensorNest

__all__ = ["RowsAlike"]


class RowsAlike:
    """Random ops whose rows are all alike, another row at each step: equal on both sides however rows are split.

    A draw of shape [N, ..., d] is one of [1, ..., 1, d], repeated; of shape [N] or [] it is one number. Gamma and
    Poisson numbers are their mean, and what is shuffled keeps its order. Generators of Keras count on as always. Ops in
    ``unknown`` are left as they are.
    """

    def __init__(self) -> None:
        self.step = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.has_drawn = False
        self.unknown: set[str] = set()

    def __call__(self, name: str, original: Original, /, *args: TensorNest, **kwargs: TensorNest) -> tf.Tensor:
        """Draw, as ``_keras.random.intercept_random_ops`` asks."""
        self.has_drawn = True
        if name in ("stateless_multinomial", "multinomial"):
            best = tf.argmax(args[0], axis=-1, output_type=kwargs.get("output_dtype") or tf.int64)
            return tf.tile(best[:, tf.newaxis], [1, args[1]])
        if name in ("random_shuffle", "stateless_shuffle"):
            return tf.identity(args[0])
        kind = _KINDS.get(name)
        if kind is None and name in _MEANS:
            given = dict(zip(_MEANS[name], args, strict=False)) | kwargs
            mean = tf.convert_to_tensor(next(given[key] for key in ("mean", "alpha", "rate", "lam") if key in given))
            shape = tf.convert_to_tensor(given["shape"], tf.int32)
            own = tf.shape(mean) if name in _EACH else []
            return tf.cast(tf.broadcast_to(mean, tf.concat([shape, own], 0)), given.get("dtype") or mean.dtype)
        if kind is None:
            self.unknown.add(name)
            return original(*args, **kwargs)
        given = dict(zip(kind.arguments, args, strict=False)) | kwargs
        shape = tf.convert_to_tensor(given["shape"], tf.int32)
        rank = int(shape.shape[0] or 0)
        row = shape[:0] if rank <= 1 else tf.concat([tf.ones([rank - 1], tf.int32), shape[-1:]], 0)
        limits = [given["minval"], given["maxval"]] if "minval" in given else []
        dtype = [] if limits else [given["dtype"]]
        key = tf.reshape(tf.cast(self.step.read_value(), tf.uint64), [1])
        drawn = kind.draw(row, key, tf.zeros([2], tf.uint64), tf.constant(1), *limits, *dtype)
        return tf.broadcast_to(drawn, shape)


@dataclass(frozen=True)
class _Kind:
    arguments: tuple[str, ...]
    draw: Callable[..., tf.Tensor]


_MEANS = {  # arguments, by the name of an op
    "random_gamma": ("shape", "mean"),
    "random_poisson_v2": ("shape", "mean", "seed", "seed2", "dtype"),
    "stateless_random_gamma_v3": ("shape", "key", "counter", "alg", "mean"),
    "stateless_random_poisson": ("shape", "seed", "mean", "dtype"),
}
_EACH = ("random_gamma", "random_poisson_v2")  # draw so many for each mean
_KEY = ("key", "counter", "alg")
_SEED = ("seed", "seed2")
_uniform, _normal, _truncated, _integers = stateless_random_ops()
_KINDS = {
    "stateless_random_uniform_v2": _Kind(("shape", *_KEY, "dtype"), _uniform),
    "stateless_random_normal_v2": _Kind(("shape", *_KEY, "dtype"), _normal),
    "stateless_truncated_normal_v2": _Kind(("shape", *_KEY, "dtype"), _truncated),
    "stateless_random_uniform_int_v2": _Kind(("shape", *_KEY, "minval", "maxval"), _integers),
    "random_uniform": _Kind(("shape", "dtype", *_SEED), _uniform),
    "random_standard_normal": _Kind(("shape", "dtype", *_SEED), _normal),
    "truncated_normal": _Kind(("shape", "dtype", *_SEED), _truncated),
    "random_uniform_int": _Kind(("shape", "minval", "maxval", *_SEED), _integers),
}
