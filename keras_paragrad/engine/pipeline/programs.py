"""What the programs that XLA compiled are called in a trace."""

from pathlib import Path

from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

_PLANE = "/host:metadata"


def program_names(file: Path) -> dict[str, str]:
    """The names of programs, which hold those of the functions that were compiled, by their numbers in a trace.

    Args:
        file: An `.xplane.pb`.
    """
    # xprof's reader leaves out what isn't an event.
    planes = XSpace.FromString(file.read_bytes()).planes
    metadata = [each for plane in planes if plane.name == _PLANE for each in plane.event_metadata.values()]
    return {str(each.id): each.name for each in metadata}
