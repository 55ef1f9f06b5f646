"""The collector of NeMo Gym alone, by its own command, before an agent server that answers `/run` at once.

    python collect_gym.py URL INPUT IN_FLIGHT

It plans, sends the rows, and appends what comes back to a file that it flushes and does not sync. The metrics
of the finished run would be computed by the agent server, which is not measured here: they are turned off.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from nemo_gym.cli.main import main


def words(base_url: str, path: Path, in_flight: int) -> list[str]:
    """What one types to collect from agents that run already."""
    head = urlsplit(base_url)
    return [
        *("gym", "eval", "run", "--no-serve"),
        f"+head_server.host={head.hostname}",
        f"+head_server.port={head.port}",
        "+agent_name=bench",
        f"+input_jsonl_fpath={path}",
        f"+output_jsonl_fpath={path.with_name('out.jsonl')}",
        f"+num_samples_in_parallel={in_flight}",
        "+disable_aggregation=true",
    ]


if __name__ == "__main__":
    sys.argv = words(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    main()
