"""What a model holds for its runs on replicas, apart from its layers: scope, seeds, recorders, traced functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.optimizers import accumulated_gradients, inner_optimizer, num_batches_used
from keras_dist_ext._keras.strategies import strategy_of_model
from keras_dist_ext.aliases import SpecNest, TensorNest
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.step.compression import GradientCompression
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.nan_guard import Guard
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.reduce import keep_on_first_replica, sum_components
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.step.step_plan import StepPlan
from keras_dist_ext.strategy.scope import check_sums, hold_sums, move_into_scope, optimizers
from keras_dist_ext.strategy.virtual import num_replicas_of
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_spec import has_static_rows
from keras_dist_ext.training.batch_statistics import BatchStatistics, check_layers
from keras_dist_ext.training.building import build_for_run
from keras_dist_ext.training.check_mode import CheckMode
from keras_dist_ext.training.divergence import Divergence
from keras_dist_ext.training.execution import RunKind, StepFunction
from keras_dist_ext.training.run_callback import Callbacks, RunCallback, callbacks_in
from keras_dist_ext.training.stop_signal import StopSignal
from keras_dist_ext.training.whole_batch_layers import check_whole_batch_layers

if TYPE_CHECKING:
    from keras_dist_ext.training.parameter_server.coordinator import Coordinator

__all__ = ["ReplicaRuntime", "runtime_of", "stop_attribute"]


class ReplicaRuntime:
    """What a model of this package holds for its runs, as ``model.replica_runtime``.

    Args:
        model: that owns it.

    Attributes:
        model: see above.
        seeds: of the model's random generators.
        stops: the wishes to end training, an evaluation or a prediction.
        recorders: of the steps of the run that is under way.
        guard: of those steps, if they are guarded.
        functions: what Keras calls for each execution, by the kind of step, then by what its steps record.
        batch_spec: of the batch that the model was built for: shapes with an unknown number of rows.
        rows_are_static: whether it was known how many rows such a batch has.
        loss_exponents: how losses given to ``add_loss`` grow with the rows, by the kind of step and the layer's id.
        plans: what is known of a step before it is traced to be run, by the kind of step.
        check: how `compile` was told to check steps, and
        checked: of which kinds that was done, and
        reported: what was said of them: parts that differ and their names, or why steps could not be compared.
        batch_statistics: of whose examples BatchNormalization takes them.
        exact: whether all replicas together do what one device does, random numbers included.
        chooses_num_steps: whether the number of steps of an execution is ours to choose (``"auto"``).
        chooses_xla: whether it is Keras that chooses to compile by XLA (``"auto"``).
        can_split_batches: whether steps can be made of parts of a replica's rows.
        kind_of_batches: what a step makes of a batch that is given by itself.
        needs_variables: whether somebody looks at the model's variables before its first step, who is not Keras.
        accumulators_are_split: whether each replica holds a part of the gradients that are being accumulated.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.seeds = Seeds(model)
        self.stops: dict[RunKind, StopSignal] = {
            "train": StopSignal(),
            "test": StopSignal(),
            "predict": StopSignal(),
        }
        self.recorders: tuple[Recorder, ...] = ()
        self.guard: Guard | None = None
        self.functions: dict[str, dict[tuple[bool, ...], StepFunction]] = {"train": {}, "test": {}}
        self.batch_spec: SpecNest = None
        self.rows_are_static = False
        self.loss_exponents: dict[str, dict[int, list[Fraction]]] = {}
        self.plans: dict[str, StepPlan] = {}
        self.check: CheckMode = True
        self.batch_statistics: BatchStatistics = "replica"
        self.exact = False
        self.compression: GradientCompression | None = None
        self.checked: set[RunKind] = set()
        self.reported: set[tuple[str, str]] = set()
        self.chooses_num_steps = True
        self.chooses_xla = True
        self.can_split_batches = True
        self.kind_of_batches: Kind = "train"
        self.needs_variables = False
        # Kinds of steps, and what batches they were traced for in scratch graphs.
        self._built_for: set[tuple[str, str]] = set()
        self._holds_sums_of: set[str] = set()  # kinds of steps whose variables were looked through
        self.accumulators_are_split = False
        self._guard: Guard | None = None  # made once, because traced steps hold it
        self._divergence: Divergence | None = None  # likewise
        self._coordinator: Coordinator | None = None

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that the model lives under."""
        return self.model.distribute_strategy

    @contextlib.contextmanager
    def in_scope(self) -> Iterator[None]:
        """Enter the strategy's scope, unless one is entered already."""
        strategy = strategy_of_model(self.model)
        if strategy is None or tf.distribute.has_strategy():
            yield
        else:
            with strategy.scope():
                yield

    def take_into_scope(self, made: TensorNest) -> None:
        """Move optimizers and metrics into the scope that were made for a call, just outside of it."""
        if strategy_of_model(self.model) is None or tf.distribute.has_strategy():
            return
        with self.in_scope():
            for thing in tree.flatten(made):
                if isinstance(thing, (keras.optimizers.Optimizer, keras.metrics.Metric)):
                    move_into_scope(thing)

    def hold_sums(self) -> None:
        """Have sums over replicas be read as on one device from now on."""
        if strategy_of_model(self.model) is not None and self.strategy.num_replicas_in_sync > 1:
            hold_sums(self.model)

    # What steps are made for

    def build(self, kind: RunKind, batch_spec: SpecNest, exact_spec: SpecNest) -> None:
        """Build the model for a run, unless it lives under no strategy and Keras' own first step is to build it.

        Args:
            kind: of its steps.
            batch_spec: of a batch, shapes with an unknown number of rows.
            exact_spec: of a batch, with the number of its rows where that is known.
        """
        self.batch_spec, self.rows_are_static = batch_spec, has_static_rows(exact_spec)
        model = self.model
        is_stock = strategy_of_model(model) is None and model.placement is None and model.virtual_replicas is None
        if is_stock and not self.needs_variables and self.seeds.wanted is None and self.seeds.root is None:
            return
        build = kind, repr(batch_spec)
        with self.in_scope():
            build_for_run(model, kind, batch_spec, exact_spec, was_traced=build in self._built_for)
        if build not in self._built_for:  # which may have made variables
            self._holds_sums_of.clear()
        self._built_for.add(build)
        if self.compression is not None and kind == "train":
            with self.in_scope():
                self.compression.prepare(model.trainable_variables)
        self.check_layers(kind)

    def check_layers(self, kind: RunKind) -> None:
        """Refuse or warn of layers that need all examples of a batch, or all of a sum, where each replica has some.

        Args:
            kind: of the steps that are about to be made.
        """
        if num_replicas_of(self.model) == 1 or isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            return
        if kind not in self._holds_sums_of:
            check_sums(self.model)
            self._holds_sums_of.add(kind)
        if self.batch_statistics == "global":
            check_layers(self.model)
        check_whole_batch_layers(self.model, kind, exact=self.exact)

    # Steps that were traced

    def function_of(
        self, kind: Kind, recorded: tuple[bool, ...], make: Callable[[], StepFunction], *, is_new: bool
    ) -> StepFunction:
        """Return what Keras calls for executions; those that record something else are kept, unless it is to be new.

        Args:
            kind: of its steps.
            recorded: what they record, and how they run.
            make: makes it.
            is_new: whether all that were made are to be forgotten.
        """
        made = self.functions[kind]
        if is_new:
            made.clear()
        if recorded not in made:
            made[recorded] = make()
        return made[recorded]

    def forget_traces(self) -> None:
        """Have all that is known of the model's steps found out anew: it was compiled again."""
        self.loss_exponents.clear()
        self.plans.clear()
        self._built_for.clear()
        self._holds_sums_of.clear()
        self.checked.clear()
        self.reported.clear()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of a ParameterServerStrategy's workers; made when it is first asked for."""
        if self._coordinator is None:
            from keras_dist_ext.training.parameter_server.coordinator import Coordinator

            self._coordinator = Coordinator(self.model)
        return self._coordinator

    # What a run asks for

    def add_recorder(self, recorder: Recorder) -> None:
        """Have the steps of the run that is about to begin recorded."""
        recorder.begin()
        self.recorders = (*self.recorders, recorder)

    def drop_recorder(self, recorder: Recorder) -> None:
        """Have the steps of the run that is under way recorded no longer, from the next execution on."""
        self.recorders = tuple(other for other in self.recorders if other is not recorder)
        self.model.make_train_function()

    def guard_steps(self, most_in_a_row: int) -> Guard:
        """Have steps of the run that is about to begin left out if something in them is not finite."""
        num_replicas = num_replicas_of(self.model)
        if self._guard is None or self._guard.num_replicas != num_replicas:
            with self.in_scope():
                self._guard = Guard(num_replicas)
        self._guard.begin(most_in_a_row)
        self.guard = self._guard
        return self._guard

    @contextlib.contextmanager
    def prepared(self, callbacks: Callbacks) -> Iterator[None]:
        """Let callbacks say what a run needs before it begins, and clean up after it, however it ended.

        A callback may begin another run, say predict, in the middle of one.
        """
        recorders, self.recorders = self.recorders, ()
        guard, self.guard = self.guard, None
        needed, self.needs_variables = self.needs_variables, False
        try:
            with heartbeat.running(), contextlib.ExitStack() as stack:
                for callback in callbacks_in(callbacks):
                    if isinstance(callback, RunCallback):
                        self.needs_variables = True
                        callback.on_run_prepare(self.model)
                        stack.callback(callback.on_run_end)
                self.seeds.will_begin()
                yield
        finally:
            self.recorders, self.guard, self.needs_variables = recorders, guard, needed

    def changing_attributes(self) -> tuple[tuple[object, tuple[str, ...]], ...]:
        """Name what runs change, besides variables: objects, and attributes of each."""
        return (
            (self, ("accumulators_are_split", "recorders")),
            (self.seeds, ("num_passes", "_is_to_begin", "wanted")),
            *((stop, ("is_requested",)) for stop in self.stops.values()),
        )

    def agree_on_stop(self) -> None:
        """Have training end on all workers if a callback of one has asked for it; all must call it."""
        workers, stop = workers_of(self.strategy), self.stops["train"]
        if workers is not None and workers.sum([float(stop.is_requested)])[0]:
            stop.request(True)

    def order_seed(self, kind: RunKind) -> int | None:
        """Return the seed of the data's order in the pass that begins; None leaves the order to chance."""
        return self.seeds.order_of_next_pass() if kind == "train" else self.seeds.order_of_evaluation()

    # Between executions

    def end_epoch(self) -> None:
        """Hold what one device would hold, and record the next epoch from its beginning."""
        self.synchronize()
        for recorder in self.recorders:
            recorder.begin()

    def synchronize(self) -> None:
        """Hold what one device would hold, at the end of an epoch, and before saving.

        During an accumulation of gradients each replica has a part of the sum. Metrics of a parameter server's workers
        are on their way.
        """
        if self._coordinator is not None:
            self._coordinator.join()
        self._gather_accumulators()

    def _gather_accumulators(self) -> None:
        if self.accumulators_are_split:
            self.accumulators_are_split = False
            for optimizer in self._accumulating():
                sum_components(self.strategy, accumulated_gradients(optimizer))

    def scatter_accumulators(self) -> None:
        """Before training continues in the middle of an accumulation: give the first replica the sum, the others 0."""
        if self.accumulators_are_split:
            return
        virtual = self.model.virtual_replicas
        sums_each_batch = virtual is not None and virtual.is_ordered
        self.accumulators_are_split = self.strategy.num_replicas_in_sync > 1 and not sums_each_batch
        if self.accumulators_are_split:
            workers = workers_of(self.strategy)
            for optimizer in self._accumulating():
                for accumulator in accumulated_gradients(optimizer):
                    keep_on_first_replica(accumulator, is_chief=workers is None or workers.is_chief)

    def _accumulating(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers in the middle of an accumulation of gradients of which each replica has a part."""
        whole = self.plans["train"].whole_accumulators if "train" in self.plans else ()
        return [optimizer for optimizer in _accumulating(self.model) if id(optimizer) not in whole]

    def find_divergence(self) -> str | None:
        """Say what differs between replicas, over all workers; None where nothing does."""
        if self._divergence is None:
            self._divergence = Divergence(self.model)
        finding = self._divergence.check(0)
        return None if finding is None else str(finding["what"])


def runtime_of(model: keras.Model) -> ReplicaRuntime | None:
    """Return the runtime of a model of this package; None for a model of stock Keras, and for anything else."""
    runtime = getattr(model, "replica_runtime", None)
    return runtime if isinstance(runtime, ReplicaRuntime) else None


def stop_attribute(kind: RunKind) -> property:
    """Make the attribute of a model by which callbacks end runs of a kind, and Keras' loops are told to."""

    def is_set(model: keras.Model) -> bool:
        return bool(model.replica_runtime.stops[kind].is_set)

    def request(model: keras.Model, value: bool) -> None:
        model.replica_runtime.stops[kind].request(value)

    return property(is_set, request, doc="Whether the run ends after the step that is under way; callbacks set it.")


def _accumulating(model: DistributedModel) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model that are in the middle of an accumulation of gradients."""
    found = [inner_optimizer(optimizer) for _, optimizer in optimizers(model)]
    return [
        optimizer
        for optimizer in found
        if optimizer.built
        and optimizer.gradient_accumulation_steps
        and num_batches_used(optimizer) % optimizer.gradient_accumulation_steps
    ]
