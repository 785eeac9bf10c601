"""Models made elsewhere become ours."""

__all__: list[str] = []
