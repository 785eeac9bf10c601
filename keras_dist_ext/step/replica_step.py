"""The traced code of one distributed step: what a replica computes, and what all replicas agree on.

User code inside a step (``train_step``, ``compute_loss``, losses, layers, metrics) is written for one device and sees
one replica's rows as if they were the whole batch. ``ReplicaStep`` makes the sum over replicas exact:

- a gradient is weighted by the replica's share of the global rows, then summed once, before clipping and updates
  (``gradients``);
- a loss that does not divide by the rows (sum, mask, sample weights) divides by the count over all replicas
  (``row_weights``);
- an optimizer runs on every replica with the same summed gradient, so no conditional of it spans devices (``update``);
- non-trainable state that a layer assigned becomes the mean over replicas, weighted by rows (``layer_state``);
- code that compares examples gets the rows of all replicas (``all_rows``);
- metrics add up on each replica, and results are computed from the pooled state, once an execution (``logs``);
- each replica draws from its own random streams (``draws``).

How they are added up over replicas, if there are several, is said by a ``Reducer``.

Letters: n = rows of a replica, N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.interception import OpSeeds
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import DType, Gradient, Original, TensorNest, TracedFunction, UserFunction
from keras_dist_ext.errors import DataError
from keras_dist_ext.step import pass_through
from keras_dist_ext.step.all_rows import AllRows
from keras_dist_ext.step.branches import Branches
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.draws import RandomStreams
from keras_dist_ext.step.gradients import Gradients
from keras_dist_ext.step.jacobians import batch_jacobian_of_any_rows, jacobian_of_any_rows
from keras_dist_ext.step.layer_state import LayerState
from keras_dist_ext.step.logs import Result
from keras_dist_ext.step.metric_state import MetricState
from keras_dist_ext.step.nan_guard import ReplicaGuard
from keras_dist_ext.step.plain_calls import PlainCalls
from keras_dist_ext.step.reduce import as_float, scale
from keras_dist_ext.step.reducers import Reducer, reducer_of
from keras_dist_ext.step.row_weights import RowWeights
from keras_dist_ext.step.slices import sum_duplicates, to_dense
from keras_dist_ext.step.step_options import StepOptions

__all__ = ["ReplicaStep"]


class ReplicaStep:
    """One replica's part of a step, while it is traced (or run eagerly).

    Attributes:
        results: of metrics that the step has computed, by the tensor's id.
        assigned: ids of variables that it has assigned, in this order.
        weights: of the replica's rows.
        all_rows: the rows of the global batch, for code that asks for them.
        called_hooks: the hooks that Keras and TensorFlow have called in it.
        plain_calls: follows a step of the user's that is taken for plain.

    Args:
        model: the Keras model.
        rows: n, an int where static.
        global_rows: N, an int where static.
        options: see there.
        reducer: adds up over replicas; by default as its strategy does.
        first_row: where its rows begin in the global batch, if that is known.
    """

    def __init__(
        self,
        model: DistributedModel,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        options: StepOptions | None = None,
        reducer: Reducer | None = None,
        *,
        first_row: int | tf.Tensor | None = None,
    ) -> None:
        options = StepOptions() if options is None else options
        self.called_hooks: set[str] = set() if options.plan is None else options.plan.called_hooks
        self.model = model
        self.kind = options.kind
        self.note = options.note
        self.results: dict[int, Result] = {}
        self.assigned: list[int] = []
        self._reducer = reducer = reducer_of(model) if reducer is None else reducer
        of_rows = None if options.plan is None else options.plan.exponents
        self.weights = RowWeights(model, rows, global_rows, reducer, options.exponents, of_rows)
        self._streams = RandomStreams(model, reducer, options.global_generator, options.observer)
        self._noted_draws = options.draws
        self.all_rows = AllRows(self.weights, reducer, first_row, options.observer)
        shared = () if options.plan is None else options.plan.shared_state
        self._states = LayerState(self.weights, self.all_rows, shared)
        self._metrics = MetricState(model, reducer, self.all_rows)
        self._guard = (
            None
            if options.guard is None
            else ReplicaGuard(options.guard, reducer.replica_id, reducer.num_replicas, rows)
        )
        self._observer = options.observer
        self._weighs_early = False  # the losses that are being added up
        self.gradients = Gradients(
            reducer, self.weights, self._states, self.note, self._guard, self._observer, options.plan
        )
        self._pools_results = options.pools_results
        self._is_plain = options.plan is not None and options.plan.is_plain
        self.plain_calls: PlainCalls | None = None
        examination = self._observer if self._observer.examines else None
        self._branches = Branches(model, reducer, options.plan, examination, options.guard)

    @property
    def num_replicas(self) -> int:
        """R."""
        return self._reducer.num_replicas

    @property
    def replica_id(self) -> tf.Tensor:
        """The replica's number over all workers: an int but on TPUs."""
        return self._reducer.replica_id

    @property
    def virtual_replica(self) -> int | None:
        """The number of the virtual replica, or of the part of a batch, where a replica carries several."""
        return self._reducer.virtual_replica

    def sum_over_replicas(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all replicas; every replica gets the sums."""
        return self._reducer.sum(values)

    def begin(self, batch: TensorNest) -> None:
        """Know the replica's rows, also to look at when something in the step is not finite."""
        self.all_rows.begin(batch)
        if self._is_plain and not tf.executing_eagerly():  # where ops are made that no hook sees
            self.plain_calls = PlainCalls(self.model, batch)
        if not self.weights.are_examined and not self._observer.examines:
            self._streams.begin(self.all_rows, self._noted_draws)
        if self._guard is not None:
            self._guard.batch = batch

    # What Keras asks (Step)

    def reduce_loss(
        self, local: tf.Tensor, sample_weight: TensorNest, mask: TensorNest, reduction: str | None, dtype: DType | None
    ) -> tf.Tensor:
        """Turn a replica's reduced loss into one whose mean over replicas, weighted by share, is the global loss."""
        if self.all_rows.kind_of(local) == "replicated":  # of the losses of all rows: the same on every replica
            return self.weights.mark_as_mean(local)
        loss = self.weights.reduce_loss(local, sample_weight, mask, reduction)
        return self.weights.weigh_gradient(loss) if self._weighs_early and not loss.shape.rank else loss

    def begin_loss(self) -> None:
        """Prepare for what Keras' ``compute_loss`` adds up.

        Where all that Keras' own step differentiates are losses of `compile`, and an optimizer scales their sum, each
        gets its weight by itself.
        """
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        is_scaled = self.kind == "train" and optimizer is not None and inner_optimizer(optimizer) is not optimizer
        is_own = any(overrides(model, name) for name in ("train_step", "compute_loss"))
        self._weighs_early = (
            is_scaled and self.num_replicas > 1 and model.placement is None and not is_own and not model.losses
        )

    def note_loss(self, value: tf.Tensor) -> None:
        """Note what Keras' ``compute_loss`` has returned, a sum of means."""
        self.weights.mark_as_mean(value)
        if self._weighs_early:
            self.weights.mark_as_weighted(value)
        self._weighs_early = False
        if len(getattr(value, "shape", ())) == 0:
            if self._guard is not None:
                self._guard.losses.append(value)
            if self.note is not None:
                self.note.loss(self.replica_id, value)

    def assumes_means_of_losses(self) -> bool:
        """Whether losses that layers add may be taken for means though nothing is known of them: nobody runs it."""
        return self._observer.on_unknown_losses()

    def as_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Turn a scalar of the user's code into one whose mean over replicas, weighted by share, is the global one."""
        return self.weights.as_mean(value)

    def mean_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        values, sample_weight = self.weights.mean_update(metric, values, sample_weight)
        values = self.all_rows.as_own(values)
        if self.note is not None and metric.name == "loss" and len(getattr(values, "shape", ())) == 0:
            self.note.loss(self.replica_id, values, is_logged=True)
        return values, sample_weight

    def sum_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Make a scalar that a step gives to a ``Sum`` count once for the global batch, not once a replica."""
        values, sample_weight = self.weights.sum_update(metric, values, sample_weight)
        return self.all_rows.as_own(values), sample_weight

    def scale_loss(
        self, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Weight the loss by the replica's share."""
        return self.weights.scale_loss(optimizer, loss, original)

    def differentiate(
        self,
        gradient: Callable[[TensorNest, TensorNest], TensorNest],
        target: TensorNest,
        sources: TensorNest,
        output_gradients: TensorNest = None,
        *,
        of_keras: keras.optimizers.Optimizer | None = None,
    ) -> TensorNest:
        """Return gradients of the global batch for what all replicas share, and this replica's own for all else.

        Args:
            gradient: takes a target and what comes from above; returns gradients.
            target: a loss, or several.
            sources: what it is differentiated for.
            output_gradients: what comes from above.
            of_keras: the optimizer of the model whose step of Keras' own asks, if one does.
        """
        if self.kind == "predict":
            return gradient(target, output_gradients)
        if self.plain_calls is not None and of_keras is None:
            of_keras = self.plain_calls.optimizer
        return self.gradients.differentiate(gradient, target, sources, output_gradients, of_keras=of_keras)

    def jacobian(self, jacobian: Callable[[], TensorNest], target: TensorNest, sources: TensorNest) -> TensorNest:
        """Return a jacobian over the global batch, where the target has no dimension of examples, else of this replica.

        Args:
            jacobian: computes it from this replica's examples.
            target: what is differentiated.
            sources: what for.
        """
        whole = functools.partial(jacobian_of_any_rows, jacobian, target, sources, self.weights.rows)
        return whole() if self.kind == "predict" else self.gradients.jacobian(whole, target, sources)

    def batch_jacobian(self, jacobian: Callable[[], tf.Tensor], target: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
        """Return a jacobian of each of this replica's examples; see ``jacobian``."""
        return jacobian() if self.num_replicas == 1 else batch_jacobian_of_any_rows(jacobian, target, source)

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        variables: Sequence[Variable],
        original: Callable[..., None],
    ) -> None:
        """Sum the gradients over replicas, then let every replica run the optimizer on its own copies."""
        self.gradients.apply(optimizer, grads, variables, original)

    def all_reduce_gradients(self, grads_and_vars: TensorNest) -> TensorNest:
        """Leave gradients alone: ``apply`` sums them."""
        return grads_and_vars

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: tf.Tensor, original: Original) -> tf.Tensor:
        """All-reduce inside a layer."""
        self._branches.check_planned()
        return self._reducer.all_reduce(reduce_op, value, original)

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> None:
        """Note state that a layer assigns, so that the replicas agree on it after the step."""
        self.assigned.append(id(variable))
        if self._guard is not None:
            self._guard.of_step.note(variable)
        if self._metrics.assign(variable, value):
            return
        self._observer.on_write(variable)
        is_shared = self._reducer.assign(variable, value, original)
        if is_shared and not self._streams.is_drawing and self._states.note(variable, value):
            self._observer.on_assign(variable)

    def note_variable(self, name: str) -> None:
        """Note a variable of Keras that the step makes."""
        self._observer.on_variable(name)

    def next_seed(
        self, generator: keras.random.SeedGenerator, ordered: bool, original: Callable[[bool], tf.Tensor]
    ) -> tf.Tensor:
        """Give each replica its own stream."""
        state = self._streams.next_seed(generator, ordered, original)
        return state if self._streams.are_global else self.all_rows.note_own(self._observer.on_draw(state))

    def op_seeds(self, op_seed: int | None, original: Callable[[int | None], OpSeeds]) -> OpSeeds:
        """Seed a ``tf.random`` op."""
        return self._streams.op_seeds(op_seed, original)

    def constant_seed(self, seed: int) -> None:
        """Warn that an integer as a seed gives every replica the same numbers."""
        self._streams.constant_seed(seed)

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Callable[..., tf.Tensor]) -> tf.Tensor:
        """Draw by a key."""
        return self._streams.draw(kind, given, draw)

    def check_draws(self) -> None:
        """Refuse what one device does not draw row by row, where that is wanted, of all that was traced."""
        self._streams.check()

    @property
    def has_global_statistics(self) -> bool:
        """Whether BatchNormalization takes the statistics of the rows of all replicas."""
        return self._reducer.num_replicas > 1 and self.model.replica_runtime.batch_statistics == "global"

    def call_function(
        self, original: Original, function: TracedFunction, args: TensorNest, kwargs: TensorNest
    ) -> TensorNest:
        """Call a tf.function of the user's, traced anew for each step."""
        return self._branches.call(original, function, args, kwargs)

    def cond(self, original: Original, predicate: tf.Tensor, true: UserFunction, false: UserFunction) -> TensorNest:
        """Trace a branch of the graph."""
        return self._branches.cond(original, predicate, true, false)

    def while_loop(self, original: Original, *args: TensorNest, **options: TensorNest) -> TensorNest:
        """Trace a loop of the graph."""
        return self._branches.while_loop(original, *args, **options)

    def on_rows(self, inputs: TensorNest, op: Callable[[tf.Tensor], TensorNest]) -> TensorNest:
        """Return what an op gives for each row, where this replica may have none."""
        return op(inputs) if self.num_replicas == 1 else pass_through.on_rows(inputs, op)

    def sum_duplicates(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Add up slices of one row as the other replicas do."""
        return slices if self.num_replicas == 1 else sum_duplicates(slices)

    def to_dense(self, slices: tf.IndexedSlices) -> tf.Tensor:
        """Add up slices of one row as the other replicas do."""
        return NotImplemented if self.num_replicas == 1 else to_dense(slices)

    def check_stateful(self, layer: keras.layers.Layer) -> None:
        """Refuse a layer that keeps a state for each row of the global batch.

        Raises:
            DataError: there are several replicas.
        """
        if self.num_replicas > 1:
            raise DataError(
                f"'{layer.name}' is stateful: it keeps a state for each row of a batch, and each of the "
                f"{self.num_replicas} replicas has only some of the rows. Run it on one device "
                "(`pick_strategy('one_device')`), or have it return its states (`return_state=True`) and give them "
                "back as inputs (`initial_state=`)."
            )

    # Around the user's step

    def note_result(self, metric: keras.metrics.Metric, value: TensorNest) -> TensorNest:
        """Remember that ``value`` is the result of ``metric``, to compute it from the pooled state instead."""
        if self._pools_results:
            return self._reducer.pooled_result(metric) if self.num_replicas > 1 else value
        self._observer.on_result()
        for place, leaf in enumerate(tree.flatten(value)):  # a result may be a dict of several
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = Result(metric, place, leaf, len(self.assigned))
        return value

    @property
    def has_assigned(self) -> bool:
        """Whether state was assigned on which the replicas have not agreed yet."""
        return bool(self._states)

    def end(self, returned: Sequence[tf.Tensor]) -> None:
        """See that what was known of the step has come true, or say to who examines it that it has ended.

        Args:
            returned: what it returns.

        Raises:
            StalePlan: it has not.
        """
        if self._observer.examines:
            self._observer.on_end(self.gradients, returned)
        elif self.num_replicas > 1 and not tf.executing_eagerly():
            self.gradients.check_plan(returned)

    def finish(self, logs: TensorNest) -> list[tf.Tensor]:
        """Agree on what is left, and return the leaves of the logs that are not results of metrics."""
        self.check_draws()
        self._metrics.finish()
        states, terms = self._states.take_terms()
        if states:
            self._reducer.assign_mean(states, terms)
        local = [leaf for leaf in tree.flatten(logs) if id(leaf) not in self.results]
        if self.num_replicas == 1:
            return [tf.convert_to_tensor(leaf) for leaf in local]
        return self.weights.zero_if_empty([scale(as_float(self.as_mean(leaf)), self.weights.share) for leaf in local])
