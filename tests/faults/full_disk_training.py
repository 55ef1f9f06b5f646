"""Trainings whose token export is on a small tmpfs, mounted by this process in the namespace it was given.

    python full_disk_training.py DIRECTORY KILOBYTES ...     # the settings are in ROLLBOOK_SETTINGS

Prints a line of JSON for each size: what is on the tmpfs, and what `tokens` and `audit` say of the run; then
the same after the disk has grown and the run was resumed from its first checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

import rollbook
from rollbook.errors import UsageError
from rollbook.records.token_places import token_source
from rollbook.rl.settings import RlSettings
from rollbook.rl.train import train
from rollbook.tokens.report import token_report


def main() -> None:
    directory = Path(sys.argv[1])
    asked = msgspec.json.decode(os.environ["ROLLBOOK_SETTINGS"], type=RlSettings)
    for size in sys.argv[2:]:
        small, log_path = directory / f"small-{size}", directory / f"run-{size}"
        small.mkdir()
        mount(small, f"size={size}k")
        settings = on_disk(asked, small, log_path)
        train(settings, log=lambda _: None)
        full = told(log_path, small)
        mount(small, "remount,size=64m")
        train(settings, resume="000001", log=lambda _: None)
        print(json.dumps([full, told(log_path, small)]))


def mount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)


def on_disk(settings: RlSettings, small: Path, log_path: Path) -> RlSettings:
    """With the export on the small disk, and the run on the large one."""
    export = settings.trainer.token_export
    assert export is not None
    export = msgspec.structs.replace(export, path=str(small / "x"))
    experimental = msgspec.structs.replace(settings.trainer.experimental, token_export=export)
    trainer = msgspec.structs.replace(settings.trainer, experimental=experimental)
    return msgspec.structs.replace(settings, log_path=str(log_path), trainer=trainer)


def told(log_path: Path, small: Path) -> dict[str, Any]:
    files = {path.name: path.stat().st_size for path in (small / "x").iterdir()}
    manifest = (small / "x" / "manifest.jsonl").read_text()
    try:
        report = msgspec.to_builtins(token_report(token_source(log_path)), str_keys=True)
    except UsageError as error:
        report = {"error": str(error)}
    audit = rollbook.audit(log_path)
    return {
        "files": {name: size for name, size in files.items() if not name.startswith(".")},
        "manifest": [json.loads(line) for line in manifest.splitlines()],
        "report": report,
        "findings": [msgspec.to_builtins(finding) for finding in audit.findings],
        "verdict": audit.verdict,
        "complete": [json.loads(line)["iteration"] for line in (log_path / "iterations.jsonl").open()],
        "alerts": [json.loads(line) for line in (log_path / "alerts.jsonl").open()],
    }


if __name__ == "__main__":
    main()
