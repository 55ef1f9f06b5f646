"""`python -m helpers.without_weights MODULE WORDS` is `python -m MODULE WORDS` without files of weights.

Where the variable WITHOUT_WEIGHTS is set, every function that opens a file of tensors raises in it. Of the
weights that it is sent, LOSES_WEIGHTS makes zeros. LARGEST_FILE is how many bytes it can write into one, as
if the disk were full then.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys
from typing import Any

VARIABLE = "WITHOUT_WEIGHTS"
LOSES = "LOSES_WEIGHTS"
LARGEST_FILE = "LARGEST_FILE"


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("this process was to read no file of weights")


def forbid() -> None:
    """Under every name that a module has imported it by, of libraries too."""
    import peft
    import safetensors.torch
    import transformers.modeling_utils

    assert peft and transformers  # they have their own names for these
    known = (safetensors.safe_open, safetensors.torch.load_file, safetensors.torch.safe_open)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if any(value is one for one in known):
                setattr(module, name, _refuse)


def lose() -> None:
    from rollbook.train.processes import Processes

    receive = Processes.share_tensor
    Processes.share_tensor = lambda self, tensor: receive(self, tensor).zero_()  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.pop(VARIABLE, ""):
        forbid()
    if os.environ.pop(LOSES, ""):
        lose()
    if most := int(os.environ.pop(LARGEST_FILE, "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
