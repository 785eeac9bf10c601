"""Look at the graphs that functions are traced to, and steer how they are traced and called."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api as ag_api
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs, summary_ops_v2
from tensorflow.python.util import tf_decorator

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.backend import global_state
from keras_dist_ext._keras.interception import patched, thread
from keras_dist_ext._keras.tapes import unrecorded
from keras_dist_ext.aliases import SpecNest, TensorNest, TracedFunction, UserFunction

__all__ = [
    "ScratchTrace",
    "clone_function",
    "functions_traced_apart",
    "scratch_graph",
    "functions_of_op",
    "set_op_device",
    "capture_thread_context",
    "run_independently",
    "return_in_place",
    "in_branch",
    "in_vectorized_map",
    "in_xla",
    "know_variables",
    "capture_thread_state",
    "state_of_thread",
    "inlined",
    "observe_traces",
    "IteratorFunction",
    "traced_graphs",
]


def clone_function(function: TracedFunction) -> TracedFunction:
    """A tf.function like another, without its traces (polymorphic_function.py).

    One that was loaded from a file has nothing but its traces (saved_model/function_deserialization.py), and is itself.
    """
    return function._clone(None) if type(function) is polymorphic_function.Function else function


@contextlib.contextmanager
def functions_traced_apart() -> Iterator[None]:
    """Have what calls a tf.function meanwhile call another one like it, which is new, so that no trace stays."""
    clones: dict[int, tuple[TracedFunction, TracedFunction]] = {}  # by the id of a function, which is kept with its own
    original = polymorphic_function.Function.__call__

    def call(function: TracedFunction, *args: object, **kwargs: object) -> TensorNest:
        _, clone = clones.setdefault(id(function), (function, clone_function(function)))
        return original(clone, *args, **kwargs)

    with patched(polymorphic_function.Function, "__call__", call):
        yield


def scratch_graph(name: str) -> contextlib.AbstractContextManager[tf.Graph]:
    """Trace what follows into a scratch graph, which nothing runs (tensorflow/python/framework/func_graph.py)."""
    return tf.__internal__.FuncGraph(name).as_default()  # type: ignore[no-any-return]


class ScratchTrace:
    """A function of a batch that is traced in a scratch graph, and of which single numbers may be evaluated.

    Nothing runs but what these numbers are computed from (tensorflow/python/eager/wrap_function.py, ``prune``).

    Args:
        function: takes a batch.
        spec: of the batch.

    Attributes:
        graph: that it was traced to.
    """

    def __init__(self, function: Callable[[TensorNest], object], spec: SpecNest) -> None:
        specs = [one for one in keras.tree.flatten(spec) if one is not None]

        def traced(*leaves: tf.Tensor) -> None:
            given = iter(leaves)
            function(keras.tree.map_structure(lambda one: None if one is None else next(given), spec))

        self._wrapped = tf.compat.v1.wrap_function(traced, specs, name="scratch")
        self._feeds = self._wrapped.inputs[: len(tf.nest.flatten(specs, expand_composites=True))]
        self.graph = self._wrapped.graph

    def evaluate(self, values: Sequence[tf.Tensor], batches: Sequence[TensorNest]) -> list[list[tf.Tensor]]:
        """Compute tensors of the graph for each of some batches."""
        pruned = self._wrapped.prune(self._feeds, list(values))
        assigns = b"Assign" in pruned.graph.as_graph_def().SerializeToString()
        kept = [(variable, variable.read_value()) for variable in pruned.graph.variables if assigns]
        given = [[one for one in keras.tree.flatten(batch) if one is not None] for batch in batches]
        try:
            return [list(pruned(*tf.nest.flatten(leaves, expand_composites=True))) for leaves in given]
        finally:
            for variable, value in kept:
                variable.assign(value)


def functions_of_op(op: tf.Operation) -> list[tf.Graph]:
    """The graphs of the functions that an op calls: that of a call, of each branch, or of a loop's body and condition.

    tensorflow/python/framework/ops.py keeps the functions of a graph (`Graph._get_function`), and
    eager/polymorphic_function/atomic_function.py the graph that one was traced to. None are known of other ops, and of
    functions of TensorFlow 1 (framework/function.py), as that of `tf.nn.ctc_loss`.
    """
    given = [op.get_attr(name) for name in _FUNCTIONS_OF_OP.get(op.type, ())]
    functions = given[0] if op.type in ("Case", "StatelessCase") else given
    found = []
    for function in functions:
        graph = op.graph
        while graph is not None and graph._get_function(function.name) is None:
            graph = getattr(graph, "outer_graph", None)
        if graph is None:
            return []
        found.append(getattr(graph._get_function(function.name), "graph", None))
    return [] if None in found else found


_FUNCTIONS_OF_OP = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("body", "cond")),
}


def set_op_device(op: tf.Operation, device: str) -> None:
    """Have an op of a graph that is being traced run on a device (tensorflow/python/framework/ops.py)."""
    op._set_device(device if device.startswith("/") else f"/device:{device}")


def capture_thread_context(
    context: tf.distribute.ReplicaContext,
) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Note where a replica's thread is, for other threads to enter there: graph, device, globals, summaries.

    tensorflow/python/distribute/mirrored_run.py has threads for replicas, which it prepares likewise. Keras' globals
    belong to a thread (keras/src/backend/common/global_state.py).

    Args:
        context: the replica context to enter.

    Returns:
        What enters, and takes a name for the scope of the ops.
    """
    graph, is_eager = tf.compat.v1.get_default_graph(), tf.executing_eagerly()
    with tf.init_scope():
        outside = tf.compat.v1.get_default_graph(), tf.executing_eagerly()
    globals_of_keras = state_of_thread()
    summaries = dict(vars(summary_ops_v2._summary_state))
    if is_eager:
        device, scope = tf_context.context().device_name, ""
    else:
        graph.switch_to_thread_local()
        devices, scope = graph._device_function_stack.copy(), graph.get_name_scope()

    @contextlib.contextmanager
    def enter(name: str) -> Iterator[None]:
        vars(global_state.GLOBAL_STATE_TRACKER).update(globals_of_keras)
        vars(summary_ops_v2._summary_state).update(summaries)
        with contextlib.ExitStack() as stack:
            for place, eagerly in (outside, (graph, is_eager)):
                stack.enter_context(place.as_default())
                if eagerly:
                    stack.enter_context(tf_context.eager_mode())
            if is_eager:
                stack.enter_context(tf.device(device))
            else:
                graph._device_function_stack = devices.copy()
                stack.enter_context(tf.name_scope(f"{scope}/{name}/" if scope else f"{name}/"))
            stack.enter_context(context)
            yield

    return enter


