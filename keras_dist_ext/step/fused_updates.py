"""Let Keras' usual optimizers update a variable by TensorFlow's fused ops, where those give Keras' numbers.

An optimizer of Keras makes up to 12 passes over a variable; a fused op makes one. It takes the place of ``update_step``
alone, so that clipping, weight decay, averages, loss scale and accumulation stay Keras' own around it. Each was held
against Keras' formula (keras/src/optimizers/*.py; tensorflow/core/kernels/training_ops.cc):

* SGD: the same formula, the same bits.
* Adam, AdamW: the op rounds ``1 - beta_2`` as that of float32 numbers, for 0.999 by 1.3e-5, so the second moments are
  updated before it, and the op gets 1 for ``beta_2``, which leaves them as they are. A gradient whose square is
  infinite makes NaN of weights at once; Keras makes it in the step after.
* RMSprop: with momentum the same formula; else the moments as above, because the op would need another slot.

What is left to Keras: Adagrad, whose epsilon stands elsewhere, so that equality depends on what the accumulators hold;
centered RMSprop, which divides by a difference that rounding decides; AMSGrad; Lion, whose signs rounding can turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext._keras.optimizers import slots_by_attribute, slots_of
from keras_dist_ext._keras.tracing import in_xla
from keras_dist_ext._keras.variables import Variable, local_component
from keras_dist_ext.aliases import Gradient
from keras_dist_ext.step.pass_through import LocalUpdate

__all__ = ["KERAS_UPDATES", "fused_updates", "is_close_to_one_minus", "update_for"]


class Given(NamedTuple):
    """What the update of a variable is given.

    Attributes:
        optimizer: whose update it is.
        variable: this replica's copy.
        slots: what the optimizer keeps for it, this replica's copies.
        gradient: dense.
        scalars: what `_scalars` has computed.
    """

    optimizer: keras.optimizers.Optimizer
    variable: tf.Variable
    slots: Mapping[str, tf.Variable]
    gradient: tf.Tensor
    scalars: Mapping[str, tf.Tensor]


FusedUpdate = Callable[[Given], None]
"""Updates a variable, and its slots."""

KERAS_UPDATES = {
    cls: cls.update_step
    for cls in (keras.optimizers.SGD, keras.optimizers.RMSprop, keras.optimizers.Adam, keras.optimizers.AdamW)
}
"""The optimizers that may be fused, of exactly these classes, and the code that is. A test empties it to have none."""

_CLOSE = 3e-7  # 0.9 is off by 2.4e-7; a hundred steps by a rate that is off by this are to rounding those of Keras


def is_close_to_one_minus(rate: float) -> bool:
    """Whether a float32 op that computes ``1 - rate`` gets what Keras gets, which computes it in Python."""
    exact = 1.0 - rate
    return abs(1.0 - float(np.float32(rate)) - exact) <= _CLOSE * exact


def update_for(optimizer: keras.optimizers.Optimizer) -> FusedUpdate | None:
    """Return what updates a variable with an optimizer's numbers by fused ops; None where only Keras' own code does."""
    cls = type(optimizer)
    if cls.update_step is not KERAS_UPDATES.get(cls) or "update_step" in vars(optimizer):
        return None
    if not all(isinstance(getattr(optimizer, name, 0.0), int | float) for name in _NUMBERS):
        return None
    if cls is keras.optimizers.SGD:
        return _momentum if optimizer.momentum else _gradient_descent
    if cls is keras.optimizers.RMSprop:
        if optimizer.centered or not is_close_to_one_minus(optimizer.rho):
            return None
        return _rmsprop_with_momentum if optimizer.momentum > 0 else _rmsprop
    return None if optimizer.amsgrad or not is_close_to_one_minus(optimizer.beta_1) else _adam


_NUMBERS = ("momentum", "rho", "beta_1", "beta_2", "epsilon")  # what is computed in Python


@contextlib.contextmanager
def fused_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Have an optimizer that each replica runs on its own copies update dense float32 variables by fused ops.

    So it is outside of XLA, which fuses by itself: an update costs passes over memory on CPUs, and kernels on GPUs.

    Args:
        optimizer: of Keras, without a LossScaleOptimizer around it.
    """
    fused = update_for(optimizer) if isinstance(current_step(), LocalUpdate) else None
    if fused is None:
        yield
        return
    original = optimizer.update_step
    lists: dict[str, list[Variable]] = {}  # there are none before the optimizer is built, perhaps in here
    scalars: dict[tf.Graph | None, Mapping[str, tf.Tensor]] = {}  # by graph: an update may be in a branch of it

    def update_step(gradient: Gradient, variable: Variable, learning_rate: tf.Tensor) -> None:
        lists.update({} if lists else slots_by_attribute(optimizer))
        local = local_component(variable)
        slots = {name: local_component(slot) for name, slot in slots_of(optimizer, variable, lists).items()}
        if not _is_plain(gradient, [local, *slots.values()]):
            original(gradient, variable, learning_rate)
            return
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph not in scalars:
            scalars[graph] = _scalars(optimizer, learning_rate)
        fused(Given(optimizer, local, slots, gradient, scalars[graph]))

    vars(optimizer)["update_step"] = update_step
    try:
        yield
    finally:
        del vars(optimizer)["update_step"]


