"""Read what TensorFlow's profiler has written."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_dist_ext import versions

if TYPE_CHECKING:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = ["op_spans"]


def op_spans(directory: str) -> Iterator[tuple[str, float, float]]:
    """When ops ran, by name, of the profile that `tf.profiler.experimental.stop` has written to a directory.

    The profiler's files hold an event `name:type` for each op, in picoseconds after its line's begin
    (tensorflow/tsl/profiler/protobuf/xplane.proto; named in tensorflow/core/framework/op_kernel.cc, `TraceString`). On
    a GPU events are kernels, and a stat `tf_op` has that name; copies, which have the name of what they copy, are left
    out.
    """
    for path in pathlib.Path(directory).rglob("*.xplane.pb"):
        for plane in _profile(path.read_bytes()).planes:
            names = {number: event.name for number, event in plane.event_metadata.items()}
            stats = {number: stat.name for number, stat in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    name = names[event.metadata_id]
                    if name.startswith("Memcpy"):
                        continue
                    of_kernel = [s for s in event.stats if stats.get(s.metadata_id) == "tf_op"]
                    if of_kernel and line.name.startswith("Stream"):
                        name = stats.get(of_kernel[0].ref_value) or of_kernel[0].str_value
                    begin = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                    yield name.partition(":")[0], begin, begin + event.duration_ps * 1e-12


@versions.naming("Placement.measure")
def _profile(content: bytes) -> xplane_pb2.XSpace:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(content)
