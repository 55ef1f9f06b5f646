"""The gate for secrets: no line, page, document or log holds the value of one, wherever it might stand.

Model output, an environment's logs and the message of an error may quote one. What is looked for, and in
which forms, `secret_values` says. In JSON only strings are searched, so that no number changes and no line
breaks.
"""

from __future__ import annotations

import re

# A string, and in a string an escape, which no value may begin in the middle of.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_ESCAPE = rb"\\(?:u[0-9a-fA-F]{4}|.)"


class LineSecrets:
    """Knows the environment's values from when it was made, and what configs add to them later."""

    def __init__(self) -> None:
        # Here and not above: who only reads logs pays for no redactor.
        from rollbook.records import secret_values

        self._source = secret_values
        self._redacted = secret_values.REDACTED.encode()
        self._learn()

    def _learn(self) -> None:
        self._remembered = self._source.count_of_remembered()
        self._values = [form.encode("utf-8", "surrogateescape") for form in self._source.known_values()]
        any_of_them = b"|".join(map(re.escape, self._values))
        self._in_strings = re.compile(b"(" + any_of_them + b")|" + _ESCAPE, re.DOTALL)

    def cleaned(self, data: bytes) -> bytes:
        """Text of any kind."""
        for value in self._held_in(data):
            data = data.replace(value, self._redacted)
        return data

    def cleaned_json(self, data: bytes) -> bytes:
        """One or more JSON values."""
        if not self._held_in(data):
            return data
        return _STRING.sub(lambda string: self._in_strings.sub(self._replaced, string[0]), data)

    def held_back(self, data: bytes) -> int:
        """How many bytes at the end of a part of a stream may be the beginning of a value."""
        lengths = (
            length
            for value in self._values
            for length in range(min(len(value) - 1, len(data)), 0, -1)
            if data.endswith(value[:length])
        )
        return max(lengths, default=0)

    def _held_in(self, data: bytes) -> list[bytes]:
        if self._remembered != self._source.count_of_remembered():
            self._learn()
        return [value for value in self._values if value in data]

    def _replaced(self, match: re.Match[bytes]) -> bytes:
        return self._redacted if match[1] else match[0]


class StreamSecrets:
    """The same for a stream that comes in parts: `feed` what came, write what it returns.

    What has a credential's shape is redacted too.
    """

    def __init__(self) -> None:
        from rollbook.records.redact import beginning_of_a_shape, redact_shapes

        self._secrets = LineSecrets()
        self._redact_shapes, self._beginning_of_a_shape = redact_shapes, beginning_of_a_shape
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        clean = self._secrets.cleaned(self._held + data)
        ready = len(clean) - max(self._secrets.held_back(clean), self._beginning_of_a_shape(clean))
        self._held = clean[ready:]
        return self._redact_shapes(clean[:ready])

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return self._redact_shapes(held)
