"""Tell which steps of the user's may be plain (see ``step.plain_calls``), before they are traced.

What is asked here of a step's code only saves a trace that would be given up: the trace itself tells whether it is so.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterator, Mapping

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import KerasFunctional, overrides
from keras_dist_ext._keras.optimizers import inner_optimizer, keeps_gradients
from keras_dist_ext._keras.row_wise import are_row_wise, has_row_wise_layers
from keras_dist_ext._keras.user_code import has_user_layers, is_users
from keras_dist_ext.step.logs import leaf_metrics
from keras_dist_ext.strategy.virtual import num_replicas_of

__all__ = ["may_be_plain"]


def may_be_plain(model: keras.Model, kind: str) -> bool:
    """Whether a step of a kind is the user's own, and all else that it may call is Keras'.

    Args:
        model: of ours.
        kind: "train" or "test".
    """
    name, runtime, strategy = f"{kind}_step", model.replica_runtime, model.distribute_strategy
    if num_replicas_of(model) == 1 or not overrides(model, name) or name in vars(model):
        return False
    if model.run_eagerly or tf.config.functions_run_eagerly() or model.jit_compile or not model.compiled:
        return False
    if runtime.exact or model.placement is not None or model.virtual_replicas is not None:
        return False
    if model.replica_seeds.draws == "global" or isinstance(strategy, tf.distribute.TPUStrategy):
        return False
    if kind == "train" and not _takes_gradients(model.optimizer):
        return False
    return _computes_by_keras(model) and _only_calls(getattr(type(model), name), type(model))


def _takes_gradients(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether it is an optimizer of Keras' own that does not scale the loss, by what is known when it is built.

    One that accumulates gradients must know from the first of them whether they are those of the global batch.
    """
    if optimizer is None or inner_optimizer(optimizer) is not optimizer or optimizer.gradient_accumulation_steps:
        return False
    return keeps_gradients(optimizer)


def _computes_by_keras(model: keras.Model) -> bool:
    """Whether a built model is of layers, losses and metrics of Keras' own that compute each example by itself."""
    if not isinstance(model, KerasFunctional | keras.Sequential) or has_user_layers(model):
        return False
    if not all(layer.built for layer in flat_layers(model)):
        return False
    if any(len(output.shape) < 2 for output in model.outputs or ()):  # the last axis is that of the examples
        return False
    if any(overrides(model, name) for name in ("compute_loss", "compute_metrics", "get_metrics_result", "call")):
        return False
    return has_row_wise_layers(model) and are_row_wise(model, leaf_metrics(model))


_HARMLESS = (tf.GradientTape, keras.utils.unpack_x_y_sample_weight)
_OF_REPLICA = ("shape", "get_shape")  # by which Python may do other things on some replicas


def _only_calls(step: object, cls: type) -> bool:
    """Whether a method's code calls methods of Keras', and nothing that is likely to make an op."""
    if not isinstance(step, types.FunctionType):  # a tf.function, or decorated
        return False
    cells = dict(zip(step.__code__.co_freevars, (_content(cell) for cell in step.__closure__ or ()), strict=False))
    return all(_is_harmless(*found, cls) for found in _names_in(step.__code__, {**step.__globals__, **cells}))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names_in(code: types.CodeType, outside: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield what code asks for: "attribute" and its name, "thing" and it, and "op" where it computes by operators."""
    thing: object = None
    for instruction in dis.get_instructions(code):
        operation, argument = instruction.opname, instruction.argval
        is_attribute = operation in ("LOAD_ATTR", "LOAD_METHOD")
        if isinstance(thing, types.ModuleType):
            thing = getattr(thing, argument, None) if is_attribute else None
            if not isinstance(thing, types.ModuleType):
                yield "thing", thing
                thing = None
            continue
        if is_attribute:
            yield "attribute", argument
        elif operation == "LOAD_GLOBAL" or (operation in ("LOAD_DEREF", "LOAD_CLASSDEREF") and argument in outside):
            thing = outside.get(argument, vars(builtins).get(argument))
            if not isinstance(thing, types.ModuleType):
                yield "thing", thing
        elif operation.startswith(("BINARY_", "INPLACE_", "UNARY_")) and not _is_subscript(instruction):
            yield "op", None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a comprehension
            yield from _names_in(constant, outside)


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("BINARY_SUBSCR", "BINARY_SLICE", "UNARY_NOT") or instruction.argrepr == "[]"


def _is_harmless(what: str, found: object, cls: type) -> bool:
    if what == "attribute":
        if found in _OF_REPLICA:
            return False
        method = getattr(cls, str(found), None)
        return not (isinstance(method, types.FunctionType) and is_users(method))
    return what == "thing" and (any(found is one for one in _HARMLESS) or _is_builtin(found))


def _is_builtin(thing: object) -> bool:
    return any(thing is one for one in vars(builtins).values())
