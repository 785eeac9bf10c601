"""Check, before the first step, that Keras and TensorFlow still call the hooks of this package in a step.

A newer release may no longer call one of the functions that ``_keras`` replaces. Nothing would fail then: a loss, a
gradient or a draw would be that of one replica. So each of these hooks is tried once in a process, on a small stock
model that is traced in a scratch graph, and by each layer and function that has to call it; and while a step of Keras'
own is traced, the hooks that it must call are noted. On one replica nothing of this matters, and nothing is tried.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.draw_hooks import DRAWS
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.interception import HOOKS
from keras_dist_ext._keras.optimizers import keeps_gradients
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext.errors import BackendError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.hook_uses import TriedStep, Use, uses_of_hooks
from keras_dist_ext.step.save_hook_checks import uncalled_save_hooks
from keras_dist_ext.step.state_checks import STATES, State

__all__ = ["check_hooks", "check_step", "states_elsewhere", "uncalled_hooks"]

_T = TypeVar("_T")


@functools.cache
def check_hooks() -> None:
    """Try all hooks, once a process; not inside of code that replaces functions for a while.

    Raises:
        BackendError: Keras or TensorFlow does not call one of them.
    """
    _refuse(uncalled_hooks(), "a small stock model", " Nothing was trained.")
    elsewhere = states_elsewhere()
    if elsewhere:
        raise BackendError(
            _advised(
                f"not where it was: {', '.join(map(str, elsewhere))}, by which keras_dist_ext makes the numbers of "
                "several replicas those of one device: they would be wrong without an error. Nothing was trained."
            )
        )
    unasked = _in_thread(uncalled_save_hooks)
    if unasked:
        named = ", ".join(f"{hook} ({hook.file})" for hook in unasked)
        raise BackendError(
            _advised(
                f"what saves a small model no longer calls {named}, by which keras_dist_ext has files whole, of one "
                "worker each, and with the seeds of replicas: they would not be, without an error. Nothing was trained."
            )
        )


def uncalled_hooks() -> dict[str, list[str]]:
    """Return the hooks that are not called, each with the uses that should call it.

    Raises:
        BackendError: a use fails.
    """
    step = TriedStep()
    missing: dict[str, list[str]] = {}
    called: set[str] = set()

    def use_all() -> None:
        uses = uses_of_hooks(step)
        with intercept(step), scratch_graph("hook_checks"):
            for use in uses:
                step.called_hooks.clear()
                step.drawn.clear()
                failure = _failure_of(use)
                if use.draws is not None and use.draws not in step.drawn:
                    step.called_hooks.discard(DRAWS)
                called.update(step.called_hooks)
                for hook in installed.intersection(use.hooks) - step.called_hooks:
                    missing.setdefault(hook, []).append(use.what)
                if failure is not None and not missing:
                    raise RuntimeError(f"{use.what}: {type(failure).__name__}: {failure}") from failure

    installed = set(map(str, HOOKS))
    _in_thread(use_all)
    return missing | {hook: [] for hook in sorted(installed - called - set(missing))}


def _failure_of(use: Use) -> Exception | None:
    try:
        use.run()
    except Exception as error:  # perhaps because a hook was not called
        return error
    return None


def states_elsewhere() -> list[State]:
    """Return the private state that is not where it was."""
    return _in_thread(lambda: [state for state in STATES if not _is_found(state)])


def _is_found(state: State) -> bool:
    try:
        return state.is_found()
    except Exception:  # it is gone, or something else
        return False


def _in_thread(use: Callable[[], _T]) -> _T:
    """Call a function in its own thread: in no graph, strategy or tape, and with its own names."""
    found: list[_T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            with warnings.catch_warnings(), tf.device("CPU:0"):
                warnings.simplefilter("ignore")  # about a model that is not the user's
                found.append(use())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="hook_checks")
    thread.start()
    thread.join()
    if failed:
        raise BackendError(_advised(f"A small stock model fails with {type(failed[0]).__name__}: {failed[0]}."))
    return found[0]


def check_step(model: DistributedModel, kind: str, called_hooks: Collection[str]) -> None:
    """Check that a step of Keras' own called the hooks that it must call while it was traced.

    Args:
        model: whose step it is.
        kind: "train", "test" or "predict".
        called_hooks: the hooks that steps of this kind of the model have called.

    Raises:
        BackendError: one of them was not.
    """
    _refuse(
        {hook: [] for hook in _expected(model, kind) if hook not in called_hooks},
        f"the {kind} step of '{model.name}', which is Keras' own,",
    )


def _expected(model: DistributedModel, kind: str) -> list[str]:
    if kind not in ("train", "test") or not isinstance(model, keras.Model) or not _is_keras(model, f"{kind}_step"):
        return []
    expected = ["Mean.update_state", "Variable._direct_assign"]
    if _is_keras(model, "compute_loss"):
        expected.append("Model.compute_loss")
    if kind == "train" and model.trainable_weights and model.optimizer is not None:
        expected.append("GradientTape.gradient")
        if keeps_gradients(model.optimizer):
            is_wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            expected.append("LossScaleOptimizer.apply" if is_wrapped else "Optimizer.apply")
    calls_layers = isinstance(model, keras.Sequential) and _is_keras(model, "call")
    if kind == "train" and calls_layers and any(map(_draws, model.layers)):
        expected.append("SeedGenerator.next")
    return expected


def _is_keras(thing: object, name: str) -> bool:
    """Whether a method is Keras' own, neither the user's nor, as in a loop, one of this package."""
    return name not in vars(thing) and getattr(type(thing), name).__module__.split(".")[0] == "keras"


def _draws(layer: keras.layers.Layer) -> bool:
    return type(layer) is keras.layers.Dropout and layer.rate > 0 and _is_keras(layer, "call")


def _refuse(missing: Mapping[str, Sequence[str]], caller: str, consequence: str = "") -> None:
    if missing:
        files = {str(hook): hook.file for hook in HOOKS}
        named = ", ".join(
            f"{name} ({files.get(name, 'which it no longer has')}){f' in {_listed(uses)}' if uses else ''}"
            for name, uses in missing.items()
        )
        raise BackendError(
            _advised(
                f"{caller} no longer calls {named}, by which keras_dist_ext makes the numbers of several replicas "
                f"those of one device: they would be wrong without an error.{consequence}"
            )
        )


def _listed(uses: Sequence[str]) -> str:
    """Join names; if there are many, the first ones."""
    return " and ".join(uses) if len(uses) < 3 else f"{uses[0]}, {uses[1]} and {len(uses) - 2} others"


def _advised(found: str) -> str:
    installed = f"TensorFlow {tf.__version__} and Keras {keras.__version__}"
    return f"With {installed}: {found} {versions.advice()}"
