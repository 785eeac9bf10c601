"""Say why a placement does not help: findings, from the devices alone, and from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.training.placement.parts import Part
from keras_dist_ext.training.placement.timeline import Timeline

__all__ = ["of_devices", "of_times"]

_LEAST_GAIN = 1.25  # that perfect overlap must promise
_LEAST_BUSY = 1.15  # devices at once, where overlap was asked for


def of_devices(
    parts: Sequence[Part], homes: Sequence[str], processors: Mapping[str, str], micro_batches: int
) -> list[Finding]:
    """Return what is known before a step is made.

    Args:
        parts: with their devices.
        homes: the replicas' own devices.
        processors: what carries each device.
        micro_batches: parts of a replica's batch.
    """
    findings = []
    group = list(dict.fromkeys([homes[0], *(part.devices[0] for part in parts)]))
    if len(group) == 1:
        findings.append(
            Finding(
                "one-device",
                f"All parts of a replica are on one device, {group[0]}, so the model runs as without place.",
                f"{', '.join(part.name for part in parts)} on {group[0]}, which is the replica's own",
                "Give at least one part a device of its own.",
            )
        )
        return findings
    carriers = {processors.get(device, device) for device in group}
    if len(carriers) == 1:
        (carrier,) = carriers
        findings.append(
            Finding(
                "one-processor",
                f"{' and '.join(group)} are logical devices of one processor, whose cores and memory the parts share, "
                "so placing them makes no step faster, and fits no model that did not fit before.",
                f"{counted(len(group), 'logical device')} of {carrier.removeprefix('/physical_device:')}",
                "Use it to try things out; then give parts devices of their own, such as GPU:0 and GPU:1.",
            )
        )
    if micro_batches == 1:
        findings.append(
            Finding(
                "parts-take-turns",
                f"A part waits for the one before it, so one of {len(group)} devices works at a time: this saves "
                "memory, not time.",
                "micro_batches=1",
                f"place(..., micro_batches={2 * len(group)})",
            )
        )
    return findings


def of_times(timeline: Timeline) -> list[Finding]:
    """Return what was found by measuring steps."""
    findings = []
    seconds = timeline.seconds_by_device
    busiest = max(seconds, key=lambda device: seconds[device])
    total = math.fsum(seconds.values())
    gain = total / seconds[busiest] if seconds[busiest] else 1.0
    if len(seconds) > 1 and gain < _LEAST_GAIN:
        of_busiest = [part.name for part in timeline.parts if part.device == busiest]
        findings.append(
            Finding(
                "unequal-parts",
                f"{busiest} has {seconds[busiest] / total:.0%} of the computing: with perfect overlap a step would be "
                f"{gain:.2f} times as fast at most, and the other devices wait.",
                "; ".join(
                    f"{part.name} on {part.device}: {1e3 * part.seconds:.3g} ms a step" for part in timeline.parts
                ),
                f"Cut {', '.join(map(repr, of_busiest))} in two, or give layers of it to another device.",
            )
        )
    for transfer in timeline.transfers:
        ours = next((part.seconds for part in timeline.parts if part.name == transfer.part), 0.0)
        if transfer.seconds > ours:
            findings.append(
                Finding(
                    "slow-transfer",
                    f"To bring {transfer.part!r} its inputs, and their gradients back, takes longer than what it "
                    "computes, so that it would be faster where its inputs are.",
                    f"{transfer.num_bytes / 2**20:.3g} MiB from {transfer.source} to {transfer.target} and back: "
                    f"{1e3 * transfer.seconds:.3g} ms a step; {transfer.part} computes {1e3 * ours:.3g} ms",
                    f"Put {transfer.part!r} on {transfer.source}, or cut the model where less is handed on.",
                    transfer.seconds - ours,
                )
            )
    if timeline.micro_batches > 1 and len(seconds) > 1 and timeline.num_busy < _LEAST_BUSY:
        findings.append(
            Finding(
                "no-overlap",
                f"With micro_batches={timeline.micro_batches}, {timeline.num_busy:.2f} devices work at once: parts "
                "still take turns.",
                f"of {len(seconds)} devices, in {counted(timeline.num_steps, 'step')} of "
                f"{1e3 * timeline.step_seconds:.3g} ms",
                "Micro-batches that are too small, or a layer that sums over the whole batch (a synchronized "
                "BatchNormalization), make parts wait. Give larger batches, or fewer micro-batches.",
            )
        )
    return findings
