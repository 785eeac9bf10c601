"""Name everything that this package refuses to do.

    KerasDistError                      whatever this package raises on purpose
    ├── StrategyError (ValueError)      a strategy that is not available here
    │   └── ClusterError                TF_CONFIG or the scheduler describes no usable cluster
    ├── ScopeError (ValueError)         something lives outside the strategy's scope
    ├── SeedError (ValueError)          a seed that cannot be used, or streams that would repeat
    ├── DataError (ValueError)          data that cannot be split or fed as asked
    ├── MonitorError (ValueError)       what a monitor cannot record, or has nowhere to write
    ├── CallbackError (ValueError)      an argument that a callback cannot have, or a run that it cannot be part of
    ├── NonFiniteError (ArithmeticError) a step whose loss or gradients are NaN or infinite
    ├── WorkersError (RuntimeError)     workers that disagree about a run, or one that does not arrive
    ├── CertificateError (ValueError)   a model, data or strategy that no certificate can be made of
    ├── ResumeError (ValueError)        a run that cannot be saved, or cannot be resumed
    ├── StepError (ValueError)          a step that would not train on replicas as on one device
    ├── LoopError (ValueError)          a step of your own that would not do what it seems to
    ├── PlacementError (ValueError)     a part of a model that cannot live where it is to
    ├── TunerError (ValueError)         a search that cannot be made as asked
    ├── LaunchError (RuntimeError)      a worker process that did not start, failed or ran out of time
    │   ├── WorkerFailed                the first worker that failed, and how (in launch.py)
    │   └── NotStarted                  a process that the system has no room for (in host.py)
    └── BackendError (ImportError)      Keras that is not Keras 3 on TensorFlow, or keras-tuner that is not there

A message says what was found, what it leads to and what to do, with names and numbers.
"""

__all__ = [
    "KerasDistError",
    "StrategyError",
    "ClusterError",
    "ScopeError",
    "SeedError",
    "DataError",
    "MonitorError",
    "CallbackError",
    "NonFiniteError",
    "WorkersError",
    "CertificateError",
    "ResumeError",
    "StepError",
    "LoopError",
    "PlacementError",
    "TunerError",
    "LaunchError",
    "BackendError",
]


class KerasDistError(Exception):
    """Whatever this package raises on purpose."""


class StrategyError(KerasDistError, ValueError):
    """A strategy that is not available on this machine, with these devices, in this process."""


class ClusterError(StrategyError):
    """TF_CONFIG, or what the scheduler says, does not describe a cluster that could train."""


class ScopeError(KerasDistError, ValueError):
    """A variable, optimizer, metric or seed lives outside the strategy's scope."""


class SeedError(KerasDistError, ValueError):
    """A seed that cannot be used, or random generators that would repeat each other."""


class DataError(KerasDistError, ValueError):
    """Data that cannot be split over workers and replicas, or fed to them, as asked."""


class MonitorError(KerasDistError, ValueError):
    """What a monitor is asked to do and cannot: a model it cannot see into, or nowhere to write."""


class CallbackError(KerasDistError, ValueError):
    """An argument that a callback cannot have, or a run that it cannot be part of."""


class NonFiniteError(KerasDistError, ArithmeticError):
    """A step in which a replica's loss or gradients are NaN or infinite; its update was left out."""


class WorkersError(KerasDistError, RuntimeError):
    """Workers that disagree about a run, so that they would deadlock, or one that does not arrive."""


class CertificateError(KerasDistError, ValueError):
    """A model, data or a strategy that no certificate can be made of."""


class ResumeError(KerasDistError, ValueError):
    """A run that cannot be saved as asked, or that cannot be resumed from its checkpoint."""


class StepError(KerasDistError, ValueError):
    """A step of a model that would not train on replicas as on one device."""


class LoopError(KerasDistError, ValueError):
    """A step of a training loop that would not do what it seems to, or a loop that lacks something."""


class TunerError(KerasDistError, ValueError):
    """A search of hyperparameters that cannot be made as asked, or a project that another search has begun."""


class PlacementError(KerasDistError, ValueError):
    """A part of a model that does not exist, or cannot live on the device that it is to live on."""


class LaunchError(KerasDistError, RuntimeError):
    """A worker process that did not start, failed, or ran out of time."""


class BackendError(KerasDistError, ImportError):
    """Keras as installed or configured is not Keras 3 on TensorFlow, or what an extra brings is not there."""
