"""Say whether replicas train as one device does."""

__all__: list[str] = []
