"""Train Keras 3 models under tf.distribute, get one device's numbers, and see what every replica does.

Importing this package imports no TensorFlow: each name loads its module when it is first used; ``__init__.pyi`` says
which. In the order in which a training script meets them:

    strategies   pick_strategy, StrategyChoice, VirtualReplicas, check_scope, ScopeGuard
    models       Model, Sequential, adopt, clone_model, load_model, local_copy, place, Placement
    steps        gather_rows, row_indices, reduce_gradients
    loops        TrainLoop, Replica, per_replica, gather, NonFinite, every, on_improvement, on_preemption, Resume
    data         distribute, bucket_by_length, audit, inspect
    seeds        ReplicaSeeds, seed_replicas, describe_seeds
    callbacks    RunCallback: what callbacks of several workers or replicas may implement
    monitoring   ReplicaMonitor, EventWriter, JsonLinesWriter, replay, MemoryWriter, TerminalWriter
    diagnosis    ParallelismDoctor, diagnose, certify, Certificate, plan
    processes    launch, RayCluster, heartbeat
    search       tuner, a package
    errors       KerasDistError, and below it BackendError, CallbackError, CertificateError, ClusterError, DataError,
                 LaunchError, LoopError, MonitorError, NonFiniteError, PlacementError, ResumeError, ScopeError,
                 SeedError, StepError, StrategyError, TunerError, WorkersError

The packages, each of which imports only from those before it: `_keras` is the only one that uses private API of Keras
and TensorFlow; `cluster` starts processes and describes a cluster; `strategy` chooses a strategy and keeps its workers
in agreement; `data` splits examples; `step` is what one replica computes; `training` has models and loops; `monitoring`
writes records; `diagnosis` judges runs; `tuner` searches hyperparameters; `examples` are scripts. Below them are
`aliases`, `errors`, `messages`, `findings`, `hashing`, `versions`, `argument_types`, `arguments` and `whole_files`,
above them `cli`.
"""

import os

from keras_dist_ext.versions import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)


if "KERAS_DIST_EXT_HEARTBEAT" in os.environ:  # `launch` has started this process, and watches its steps
    from keras_dist_ext.cluster.heartbeat import begin

    begin()
