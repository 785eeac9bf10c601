"""Find out, by their shapes, which random numbers of a step have a dimension of examples.

While a step is traced for replicas, the number of rows is unknown, and so may be other sizes, such as the length of
sequences: a shape does not say which is which, and at run time two of them may be equal. So a step is traced before, in
scratch graphs on two numbers of rows, with all other sizes the same. A dimension that equals the number of rows in both
is that of examples; one that is the same in both does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import SeedError
from keras_dist_ext.step.draw_refusals import FIX

__all__ = ["NUMBERS_OF_ROWS", "NotedDraw", "UnknownDraws", "has_examples", "static_shape"]

NUMBERS_OF_ROWS = (2, 420)
"""For the scratch graphs of a step: few, so that a size that has a limit shows it, and many with many divisors."""


class UnknownDraws(Exception):
    """A step draws, and it is not known yet which numbers have a dimension of examples."""


@dataclass(frozen=True)
class NotedDraw:
    """Random numbers that were drawn while a step was traced in a scratch graph.

    Attributes:
        kind: see ``global_draws.draw_rows``.
        shapes: on few rows, and on many.
    """

    kind: str
    shapes: tuple[tf.TensorShape, tf.TensorShape]


def static_shape(shape: TensorNest) -> tf.TensorShape:
    """What is known of the values of a shape while a graph is traced."""
    shape = tf.convert_to_tensor(shape)
    if shape.shape.num_elements() is None:
        return tf.TensorShape(None)
    known = tf.get_static_value(shape, partial=True)
    if known is not None:
        return tf.TensorShape(known.tolist())
    return tf.zeros(shape).shape  # of which TensorFlow knows more; no zeros are made, since nothing needs them


def has_examples(noted: NotedDraw, static: tf.TensorShape, *, of_one_batch: bool) -> bool:
    """Whether the first dimension of what is drawn is that of examples.

    Args:
        noted: the same draw in the scratch graphs.
        static: what is known of its shape while the step is traced.
        of_one_batch: whether the replicas' rows are parts of one batch, whose sequences have one length.

    Raises:
        SeedError: it is not known, or another dimension depends on the examples, too.
    """
    what = f"random numbers ({noted.kind}) of the shape {static}"
    few, many = noted.shapes
    if static.rank is None or few.rank is None or many.rank is None:
        raise SeedError(
            f'draws="global": the number of dimensions of {what} is unknown, and so which of them is that of examples. '
            "Say the shape (tf.ensure_shape). " + FIX
        )
    pairs = list(zip(few, many, strict=False))
    is_first = pairs[:1] == [NUMBERS_OF_ROWS]
    others = pairs[1:] if is_first else pairs
    if few.rank != many.rank or any(one is None or one != other for one, other in others):
        raise SeedError(
            f'draws="global": {what} may have a dimension of examples that is not the first, or another that depends '
            "on the examples. Put that of examples first, and make the others constants, or sizes of the inputs. " + FIX
        )
    are_others = any(own not in (None, one) for own, one in zip(static[is_first:], few[is_first:], strict=False))
    if few.rank != static.rank or (is_first and static[0] is not None) or are_others:
        raise SeedError(
            f'draws="global": {what} have the shape {few} where the number of rows is known: the step draws otherwise '
            "where it is not. " + FIX
        )
    if not of_one_batch and not static[is_first:].is_fully_defined():
        raise SeedError(
            f'draws="global": {what} have sizes that may differ between replicas, whose batches were made apart. Give '
            "`fit` the global batch, or make all sizes but the number of rows constants. " + FIX
        )
    return is_first
