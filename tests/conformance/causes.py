"""What makes the rows of the table fail: patches of ours that put a cause back, and which of them belongs to a row.

A row that cannot fail shows nothing. `cd tests && python -m conformance` puts the causes back one at a time.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import tensorflow as tf

from conformance.run import Row
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import current_step, intercept
from keras_dist_ext._keras.strategies import replica_id
from keras_dist_ext._keras.variables import components, is_sync_on_read
from keras_dist_ext.data import split as data
from keras_dist_ext.step import draws, pass_through, recorder, reduce, reducers, update, xla
from keras_dist_ext.step.gradients import Gradients
from keras_dist_ext.step.pass_through import LocalUpdate, PassThrough
from keras_dist_ext.step.reducers import MirroredReducer
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.row_weights import RowWeights
from keras_dist_ext.training import (
    batch_reader,
    batch_split,
    distributed_step,
    epoch_data,
    prediction,
    program,
    step_logs,
    xla_rule,
)
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.runtime import ReplicaRuntime

__all__ = ["CAUSES", "Cause", "cause_of"]

Cause = Callable[[], AbstractContextManager[Any]]
"""Puts a cause back while its context lasts; its docstring says what is wrong then."""


def cause_of(row: Row) -> Cause:
    """Return the cause that the row must show: the first whose pattern matches its name."""
    return next(cause for cause, names in CAUSES if re.fullmatch(names, row.name))


# How replicas are weighted and added up


def equal_shares() -> AbstractContextManager[Any]:
    """A replica counts 1/R, whatever its share of the rows (fault 8)."""
    equal = {
        "share": property(lambda self: 1.0 / self._num_replicas),
        "inverse_share": property(lambda self: float(self._num_replicas)),
    }
    return patch.multiple(RowWeights, **equal)


def own_gradients() -> AbstractContextManager[Any]:
    """A replica applies its own gradients, not their sum."""
    return patch.object(update, "sum_terms", lambda replicas, update, gradients, values: (gradients, values))


def empty_batches_count() -> AbstractContextManager[Any]:
    """What a replica without rows computes is added too (fault 10)."""

    def init(original: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._can_be_empty = False

        return changed

    return instead(RowWeights, "__init__", init)


def local_counts() -> AbstractContextManager[Any]:
    """A loss divides by the elements of its replica (fault 9), and a sum counts as a mean."""
    return patch.object(ReplicaStep, "reduce_loss", lambda self, local, *_: local)


def a_vector_is_a_mean() -> AbstractContextManager[Any]:
    """A loss that is not reduced is weighted as a mean is."""

    def scale_loss(original: Any) -> Any:
        def changed(self: Any, optimizer: Any, loss: Any, keras_own: Any) -> Any:
            scaled = original(self, optimizer, loss, keras_own)
            return scaled * tf.cast(self.weights.share, scaled.dtype) if scaled.shape.rank else scaled

        return changed

    return instead(ReplicaStep, "scale_loss", scale_loss)


def sums_count_as_means() -> AbstractContextManager[Any]:
    """A sum that a layer gives to `add_loss` is averaged over replicas."""
    return patch.object(RowWeights, "additional_loss", lambda self, local, exponent: local)


def penalties_once_a_replica() -> AbstractContextManager[Any]:
    """A penalty is added by each replica, and not divided by their number."""

    def aggregate(original: Any) -> Any:
        def changed(self: Any, loss: Any) -> Any:
            return original(self, loss) * (1 if current_step() is None else current_step().num_replicas)

        return changed

    return instead(Model, "_aggregate_additional_loss", aggregate)


def unscaled_gradients_are_whole() -> AbstractContextManager[Any]:
    """Gradients of a loss that no optimizer has scaled are added without weights."""

    def differentiate(original: Any) -> Any:
        def changed(self: Any, gradient: Any, target: Any, output_gradients: Any = None, **how: Any) -> Any:
            if self.scaled_by(target) is None:
                return gradient(target, output_gradients)
            return original(self, gradient, target, output_gradients, **how)

        return changed

    return instead(RowWeights, "differentiate", differentiate)


def sparse_of_the_first() -> AbstractContextManager[Any]:
    """Of sparse gradients only those of the first replica are kept."""

    def add(original: Any) -> Any:
        return lambda parts: parts[0] if isinstance(parts[0], tf.IndexedSlices) else original(parts)

    return instead(reduce, "_add", add)


# How replicas update what they hold


def clipped_before_the_sum() -> AbstractContextManager[Any]:
    """Each replica clips its own gradients."""

    def own_terms(original: Any) -> Any:
        def changed(self: Any, optimizer: Any, present: Any, terms: Any) -> Any:
            own, are_global = original(self, optimizer, present, terms)
            return optimizer._clip_gradients(own), are_global

        return changed

    return instead(Gradients, "_own_terms", own_terms)


def counts_of_the_first() -> AbstractContextManager[Any]:
    """What an optimizer counts, such as its steps, counts on the first replica only."""

    def assign(original: Any) -> Any:
        def changed(self: Any, variable: Any, value: Any, keras_own: Any) -> None:
            if variable.trainable or replica_id() == 0:
                original(self, variable, value, keras_own)

        return changed

    return instead(LocalUpdate, "assign", assign)


def updates_once_a_replica() -> AbstractContextManager[Any]:
    """The optimizer makes as many updates of a step as there are replicas."""

    def run_optimizer(original: Any) -> Any:
        def changed(replicas: Any, *args: Any) -> None:
            for _ in range(replicas.num_replicas):
                original(replicas, *args)

        return changed

    return instead(update, "run_optimizer", run_optimizer)


def updates_of_all_replicas_at_once() -> AbstractContextManager[Any]:
    """Replicas meet inside of an optimizer's conditions (fault 6)."""
    return patch.object(reducers, "local_updates", lambda strategy, step: intercept(PassThrough(of_worker=False)))