def _is_plain(gradient: Gradient, variables: list[tf.Variable]) -> bool:
    """Whether a gradient is dense, and that and all variables float32, on one CPU or GPU."""
    if isinstance(gradient, tf.IndexedSlices) or in_xla():
        return False
    (device, *others) = {variable.device for variable in variables}
    dtypes = {gradient.dtype, *(variable.dtype for variable in variables)}
    return not others and _device_type(device) in ("CPU", "GPU") and dtypes == {tf.float32}


def _device_type(device: str) -> str | None:
    kind: str | None = tf.DeviceSpec.from_string(device).device_type
    return kind


def _scalars(optimizer: keras.optimizers.Optimizer, learning_rate: tf.Tensor) -> Mapping[str, tf.Tensor]:
    """Compute, once an update, what all variables need."""
    scalars = {"lr": keras.ops.cast(learning_rate, "float32")}
    if hasattr(optimizer, "beta_2"):
        step = keras.ops.cast(optimizer.iterations + 1, "float32")
        scalars |= {f"{name}_power": tf.pow(_float32(getattr(optimizer, name)), step) for name in _BETAS}
    return scalars


_BETAS = ("beta_1", "beta_2")


def _gradient_descent(given: Given) -> None:
    _descend(given.variable, given.gradient, given.scalars["lr"])


def _momentum(given: Given) -> None:
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=given.variable.handle,
        accum=given.slots["momentums"].handle,
        lr=given.scalars["lr"],
        grad=given.gradient,
        momentum=_float32(given.optimizer.momentum),
        use_nesterov=given.optimizer.nesterov,
    )


def _rmsprop(given: Given) -> None:
    velocity = given.slots["velocities"]
    _approach(velocity, tf.square(given.gradient), 1 - given.optimizer.rho)
    change = given.gradient / tf.sqrt(velocity.read_value() + given.optimizer.epsilon)
    _descend(given.variable, change, given.scalars["lr"])


def _rmsprop_with_momentum(given: Given) -> None:
    tf.raw_ops.ResourceApplyRMSProp(
        var=given.variable.handle,
        ms=given.slots["velocities"].handle,
        mom=given.slots["momentums"].handle,
        lr=given.scalars["lr"],
        rho=_float32(given.optimizer.rho),
        momentum=_float32(given.optimizer.momentum),
        epsilon=_float32(given.optimizer.epsilon),
        grad=given.gradient,
    )


def _adam(given: Given) -> None:
    velocity = given.slots["velocities"]
    _approach(velocity, tf.square(given.gradient), 1 - given.optimizer.beta_2)
    tf.raw_ops.ResourceApplyAdam(
        var=given.variable.handle,
        m=given.slots["momentums"].handle,
        v=velocity.handle,
        beta1_power=given.scalars["beta_1_power"],
        beta2_power=given.scalars["beta_2_power"],
        lr=given.scalars["lr"],
        beta1=_float32(given.optimizer.beta_1),
        beta2=_float32(1.0),
        epsilon=_float32(given.optimizer.epsilon),
        grad=given.gradient,
    )


def _approach(variable: tf.Variable, value: tf.Tensor, rate: float) -> None:
    """Move a variable to a value by a part of the way."""
    _descend(variable, variable.read_value() - value, _float32(rate))


def _descend(variable: tf.Variable, delta: tf.Tensor, rate: tf.Tensor) -> None:
    """Subtract a change, times a rate, in one pass."""
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=delta)


def _float32(number: float) -> tf.Tensor:
    return tf.constant(number, tf.float32)
