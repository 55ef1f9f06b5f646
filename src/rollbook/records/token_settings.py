"""The settings of the token export: the block `trainer.experimental.token_export` of an RL or SFT config.

trainer:
  experimental:
    token_export:      # an empty block is enough
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.records.identity import derive_seed
from rollbook.records.token_columns import COLUMNS, EXPORTED, with_sources

ALWAYS = ("token_ids", "loss_mask")  # without these no other column can be read


class TokenExportSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    path: str | None = None  # by default <log_path>/token_exports/rank_N.jsonl
    format: Literal["jsonl", "parquet"] = "jsonl"
    every: Annotated[int, msgspec.Meta(ge=1)] = 1  # iterations, or optimiser steps of a fine-tuning
    # Of the sequences; which ones follows from a hash of the trajectory's key.
    fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    columns: list[str] | None = None  # all by default

    def __post_init__(self) -> None:
        for name in self.columns or ():
            if name not in EXPORTED:
                near = difflib.get_close_matches(name, EXPORTED, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COLUMNS)}"
                raise ValueError(f"columns: {name!r} is not a column of the export; {hint}")
        if self.path is not None and not self.path.strip("/. "):
            raise ValueError(f"path {self.path!r} names no file or directory")

    def exports(self, name: str) -> bool:
        """Whether the export has a column. In Parquet the ones that another follows from stand for it."""
        if self.columns is None:
            return True
        wanted = {*ALWAYS, *self.columns}
        return name in (with_sources(wanted) if self.format == "parquet" else wanted)


def is_chosen(fraction: float, seed: int, places: Sequence[str | int]) -> bool:
    """Whether an export of a fraction of the sequences has the one at these places."""
    return fraction >= 1 or derive_seed("token_export", seed, *places) < fraction * 2**63


class ExperimentalSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    token_export: TokenExportSettings | bool = False


class TrainerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The block `trainer` of a config."""

    experimental: ExperimentalSettings = ExperimentalSettings()

    @property
    def token_export(self) -> TokenExportSettings | None:
        """The settings of the export, or None where it is off."""
        found = self.experimental.token_export
        return found if isinstance(found, TokenExportSettings) else None


class PlannedExport(msgspec.Struct):
    """What config.json says of the rows that an export is to have."""

    every: int = 1
    fraction: float = 1.0


def planned_export(trainer: Any) -> PlannedExport | None:
    """From the block `trainer` of a config.json; None where the export is off."""
    experimental = trainer.get("experimental") if isinstance(trainer, Mapping) else None
    found = experimental.get("token_export") if isinstance(experimental, Mapping) else None
    return msgspec.convert(found, PlannedExport) if isinstance(found, Mapping) else None


def with_token_export(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config in which an empty block `token_export:` is one with the defaults."""
    trainer = values.get("trainer")
    if not isinstance(trainer, Mapping):
        return dict(values)
    block = trainer.get("experimental")
    if not isinstance(block, Mapping) or "token_export" not in block:
        return dict(values)
    given = block["token_export"]
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        raise UsageError(
            f"trainer.experimental.token_export must be a block of settings, not {given!r}; an empty one "
            "turns the export on, false turns it off"
        )
    filled = {} if given is None or given is True else given
    return {**values, "trainer": {**trainer, "experimental": {**block, "token_export": filled}}}
