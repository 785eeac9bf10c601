"""Decide whether XLA compiles what the replicas of a model compute."""

from __future__ import annotations

import warnings

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext._keras.user_code import has_user_code
from keras_dist_ext.aliases import SpecNest
from keras_dist_ext.step.xla import can_compile
from keras_dist_ext.strategy.packs import bytes_per_pack_of
from keras_dist_ext.training.batch_devices import accelerators
from keras_dist_ext.training.execution import RunKind

__all__ = ["uses_xla"]


def uses_xla(model: keras.Model, kind: RunKind) -> bool:
    """Whether XLA compiles what a replica computes in steps of a kind: it was asked for, or ``"auto"`` chooses it.

    Without a strategy ``"auto"`` is what Keras makes of it (keras/src/trainers/trainer.py); under one, where Keras
    never compiles, it is the rule of ``_pays``.
    """
    if model.run_eagerly or tf.config.functions_run_eagerly() or model.placement is not None:
        return False
    if model.jit_compile:
        return can_compile(model.distribute_strategy)
    return model.replica_runtime.chooses_xla and _pays(model, kind)


def _pays(model: keras.Model, kind: RunKind) -> bool:
    """Whether all replicas are GPUs, which XLA makes faster, and nothing is to be computed that it may not compile.

    It compiles anew for each shape, draws by other formulas, cannot add up over replicas, and gives all gradients at
    once: left out are batches of changing length, what is drawn or normalized by the rows of all replicas, code that is
    not Keras', and sums of a pack at a time, which are to begin while other gradients are computed.
    """
    strategy, runtime = model.distribute_strategy, model.replica_runtime
    if is_default_strategy(strategy) or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return False
    devices = strategy.extended.worker_devices
    if model.virtual_replicas is not None or len(accelerators(strategy)) < len(devices):
        return False
    if runtime.exact or runtime.batch_statistics == "global" or model.replica_seeds.draws == "global":
        return False
    if bytes_per_pack_of(strategy):
        return False
    return _has_one_shape(runtime.batch_spec) and _is_supported(model) and not has_user_code(model, kind)


def _is_supported(model: keras.Model) -> bool:
    """Whether Keras would have XLA compile a model: all layers support that, and ops need not be deterministic.

    It says so where it is asked for it (the setter of ``jit_compile``, keras/src/trainers/trainer.py).
    """
    before = model.jit_compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not
        model.jit_compile = True
    is_supported = bool(model.jit_compile)
    model.jit_compile = before
    return is_supported


def _has_one_shape(spec: SpecNest) -> bool:
    """Whether batches are dense numbers, and differ in the number of their rows alone."""
    leaves = [leaf for leaf in tree.flatten(spec) if leaf is not None]
    return bool(leaves) and all(
        isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string and leaf.shape[1:].is_fully_defined()
        for leaf in leaves
    )
