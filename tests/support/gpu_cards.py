"""Share the cards of a machine out for tests/gpu: how each is cut, and which replicas are summed by NCCL.

    plan = plan_for(num_cards=2, num_processes=14)
    plan.cuts                # (2, 2): logical devices of each card, numbered card by card
    plan.devices(2)          # (0, 2): a card each
    plan.sums_by_nccl(2)     # True; not of 4, of which two share a card: NCCL takes one rank a card

Plain numbers, without TensorFlow: tests/unit/test_gpu_cards.py has machines with other numbers of cards than ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NUM_DEVICES", "Plan", "cut", "plan_for"]

NUM_DEVICES = 4
"""That a process has, at least, so that there are two and four replicas."""

_CARD_MIB = 74 * 1024  # of one of 78 GiB
_CUDA_MIB = 900  # that a process takes of a card for CUDA and its libraries
_WORKER_MIB = 1600  # that one takes which tests start, all in all
_NUM_WORKERS = 10  # of those, at most, at a time
_MOST_MIB = 1536


@dataclass(frozen=True)
class Plan:
    """What a process that runs tests does with the cards, and what the workers do that it starts."""

    cuts: tuple[int, ...]  # logical devices of each card; none: there is no card
    memory_mib: int  # of each logical device

    def devices(self, num_replicas: int) -> tuple[int, ...]:
        """Number the logical devices of so many replicas, on as many cards as there are."""
        firsts = itertools.accumulate(self.cuts, initial=0)
        of_cards = [range(first, first + size) for first, size in zip(firsts, self.cuts, strict=False)]
        turns = itertools.zip_longest(*of_cards)
        return tuple(device for turn in turns for device in turn if device is not None)[:num_replicas]

    def sums_by_nccl(self, num_replicas: int) -> bool:
        """Say whether so many replicas of one process have a card each."""
        return 2 <= num_replicas <= len(self.cuts)

    @property
    def is_cut(self) -> bool:
        """Whether cards have several logical devices: TensorFlow then sums by its ring, unless it is told otherwise."""
        return any(size > 1 for size in self.cuts)

    def card_of_worker(self, task: int) -> int:
        """Return the one card that a worker sees."""
        return task % len(self.cuts)

    def implementations(self, num_workers: int) -> tuple[str, ...]:
        """Name the implementations of collectives that so many workers can use; launches take them in turn."""
        return ("ring", "nccl") if num_workers <= len(self.cuts) else ("ring",)


def plan_for(num_cards: int, num_processes: int = 1, memory_mib: int | None = None) -> Plan:
    """Share cards out.

    Args:
        num_cards: that TensorFlow sees.
        num_processes: that run tests at a time, each on all cards.
        memory_mib: of a logical device, instead of a share of a card of 78 GiB.
    """
    if not num_cards:
        return Plan((), memory_mib or 0)
    cuts = tuple(max(1, (NUM_DEVICES - card + num_cards - 1) // num_cards) for card in range(num_cards))
    workers_mib = _WORKER_MIB * -(-_NUM_WORKERS // num_cards)
    of_process = (_CARD_MIB - workers_mib) // num_processes
    return Plan(cuts, memory_mib or min(_MOST_MIB, (of_process - _CUDA_MIB) // cuts[0]))


def cut(config: Any, cards: Sequence[Any], plan: Plan, task: int | None = None) -> None:
    """Have TensorFlow make the logical devices, before it is initialised.

    Args:
        config: `tf.config`.
        cards: all that it sees; none may be hidden where one is cut, since it counts both to choose its collectives.
        plan: for them.
        task: of a worker, which sees one card and has one device.
    """

    def device() -> Any:
        return config.LogicalDeviceConfiguration(memory_limit=plan.memory_mib)

    if task is not None:
        card = cards[plan.card_of_worker(task)]
        config.set_visible_devices([card], "GPU")
        config.set_logical_device_configuration(card, [device()])
        return
    for card, size in zip(cards, plan.cuts, strict=True):
        config.set_logical_device_configuration(card, [device() for _ in range(size)])
