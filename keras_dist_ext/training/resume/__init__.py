"""Runs that go on after a crash."""

__all__: list[str] = []
