"""The process that trains: `python -m rollbook.rl.main`, started by `rollbook rl` alone or by torchrun."""

from __future__ import annotations

from rollbook.rl.settings import RlSettings
from rollbook.runs.launch import Log, Started, run_child


def main() -> None:
    run_child("rollbook.rl.main", RlSettings, _train)


def _train(started: Started[RlSettings], log: Log) -> object:
    from rollbook.rl.train import train

    return train(started.settings, resume="start-over" if started.overwrite else started.resume, log=log)


if __name__ == "__main__":
    main()
