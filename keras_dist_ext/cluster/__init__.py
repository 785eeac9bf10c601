"""Start the processes of a cluster and watch them, and read which processes participate in one.

Nothing here imports TensorFlow when it is imported. In reading order:

    launch         starts, watches and restarts a process for each worker: ``kde.launch``
    attempts       the starts of one launch, the first and those after a failure
    worker_run     how a process ended
    worker_count   how many workers start, at least and at most
    command        what a process is to run: checked, and turned into a command line
    tasks, cores   each process' task and address, and its share of the CPUs
    process_group  the processes of one launch, which end together
    process        one of them: its output, its end
    host           what a launch needs of the place where they run
    placing        the wait for places there
    local_host     this machine as that place
    ray_cluster    a Ray cluster, and the connection to it: ``kde.RayCluster``
    ray_host       it as that place
    ray_places     the room that there is on it
    ray_process    a process there, seen from here
    ray_agent      what runs on its nodes
    orphans        what processes leave behind
    worker         what runs in it
    heartbeat      what a worker reports of its steps: ``kde.heartbeat``
    hang_report    what workers do that make no progress
    failure        why a launch failed
    signals        the signals that ask a launch to end
    spec           the cluster as TF_CONFIG, MPI or a resolver describes it
    slurm          the same of SLURM
    rendezvous     the workers of a cluster wait for each other before TensorFlow connects them
"""

__all__: list[str] = []
