"""The process that checks an input, made first of all.

It loads what the check needs while this one loads what everything else needs, so nothing may be imported here
that takes long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.forked import Standby

if TYPE_CHECKING:
    from rollbook.collect.input_rows import Checked


# A thread that numpy begins for linear algebra spins for a while, on the core that this process is on.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


def standby_checker() -> Standby[Checked]:
    return Standby("rollbook.collect.input_pass", "check_input", _ENVIRONMENT)
