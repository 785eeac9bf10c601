"""Write what each replica did to files and screens.

In reading order:

    monitor       ``kde.ReplicaMonitor``
    watch         from records of steps to intervals, findings and writers
    intervals     which steps make an interval
    exchange      put together what the replicas of all workers did
    stragglers    which replica holds the others up
    manifest      describe a run
    writers       what writers have in common, and ``kde.MemoryWriter``
    event_files   ``kde.EventWriter``, for TensorBoard
    json_lines    ``kde.JsonLinesWriter`` and ``kde.replay``
    append_file   append whole records to a file
    terminal      ``kde.TerminalWriter``
    dashboard     the tab *Replicas* of TensorBoard
"""

__all__: list[str] = []
