"""Ends a training that has diverged, so that its weights are never handed over as a result.

A step that is not finite is left out, which keeps a bad batch from doing harm. Where many are left out, the
weights themselves are broken: they give nothing that is finite any more. The same where the last one was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from rollbook.errors import RollbookError

WINDOW = 100  # steps that are looked back at
MOST = 3  # of them that may be not finite
MaxNonfiniteSteps = Annotated[int, msgspec.Meta(ge=0)]


class DivergedError(RollbookError):
    """Raised where too many steps were not finite. Nothing is saved, so `--resume` begins before them."""


class StepsLeftOut:
    """The optimiser steps of a run that were not finite, counted from 1."""

    def __init__(
        self, most: int, setting: str, *, taken: int = 0, left_out: Iterable[int] = (), own_loss: str = ""
    ) -> None:
        """`most` is the value of `setting`; `taken` and `left_out` are those of the run so far.

        `own_loss` is the function of a loss that the user wrote.
        """
        self._most, self._setting, self._own_loss = most, setting, own_loss
        self.taken, self.left_out = taken, list(left_out)

    def note(self, is_left_out: bool) -> None:
        self.taken += 1
        if is_left_out:
            self.left_out.append(self.taken)
        self.left_out = [number for number in self.left_out if number > self.taken - WINDOW]

    def problem(self, *, is_last: bool) -> str | None:
        """Why the run has diverged, and what to do; None while it has not. `is_last`: no step will follow."""
        number, looked_at = len(self.left_out), min(self.taken, WINDOW)
        if number > self._most:
            limit = f"{self._setting} allows {self._most}"
            what = f"{number} of the last {looked_at} optimiser steps were not finite, and {limit}"
        elif is_last and self.left_out[-1:] == [self.taken]:
            what = "the last optimiser step was not finite"
        else:
            return None
        loss = f" The loss was computed by {self._own_loss}." if self._own_loss else ""
        return (
            f"the run has diverged: {what}.{loss} Nothing is handed over. Look at loss and gradient before "
            "that (rollbook plot); then start over with a lower learning rate, or without the data that does "
            "it"
        )
