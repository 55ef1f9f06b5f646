"""`rollbook collect`: makes the process that is to check the input, then hands over to `collect_command`.

That process loads what it needs while this one loads the rest.
"""

from __future__ import annotations

from contextlib import closing

from rollbook.collect.standby import standby_checker


def app(args: list[str], prog_name: str) -> None:
    with closing(standby_checker()) as checker:
        from rollbook.cli.collect_command import app

        app(args=args, prog_name=prog_name, obj=checker)
