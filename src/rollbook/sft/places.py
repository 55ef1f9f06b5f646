"""Which files in an output directory belong to a run, and who may begin one there. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from rollbook.errors import UsageError
from rollbook.records.atomic import make_directory
from rollbook.records.checkpoints import Choice, choose, none_is_whole, read_checkpoints
from rollbook.records.layout import RunFiles
from rollbook.records.locks import FileLock
from rollbook.runs.saved_models import newest_model

LF_ARGUMENTS = "llamafactory.yaml"  # marks a directory that LLaMA-Factory trains in
_OF_A_RUN = re.compile(  # everything else in the directory is the user's
    r"checkpoint-\d+|(?:trainer_log|alerts|metrics|checkpoints|iterations)\.jsonl|handed_over|code\.diff"
    r"|training_(?:eval_)?loss\.png|training_args\.bin|llamafactory\.yaml"
    r"|(?:run|trainer_state|train_results|all_results|eval_results|config|generation_config)\.json"
    r"|model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?|adapter_(?:model\.safetensors|config\.json)"
    r"|chat_template\.jinja|tokenizer(?:_config)?\.json|(?:special_tokens_map|added_tokens)\.json"
)


def refuse_occupied(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """A directory with something in it is only used by who says what to do with it."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"training.output_dir {directory} is a file; choose another")
    there = directory.is_dir() and any(directory.iterdir())
    has_run = RunFiles(directory).run.exists() or (directory / LF_ARGUMENTS).exists()
    if there and not resume and not overwrite:
        newest = newest_model(directory)
        again = "--resume starts its run over, " if has_run else ""
        hint = f"--resume continues from step {newest.step}, " if newest else again
        raise UsageError(
            f"{directory} is not empty; {hint}--overwrite sets aside the run that is there and starts over, "
            "or choose another output_dir"
        )
    if resume and there and not has_run:
        raise UsageError(f"{directory} has no run in it to resume; choose another output_dir")


def checkpoint_to_resume(directory: Path, *, verify: bool = True) -> Choice:
    """The newest checkpoint that is what was saved; none where none was saved.

    `verify` compares its files with their digests, and not only their sizes.
    """
    choice = choose(read_checkpoints(RunFiles(directory).checkpoints), directory, verify=verify)
    if choice.stored is None and choice.passed_over:
        raise none_is_whole(directory, choice.passed_over, "start over with --overwrite")
    return choice


def set_aside_run(directory: Path) -> Path | None:
    """Move the files of the run in a directory below `superseded/`; returns where they are now.

    Refused (LockedError) while a trainer is at work there.
    """
    with FileLock(RunFiles(directory).run):
        old = [path for path in directory.iterdir() if _OF_A_RUN.fullmatch(path.name)]
        if not old:
            return None
        number = 1
        while (keep := directory / "superseded" / f"run_{number:03d}").exists():
            number += 1
        make_directory(keep)
        for path in old:
            path.rename(keep / path.name)
        return keep
