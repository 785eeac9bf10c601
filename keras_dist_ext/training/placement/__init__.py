"""Put parts of a model on different devices: ``kde.place``.

In reading order:

    place      ``kde.place`` and ``kde.Placement``
    groups     a group of devices for each replica
    parts      the layers of a part
    variables  make variables anew on other devices
    trace      where the ops of a step run
    timeline   measure when each part works
    verdict    why a placement does not help
"""

__all__: list[str] = []
