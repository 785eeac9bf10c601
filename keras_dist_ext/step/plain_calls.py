"""See, while a step of the user's is traced, whether it only hands on what code of Keras' own has computed.

Such a step, as in Keras' guide to steps of one's own, calls the model, a loss, a tape, the optimizer and metrics, each
with rows of the batch or what another of them has returned, and makes no op by itself. All that it does is then what
Keras' own step does, of which is known that replicas do together what one device does: it needs no trace aside, and no
check. What is anything else ends the trace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.creation import call_outside
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext._keras.row_wise import is_row_wise
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import BatchFunction, Gradient, StepData, TensorNest
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.logs import leaf_metrics

__all__ = ["NotPlain", "PlainCalls", "call_model", "noted_calls"]


class NotPlain(Exception):
    """A step that was taken for plain computes something itself, or hands on something where Keras' own does not."""


class PlainCalls:
    """Follows one replica's step while it is traced.

    Args:
        model: of which all layers, losses and metrics are Keras' own.
        batch: of the replica.

    Attributes:
        optimizer: gets the gradients that a tape is asked for; None where none may be asked for now.
    """

    def __init__(self, model: DistributedModel, batch: StepData) -> None:
        self._model = model
        self._held: list[TensorNest] = []  # or an id could become that of another tensor
        self._rows: set[int] = set()
        self._losses: set[int] = set()
        self._sources: dict[int, Variable] | None = None  # by the gradient's id
        self._has_called = self._has_applied = False
        self._is_inside = True
        self._is_plain = True
        self.optimizer: keras.optimizers.Optimizer | None = None
        self._add(self._rows, batch)
        self._known: Mapping[str, Callable[..., TensorNest]] = {
            "model": self._call_model,
            "result": self._compute_result,
            "update": self._update_metric,
            "loss": self._compute_loss,
            "Model.compute_loss": self._compute_loss,
            "GradientTape.gradient": self._differentiate,
            "Optimizer.apply": self._apply,
            "Optimizer.scale_loss": self._scale_loss,
        }

    def is_of(self, model: DistributedModel) -> bool:
        """Whether it is a step of that model."""
        return model is self._model

    def follow(self, step: BatchFunction, batch: StepData, results: Mapping[int, object]) -> TensorNest:
        """Follow what a step calls, and return its logs; all else that is traced is not the step's.

        Args:
            step: of the user's.
            batch: of the replica.
            results: of metrics, by the id of a tensor; filled by the step.

        Raises:
            NotPlain: it is not plain: it does something else, also where it goes on after this was raised in it, or
                returns other things than results of metrics, and losses.
        """
        self._is_inside = False
        try:
            logs = step(batch)
        finally:
            self._is_inside = True
        self._require(all(id(leaf) in results or id(leaf) in self._losses for leaf in tree.flatten(logs)))
        return logs

    def call(self, name: str, function: Callable[..., TensorNest], /, *args: object, **kwargs: object) -> TensorNest:
        """Call what the step, or code that it has called, calls.

        Args:
            name: of a hook, or "model", "loss" (an object), or "result" or "update" (of a metric).
            function: does what it does.
            args: that it is given.
            kwargs: likewise.

        Raises:
            NotPlain: it is the step that calls it, and Keras' own step would not, or not with these.
        """
        if self._is_inside:
            return function(*args, **kwargs)
        self._require(name in self._known)
        self._is_inside = True
        try:
            return self._known[name](function, *args, **kwargs)
        finally:
            self._is_inside = False

    def _require(self, is_so: bool) -> None:
        self._is_plain = self._is_plain and is_so  # the step may catch what is raised here
        if not self._is_plain:
            raise NotPlain

    def _add(self, ids: set[int], values: TensorNest) -> None:
        leaves = [leaf for leaf in tree.flatten(values) if leaf is not None]
        self._held += leaves
        ids.update(map(id, leaves))

    def _are_rows(self, values: TensorNest) -> bool:
        """Whether all of the values are rows, or flags of Python; a number may be that of a replica's rows."""
        return all(
            leaf is None or isinstance(leaf, bool | str) or id(leaf) in self._rows for leaf in tree.flatten(values)
        )

    def _call_model(self, function: Callable[..., TensorNest], *args: object, **kwargs: object) -> TensorNest:
        self._require(not self._has_called and self._are_rows((args, kwargs)))
        self._has_called = True
        outputs = function(*args, **kwargs)
        self._add(self._rows, outputs)
        return outputs

    def _compute_loss(
        self, function: Callable[..., TensorNest], of: keras.Model | keras.Loss, *args: object, **kwargs: object
    ) -> TensorNest:
        is_own = of is self._model or (isinstance(of, keras.Loss) and is_row_wise(of))
        self._require(is_own and self._are_rows((args, kwargs)))
        loss = function(of, *args, **kwargs)
        self._require(tf.is_tensor(loss) and loss.shape.rank == 0)
        self._add(self._losses, loss)
        return loss

    def _scale_loss(
        self, function: Callable[..., TensorNest], optimizer: keras.optimizers.Optimizer, loss: TensorNest
    ) -> TensorNest:
        self._require(optimizer is self._model.optimizer and id(loss) in self._losses)
        scaled = function(optimizer, loss)
        self._add(self._losses, scaled)
        return scaled

    def _differentiate(
        self,
        function: Callable[..., TensorNest],
        tape: tf.GradientTape,
        target: TensorNest,
        sources: TensorNest,
        *others: object,
        **options: object,
    ) -> TensorNest:
        self._require(not others and not options)
        variables = tf.nest.flatten(sources)
        are_variables = all(isinstance(source, keras.Variable | tf.Variable) for source in variables)
        self._require(self._sources is None and are_variables and id(target) in self._losses)
        self.optimizer = self._model.optimizer
        gradients = function(tape, target, sources)
        self.optimizer = None
        flat = tf.nest.flatten(gradients)
        self._require(len(flat) == len(variables))
        self._held += flat
        pairs = zip(flat, variables, strict=True)
        self._sources = {id(gradient): variable for gradient, variable in pairs if gradient is not None}
        return gradients

    def _apply(
        self,
        function: Callable[..., TensorNest],
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> TensorNest:
        self._require(optimizer is self._model.optimizer and not self._has_applied and trainable_variables is not None)
        gradients, variables = list(grads), list(trainable_variables or ())
        made = self._sources or {}
        self._require(
            len(gradients) == len(variables)
            and all(g is None or made.get(id(g)) is v for g, v in zip(gradients, variables, strict=True))
        )
        self._has_applied = True
        if not optimizer.built:
            call_outside(functools.partial(optimizer.build, variables), self._model.distribute_strategy)
        return function(optimizer, gradients, variables)

    def _update_metric(
        self, function: Callable[..., TensorNest], metric: keras.Metric, *args: object, **kwargs: object
    ) -> TensorNest:
        takes_loss = type(metric) is keras.metrics.Mean and len(args) == 1 and id(args[0]) in self._losses
        self._require(is_row_wise(metric))
        self._require(self._are_rows((args, kwargs)) or (takes_loss and not kwargs))
        return function(metric, *args, **kwargs)

    def _compute_result(self, function: Callable[..., TensorNest]) -> TensorNest:
        return function()


def call_model(
    model: DistributedModel, call: Callable[..., TensorNest], /, *args: object, **kwargs: object
) -> TensorNest:
    """Call a model, which its running step, if it is followed, is told.

    Args:
        model: of ours.
        call: does so.
        args: that it is given.
        kwargs: likewise.
    """
    calls = getattr(current_step(), "plain_calls", None)
    if calls is None or not calls.is_of(model):
        return call(*args, **kwargs)
    return calls.call("model", call, *args, **kwargs)


@contextlib.contextmanager
def noted_calls(model: DistributedModel) -> Iterator[None]:
    """Have losses, and the updates of metrics, tell the running step, if it is followed, that they are called.

    Args:
        model: whose metrics these are.
    """
    metrics = [*model.metrics, *leaf_metrics(model)]
    for metric in metrics:
        metric.__dict__["update_state"] = functools.partial(_call_noted, "update", type(metric).update_state, metric)
    try:
        with _noted_losses():
            yield
    finally:
        for metric in metrics:
            metric.__dict__.pop("update_state", None)


_CALL_OF_LOSS = keras.Loss.__call__
_lock = threading.Lock()
_traces: list[object] = []  # that note calls of losses, of any thread


@contextlib.contextmanager
def _noted_losses() -> Iterator[None]:
    trace = object()
    with _lock:
        _traces.append(trace)
        keras.Loss.__call__ = _call_loss
    try:
        yield
    finally:
        with _lock:
            _traces.remove(trace)
            if not _traces:
                keras.Loss.__call__ = _CALL_OF_LOSS


def _call_loss(loss: keras.Loss, *args: object, **kwargs: object) -> TensorNest:
    return _call_noted("loss", _CALL_OF_LOSS, loss, *args, **kwargs)


def _call_noted(name: str, function: Callable[..., TensorNest], /, *args: object, **kwargs: object) -> TensorNest:
    calls = getattr(current_step(), "plain_calls", None)
    return function(*args, **kwargs) if calls is None else calls.call(name, function, *args, **kwargs)
