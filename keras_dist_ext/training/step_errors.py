"""Say why a step of the user's cannot be traced or run, where TensorFlow's own error does not."""

from __future__ import annotations

import re
import traceback

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.errors import KerasDistError, LoopError

__all__ = ["explain", "metric_under_way", "reason_of"]


def explain(name: str, error: Exception, *, of_loop: bool = False, is_eager: bool = False) -> LoopError | None:
    """Say why a step cannot be traced; None where the error itself does.

    Args:
        name: of the step.
        error: that tracing it has raised.
        of_loop: whether it is that of a ``TrainLoop``.
        is_eager: whether it is to run eagerly, and is only traced to be examined.
    """
    first_line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, KerasDistError):
        return None
    if isinstance(error, RuntimeError) and "cross-replica context" in str(error):
        sums = (
            "declare reductions in reduce={...}"
            if of_loop
            else "leave reductions out, since gradients, losses and metrics add up over replicas by themselves"
        )
        return LoopError(
            f"The step {name!r} calls a method of the strategy (run, reduce, gather) that is for code outside of "
            f"replicas. The step runs on every replica already: call what you gave to strategy.run as it is, and "
            f"{sums}."
        )
    if isinstance(error, RuntimeError) and "`merge_call` called while defining a new graph" in str(error):
        return LoopError(
            f"The step {name!r} adds up over replicas (BatchNormalization with the statistics of the global batch, a "
            "synchronized layer) inside of a tf.function, or of a branch or loop in the graph, where replicas cannot "
            "wait for each other. Call it outside, and choose between its outputs with tf.where."
        )
    if isinstance(error, RuntimeError) and "made a different number of replica_context().merge_call()" in str(error):
        return LoopError(
            f"The step {name!r}, which runs eagerly, asks Python for what a replica computes from its own examples, "
            "by an if or a while, so that some replicas add up what others do not (a mean over no examples is NaN, by "
            "which no comparison holds). Decide by a number of the whole batch, such as loss = "
            "kde.reduce_gradients(loss), which is the same on all replicas."
        )
    if is_eager:
        return LoopError(
            f"The step {name!r} cannot be traced ({first_line}), which is done once before it runs, also with "
            "run_eagerly=True, to see what it returns. Ask tf.executing_eagerly() before what needs the value of a "
            "tensor, such as .numpy()."
        )
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return LoopError(
            f"The step {name!r} asks Python for the value of a tensor, by an if, a while, a for or a bool "
            f"({first_line}), which is not known when the step is compiled. Use tf.where, tf.cond or tf.while_loop; or "
            "a function of its own decorated with tf.function, whose ifs and loops TensorFlow translates."
        )
    if _asks_for_value(error):
        shown = "with its reduction in reduce={...}, and" if of_loop else "among the logs, and"
        return LoopError(
            f"The step {name!r} asks for the value of a tensor, by .numpy(), float(), a function of NumPy or the like "
            f"({first_line}), which is not known when the step is compiled. Compute with TensorFlow ops; return what "
            f"you want to see, {shown} look at it in a callback; or print it by tf.print."
        )
    if isinstance(error, ValueError) and "cannot be reduced with the given reduce op" in str(error):
        return LoopError(
            f"The step {name!r} assigns the same number on all replicas to a tf.Variable whose aggregation adds up "
            f"what they assign ({first_line}), so it is unknown whether it counts once or for each. Make the variable "
            "with tf.VariableAggregation.ONLY_FIRST_REPLICA, or by add_weight, for what all assign alike."
        )
    method = _method_without_replicas(error)
    if method:
        return LoopError(
            f"The step {name!r} calls {method} of a variable, which TensorFlow does not have for variables that each "
            "replica has a copy of. Gather the rows of all replicas and assign them, the same on each: "
            "`rows = kde.gather_rows(rows)`, then `variable.assign(tf.tensor_scatter_nd_update(variable, indices, "
            "rows))`, with indices for as many rows."
        )
    return None


def _asks_for_value(error: Exception) -> bool:
    text = str(error)
    return (
        (isinstance(error, AttributeError) and "has no attribute 'numpy'" in text and "Tensor" in text)
        or (isinstance(error, TypeError) and "SymbolicTensor" in text and "() argument must be" in text)
        or (isinstance(error, NotImplementedError) and "symbolic tf.Tensor" in text)
    )


def _method_without_replicas(error: Exception) -> str:
    """Return the method of a variable that has raised an error without a word; "" where it was something else.

    tensorflow/python/ops/variables.py: those of the base class that a distributed variable has not got.
    """
    if not isinstance(error, NotImplementedError) or str(error):
        return ""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename.endswith("variables.py"):
        return last.name
    called = re.findall(r"\.(\w+)\(", last.line or "")  # TensorFlow has left its own frames out of the traceback
    return next((name for name in called if name.startswith(_NOT_OF_REPLICAS) and hasattr(tf.Variable, name)), "")


_NOT_OF_REPLICAS = ("batch_scatter_", "gather_nd", "scatter_nd_", "sparse_read")


def metric_under_way() -> keras.metrics.Metric | None:
    """Return the metric of Keras whose method has been called, and calls this; None where there is none."""
    for frame, _ in traceback.walk_stack(None):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.metrics.Metric):
            return owner
    return None


def reason_of(error: Exception) -> tuple[str, str, str]:
    """Return the op at which a graph has failed, the user's line that made it, as " (at ...)", and why.

    Where Python has failed, and no graph, there is no op.
    """
    text = str(getattr(error, "message", error))
    node = re.search(r"Detected at node (\S+) defined", text)
    frames = re.findall(r'File "([^"]+)", line (\d+), in', text)
    if node is None:
        frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
        text = text.partition("\x1b[1m")[2].partition("\x1b[0m")[0] or text  # Keras says in which layer
        text = re.sub(r"^\{\{function_node \S+\}\} | \[Op:\w+\].*", "", text.strip())
    own = [f for f in frames if not re.search(r"site-packages|keras_dist_ext|lib/python|<", f[0])]
    why = next((part for part in re.findall(r"^\s*(.*?)\s*\[\[\{\{node", text, re.MULTILINE) if part), "")
    if not why:
        lines = text.splitlines()
        at = next((i for i, part in enumerate(lines) if "[[{{node" in part), 1)
        why = next((part.strip() for part in reversed(lines[:at]) if part.strip()), type(error).__name__)
    line = f" (at {own[-1][0].rpartition('/')[2]}, line {own[-1][1]})" if own else ""
    why = re.sub(r"^\(\d+\) [A-Z_]+:\s*", "", why).removesuffix(".")  # of several that have failed
    return ("" if node is None else node[1]), line, why
