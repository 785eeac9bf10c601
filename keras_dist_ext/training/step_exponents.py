"""Learn from scratch graphs how the numbers of a step grow with the rows of a batch."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import SpecNest, StepData
from keras_dist_ext.data.split import without_optionals
from keras_dist_ext.step.added_losses import UnknownLossExponents, find_exponents
from keras_dist_ext.step.logs import ComputesWithResults
from keras_dist_ext.step.means import BatchExponents
from keras_dist_ext.step.measured_exponents import MOST_ROWS, learn_exponents, learn_exponents_of_sizes
from keras_dist_ext.step.update import UnbuiltOptimizer
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_split import is_per_replica
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.few_rows import first_rows, rows_of_chief

__all__ = ["ignore_loss_exponents", "learn_loss_exponents", "learn_step_exponents", "rows_of_step"]


def learn_step_exponents(step: DistributedStep) -> None:
    """Learn which numbers of a step are means over the rows, and which are sums.

    What a step of the user's own computes counts as means where it cannot be traced so.
    """
    if step.exponents is None:
        return

    def run(rows: StepData) -> None:
        step.run_on_first_replica(rows, step.num_step_replicas)  # as if all replicas had these rows

    def of_any_size(exponents: BatchExponents) -> None:
        learn_exponents(exponents, run, step.model.replica_runtime.batch_spec, rows_of_step(step))

    def of_some_sizes(exponents: BatchExponents) -> None:
        rows = rows_of_step(step)
        if rows is not None:
            learn_exponents_of_sizes(exponents, run, _specs_of, rows)

    for learn in (of_any_size, of_some_sizes):
        try:
            learn(step.exponents)
            return
        except ComputesWithResults:
            step.pool_results()
            learn_step_exponents(step)
            return
        except (UnbuiltOptimizer, UnknownLossExponents):
            raise
        except Exception:  # code that needs a number of rows, or runs eagerly only
            continue


def _specs_of(rows: StepData) -> SpecNest:
    return tree.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), rows)


def learn_loss_exponents(step: DistributedStep) -> None:
    """Trace the step's model in a scratch graph, to learn which losses given to ``add_loss`` are sums over the rows.

    A step of the user's own need not call the model on the batch; then they are read from the graph of the step.
    """
    if step.adds_own_losses:
        ignore_loss_exponents(step)
        return
    runtime, training = step.model.replica_runtime, step.kind == "train"
    try:
        found = find_exponents(step.model, runtime.batch_spec, training=training, rows=rows_of_step(step))
    except Exception:
        if not step.is_of_user:
            raise
        found = {}
    runtime.loss_exponents[step.kind] = found


def ignore_loss_exponents(step: DistributedStep) -> None:
    """Take losses that layers add as the graph of the step has them."""
    step.model.replica_runtime.loss_exponents[step.kind] = {}


def rows_of_step(step: DistributedStep) -> StepData:
    """Return some of the first batch of what a step is to be made on; None where it is not known."""
    batch = None if step.first_batch is None else step.first_batch()
    if batch is None or not is_per_replica(batch):
        return None if batch is None else without_optionals(batch)
    workers = workers_of(step.strategy)
    rows = first_rows(batch, MOST_ROWS, step.strategy)
    if workers is None:
        return rows
    return rows_of_chief(rows, workers) if workers.sum([float(rows is None)])[0] == 0 else None
