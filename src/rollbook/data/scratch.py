"""A place for what does not fit into memory: a hidden directory beside the output, gone when the work is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollbook.errors import WriteError


@contextmanager
def scratch_beside(output: Path | None) -> Iterator[Path]:
    """On the disk that has room for the output, since a temporary directory may be memory."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="rollbook-") as directory:
            yield Path(directory)
        return
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as directory:
            yield Path(directory)
    except OSError as error:
        raise WriteError(f"{output}: not made ({error}); nothing is left of it") from error
