"""The state of every random generator of this process as JSON: random, numpy, torch and CUDA.

A loop saves it with a checkpoint and puts it back on resume, so that what follows draws the numbers that an
uninterrupted run would have drawn. It is text, never a pickle: a pickle runs whatever its author wrote.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollbook.errors import BadFileError

RANDOM_STATE = "random_state.json"


def seed_generators(seed: int) -> None:
    """Begin every generator of this process anew: ours, and those that a model's or a user's code may ask."""
    random.seed(seed)
    if (numpy := _imported("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := _imported("torch")) is not None:
        torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Plain values that `json` takes. numpy and torch are asked only if this process has imported them:
    one that another thread (that of a tracker, say) is still importing has drawn no number yet."""
    version, internal, next_gauss = random.getstate()
    state: dict[str, Any] = {"random": [version, list(internal), next_gauss]}
    if (numpy := _imported("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    if (torch := _imported("torch")) is not None:
        state["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available():
            state["cuda"] = [_text(device) for device in torch.cuda.get_rng_state_all()]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `capture_random_state` returned; generators that it does not name are left alone."""
    if "random" in state:
        version, internal, next_gauss = state["random"]
        random.setstate((version, tuple(internal), next_gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available():
            for device, text in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(text), device)


def encode_random_state() -> bytes:
    # Not orjson: the state of some generators of numpy has integers of 128 bits.
    return json.dumps(capture_random_state(), sort_keys=True).encode() + b"\n"


def read_random_state(path: Path) -> None:
    """Restore what a file holds; BadFileError where that is no random state."""
    try:
        state = json.loads(path.read_bytes())
        restore_random_state(state)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise BadFileError(path, f"is not the state of random generators: {error}") from None


def _imported(name: str) -> Any:
    """The module if its import is over, else None."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _text(state: Any) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> Any:
    import torch

    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
