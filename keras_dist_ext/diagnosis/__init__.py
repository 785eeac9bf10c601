"""Say why a run is not faster, and whether it is right.

doctor       ``kde.diagnose`` and ``kde.ParallelismDoctor``: why it is not faster
certificate  ``kde.certify``: whether replicas train what one device would
plan         ``kde.plan``: what more replicas would give
first_fit    run a script up to its first call of `fit`
"""

__all__: list[str] = []
