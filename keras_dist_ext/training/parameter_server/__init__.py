"""Train under a ``ParameterServerStrategy``.

In reading order:

    coordinator   hand steps to the workers
    worker_steps  what a worker runs
    worker_data   what a worker reads
    worker_calls  calls to workers, and what they return
    pool          add up the metrics of all workers
"""

__all__: list[str] = []
