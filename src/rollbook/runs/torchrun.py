"""`python -m rollbook.runs.torchrun WORDS`: torchrun, which ends with 130 where a signal has stopped it.

Left alone it ends with 1 and a traceback of its own, as if something had failed, though its processes have
saved and ended in order.
"""

from __future__ import annotations

import sys

from rollbook.runs.stop_signals import Stopped


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException:
        sys.exit(Stopped.exit_code)


if __name__ == "__main__":
    main()
