"""Tell whether layers, losses and metrics of Keras' own compute each example of a batch by itself.

Where that is not certain the answer is no: it costs a check, and the trace of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import function_arguments
from keras_dist_ext._keras.layers import attributes, flat_layers
from keras_dist_ext._keras.models import KerasFunctional
from keras_dist_ext._keras.user_code import compiled_parts, has_user_code, is_users, runs_user_code

__all__ = ["are_row_wise", "has_code_to_check", "has_row_wise_layers", "is_row_wise"]


def has_code_to_check(model: keras.Model, kind: str) -> bool:
    """Whether a step of a kind runs code of the user's, or parts of Keras' own that may join examples of a batch."""
    return has_user_code(model, kind) or not (has_row_wise_layers(model) and are_row_wise(model, ()))


def has_row_wise_layers(model: keras.Model) -> bool:
    """Whether all that a model computes is by layers that are, and hold no code of the user's.

    Operations between layers may be arithmetic, or along other axes than that of the batch.
    """
    return all(_is_row_wise_layer(layer, is_model=layer is model) for layer in flat_layers(model))


def _is_row_wise_layer(layer: keras.Layer, *, is_model: bool) -> bool:
    operations = layer.operations if isinstance(layer, KerasFunctional) else ()
    if not all(isinstance(one, keras.Layer) or _is_row_wise_operation(one) for one in operations):
        return False
    held = {} if is_model else dict(attributes(layer))  # a model of the user's holds what it wants
    if any(_is_users_part(part) for value in held.values() for part in _parts(value)):
        return False
    return not any(_may_be_batch(held.get(name)) for name in ("axis", "axes"))


def _is_row_wise_operation(operation: keras.Operation) -> bool:
    """Whether one of ``keras.ops`` between layers is of each number by itself, or along other axes than the first."""
    if is_users(type(operation)):
        return False
    ranks = {len(tensor.shape) for tensor in tree.flatten(operation.input)}
    if type(operation).__name__ in _OF_EACH_NUMBER:
        return len(ranks) == 1  # else each example may meet each other one
    axes = tree.flatten(getattr(operation, "axis", None))
    return all(isinstance(axis, int) and (axis > 0 or (axis == -1 and min(ranks) > 1)) for axis in axes)


_OF_EACH_NUMBER = (
    *("Absolute", "Add", "Cast", "Divide", "Exp", "Gelu", "LeakyRelu", "Log", "Maximum", "Minimum", "Multiply"),
    *("Negative", "NotEqual", "Relu", "Sigmoid", "Sqrt", "Square", "Subtract", "Tanh", "TrueDivide"),
)


def _parts(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_users_part(part: object) -> bool:
    """Whether it is a function that a layer may run (an activation, a regularizer), or an object that is such."""
    kinds = (keras.Regularizer, keras.constraints.Constraint)
    if isinstance(part, kinds) or (isinstance(part, keras.Initializer) and not isinstance(part, type)):
        return is_users(type(part))
    return hasattr(part, "__code__") and is_users(part)


def are_row_wise(model: keras.Model, others: Iterable[keras.Metric]) -> bool:
    """Whether the losses and metrics of ``compile``, and other metrics, are."""
    return all(map(is_row_wise, [*compiled_parts(model), *others]))


def is_row_wise(one: object) -> bool:
    """Whether a loss or metric is Keras' own, and computes each row by itself (losses/losses.py).

    Args:
        one: of these, or a function that stands for it; a name that ``compile`` finds out about, or None.
    """
    if not isinstance(one, keras.Loss | keras.Metric):
        return not is_users(one) and one is not keras.losses.circle
    if runs_user_code(one) or getattr(one, "fn", None) is keras.losses.circle:
        return False  # which compares the examples of a batch with each other
    given = function_arguments(one)
    return not any(_may_be_batch(axis) for axis in (given.get("axis"), getattr(one, "axis", None)))


def _may_be_batch(axis: object) -> bool:
    """Whether an axis, or one of several, is that of the examples, or counts from the last and may be it."""
    return any(isinstance(one, int) and (one == 0 or one < -1) for one in tree.flatten(axis))
