"""A collection on a disk that fills up, run inside a small one. Exits 0 when every promise was kept.

    python full_disk_collection.py DIRECTORY tmpfs|limit

`tmpfs`: DIRECTORY is mounted as a tmpfs of 256 KiB first; the caller provides the namespace. `limit`: the
size of every file is limited instead.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collecting import assert_exactly_once, command, config, expected_keys, script, small_input
from rollbook.records.progress import read_progress

SIZE = 256 * 1024
ROWS = 150


def fill(directory: Path, kind: str) -> None:
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(directory)], check=True)
        (directory / "ballast").write_bytes(bytes(SIZE * 3 // 4))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 8, resource.RLIM_INFINITY))


def free(directory: Path, kind: str) -> None:
    if kind == "tmpfs":
        (directory / "ballast").unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    fill(directory, kind)
    small_input(directory, ROWS)
    config(directory, script(directory, "await asyncio.sleep(random.uniform(0, 0.02))\nreturn '2'"))
    output, progress = directory / "out.jsonl", directory / "out_progress.json"
    acknowledged, lines = 0, b""
    for _ in range(3):  # trying again on a full disk makes nothing worse
        full = command(directory, "num_samples_in_parallel=4")
        assert full.returncode == 1, full
        assert "Traceback" not in full.stderr, full.stderr
        assert str(directory) in full.stderr, full.stderr
        acknowledged = max(acknowledged, read_progress(progress).done)
        content = output.read_bytes()
        assert content.startswith(lines)
        lines = content[: content.rfind(b"\n") + 1]
        assert acknowledged <= lines.count(b"\n") < ROWS
        assert lines, "nothing was collected before the disk was full"
    free(directory, kind)
    done = command(directory)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(lines), "what was acknowledged is lost"
    assert_exactly_once(output, expected_keys(ROWS))
    print("kept")


if __name__ == "__main__":
    main()