def run_independently(value: tf.Tensor | tf.Operation) -> None:
    """Let a stateful op, or the one that makes a tensor, run as soon as its inputs are there, while it is traced.

    Stateful ops without a resource run in the order in which they were traced, those of one replica after those of the
    replicas before it (python/framework/auto_control_deps.py, `run_independently`).
    """
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None and not tf.executing_eagerly():
        manager.run_independently(value if isinstance(value, tf.Operation) else value.op)


def return_in_place() -> None:
    """Have what the function that is being traced is about to return stay on the device that was named for it.

    TensorFlow makes an Identity of each value after it has returned (``mark_as_return`` in
    python/framework/auto_control_deps.py), and places that anew: on a GPU, if there is one. The graph forgets its
    devices when its trace ends (``_func_graph_as_default_inner_cm`` in python/framework/func_graph.py).
    """
    graph = tf.compat.v1.get_default_graph()
    with graph.device(_where_its_input_is):
        devices = graph._device_function_stack.copy()
    graph._device_function_stack = devices


def _where_its_input_is(op: tf.Operation) -> str:
    return op.inputs[0].device if op.type == "Identity" and not op.device else op.device  # type: ignore[no-any-return]


def in_branch(graph: tf.Graph) -> bool:
    """Whether the code being traced is in a branch or a loop of a graph (ops/control_flow_v2_func_graphs.py)."""
    here = tf.compat.v1.get_default_graph()
    while here is not None and here is not graph:
        if isinstance(here, _BRANCHES):
            return True
        here = getattr(here, "outer_graph", None)
    return False


_BRANCHES = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
)


def in_vectorized_map() -> bool:
    """Whether what is traced now is one turn of a tf.vectorized_map.

    All turns are made from the ops of one, in a scope of that name (python/ops/parallel_for/control_flow_ops.py,
    ``_pfor_impl``), so a turn cannot wait for those of other replicas.
    """
    return _TURN.search(tf.get_current_name_scope()) is not None


_TURN = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")


def in_xla() -> bool:
    """Whether the code being traced will be compiled by XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def know_variables(graph: tf.Graph) -> None:
    """Have a scratch graph know its variables, as that of a tf.function does (python/framework/func_graph.py)."""
    graph.variables = graph._watched_variables


def state_of_thread() -> dict[str, object]:
    """Keras' globals of this thread (keras/src/backend/common/global_state.py)."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


