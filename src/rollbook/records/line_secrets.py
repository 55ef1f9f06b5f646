"""The gate for secrets: no line, page, document or log holds the value of one, wherever it might stand.

Model output, an environment's logs and the message of an error may quote one. Only values that look like
credentials (long, with digits) are replaced: a password that is an ordinary word would take that word out of
every conversation.
"""

from __future__ import annotations


class LineSecrets:
    """Knows the environment's values from when it was made, and what configs add to them later."""

    def __init__(self) -> None:
        # Here and not above: who only reads logs pays for no redactor.
        from rollbook.records import redact

        self._redact = redact
        self._redacted = redact.REDACTED.encode()
        self._learn()

    def _learn(self) -> None:
        self._remembered = self._redact.count_of_remembered()
        self._values = [value.encode() for value in self._redact.known_credentials()]

    def cleaned(self, data: bytes) -> bytes:
        if self._remembered != self._redact.count_of_remembered():
            self._learn()
        for value in self._values:
            if value in data:
                data = data.replace(value, self._redacted)
        return data

    def held_back(self, data: bytes) -> int:
        """How many bytes at the end of a part of a stream may be the beginning of a value."""
        lengths = (
            length
            for value in self._values
            for length in range(min(len(value) - 1, len(data)), 0, -1)
            if data.endswith(value[:length])
        )
        return max(lengths, default=0)


class StreamSecrets:
    """The same for a stream that comes in parts: `feed` what came, write what it returns."""

    def __init__(self) -> None:
        self._secrets = LineSecrets()
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        clean = self._secrets.cleaned(self._held + data)
        ready = len(clean) - self._secrets.held_back(clean)
        self._held = clean[ready:]
        return clean[:ready]

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return held
