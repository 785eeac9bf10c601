"""Make the plan of a step, once, before it is traced to be run."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras.tracing import know_variables, scratch_graph
from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.step.added_losses import UnknownLossExponents, placeholders
from keras_dist_ext.step.ancestry import assignments
from keras_dist_ext.step.drawn_shapes import UnknownDraws
from keras_dist_ext.step.logs import ComputesWithResults, leaf_metrics
from keras_dist_ext.step.means import UnknownExponents
from keras_dist_ext.step.plain_calls import NotPlain
from keras_dist_ext.step.step_plan import StalePlan, Unplanned
from keras_dist_ext.step.update import UnbuiltOptimizer
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.draw_examination import cannot_note, learn_draws
from keras_dist_ext.training.step_assignments import check_assigned, check_decisions, check_of_keras
from keras_dist_ext.training.step_examination import StepExamination
from keras_dist_ext.training.step_exponents import ignore_loss_exponents, learn_loss_exponents, learn_step_exponents

__all__ = ["MISSING", "make_plan", "prepare"]

MISSING = (
    UnbuiltOptimizer,
    UnknownLossExponents,
    UnknownExponents,
    UnknownDraws,
    ComputesWithResults,
    Unplanned,
    StalePlan,
    NotPlain,
)
"""What is raised where a step that is traced lacks something that ``prepare`` makes good.

A step of the user's, and one that runs eagerly, is planned before it is traced to be run, and its optimizer is built
before. What is left is asked for only where it turns up, since each answer costs a trace of its own, or depends on what
TensorFlow tells while it traces. The trace that has asked for it is given up: measuring looks at the next batch, and
puts it in front of another iterator than the one that this trace was given.

- ``UnbuiltOptimizer``: the step could not be traced in a scratch graph, or its optimizer scales the loss, which it does
  by another number once it is built.
- ``UnknownLossExponents``: a layer adds a loss; which layers do is known when they are called.
- ``UnknownExponents``: a loss or a metric does not say whether it is a mean over the rows, which its graph, or a few
  rows, must tell. Losses of Keras' own do.
- ``UnknownDraws``: all replicas are to draw what one device draws, and shapes do not tell what has a dimension of
  examples.
- ``ComputesWithResults``: logs are computed from results of metrics, seen by their tensors.
- ``Unplanned``: in Keras' own step, a layer or a loss takes gradients of a tape, or the user's optimizer does.
- ``StalePlan``: gradients that went straight into an optimizer when the step was planned go elsewhere, too, as where it
  branches in Python.
