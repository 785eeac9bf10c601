"""Report the replica and the step of a NaN or infinity before it spreads; stop there, or skip the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import components
from keras_dist_ext.aliases import JsonObject, Logs
from keras_dist_ext.errors import CallbackError, NonFiniteError
from keras_dist_ext.messages import counted, warn
from keras_dist_ext.step.nan_guard import DATA, GRADIENTS, LOSS, BadStep, Guard
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.run_callback import RunCallback

__all__ = ["LeftOut", "NonFinite"]

_ACTIONS = ("raise", "stop", "skip")
_WARNED = 3  # steps that are warned of one by one before the rest is counted
_KEPT = 1000


class LeftOut(NamedTuple):
    """A step that was left out."""

    epoch: int  # counted from 1, as the progress bar does
    step: int  # in the epoch, likewise
    loss: tuple[int, ...]  # replicas whose loss was not finite
    gradients: tuple[int, ...]  # whose gradients were not
    data: tuple[int, ...]  # and those of them whose batch was not


class NonFinite(RunCallback):
    """Leave out the update of a step in which any replica's loss or gradients are NaN or infinite, on all replicas.

        model.fit(train, callbacks=[kde.NonFinite("skip")])

    Without it, one such row of the data turns all weights of all replicas to NaN. With it, weights, optimizer and
    metrics stay as they were before that step, whatever is done then, and whatever ``steps_per_execution`` is. Which
    replica it was, and whether its batch held such numbers already, is said when the execution is over.

    It costs one look at each gradient on the replica's own device, and nothing else: what replicas find travels in the
    reduction of the gradients. A ``LossScaleOptimizer`` (``mixed_float16``) deals with gradients that overflow by
    itself; these count here once its scale is down at 1. A step with several optimizers leaves out the updates of
    those whose gradients are not finite; where it changes gradients first, those of the optimizers that follow, too.
    Optimizers written by hand, in a ``TrainLoop``, get gradients of 0 from ``replica.reduce_gradients``.

    Args:
        action: what follows. ``"raise"``: an error, in the same step on all workers. ``"stop"``: a warning, and
            training ends as when ``model.stop_training`` is set. ``"skip"``: a warning, and training continues.
        most_in_a_row: how many steps may be left out one after the other with ``"skip"``; one more is an error. It is
            no single bad batch then.

    Attributes:
        left_out: the steps of the run that were left out, at most the last 1000 of them.

    Raises:
        CallbackError: when it is made, if an argument is invalid; when training begins, if the model is not one of
            this package, or its strategy has no steps that all replicas make together.
        NonFiniteError: in training, see ``action``.
    """

    def __init__(self, action: Literal["raise", "stop", "skip"] = "raise", *, most_in_a_row: int = 10) -> None:
        super().__init__()
        self.action = arguments.one_of("action", action, _ACTIONS, error=CallbackError)
        most = arguments.MOST_EXAMPLES  # as an int32 can count
        self.most_in_a_row = arguments.integer("most_in_a_row", most_in_a_row, least=1, most=most, error=CallbackError)
        self.left_out: list[LeftOut] = []
        self._num_left_out = 0
        self._guard: Guard | None = None
        self._guarded: keras.Model | None = None
        self._epoch = 0

    supports_multi_step = True

    def get_run_config(self) -> Mapping[str, object]:
        """See ``RunCallback``."""
        return {"action": self.action, "most_in_a_row": self.most_in_a_row}

    def on_run_prepare(self, model: keras.Model) -> None:
        """Have the steps of the run that is about to begin guarded."""
        strategy = model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
            raise CallbackError(
                f"'{model.name}' lives under {type(strategy).__name__}, where NonFinite cannot leave out a step on all "
                "replicas. Use keras.callbacks.TerminateOnNaN there, and clip gradients."
            )
        self._guard = model.guard_steps(self.most_in_a_row if self.action == "skip" else 0)
        self._guarded = model
        self.left_out = []
        self._num_left_out = 0

    def on_run_end(self) -> None:
        """Forget the run."""
        self._guarded = None

    def get_state(self) -> JsonObject:
        """Return what a resumed run needs to know, see ``Resume``."""
        return {
            "num_left_out": self._num_left_out,
            "left_out": [[*step[:2], *map(list, step[2:])] for step in self.left_out],
        }

    def set_state(self, state: JsonObject) -> None:
        """Take ``state``, which ``get_state`` has returned."""
        self._num_left_out = int(state["num_left_out"])
        self.left_out = [LeftOut(e, s, *(tuple(r) for r in replicas)) for e, s, *replicas in state["left_out"]]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        if self._guarded is not self.model:
            raise CallbackError(
                f"'{getattr(self.model, 'name', self.model)}' is a {type(self.model).__name__} of stock Keras, whose "
                "steps NonFinite cannot see into. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy)."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Look at what the execution has left out; called once an execution."""
        assert self._guard is not None
        before = self._num_left_out
        bad, num_new, is_over = self._guard.look()
        if not bad:
            return
        self._num_left_out += num_new
        steps = [self._named(step, batch) for step in bad]
        self.left_out = [*self.left_out, *steps][-_KEPT:]
        if is_over:
            self._end(steps[-1] if self.action == "skip" else steps[0])
            return
        for step in steps[: max(0, _WARNED - before)]:
            self._warn(f"{self._what(step)} {_LEFT_OUT} Training continues.")

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Say how many steps were left out, if not all were warned of."""
        if self.action == "skip" and self._num_left_out > _WARNED:
            self._warn(
                f"NonFinite has left out {counted(self._num_left_out, 'step')} of this run in all; the last was step "
                f"{self.left_out[-1].step} of epoch {self.left_out[-1].epoch}."
            )

    def _end(self, step: LeftOut) -> None:
        if self.action == "stop":
            self._warn(f"{self._what(step)} {_LEFT_OUT} Training stops here. {self._advice(step)}")
            self.model.stop_training = True
            return
        many = f" It is step {self.most_in_a_row + 1} in a row." if self.action == "skip" else ""
        raise NonFiniteError(f"{self._what(step)}{many} {_LEFT_OUT} {self._advice(step)}")

    def _warn(self, message: str) -> None:
        workers = workers_of(self.model.distribute_strategy)
        if workers is None or workers.is_chief:  # others would say the same
            warn(message)

    # Wording

    def _named(self, step: BadStep, last: int) -> LeftOut:
        def replicas(flag: int) -> tuple[int, ...]:
            return tuple(replica for replica, code in enumerate(step.found) if code & flag)

        number = last - step.steps_ago + 1
        return LeftOut(self._epoch + 1, number, replicas(LOSS), replicas(GRADIENTS), replicas(DATA))

    def _what(self, step: LeftOut) -> str:
        bad = sorted({*step.loss, *step.gradients})
        assert self._guard is not None
        who = self._names(bad) if len(bad) < self._guard.num_replicas or len(bad) == 1 else f"all {len(bad)} replicas"
        things = " and ".join(name for name, found in (("loss", step.loss), ("gradients", step.gradients)) if found)
        text = f"Step {step.step} of epoch {step.epoch}: {things} of {who} {_is(things)} not finite"
        if not step.data:
            return f"{text}; {'its' if len(bad) == 1 else 'their'} data is finite."
        whose = "its" if len(bad) == 1 else "their" if list(step.data) == bad else self._names(step.data, "'s")
        return f"{text}, and neither is {whose} data."

    def _names(self, replicas: Sequence[int], of: str = "") -> str:
        """Name replicas, with their workers if there are several."""
        assert self._guard is not None
        workers = workers_of(self.model.distribute_strategy)
        kind = "replica" if self.model.virtual_replicas is None else "virtual replica"
        names = [str(replica) for replica in replicas]
        if workers is not None:
            each = self._guard.num_replicas // workers.num_workers
            names = [f"{replica} (worker {replica // each})" for replica in replicas]
        return f"{kind}{'' if len(names) == 1 else 's'} {', '.join(names)}{of}"

    def _advice(self, step: LeftOut) -> str:
        if step.data:
            return "Look for NaN and infinity in the data."
        spoilt = [
            variable.path
            for variable in self.model.weights
            if tf.as_dtype(variable.dtype).is_floating
            and not np.isfinite(np.asarray(components(variable)[0], np.float32)).all()
        ]
        if spoilt:
            more = f" and {counted(len(spoilt) - 3, 'other')}" if len(spoilt) > 3 else ""
            return (
                f"Weights are not finite, so no step can be: {', '.join(spoilt[:3])}{more}. Begin with weights that "
                "are; if steps have made them so, with a smaller learning rate."
            )
        return "Take a smaller learning rate, clip gradients, or look at the loss: divisions, logarithms, roots of 0."


_LEFT_OUT = "No replica has made this update: weights are as they were before."


def _is(things: str) -> str:
    return "is" if things == "loss" else "are"
