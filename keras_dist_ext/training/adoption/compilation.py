"""Compile a rebuilt model as the old one was, and take over the state of its optimizers."""

from __future__ import annotations

from collections.abc import Callable

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.models import compile_arguments, overrides
from keras_dist_ext._keras.optimizers import optimized_variables
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import MetricNest
from keras_dist_ext.step.compression import kind_of
from keras_dist_ext.strategy.scope import optimizers
from keras_dist_ext.training.adoption.recipe import CannotRebuildError, by_reference, read_recipe, rebuild_from_config
from keras_dist_ext.training.adoption.variable_pairs import assign, in_pairs, named
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["read_compile_state", "take_over_optimizers"]


def read_compile_state(model: keras.Model) -> Callable[[keras.Model], None]:
    """Read how the model was compiled, to compile another with a new optimizer of the same config, and new metrics.

    Returns:
        What compiles the other one.

    Raises:
        CannotRebuildError: The model has a `compile` of its own and does not say how to repeat it, or its optimizer
            has no config.
    """
    if overrides(model, "compile"):
        if not (overrides(model, "get_compile_config") and overrides(model, "compile_from_config")):
            raise CannotRebuildError(
                f"{type(model).__name__} has a `compile` of its own, and does not say how to repeat it. Give it "
                "`get_compile_config` and `compile_from_config`; or use `kde.adopt(model, strategy, compile=False)`, "
                "and compile the result inside the scope."
            )
        with by_reference(model) as objects:
            config = model.get_compile_config()

        def compile_from_config(clone: keras.layers.Layer) -> None:
            with keras.saving.custom_object_scope(objects):
                clone.compile_from_config(config)

        return compile_from_config

    given, runtime = compile_arguments(model), runtime_of(model)
    new_optimizer = None if model.optimizer is None else read_recipe(model.optimizer)

    def compile_alike(clone: keras.layers.Layer) -> None:
        made: dict[int, keras.Metric] = {}
        clone.compile(
            optimizer=new_optimizer and new_optimizer(type(model.optimizer)),
            loss=given["loss"],
            loss_weights=given["loss_weights"],
            metrics=_new_metrics(given["metrics"], made),
            weighted_metrics=_new_metrics(given["weighted_metrics"], made),
            run_eagerly=model.run_eagerly,
            steps_per_execution=given["steps_per_execution"],
            jit_compile=model.jit_compile,
            auto_scale_loss=False,  # the optimizer was wrapped already if it was to be
            virtual_replicas=getattr(model, "virtual_replicas", None),
            check=getattr(runtime, "check", True),
            batch_statistics=getattr(runtime, "batch_statistics", None),
            exact=getattr(runtime, "exact", False),
            gradient_compression=kind_of(getattr(runtime, "compression", None)),
        )

    return compile_alike


def _new_metrics(given: object, made: dict[int, keras.Metric]) -> MetricNest:
    """The metrics given to `compile`; those that hold variables are rebuilt."""
    if isinstance(given, dict):
        return {key: _new_metrics(value, made) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_new_metrics(value, made) for value in given]
    if not isinstance(given, keras.Metric):
        return given
    if id(given) not in made:
        made[id(given)] = rebuild_from_config(given, type(given))
    return made[id(given)]


def take_over_optimizers(clone: keras.layers.Layer, model: keras.Model, variables: dict[int, Variable]) -> None:
    """Copy the state of all optimizers, slots and counters, and read it back.

    Args:
        clone: The new model, compiled.
        model: The old one.
        variables: The new variables by the ids of the old ones.

    Raises:
        CannotRebuildError: The clone lacks an optimizer, or one trains other variables or has other slots.
    """
    of_clone = dict(optimizers(clone))
    for name, old in optimizers(model):
        new = of_clone.get(name)
        if new is None:
            raise CannotRebuildError(
                f"its optimizer '{old.name}' is the attribute {name}, which neither its constructor nor its `compile` "
                f"makes. {_WITHOUT}"
            )
        trained = optimized_variables(old)
        if old.built and not trained:
            continue  # Keras builds an optimizer for nothing when it loads a legacy file
        try:
            trained = [variables[id(variable)] for variable in trained]
        except KeyError:
            raise CannotRebuildError(
                f"its optimizer '{old.name}' trains variables that are not the model's. {_WITHOUT}"
            ) from None
        if old.built:
            with keras.name_scope(new.name, caller=new):
                new.build(trained)
        has = f"its optimizer '{old.name}' has the variables"
        for one, other in in_pairs(named(old.variables), named(new.variables), has, _WITHOUT):
            assign(other, one)


_WITHOUT = "Use `kde.adopt(model, strategy, compile=False)`, and compile the result inside the scope."
