"""`python -m rollbook.runs.torchrun WORDS`: torchrun, which ends as its processes have ended.

Left alone it ends with 1 and a traceback of its own: where a signal has stopped it, though its processes have
saved and ended in order, and below the message of a process that has failed.
"""

from __future__ import annotations

import logging
import signal
import sys

from rollbook.runs.stop_signals import Stopped


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except SignalException:
        sys.exit(Stopped.exit_code)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # it has said why
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        print(f"rollbook: process {rank} of this job was ended by {name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)


if __name__ == "__main__":
    main()
