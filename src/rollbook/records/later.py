"""Regular expressions that are compiled when they are first used.

Dozens of them take a noticeable part of the start of a command, and most commands use few.
"""

from __future__ import annotations

import re
from typing import Any, cast


class _Later:
    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        """Only of what is not there yet: from then on each method is the compiled pattern's own."""
        found = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, found)
        return found


def compiled_later(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return cast("re.Pattern[str]", _Later(pattern, flags))
