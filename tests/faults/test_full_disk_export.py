"""A token export on a disk that is really full: the run goes on, and everything says what is missing.

The disk of the export is a tmpfs of some pages, the run itself is elsewhere. Between the sizes lies where the
first thing is refused: a record, a line of the manifest, or Parquet's copy of its stream.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faults.harness import HERE, mountable, run
from helpers.rl_runs import settings_of, write_setup

ITERATIONS = 5
PATIENCE_S = 600.0


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("jsonl", (8, 24, 40)),
        pytest.param("jsonl", range(4, 100, 8), marks=pytest.mark.faults),
        pytest.param("parquet", range(4, 100, 8), marks=pytest.mark.faults),
    ],
)
def test_an_export_on_a_full_tmpfs(tmp_path: Path, kind: str, sizes: Any) -> None:
    namespace = mountable("unprivileged", tmp_path)
    export = {"experimental": {"token_export": {"format": kind}}}
    changes = {"iterations": ITERATIONS, "evals": [], "save_every": 1, "trainer": export}
    settings = settings_of(write_setup(tmp_path / "setup"), tmp_path, **changes)
    script, words = HERE / "full_disk_training.py", [str(size) for size in sizes]
    done = run(
        [*namespace, sys.executable, str(script), str(tmp_path), *words],
        patience=PATIENCE_S,
        ROLLBOOK_SETTINGS=msgspec.json.encode(settings).decode(),
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(words)
    first_gaps = {check_full(full) for full, _ in told}
    for full, after in told:
        check_resumed(full, after)
    assert 0 in first_gaps and len(first_gaps) > 1  # at once, and in the middle


def check_full(told: dict[str, Any]) -> int:
    """Returns the first iteration without its records."""
    assert told["complete"] == list(range(ITERATIONS))  # the run went on
    lines, report = told["manifest"], told["report"]
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    gaps = [line for line in lines if not line["complete"]]
    for line in gaps:
        (part,) = line["ranks"]
        assert line["selected"] > 0 == line["records"] == part["records"] and not part["complete"]
        assert "not written" in part["error"] or "append failed" in part["error"]
    unnamed = list(range(len(lines), ITERATIONS))
    if not gaps and not unnamed:
        return ITERATIONS
    # Nothing holds space that the manifest does not know of.
    ends: dict[str, int] = {}
    for line in lines:
        ends |= {part["file"]: part["end"] for part in line["ranks"] if part["file"]}
    for name, size in told["files"].items():
        if name.endswith((".jsonl", ".arrows")) and name != "manifest.jsonl":
            assert size == ends.get(name.replace(".arrows", ".parquet"), 0), name
    (alert,) = [alert for alert in told["alerts"] if alert["title"] == "the token export has stopped"]
    assert "until the run is resumed" in alert["text"]
    named = [line["iteration"] for line in gaps]
    if "error" in report:
        assert "no records" in report["error"] and len(gaps) + len(unnamed) == ITERATIONS
        assert all(f"iteration {i}" in report["error"] for i in (named[:3] or unnamed[:1]))
        assert not unnamed or "not in the export: iteration" in report["error"]
    else:
        assert [gap["iteration"] for gap in report["incomplete"]] == named
        assert report["not_exported"] == unnamed
    assert told["verdict"] == "incomplete"
    assert len(told["findings"]) == len(named) + len(unnamed)
    for finding in told["findings"]:
        assert "rollbook replay" in finding["next"] and "restore" not in finding["next"]
    return min(named + unnamed)


def check_resumed(full: dict[str, Any], told: dict[str, Any]) -> None:
    """With room again and resumed from the checkpoint after iteration 0, all later ones are there."""
    whole = [line["iteration"] for line in told["manifest"] if line["complete"]]
    before = [line for line in full["manifest"][:1] if line["complete"]]
    assert whole == [line["iteration"] for line in before] + list(range(1, ITERATIONS))
    assert told["verdict"] == ("balanced" if before else "incomplete")