- ``NotPlain``: a step of the user's that was taken for plain is not.
"""


def make_plan(step: DistributedStep) -> None:
    """Trace a step in a scratch graph, know then what it does (see ``StepPlan``), and learn what that leaves open.

    One trace is enough for all that concerns numbers alone: how losses and metrics grow with the rows is noted as
    unknown and learned afterwards, and an optimizer is built where the step gives it its gradients. A step is traced
    again only where the trace was that of another step than will run, which it cannot tell before:

    - Replicas add up in a ``tf.function``: it is a part of the step from its call on, not a function in its graph.
    - It computes with results of metrics, which then are those of all replicas where they are asked for.

    A step that cannot be traced on batches of any size is right nevertheless: gradients are summed where they are made,
    and numbers count as means.

    Args:
        step: of any kind.

    Raises:
        KerasDistError: it would not do what it seems to.
    """
    known = _ways_of(step)
    examination = _trace_aside(step)
    while known != (known := _ways_of(step)):
        examination = _trace_aside(step)
    _learn_the_rest(step, examination)


def _ways_of(step: DistributedStep) -> tuple[int, bool]:
    """What decides how a step is traced, and is seen while it is: that only becomes more, so it comes to an end."""
    return len(step.plan.inlined), step.plan.pools_results


def _trace_aside(step: DistributedStep) -> StepExamination:
    """Trace a step on batches of any size, without running it, to see what it does.

    A trace ends where it is seen to be that of another step; what comes after would be seen wrongly.
    """
    model, plan, name = step.model, step.plan, f"{step.model.name}.{step.kind}_step"
    examination = StepExamination(name, step.num_step_replicas, step.strategy)
    metrics = leaf_metrics(model)
    try:
        with scratch_graph("plan_of_a_step") as graph, plan.exponents.assuming_means():
            extra = step.run_examined(placeholders(model.replica_runtime.batch_spec), examination)
            know_variables(graph)
            assigned = list(assignments(graph))
            check_decisions(name, graph, examination.origins)
            check_assigned(step.strategy, name, assigned, examination.origins, examination.averaged)
            if model.virtual_replicas is not None:
                check_of_keras(name, assigned, examination.of_keras)
            if len(leaf_metrics(model)) == len(metrics):  # else the results of those that it made are in it
                plan.extra = [tf.TensorSpec(value.shape, value.dtype) for value in extra]
        examination.complete(plan, assigned)
    except ComputesWithResults:
        examination.computes_with_results = True
    except KerasDistError:
        raise
    except Exception:  # code that needs a number of rows, or runs eagerly only; or the trace was ended
        pass
    finally:
        plan.is_made = True
        plan.inlined |= examination.functions
    if examination.computes_with_results:
        step.pool_results()
    return examination


def _learn_the_rest(step: DistributedStep, examination: StepExamination) -> None:
    """Learn how numbers of a step grow with the rows, where its trace was not told, and the one that runs will ask."""
    runtime, exponents = step.model.replica_runtime, step.plan.exponents
    if examination.has_unknown_losses and step.kind not in runtime.loss_exponents:
        prepare(step, UnknownLossExponents())
    will_ask = exponents.are_missing or (exponents.were_asked and _runs_on_static_rows(step))
    if will_ask and exponents.answer(0) is None:
        prepare(step, UnknownExponents())


def _runs_on_static_rows(step: DistributedStep) -> bool:
    """Whether the number of a replica's rows is a constant of the graph that runs, so that nothing there grows by it.

    Workers may read rows of their own, as many as there are; on a TPU a replica's number is known when the step runs.
    """
    is_known = workers_of(step.strategy) is None and not isinstance(step.strategy, tf.distribute.TPUStrategy)
    model = step.model
    return is_known and model.replica_runtime.rows_are_static and model.replica_seeds.draws != "global"


def prepare(step: DistributedStep, missing: Exception) -> None:
    """Make good what tracing a step has found missing, one of ``MISSING``."""
    if isinstance(missing, UnbuiltOptimizer):
        with step.model.replica_runtime.in_scope():
            missing.build()
    elif isinstance(missing, UnknownLossExponents):
        try:
            learn_loss_exponents(step)
        except NotImplementedError:  # by Keras: the model has no `call`, its step calls others
            ignore_loss_exponents(step)
    elif isinstance(missing, UnknownExponents):
        try:
            learn_step_exponents(step)
        except (UnbuiltOptimizer, UnknownLossExponents) as more:
            prepare(step, more)
            prepare(step, missing)
    elif isinstance(missing, UnknownDraws):
        try:
            learn_draws(step)
        except (KerasDistError, *MISSING) as more:
            if not isinstance(more, MISSING):
                raise
            prepare(step, more)
            prepare(step, missing)
        except Exception as error:
            raise cannot_note(step.model.name, error) from error
    elif isinstance(missing, ComputesWithResults):
        step.pool_results()
    elif isinstance(missing, Unplanned):
        make_plan(step)
    elif isinstance(missing, NotPlain):
        step.plan.is_plain, step.plan.extra = False, None
        step.model.replica_runtime.checked.discard(step.kind)
        make_plan(step)
    elif isinstance(missing, StalePlan):
        step.plan.sum_at_once()
