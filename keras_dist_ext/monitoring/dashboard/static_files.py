"""Serve the page: the files of `static/`, and nothing else."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["StaticFiles"]

_TYPES = {".js": "text/javascript", ".css": "text/css", "": "text/plain"}


class StaticFiles:
    """The files of a folder inside the package, by their path in it."""

    def __init__(self, folder: Path = Path(__file__).parent / "static") -> None:
        self._files: Mapping[str, Path] = {
            file.relative_to(folder).as_posix(): file
            for file in folder.rglob("*")
            if file.suffix in (".js", ".css") or file.name == "LICENSE"
        }

    @property
    def paths(self) -> list[str]:
        """Every path that is served."""
        return sorted(self._files)

    def read(self, path: str) -> tuple[bytes, str] | None:
        """Return the content of a file and its type; None if it does not exist: a path is looked up, never joined."""
        file = self._files.get(path)
        if file is None:
            return None
        return file.read_bytes(), _TYPES[file.suffix]