def accumulators_are_kept() -> AbstractContextManager[Any]:
    """Gradients that were accumulated count on each replica again, after they were added up."""
    return patch.object(update, "_empty", lambda accumulators, when: None)


def state_of_each() -> AbstractContextManager[Any]:
    """State that a layer assigns is left as each replica has it (fault 11)."""
    return patch.object(ReplicaStep, "assign", lambda self, variable, value, keras_own: keras_own(value))


def moments_of_each() -> AbstractContextManager[Any]:
    """A reduction inside of a layer or a loss gives what its replica has."""
    return patch.object(MirroredReducer, "all_reduce", lambda self, reduce_op, value, keras_own: value)


def built_out_of_scope() -> AbstractContextManager[Any]:
    """What is built late is built outside of the strategy's scope (fault 15)."""
    return patch.object(ReplicaRuntime, "in_scope", lambda self: contextlib.nullcontext())


def compiled_in_one_piece() -> AbstractContextManager[Any]:
    """XLA is given a whole step, in which replicas wait for each other (fault 7)."""
    stack = contextlib.ExitStack()
    for user in (reducers, draws, recorder):
        stack.enter_context(patch.object(user, "in_xla", lambda: False))
    stack.enter_context(patch.object(xla_rule, "can_compile", lambda strategy: True))
    stack.enter_context(
        patch.object(
            distributed_step, "compiled_step", lambda model, kind: xla.compiled(getattr(model, f"{kind}_step"))
        )
    )
    return stack


# Metrics and logs


def metrics_of_the_first() -> AbstractContextManager[Any]:
    """Only the first replica's rows reach the metrics."""

    def compute_metrics(original: Any) -> Any:
        @functools.wraps(original)
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_other = current_step() is not None and replica_id() > 0
            return self.get_metrics_result() if is_other else original(self, *args, **kwargs)

        return changed

    return instead(Model, "compute_metrics", compute_metrics)


def means_of_the_first() -> AbstractContextManager[Any]:
    """Of what is averaged, such as losses, only the first replica's part counts."""

    def mean_update(original: Any) -> Any:
        def changed(self: Any, metric: Any, values: Any, sample_weight: Any) -> Any:
            values, sample_weight = original(self, metric, values, sample_weight)
            return values, 0.0 if replica_id() else sample_weight

        return changed

    return instead(ReplicaStep, "mean_update", mean_update)


def logs_of_the_first() -> AbstractContextManager[Any]:
    """Logs are computed from the state of metrics on the first replica (fault 14)."""

    @contextlib.contextmanager
    def pooled_state(model: Any, strategy: tf.distribute.Strategy) -> Iterator[None]:
        variables = [v for v in model.metrics_variables if is_sync_on_read(v)]
        firsts = [(v, tf.convert_to_tensor(components(v)[0])) for v in variables]
        with keras.StatelessScope(state_mapping=firsts):
            yield

    return patch.object(step_logs, "pooled_state", pooled_state)


