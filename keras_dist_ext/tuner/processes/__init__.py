"""Run a search as several processes.

In reading order:

    launch_search   ``kde.tuner.launch_search``
    parallel        divide the machine among trials
    supervisor      start processes again that die
    crew            the processes of one tuner id
    place, part     which process this is, and what it does
    chief           serves the oracle
    remote_oracle   stands for the oracle in a worker
    channel         calls between the processes
    measuring       one worker makes the first pass
"""

__all__: list[str] = []
