"""Choose a strategy, check that things live under it, and keep its workers in agreement."""

__all__: list[str] = []
