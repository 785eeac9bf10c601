"""What may be told of a step while it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["StepObserver"]


class StepObserver:
    """Is told what a step does while it is traced; this one takes no note."""

    def on_draw(self, state: Any) -> Any:
        """Return the seed that the replica draws with, or another tensor in its place."""
        return state

    def on_variable(self, name: str) -> None:
        """Take note of a variable of Keras that the step makes."""

    def on_assign(self, variable: Any) -> None:
        """Take note of state of a layer whose mean over replicas is taken after the step."""

    def on_gather(self, value: Any) -> None:
        """Take note of a tensor with the rows of all replicas."""

    def on_differentiate(self, target: Any, sources: Any) -> None:
        """Take note of losses, and what they are differentiated for."""

    def on_apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Take note of a replica's gradients that are given to an optimizer."""

    def on_reduce(self, gradients: Sequence[Any]) -> None:
        """Take note of a replica's gradients that are made global by hand."""

    def on_update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Take note of the gradients of the global batch that an optimizer runs with."""
