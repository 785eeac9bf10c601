"""Build a model as its first step would, before it is traced for replicas: trace the step in a scratch graph.

Keras builds a model by calling it, before the first step under a strategy. A step of the user's own may do without
``call``, or give it other than the batch. So it is run itself, on no data, in one replica: layers, optimizers and
metrics that meet their inputs there make their variables (see ``_keras.creation``), and nothing of the trace is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.creation import keep_constants, make_variables_outside, one_replica
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.layers import flat_layers, get_layer_losses, set_layer_losses
from keras_dist_ext._keras.models import build_from_batch, overrides
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import Gradient, SpecNest, TensorNest
from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.step.added_losses import placeholders
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.reducers import OneReplica
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.step_options import StepOptions
from keras_dist_ext.step.step_plan import StepPlan
from keras_dist_ext.strategy.virtual import num_replicas_of
from keras_dist_ext.training.batch_spec import rows_of_one
from keras_dist_ext.training.plain_steps import may_be_plain

__all__ = ["build_for_run"]


def build_for_run(
    model: keras.Model, kind: str, batch_spec: SpecNest, exact_spec: SpecNest, *, was_traced: bool
) -> None:
    """Build a model, its metrics and its optimizers for steps of a kind.

    Args:
        model: of ours.
        kind: "train" or "test".
        batch_spec: of a batch of any number of rows.
        exact_spec: of a batch, with the number of its rows where that is known.
        was_traced: whether a step on such batches was traced in a scratch graph before.
    """
    is_own = has_own_step(model, kind)
    if is_own and not was_traced and _built_as_plain(model, kind, batch_spec):
        return
    spec = tree.map_structure(lambda leaf: rows_of_one(leaf, num_replicas_of(model)), exact_spec)
    is_dense = all(leaf is None or isinstance(leaf, tf.TensorSpec) for leaf in tree.flatten(batch_spec))
    if (is_own or not is_dense) and (was_traced or _built_by_step(model, kind, spec) or is_own):
        return
    try:
        _build_from_batch(model, kind, batch_spec)
    except KerasDistError:
        raise
    except Exception:  # perhaps of a loss that must know the number of rows, as one device does
        if any(leaf is not None and leaf.shape.rank and leaf.shape[0] is not None for leaf in tree.flatten(spec)):
            with contextlib.suppress(Exception):
                _build_from_batch(model, kind, spec)
                return
        if model.run_eagerly and all(layer.built for layer in flat_layers(model)):
            return  # its first step makes the rest, as one of the user's own does that runs eagerly only
        raise


def _built_as_plain(model: keras.Model, kind: str, spec: SpecNest) -> bool:
    """Build what Keras' own step would need, for one of the user's that may be plain; return whether it is one.

    Its optimizer is built where it is given gradients: the step says what it trains.
    """
    plan = model.replica_runtime.plans.setdefault(kind, StepPlan())
    if plan.is_plain is None and not plan.is_made:
        plan.is_plain = may_be_plain(model, kind)
    if not plan.is_plain:
        return False
    later = contextlib.nullcontext() if model.optimizer is None else patched(model.optimizer, "build", _build_later)
    try:
        with later:
            build_from_batch(model, spec)
    except Exception:  # the model is not called with the inputs of the batch
        plan.is_plain = False
        return False
    plan.extra = plan.extra or []
    return True


def _build_from_batch(model: keras.Model, kind: str, spec: SpecNest) -> None:
    if kind == "test" and model.optimizer is not None and has_own_step(model, "train"):
        with patched(model.optimizer, "build", _build_later):  # the step of training says what it trains
            build_from_batch(model, spec)
    else:
        build_from_batch(model, spec)


def has_own_step(model: keras.Model, kind: str) -> bool:
    """Whether user code defines what a step does, besides what the model computes when it is called."""
    return any(overrides(model, name) for name in (f"{kind}_step", "compute_loss", "compute_metrics"))


def _build_later(variables: Sequence[Variable]) -> None:
    """Build no optimizer."""


def _built_by_step(model: keras.Model, kind: str, spec: SpecNest) -> bool:
    """Trace a step in a scratch graph; return whether that could be done.

    What cannot be traced so (it runs eagerly only, or asks for what is not there) makes its variables in its first
    step, and there its errors are those of the user's code.
    """
    strategy = model.distribute_strategy
    generator = global_generator_of(strategy, is_seeded=model.replica_seeds.root is not None)
    losses = get_layer_losses(model)
    try:
        with (
            scratch_graph("first_step"),
            one_replica(strategy, first_replica(strategy)),
            make_variables_outside(),
            use_global_seed_generator(generator),
        ):
            batch = placeholders(spec)
            options = StepOptions(kind=kind, global_generator=generator)
            built = {id(layer) for layer in flat_layers(model) if layer.built}
            with intercept(_BuildingStep(model, 1, 1, options, _IdentityReducer())):
                getattr(model, f"{kind}_step")(batch)
            for layer in flat_layers(model):
                if id(layer) not in built:
                    keep_constants(layer)
    except KerasDistError:
        raise
    except Exception:
        return False
    finally:
        set_layer_losses(losses)
    return True


class _IdentityReducer(OneReplica):
    """Stands for several replicas where nothing is run."""

    traces_functions_anew = True
    """Or those of the user's would keep a trace that neither assigns nor updates anything."""

    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: TensorNest, original: Callable[..., TensorNest]
    ) -> TensorNest:
        """Return what has the shape of the sums."""
        return tf.nest.map_structure(tf.identity, value)


class _BuildingStep(ReplicaStep):
    """A step that assigns nothing, and builds optimizers instead of running them."""

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> None:
        """Assign nothing."""

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        variables: Sequence[Variable] | None,
        original: Callable[..., None],
    ) -> None:
        """Have the optimizer make its variables for those that it is to train."""
        if variables is not None and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(list(variables))
