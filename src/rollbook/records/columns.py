"""The setting `columns`: which fields of a dataset are its prompt and its answer, under other names."""

from __future__ import annotations

import msgspec


class Columns(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Names of fields; dots descend. What is not named is found by its usual name."""

    prompt: str | None = None  # text, or messages
    messages: str | None = None  # the same, under the name that fits messages
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("prompt and messages mean the same field; leave one of them out")


USUAL = Columns()
