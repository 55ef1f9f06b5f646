"""The commands that people know from the documentation of rollout collection, typed as they stand there.

Only their sizes are smaller. Rollouts fail and environments make tasks meanwhile, and what `cat`, `wc` and
`jq` find is results alone. Where the document lies beside this checkout, each command here must be in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from collecting import PATIENCE, row, write_rows
from helpers.places import SHARED

DOCUMENT = SHARED / "source" / "rollout-scale-patterns.txt"

CHUNKS = """\
split -l 10000 -d --additional-suffix=.jsonl \\
    ../../datasets/million_tasks.jsonl \\
    chunk_
"""
COLLECT_CHUNKS = """\
MAX_PARALLEL=4  # Number of collection jobs to run simultaneously

for chunk_file in chunk_*.jsonl; do
    # Wait if too many jobs running
    while [ $(jobs -r | wc -l) -ge $MAX_PARALLEL ]; do
        sleep 10
    done

    # Start collection for this chunk
    chunk_id=$(basename $chunk_file .jsonl)
    (
        echo "Starting $chunk_id..."
        ng_collect_rollouts \\
            +agent_name=my_agent \\
            +input_jsonl_fpath=$chunk_file \\
            +output_jsonl_fpath=rollouts_${chunk_id}.jsonl \\
            +num_samples_in_parallel=20
        echo "Completed $chunk_id"
    ) &
done

# Wait for all jobs to complete
wait
"""
COUNT = "wc -l rollouts_*.jsonl | tail -1"
COUNT_CHUNKS = "ls -lh rollouts_chunk_*.jsonl | wc -l"
MERGE = """\
cat rollouts_chunk_*.jsonl > final_million_rollouts.jsonl

# Verify count
echo "Total rollouts: $(wc -l < final_million_rollouts.jsonl)"
"""
AVERAGE = "jq -s 'map(.reward) | add/length' final_million_rollouts.jsonl"
WITH_LOG = """\
ng_collect_rollouts \\
    +agent_name=my_agent \\
    +input_jsonl_fpath=tasks.jsonl \\
    +output_jsonl_fpath=rollouts.jsonl \\
    2>&1 | tee collection.log

# Later, analyze log
grep "Collecting rollouts" collection.log
"""
FIRST = """\
ng_collect_rollouts \\
    +agent_name=my_agent \\
    +input_jsonl_fpath=large_dataset.jsonl \\
    +output_jsonl_fpath=rollouts.jsonl \\
    +limit=10000
"""
PROGRESS = """\
completed=$(wc -l < rollouts.jsonl)
echo "Completed $completed rollouts"
"""
CUT = "tail -n +5248 large_dataset.jsonl > remaining.jsonl"
RESUME = """\
ng_collect_rollouts \\
    +agent_name=my_agent \\
    +input_jsonl_fpath=remaining.jsonl \\
    +output_jsonl_fpath=rollouts.jsonl \\
    +limit=$((10000 - 5247))
"""
COPIES = (CHUNKS, COLLECT_CHUNKS, COUNT, COUNT_CHUNKS, MERGE, AVERAGE, WITH_LOG, FIRST, PROGRESS, CUT, RESUME)
FAILS_AT_TIMES = """\
import pathlib

async def act(request):
    if "5 +" in request.messages[0]["content"] and not pathlib.Path("mended").exists():
        raise ValueError("no answer")
    return "I think it is 42."
