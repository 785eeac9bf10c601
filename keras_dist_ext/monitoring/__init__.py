"""Records of steps, to files and screens."""

__all__: list[str] = []