def capture_thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Note what Keras, AutoGraph and our own hooks know of this thread, for others to enter.

    Keras' globals belong to a thread (keras/src/backend/common/global_state.py), and so does whether AutoGraph converts
    (python/autograph/core/ag_ctx.py).
    """
    globals_of_keras = state_of_thread()
    own = dict(vars(thread))
    control = ag_ctx.control_status_ctx()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        vars(global_state.GLOBAL_STATE_TRACKER).update(globals_of_keras)
        vars(thread).update(own)
        with ag_ctx.ControlStatusCtx(control.status, control.options):
            yield

    return enter


def inlined(function: TracedFunction) -> UserFunction:
    """What a tf.function traces, to be called as a part of what is traced (polymorphic_function/autograph_util.py).

    TensorFlow would make other errors of those that it raises.
    """
    python_function = function.python_function
    if not function._autograph:
        return python_function  # type: ignore[no-any-return]
    _, inner = tf_decorator.unwrap(python_function)
    options = converter.ConversionOptions(
        recursive=True, optional_features=function._experimental_autograph_options, user_requested=True
    )

    def converted(*args: object, **kwargs: object) -> TensorNest:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):
            return ag_api.converted_call(inner, args, kwargs, options=options)

    return converted  # past what TensorFlow has put around it when it traced it, which converts nothing here


@versions.naming("ParallelismDoctor")
def observe_traces(note: Callable[[str, dict[str, str], float], None]) -> Callable[[], None]:
    """Have ``note(name, arguments, seconds)`` called for each tf.function that is traced outside of others.

    TensorFlow traces in one place (eager/polymorphic_function/tracing_compilation.py), and warns of frequent tracing
    without naming the argument that changes.

    Returns:
        What ends it.
    """
    from tensorflow.python.eager.polymorphic_function import tracing_compilation

    original = tracing_compilation._create_concrete_function

    def create(
        function_type: tf.types.experimental.FunctionType, *args: object, **kwargs: object
    ) -> tf.types.experimental.ConcreteFunction:
        if tf.inside_function():
            return original(function_type, *args, **kwargs)
        begin = time.perf_counter()
        made = original(function_type, *args, **kwargs)
        options = kwargs.get("tracing_options", args[-1] if args else None)
        constraints = {name: parameter.type_constraint for name, parameter in function_type.parameters.items()}
        arguments = {name: str(getattr(c, "value", c)) for name, c in constraints.items()}
        note(str(getattr(options, "name", "a function")), arguments, time.perf_counter() - begin)
        return made

    def stop() -> None:
        if tracing_compilation._create_concrete_function is create:
            tracing_compilation._create_concrete_function = original

    tracing_compilation._create_concrete_function = create
    return stop


class IteratorFunction:
    """A tf.function that is called again and again with an iterator over a dataset as its first argument.

    Which trace fits, and what it has captured, is found out once an iterator, not at each call: to look whether
    arguments fit takes as long as some hundred small ops (python/eager/polymorphic_function/concrete_function.py).

    Args:
        function: a ``tf.function``. What other arguments it has are of one shape and dtype for each iterator.
    """

    def __init__(self, function: TracedFunction) -> None:
        self.function = function
        self._iterator: Callable[[], object] = lambda: None
        self._trace: tf.types.experimental.ConcreteFunction = None
        self._captured: list[tf.Tensor] | None = None  # None: it is another thing at each call

    def __call__(self, iterator: tf.data.Iterator, *others: object) -> TensorNest:
        """Call the function."""
        if not isinstance(iterator, tf.data.Iterator):  # say, one that TensorFlow has distributed
            return self.function(iterator, *others)
        if self._iterator() is not iterator:
            trace = self._trace = self.function.get_concrete_function(iterator, *others)
            self._captured = None if any(map(callable, trace._captured_inputs)) else trace.captured_inputs
            self._iterator = weakref.ref(iterator)
        captured = self._trace.captured_inputs if self._captured is None else self._captured
        flat = tf.nest.flatten((iterator, *others), expand_composites=True)
        with unrecorded():  # TensorFlow cannot differentiate a loop over an iterator
            return self._trace._call_flat(flat, captured)


def traced_graphs(function: TracedFunction) -> list[tf.Graph]:
    """The graphs that a tf.function was traced to so far (polymorphic_function.py); none of a plain function."""
    function = function.function if isinstance(function, IteratorFunction) else function
    traces: list[tf.types.experimental.ConcreteFunction] = getattr(function, "_list_all_concrete_functions", list)()
    return [trace.graph for trace in traces]
