"""Say what keeps a run from being parallel or exact: findings, each with its evidence and what to change."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

__all__ = ["SLOWS_PIPELINES", "Finding", "FindingRecord", "worst_first"]

SLOWS_PIPELINES = frozenset(
    {
        "no-prefetch",
        "sequential-map",
        "sequential-filter",
        "python-map",
        "sequential-interleave",
        "generator-bound",
        "map-after-cache",
        "map-before-batch",
        "shard-after-map",
        "cache-never-fills",
        "repeat-before-cache",
        "skip-after-map",
        "unbatch-then-batch",
        "window-by-window",
    }
)
"""Codes of findings of `inspect` by which a pipeline takes longer; the others are about what it gives."""


class FindingRecord(TypedDict, total=False):
    """One thing that was found out about the run; as writers and the dashboard take it."""

    step: int
    kind: str  # straggler, divergence or diagnosis
    code: str
    what: str
    evidence: str
    fix: str
    seconds: float  # lost


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found out.

    Args:
        code: a stable name to look for, such as ``"no-prefetch"``.
        what: one sentence: what is so, and what it leads to.
        evidence: what was seen, with names and figures.
        fix: what to change, as code where that can be said.
        seconds: lost in what was measured; None where that is unknown.
    """

    code: str
    what: str
    evidence: str
    fix: str
    seconds: float | None = None

    def record(self, step: int) -> FindingRecord:
        """Return it as writers and the dashboard take it."""
        record = FindingRecord(
            step=step, kind="diagnosis", code=self.code, what=self.what, evidence=self.evidence, fix=self.fix
        )
        if self.seconds is not None:
            record["seconds"] = self.seconds
        return record

    def __str__(self) -> str:
        lost = "" if self.seconds is None else f" ({self.seconds:.3g} s lost)"
        return f"{self.code}: {self.what}{lost}\n  seen: {self.evidence}\n  fix:  {self.fix}"


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Sort findings by the seconds that they cost, those of unknown cost last, in the order in which they came."""
    return sorted(findings, key=lambda finding: (finding.seconds is None, -(finding.seconds or 0.0)))
