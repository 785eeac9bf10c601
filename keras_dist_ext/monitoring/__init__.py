"""Write what each replica does during a run to files and screens.

In reading order:

    monitor       ``kde.ReplicaMonitor``
    watch         from records of steps to intervals, findings and writers
    intervals     which steps make an interval
    exchange      gather the records of the replicas of all workers
    stragglers    which replicas are slow
    manifest      describe a run
    writers       the base class of writers, and ``kde.MemoryWriter``
    event_files   ``kde.EventWriter``, for TensorBoard
    json_lines    ``kde.JsonLinesWriter`` and ``kde.replay``
    append_file   append complete records to a file
    terminal      ``kde.TerminalWriter``
    dashboard     the tab *Replicas* of TensorBoard
"""

__all__: list[str] = []
