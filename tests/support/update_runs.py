"""Updates by fused ops and by Keras, and how near they are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers

from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext.step.fused_updates import fused_updates
from keras_dist_ext.step.pass_through import LocalUpdate

NUM_STEPS = 100
FUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "SGD": (lambda **more: optimizers.SGD(**({"learning_rate": 0.01} | more)), "ResourceApplyGradientDescent"),
    "momentum": (lambda **more: optimizers.SGD(momentum=0.9, **more), "ResourceApplyKerasMomentum"),
    "Nesterov": (lambda **more: optimizers.SGD(momentum=0.9, nesterov=True, **more), "ResourceApplyKerasMomentum"),
    "RMSprop": (optimizers.RMSprop, "ResourceApplyGradientDescent"),
    "RMSprop with momentum": (lambda **more: optimizers.RMSprop(momentum=0.9, **more), "ResourceApplyRMSProp"),
    "Adam": (optimizers.Adam, "ResourceApplyAdam"),
    "AdamW": (optimizers.AdamW, "ResourceApplyAdam"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.5},
    "global clipnorm": {"global_clipnorm": 0.5},
    "average": {"use_ema": True, "ema_overwrite_frequency": 7},
    "accumulation": {"gradient_accumulation_steps": 4},
    "loss scale": {},
    "schedule": {},
}


def make(name: str, option: str) -> Any:
    more = dict(OPTIONS[option])
    if option == "schedule":
        more["learning_rate"] = optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    optimizer = FUSED[name][0](**more)
    return optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=30) if option == "loss scale" else optimizer


def equal_to_rounding(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * float(np.abs(other).max()))


class Run:
    """Variables, and an optimizer that is given gradients of its own."""

    def __init__(self, optimizer: Any) -> None:
        random = np.random.default_rng(3)
        self.variables = [keras.Variable(random.normal(size=size).astype("float32")) for size in ((7, 5), (5,), (9, 4))]
        self.optimizer = optimizer
        self.gradients = [random.normal(size=(NUM_STEPS, *v.shape)).astype("float32") for v in self.variables]
        optimizer.build(self.variables)
        self.kinds: set[str] = set()

    def steps(self, begin: int, end: int, *, is_fused: bool) -> None:
        @tf.function(autograph=False)
        def step(gradients: Any) -> None:
            sparse = tf.IndexedSlices(gradients[-1][:2], tf.constant([4, 1]), tf.constant([9, 4]))
            given = [*gradients[:-1], sparse]
            if not is_fused:
                self.optimizer.apply(given, self.variables)
                return
            inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
            with intercept(LocalUpdate()), fused_updates(inner):
                self.optimizer.apply(given, self.variables)

        for i in range(begin, end):
            step([tf.constant(g[i]) for g in self.gradients])
        graph = step.get_concrete_function([tf.TensorSpec(v.shape) for v in self.variables]).graph.as_graph_def()
        bodies = [graph.node, *(f.node_def for f in graph.library.function)]
        self.kinds |= {node.op for body in bodies for node in body}

    def state(self) -> list[Any]:
        return [v.numpy() for v in [*self.variables, *self.optimizer.variables]]
