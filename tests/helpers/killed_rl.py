"""`python -m helpers.killed_rl WORDS` is `python -m rollbook.rl.main WORDS`, watched by `self_kill.watch`.

The variable WATCH is a JSON object with what `watch` is given; without it nothing is watched.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from helpers.self_kill import WATCH, watch

if __name__ == "__main__":
    if text := os.environ.pop(WATCH, ""):
        given = json.loads(text)
        log = given.pop("log", None)
        watch(Path(given.pop("root")), log=None if log is None else Path(log), **given)
    from rollbook.rl.main import main

    main()
