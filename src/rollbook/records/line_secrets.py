"""No line of a log holds the value of a secret environment variable, wherever in the line it might stand.

Model output, an environment's logs and the message of an error may quote one. Only values that look like
credentials (long, with digits) are replaced: a password that is an ordinary word would take that word out of
every conversation.
"""

from __future__ import annotations

import os


class LineSecrets:
    """The values as they are now; the longest first, so that one inside another leaves no rest."""

    def __init__(self) -> None:
        # Here and not above: who only reads logs pays for no redactor.
        from rollbook.records.redact import REDACTED, environment_credentials

        self._values = [value.encode() for value in environment_credentials(os.environ)]
        self._redacted = REDACTED.encode()

    def cleaned(self, data: bytes) -> bytes:
        for value in self._values:
            if value in data:
                data = data.replace(value, self._redacted)
        return data