def tracked_losses_count_alike() -> AbstractContextManager[Any]:
    """A scalar that a step gives to a metric counts 1 on each replica."""
    return patch.object(ReplicaStep, "mean_update", lambda self, metric, values, sample_weight: (values, sample_weight))


def computed_results_of_each() -> AbstractContextManager[Any]:
    """What a step computes from the results of metrics comes from those of each replica (fault 14)."""
    return patch.object(distributed_step, "computes_with", lambda results, logs: False)


# Data


def rows_left_over_are_dropped() -> AbstractContextManager[Any]:
    """Rows that do not divide by the number of replicas go to none."""

    def replica_rows(batch: Any, replica: int, num_replicas: int) -> Any:
        rows = data.num_rows(batch) // num_replicas
        return tree.map_structure(
            lambda leaf: leaf[replica * rows : (replica + 1) * rows] if getattr(leaf, "shape", ()) else leaf, batch
        )

    return patch.object(data, "replica_rows", replica_rows)


def ops_meet_no_rows() -> AbstractContextManager[Any]:
    """Convolutions and max pooling run on no rows, which some of TensorFlow's kernels do not bear."""
    return patch.object(pass_through, "on_rows", lambda inputs, op: op(inputs))


def every_replica_takes_all() -> AbstractContextManager[Any]:
    """Each replica computes the whole batch (fault 13)."""
    return patch.object(data, "replica_rows", lambda batch, replica, num_replicas: batch)


def predictions_out_of_order() -> AbstractContextManager[Any]:
    """Predictions are put together from the last replica, or batch, to the first."""
    return instead(prediction, "_concat", lambda original: lambda parts: original(parts[::-1]))


def split_batches_are_even() -> AbstractContextManager[Any]:
    """Of batches that TensorFlow has split, all parts are taken to have as many rows as a replica's own."""
    return patch.object(batch_split, "global_rows", lambda rows, num_replicas, *, is_even: rows * num_replicas)


