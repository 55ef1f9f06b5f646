"""The process that fine-tunes: `python -m rollbook.sft.main`, started by `rollbook sft` under supervision."""

from __future__ import annotations

from rollbook.runs.launch import Log, Started, run_child
from rollbook.sft.settings import SftSettings


def main() -> None:
    run_child("rollbook.sft.main", SftSettings, _train)


def _train(started: Started[SftSettings], log: Log) -> object:
    from rollbook.sft.train import train

    return train(
        started.settings,
        started.artifacts,
        resume=started.resume,
        overwrite=started.overwrite,
        log=log,
    )


if __name__ == "__main__":
    main()
