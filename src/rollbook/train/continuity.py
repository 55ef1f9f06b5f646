"""Whether a run can go on from a checkpoint: its next step must see the data that it would have seen.

The order of the data is a function of the files, the seed and the size of a step. If one of them changed,
step 5 of one run and step 6 of the other would learn some rows twice and others never: that is refused. Any
other setting may change, a learning rate say, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.errors import UsageError
from rollbook.train.settings import SftSettings
from rollbook.train.token_store import Corpus
from rollbook.train.trainer_files import STATE, own_state

Values = dict[str, Any]
_MAY_CHANGE = "may_change"


def made_from(settings: SftSettings, corpus: Corpus, *, rows_a_step: int, packed: bool) -> Values:
    """What the steps of a run follow from, by the names of the settings."""
    data, model, training = settings.data, settings.model, settings.training
    files = [
        [store.report.source, store.report.samples, dataset.weight, dataset.format]
        for store, dataset in zip(corpus.stores, data.train, strict=True)
    ]
    lora = msgspec.to_builtins(model.lora)
    others = {f"training.{key}": value for key, value in msgspec.to_builtins(training).items()}
    others |= {f"model.{key}": value for key, value in msgspec.to_builtins(model).items()}
    del others["model.chat_template"]  # a path: what stands there is what counts
    return {
        "data.train": files,
        "data.max_length": data.max_length,
        "data.packing": packed,
        "data.train_on": data.train_on,
        "model.chat_template": Path(model.chat_template).read_text() if model.chat_template else None,
        "training.seed": training.seed,
        "rows a step": rows_a_step,
        "model.lora": lora,
        "the model below model.lora": None if lora is None else [model.path, model.handed_over, model.config],
        _MAY_CHANGE: others,
    }


def state_to_go_on_from(checkpoint: Path, now: Values, total_steps: int) -> tuple[Values, list[str]]:
    """The stored state, and which settings changed; refuses what cannot be gone on from."""
    state: Values = orjson.loads((checkpoint / STATE).read_bytes())
    further = f"model.path: {checkpoint} with another output_dir trains its weights further"
    try:
        before: Values = own_state(state)["made_from"]
    except KeyError:
        raise UsageError(f"{checkpoint} was saved by another trainer; {further}") from None
    different = [name for name in now if name != _MAY_CHANGE and before.get(name) != now[name]]
    if different:
        raise UsageError(
            f"{checkpoint} cannot be gone on from, for since it was saved there changed: "
            f"{', '.join(different)}. Restore that, or start over with --overwrite; {further}"
        )
    if int(state["global_step"]) > total_steps:
        raise UsageError(f"{checkpoint} has more steps than the {total_steps} of the settings; {further}")
    return state, _changes(before[_MAY_CHANGE], now[_MAY_CHANGE])


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value
    ]
