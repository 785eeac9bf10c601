"""Models and loops over steps."""

__all__: list[str] = []
