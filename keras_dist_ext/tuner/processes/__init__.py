"""Run a search in several processes: a chief, and workers that train its trials.

In reading order:

    launch_search     ``kde.tuner.launch_search``
    allocation        GPUs or cores for each trial
    supervisor        restart processes that die
    worker_group      the processes of one tuner id
    process_role      which process this is
    role_entry        enter a search in that role
    oracle_server     serves the oracle, in the chief
    remote_oracle     the oracle of a worker, which asks the chief
    channel           calls between the processes
    screening_lease   one worker screens the strategies for all
"""

__all__: list[str] = []
