"""Networks with dropout and BatchNormalization take 50 steps on replicas as stock Keras does on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from cases import rotating
from exact_runs import farthest, train_network, train_on_workers
from strategies import strategies
from two_workers import on_two_workers

# Network, batches, strategy.
RUNS = [
    ("Transformer", "uneven", "mirrored3"),
    ("Transformer", "uneven", "mirrored4"),
    ("Transformer", "even", "mirrored2"),
    ("LSTM", "uneven", "mirrored4"),
]
ON_WORKERS = [("Transformer", "even"), ("Transformer", "uneven"), ("LSTM", "even"), ("LSTM", "uneven")]


def on_workers(network: str, examples: str) -> Any:
    marks = pytest.mark.rotating, on_two_workers(train_on_workers, network, examples)
    return pytest.param(network, examples, marks=marks)


@functools.cache
def of_stock(network: str, examples: str) -> Any:
    return train_network(network, examples)


@pytest.mark.parametrize(("network", "examples", "kind"), rotating(RUNS, []))
def test_50_steps_are_those_of_one_device(network: str, examples: str, kind: str) -> None:
    ours = train_network(network, examples, strategies.get(kind))
    assert farthest(ours, of_stock(network, examples)) < 1e-5


@pytest.mark.parametrize(("network", "examples"), [on_workers(*run) for run in ON_WORKERS])
def test_50_steps_on_two_workers_are_those_of_one_device(network: str, examples: str, values: Any) -> None:
    for ours in values:
        assert farthest(ours, of_stock(network, examples)) < 1e-5
    assert farthest(*values) == 0.0