"""


class Shell:
    """A bash in which `ng_collect_rollouts` is this program, and the pieces that `split` makes are small."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.here = directory / "outputs" / "million_scale"
        self.here.mkdir(parents=True)
        (directory / "script.py").write_text(FAILS_AT_TIMES)
        policy = {"kind": "scripted", "script": f"{directory / 'script.py'}:act"}
        agent = {"env": {"name": "arithmetic"}, "policy": policy}
        settings = {"agents": {"my_agent": agent}, "retry": {"bad_answer": 1, "environment": 1}}
        (self.here / "rollbook.yaml").write_bytes(orjson.dumps({**settings, "max_failure_rate": 1}))
        command = directory / "bin" / "ng_collect_rollouts"
        command.parent.mkdir()
        main = "from rollbook.cli.main import main\nmain(['collect', *sys.argv[1:]])\n"
        command.write_text(f"#!{sys.executable}\nimport sys\n{main}")
        command.chmod(0o755)

    def __call__(self, text: str, *, code: int | None = 0) -> str:
        """What it prints."""
        small = 'split() { command split -l 20 "${@:3}"; }\n'
        path = f"{self._directory / 'bin'}:{os.environ['PATH']}"
        ended = subprocess.run(
            ["bash", "-c", small + text],
            cwd=self.here,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert code is None or ended.returncode == code, ended.stdout
        return ended.stdout

    def rows(self, name: str, count: int) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_rows(path, (row(f"t{n}", f"What is {n % 10} + 1?") for n in range(count)))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the document is not beside this checkout")
@pytest.mark.parametrize("copy", COPIES)
def test_the_commands_are_those_of_the_document(copy: str) -> None:
    lines = DOCUMENT.read_text().splitlines()
    assert copy in "\n".join(line.rstrip() for line in lines)


def test_chunks_are_counted_and_joined_though_rollouts_fail_and_tasks_are_made(shell: Shell) -> None:
    shell.rows("../../datasets/million_tasks.jsonl", 60)
    said = shell(CHUNKS + COLLECT_CHUNKS)
    assert said.count("Completed chunk_") == 3, said
    shell(
        "ng_collect_rollouts +agent_name=my_agent +output_jsonl_fpath=rollouts_chunk_own.jsonl +limit=5",
        code=None,
    )
    failures = sorted(shell.here.glob("rollouts_chunk_*_failures.*"))
    assert len(failures) == 4 and any(path.read_bytes() for path in failures)
    assert len(list(shell.here.glob("rollouts_chunk_own_tasks.*"))) == 1
    own = (shell.here / "rollouts_chunk_own.jsonl").read_bytes().count(b"\n")
    assert shell(COUNT).split() == [str(54 + own), "total"]
    assert shell(COUNT_CHUNKS).strip() == "4"
    assert shell(MERGE) == f"Total rollouts: {54 + own}\n"
    lines = (shell.here / "final_million_rollouts.jsonl").read_bytes().splitlines()
    rewards = [orjson.loads(line)["reward"] for line in lines]
    if shutil.which("jq"):
        assert float(shell(AVERAGE)) == pytest.approx(sum(rewards) / len(rewards))


def test_the_log_of_a_collection_is_found_by_its_words(shell: Shell) -> None:
    shell.rows("tasks.jsonl", 10)
    assert "\nCollecting rollouts: 9 of 10, " in shell(WITH_LOG)


def test_a_resume_by_tail_is_refused_and_the_command_it_names_works(shell: Shell) -> None:
    shell.rows("large_dataset.jsonl", 30)
    shell(FIRST, code=3)
    assert shell(PROGRESS) == "Completed 27 rollouts\n"
    before = (shell.here / "rollouts.jsonl").read_bytes()
    cut, resume = CUT.replace("5248", "28"), RESUME.replace("10000 - 5247", "3")
    said = shell(f"{cut}\n{resume}", code=2)
    words = "+input_jsonl_fpath=large_dataset.jsonl +limit=30"
    assert f"To collect what is missing of large_dataset.jsonl, type the same command with {words}\n" in said
    assert (shell.here / "rollouts.jsonl").read_bytes() == before
    (shell.here / "mended").touch()
    shell(FIRST.replace("+input_jsonl_fpath=large_dataset.jsonl", words).replace("    +limit=10000\n", ""))
    assert shell(PROGRESS) == "Completed 30 rollouts\n"
