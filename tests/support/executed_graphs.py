"""The graphs that TensorFlow has executed, a part for each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context


def graphs_executed_by(call: Callable[[], object]) -> list[Any]:
    """Return the graphs of the functions that a call executes first (FunctionGraphs of TensorFlow's config.proto).

    What was collected before the call, and what others execute after it, is not among them.
    """
    context.context().enable_graph_collection()
    context.enable_run_metadata()
    try:
        context.context().export_run_metadata()
        call()
        return list(context.context().export_run_metadata().function_graphs)
    finally:
        context.disable_run_metadata()
        context.context().disable_graph_collection()
