"""The process that trains: `python -m rollbook.train.main --settings FILE --artifacts DIR [--resume]`.

Started by `rollbook sft` under supervision, alone or by torchrun.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from rollbook.errors import RollbookError
from rollbook.train.settings import SftSettings


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollbook.train.main")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    settings = msgspec.json.decode(given.settings.read_bytes(), type=SftSettings)
    try:
        from rollbook.train.sft import train

        train(settings, given.artifacts, resume=given.resume, say=_say)
    except RollbookError as error:
        print(f"rollbook: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
