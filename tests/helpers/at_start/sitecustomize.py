"""Watches one rank of a launched run: Python imports this file at its start from a directory on PYTHONPATH.

`rollbook rl` starts torchrun, which starts the ranks, so no test can call `self_kill.watch` in one of them.
"""

import json
import os
from pathlib import Path

given = json.loads(os.environ.get("ROLLBOOK_TEST_WATCH", "{}"))
if given and str(given.pop("rank")) == os.environ.get("RANK"):
    del os.environ["ROLLBOOK_TEST_WATCH"]  # of this process alone, not of those that it starts
    from helpers.self_kill import watch

    watch(Path(given.pop("root")), **given)
