"""Which iterations are complete and should be in the token export, and are in no line of its manifest.

A full disk may refuse even that line, and a kill then forgets it; what the run itself has recorded tells.
"""

from __future__ import annotations

from rollbook.records.config import read_config
from rollbook.records.iterations import read_iterations
from rollbook.records.layout import TRAIN, Layout, RunFiles
from rollbook.records.token_places import TokenSource
from rollbook.records.token_settings import planned_export
from rollbook.runs.config_history import first_with_config


def not_exported(source: TokenSource) -> list[int]:
    """Empty also where nothing tells: a fine-tuning, one file of an export, another trainer's."""
    if source.info is None or (source.only is not None and source.only.is_file()):
        return []
    files = RunFiles(source.root, Layout(source.info.layout))
    if not files.config.exists() or not files.iterations.exists():
        return []
    planned = planned_export(read_config(files.config).get("trainer"))
    if planned is None:
        return []
    since, exported = first_with_config(files, source.info), {step.iteration for step in source.steps()}
    return [
        record.iteration
        for record in read_iterations(files.iterations)
        if record.split == TRAIN
        and record.iteration >= since
        and record.iteration % planned.every == 0
        and record.iteration not in exported
    ]
