"""Choose which cases of a test run: the quick ones always, the others in turn from commit to commit."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TURNS", "handful", "head", "is_its_turn", "rotating"]

TURNS = 40
"""A case that rotates runs at one of so many commits."""


def rotating(cases: Iterable[Any], quick: Collection[Any], *, slow: Collection[Any] = ()) -> list[Any]:
    """Make parameters of a test: the default run has the cases in ``quick``, CI also a share of the others.

    The share changes with the commit, so that every case comes up over time; ``--every-case`` runs all of them.

    Args:
        cases: all of them.
        quick: those that every run has.
        slow: those that CI always has, because nothing else runs some lines.

    Raises:
        ValueError: one of those named is none of the cases: runs would go without it.
    """
    cases = list(cases)
    unknown = [case for case in (*quick, *slow) if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}; there are {cases}")
    return [case if case in quick else _marked(case, "slow" if case in slow else "rotating") for case in cases]


def _marked(case: Any, name: str) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=getattr(pytest.mark, name))


def is_its_turn(name: str, turn: int = 0, turns: int = TURNS, *, commit: str) -> bool:
    """Say whether a case runs at a commit: exactly one of the `turns` of a name does.

    Args:
        name: of the case, or of several that take turns.
        turn: which of those this is, from 0.
        turns: how many they are.
        commit: the hash of the commit.
    """
    return _number(name, commit) % turns == turn


def _number(name: str, commit: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{commit} {name}".encode()).digest()[:8], "big")


def handful(tests: Mapping[str, tuple[int, Collection[str]]], size: int, *, commit: str) -> list[str]:
    """Choose the cases of a commit from a suite that would take too long: one of each of a few tests.

    Args:
        tests: how much each counts, and its cases.
        size: what they may count together.
        commit: the hash of the commit.
    """
    chosen = []
    for name in sorted(tests, key=lambda name: _number(name, commit)):
        counts, cases = tests[name]
        if counts <= size:
            size -= counts
            chosen.append(min(cases, key=lambda case: _number(case, commit)))
    return chosen


@functools.cache
def head(root: Path) -> str:
    """Return the hash of the commit that is checked out, or "no commit" outside of a repository."""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no commit"