def built_from_the_mean_of_a_batch() -> AbstractContextManager[Any]:
    """The model is built from the mean of the first batch over the replicas (faults 3 and 4)."""

    def build(original: Any) -> Any:
        def changed(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
            if iterator is not None:
                strategy = self.distribute_strategy
                split = strategy.experimental_distribute_dataset(iterator.data_adapter.get_tf_dataset())
                tree.map_structure(lambda part: strategy.reduce("MEAN", part, axis=None), next(iter(split)))
            original(self, iterator, data_batch)

        return changed

    return instead(Model, "_maybe_symbolic_build", build)


def a_pass_begins_twice() -> AbstractContextManager[Any]:
    """Batches are taken before a pass begins (fault 4)."""

    def init(original: Any) -> Any:
        def changed(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            taken = iter(dataset)
            for _ in range(3):  # Keras puts the first two of a generator back
                next(taken, None)
            original(self, dataset, *args, **kwargs)

        return changed

    return instead(batch_reader.BatchReader, "__init__", init)


def an_epoch_begins_anew() -> AbstractContextManager[Any]:
    """Each epoch begins with the first batch, also where it should go on."""

    def begin(original: Any) -> Any:
        def changed(self: Any) -> Any:
            self.passes.reader = None
            return original(self)

        return changed

    return instead(epoch_data.EpochData, "__iter__", begin)


def an_execution_leaves_its_last_batch_out() -> AbstractContextManager[Any]:
    """Of several steps at once, the last is not made."""

    def run(original: Any) -> Any:
        def changed(self: Any, reader: Any, num_steps: int) -> Any:
            made, logs = original(self, reader, max(1, num_steps - 1))
            if made == num_steps - 1 and reader.has_more:
                reader.next_batch()
                made += 1
            return made, logs

        return changed

    return instead(program.StepProgram, "run", run)


def executions_do_not_end_with_the_data() -> AbstractContextManager[Any]:
    """An execution makes as many steps as it was asked for, also where fewer batches are left."""

    def run(original: Any) -> Any:
        return lambda self, reader, num_steps: original(self, reader, self.model.steps_per_execution)

    return instead(program.StepProgram, "run", run)


def the_end_counts_as_a_step() -> AbstractContextManager[Any]:
    """The end of an epoch's data counts as a step of the optimizer (fault 18)."""

    def settle(original: Any) -> Any:
        def changed(self: Any) -> None:
            original(self)
            self.model.optimizer.iterations.assign_add(1)

        return changed

    return instead(ReplicaRuntime, "end_epoch", settle)


def instead(owner: Any, name: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace `owner.name` by what `change` makes of it."""
    return patch.object(owner, name, change(getattr(owner, name)))


CAUSES: tuple[tuple[Cause, str], ...] = (
    # Batches
    (
        built_from_the_mean_of_a_batch,
        r"a first batch of 15 rows|strings and bools.*|a generator with an uneven first.*",
    ),
    (empty_batches_count, r"state assigned .* of replicas without rows|a custom train_step of 1 to 9 rows"),
    (equal_shares, r".*batch.* of 1 row.*|fewer rows than replicas|a batch larger than the data"),
    (equal_shares, r"(an LSTM|a GRU|a masked LSTM|an Embedding with a mask|attention) of 1 to 9 rows"),
    (rows_left_over_are_dropped, r"batches of 1 to 9 rows"),
    (ops_meet_no_rows, r"(a CNN|convolutions in time|a ConvLSTM|CTC loss) of 1 to 9 rows"),
    (own_gradients, r"even batches"),
    # Weights, masks, losses
    (metrics_of_the_first, r"sample weights of a metric"),
    (a_vector_is_a_mean, r"loss reduction None.*"),
    (
        local_counts,
        r"loss reduction (sum|mean_with_sample_weight, weighted|.*, masked.*)(, .*)?|loss reduction .*masked.*",
    ),
    (local_counts, r"masked (time steps|tokens).*|a mask of the loss's own|ignored classes|run_eagerly with masks.*"),
    (sums_count_as_means, r"add_loss of a (sum|tf\.reduce_sum)(,.*)?"),
    (penalties_once_a_replica, r"regularizers|an activity regularizer|add_loss .*"),
    # Optimizers
    (clipped_before_the_sum, r"clipping by .*|Adam clipped .*|sparse gradients, clipped.*"),
    (updates_of_all_replicas_at_once, r"EMA that overwrites.*|accumulation, Adam and clipping|accumulation and EMA"),
    (accumulators_are_kept, r".*accumulat.*"),
    (counts_of_the_first, r"Adam|AMSGrad|AdamW|Nadam|LossScaleOptimizer.*"),
    (updates_once_a_replica, r"(Nesterov )?momentum|RMSprop|Ada(grad|factor)|Lamb|Ftrl|EMA|SGD with weight decay"),
    (updates_once_a_replica, r"an? (exponential|piecewise|cosine) schedule.*|a learning rate .*|a constraint"),
    (the_end_counts_as_a_step, r"a schedule over data.*|tf\.data of unknown length"),
    (sparse_of_the_first, r"sparse gradients.*"),
    # Execution
    (logs_of_the_first, r"1 steps an execution|logs of every batch.*"),
    (executions_do_not_end_with_the_data, r"50 steps an execution"),
    (an_execution_leaves_its_last_batch_out, r"\d+ steps an execution.*|(run_eagerly|a custom train_step), 3 steps.*"),
    (every_replica_takes_all, r"train(, test and predict)? on batch.*"),
    (predictions_out_of_order, r"predict .*|predict, 3 steps an execution"),
    (compiled_in_one_piece, r"jit_compile.*"),
    # Metrics
    (means_of_the_first, r"a metric updated in call|(weighted )?validation.*"),
    (
        metrics_of_the_first,
        r"accuracy|.*AUC.*|confusion counts|F1 score.*|R2.*|a (custom|function as) metric.*|metrics of .*",
    ),
    # State
    (moments_of_each, r"synchronized BatchNormalization.*|(Dice|Tversky) loss.*"),
    (state_of_each, r"state assigned in call.*"),
    # Inputs
    (a_pass_begins_twice, r".*started once a fit|an? (endless )?generator.*"),
    (an_epoch_begins_anew, r"endless tf\.data|steps_per_epoch of .*"),
    (split_batches_are_even, r"a distributed dataset|a dataset made on each worker"),
    (rows_left_over_are_dropped, r"tensors|lists|initial_epoch|tf\.data.*|looked up words|a PyDataset.*"),
    # Models and steps of the user's own
    (built_out_of_scope, r".*lazily built.*"),
    (tracked_losses_count_alike, r"a custom train_step"),
    (unscaled_gradients_are_whole, r"a custom train_step from scratch|two optimizers from one tape|a GAN"),
    (computed_results_of_each, r"overridden losses.*"),
    (equal_shares, r"a partial last batch|.*weights.*|loss reduction .*|several losses.*|.*loss.*|mixed_.*|float64|.*"),
)
