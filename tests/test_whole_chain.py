"""A collection, datasets made of it, a fine-tuning, RL on top: its lineage, and every way to name a part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollbook
from rollbook.cli.main import main
from rollbook.errors import UsageError
from rollbook.records.complete import directory_facts, file_facts
from rollbook.records.run_inputs import directory_input, file_input
from rollbook.runs.lineage import Node, Status, lineage
from rollbook.runs.references import ARTIFACTS, find
from rollbook.runs.run import Run

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-=? ."
SFT = """\
model: {path: model, dtype: float32}
data: {train: [mix.jsonl], max_length: 128}
training: {output_dir: demo, max_steps: 2, per_device_train_batch_size: 2, save_steps: 2}
runtime_info:
  output:
"""
RL = """\
log_path: runs/rl
model: {from: sft.yaml}
environments: [{name: "vowels.py:vowels", as: vowels, tasks: tasks.jsonl}]
sampler: {max_tokens: 4}
groups_per_batch: 2
group_size: 4
iterations: 1
"""
VOWELS = '''\
from rollbook.envs import single_turn


@single_turn
def vowels(task, answer):
    """The part of the letters that are vowels."""
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
'''
AGENTS = 'agents: {a: {env: {name: arithmetic}, policy: {kind: scripted, script: ["4"]}}}\n'


def command(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rollbook", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "500"},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which each step was taken once."""
    from rollbook.tiny import write_tiny_model

    home = tmp_path_factory.mktemp("chain") / "project"
    home.mkdir()
    write_tiny_model(home / "model", ALPHABET)
    tasks = [{"id": f"t{n}", "prompt": f"{n} + 1 ?"} for n in range(4)]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    files = {"rollbook.yaml": AGENTS, "sft.yaml": SFT, "rl.yaml": RL, "vowels.py": VOWELS}
    for name, text in files.items():
        (home / name).write_text(text)
    for words in (
        "collect +agent_name=a +output_jsonl_fpath=rollouts.jsonl +limit=6 +num_repeats=2",
        "data filter rollouts.jsonl -o good.jsonl --where reward>=0",
        "data sft good.jsonl -o chat.jsonl",
        "data mix a=chat.jsonl:1.0 --total 8 -o mix.jsonl",
        "sft sft.yaml",
        "rl rl.yaml",
    ):
        done = command(home, *words.split())
        assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of it to change. What it was made from is where it was, so the original is moved away."""
    shutil.copytree(made, tmp_path / "project")
    return tmp_path / "project"


def chain(node: Node) -> list[tuple[str, str, str | None]]:
    return [(one.what, Path(one.path).name, one.status) for one in node.all()]


CHAIN = [
    ("checkpoint", "000001", None),
    ("run", "rl", "verified"),
    ("environment", "vowels.py:vowels", "verified"),
    ("tasks", "tasks.jsonl", "verified"),
    ("checkpoint", "checkpoint-2", "verified"),
    ("run", "demo", "verified"),
    ("dataset", "mix.jsonl", "verified"),
    ("dataset", "chat.jsonl", "verified"),
    ("dataset", "good.jsonl", "verified"),
    ("collection", "rollouts.jsonl", "verified"),
    ("tasks", "rollouts_tasks.ndjson", "verified"),
    ("environment", "arithmetic", "verified"),
    ("policy", "['4']", "unrecorded"),
    ("model", "model", "verified"),
]


def test_the_chain_of_a_checkpoint_goes_back_to_the_first_file(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    read: list[int] = []
    node = lineage(made / "runs/rl/checkpoints/000001", advance=read.append)
    assert chain(node) == CHAIN
    assert node.is_whole and sum(read) > 2 * (made / "model/model.safetensors").stat().st_size


def test_it_is_printed_as_a_tree_by_name_and_in_the_history(made: Path) -> None:
    done = command(made, "lineage", "rl@1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("checkpoint  runs/rl/checkpoints/000001")
    assert [line.lstrip("│├└─ ").split()[0] for line in lines[:14]] == [what for what, _, _ in CHAIN]
    assert lines[-1] == "every link that can be compared is whole"
    assert "└─ model  model  verified" in command(made, "history", "show", "demo").stdout
    node = json.loads(command(made, "lineage", "rollouts.jsonl", "--json").stdout)
    assert node["facts"]["coverage"] == {"expected": 12, "ok": 12, "failed": 0, "missing": 0}


@pytest.mark.parametrize("name", ["good.jsonl", "rollouts_tasks.ndjson", "mix.jsonl"])
def test_one_changed_row_is_named(project: Path, made: Path, name: str) -> None:
    aside = made.with_name("aside")
    made.rename(aside)
    try:
        data = (project / name).read_bytes()
        (project / name).write_bytes(data.replace(b"What", b"Wh4t", 1))
        node = lineage(project / "runs/rl")
        broken = [Path(one.path).name for one in node.all() if one.status is Status.CHANGED]
        assert broken == [name] and not node.is_whole
    finally:
        aside.rename(made)


def test_a_project_that_was_moved_as_a_whole_is_found_by_its_digests(project: Path, made: Path) -> None:
    aside = made.with_name("aside")
    made.rename(aside)
    try:
        node = lineage(project / "runs/rl")
        assert node.is_whole
        assert {one.status for one in node.all() if one.what in ("dataset", "collection", "tasks")} <= {
            Status.MOVED,
            Status.VERIFIED,
        }
        assert str(made) in next(one.why for one in node.all() if one.what == "dataset")
        (project / "good.jsonl").unlink()
        lost = [one for one in lineage(project / "runs/rl").all() if one.status is Status.MISSING]
        assert [Path(one.path).name for one in lost] == ["good.jsonl"]
    finally:
        aside.rename(made)


def test_what_was_appended_since_is_no_change(project: Path, made: Path) -> None:
    aside = made.with_name("aside")
    made.rename(aside)
    try:
        with (project / "tasks.jsonl").open("a") as file:
            file.write('{"id": "new", "prompt": "?"}\n')
        tasks = next(one for one in lineage(project / "runs/rl").all() if one.what == "tasks")
        assert tasks.status is Status.MOVED
    finally:
        aside.rename(made)


def test_a_damaged_checkpoint_breaks_its_link(project: Path) -> None:
    weights = project / "runs/rl/checkpoints/000001/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    node = lineage(weights.parent)
    assert node.parents[0].status is Status.CHANGED
    assert "model.safetensors was changed" in node.parents[0].why
    done = command(project, "lineage", "runs/rl/checkpoints/000001")
    assert done.returncode == 1 and "broken links:" in done.stdout


def test_a_loop_of_ones_own_notes_what_it_read(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w.bin").write_bytes(b"123")
    inputs = [file_input("data", tmp_path / "data.jsonl"), directory_input("model", tmp_path / "weights")]
    with Run(tmp_path / "run") as run:
        run.note_inputs(inputs)
    with Run(tmp_path / "run", resume=True) as run:
        run.note_inputs(inputs)
        assert [one.attempt for one in run.info.inputs or []] == [1, 1]
        (tmp_path / "data.jsonl").write_text('{"id": "b"}\n')
        run.note_inputs([file_input("data", tmp_path / "data.jsonl")])
    node = lineage(tmp_path / "run")
    assert [(one.what, one.status) for one in node.parents] == [
        ("data", Status.CHANGED),
        ("model", Status.VERIFIED),
        ("data", Status.VERIFIED),
    ]
    (tmp_path / "weights" / "w.bin").write_bytes(b"124")
    assert lineage(tmp_path / "run").parents[1].status is Status.CHANGED


def test_a_run_of_an_older_version_says_nothing_and_is_not_broken(tmp_path: Path) -> None:
    with Run(tmp_path / "run"):
        pass
    node = lineage(tmp_path / "run")
    assert node.parents == [] and node.is_whole


def test_a_thing_that_was_made_from_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    facts = file_facts(tmp_path / "a.jsonl")
    manifest = {
        "command": "merge",
        "output": "a.jsonl",
        "directory": str(tmp_path),
        "inputs": [{"path": "a.jsonl", "bytes": facts.bytes, "xxh3_128": facts.xxh3_128}],
    }
    (tmp_path / "a_manifest.json").write_text(json.dumps(manifest))
    node = lineage(tmp_path / "a.jsonl")
    assert node.parents[0].why == "was made from itself" and node.parents[0].parents == []


def test_the_digest_of_a_directory_is_of_names_and_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
    assert directory_facts(tmp_path / "one") == directory_facts(tmp_path / "two")
    (tmp_path / "two" / "a").rename(tmp_path / "two" / "b")
    assert directory_facts(tmp_path / "one") != directory_facts(tmp_path / "two")


def test_a_reference_that_is_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: no such file or directory"):
        find(tmp_path / "nowhere.jsonl", ARTIFACTS)
    with pytest.raises(UsageError, match="no run has been recorded yet"):
        find("demo", ARTIFACTS)
    with pytest.raises(UsageError, match="'x' is not a step; write it like demo@200"):
        find("demo@x", ARTIFACTS)


# What may be typed for a run, by what it is.
RUN = ["rl", "runs/rl", "rl@1", "runs/rl/checkpoints/000001"]
TUNED = ["demo", "artifacts/model/demo", "demo@2", "artifacts/model/demo/checkpoint-2"]
COLLECTION = ["rollouts", "rollouts.jsonl"]


@pytest.mark.parametrize("ref", [*RUN, *TUNED])
@pytest.mark.parametrize(
    "words", ["status", "diff rl", "plot -o picture.png", "lineage", "audit", "logs", "history show"]
)
def test_commands_about_runs_take_every_reference(
    made: Path, words: str, ref: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *more = words.split()
    typed = ["history", "show", ref] if verb == "history" else [verb, ref, *more]
    assert call(made, typed, monkeypatch) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("ref", [RUN[0], RUN[-1]])
@pytest.mark.parametrize("words", ["tokens", "replay --iteration 0"])
def test_commands_about_steps_take_every_reference(
    made: Path, words: str, ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *more = words.split()
    assert call(made, [verb, ref, *more], monkeypatch) == 0


@pytest.mark.parametrize("ref", COLLECTION)
@pytest.mark.parametrize("words", ["status", "diff rollouts.jsonl", "lineage", "audit", "data stats"])
def test_commands_about_collections_take_every_reference(
    made: Path, words: str, ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *more = words.split()
    typed = ["data", "stats", ref] if verb == "data" else [verb, ref, *more]
    assert call(made, typed, monkeypatch) == 0


@pytest.mark.parametrize(
    ("ref", "sql"),
    [(ref, "select count(*) from metrics") for ref in [*RUN, *TUNED]]
    + [(ref, "select count(*) from rollouts") for ref in COLLECTION],
)
def test_query_takes_every_reference(
    made: Path, ref: str, sql: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(made, ["query", sql, ref, "--json"], monkeypatch) == 0
    assert next(iter(json.loads(capsys.readouterr().out)[0].values())) > 0


@pytest.mark.parametrize("ref", [*RUN, *TUNED])
def test_open_run_takes_every_reference(made: Path, ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    reader = rollbook.open_run(ref)
    assert reader.info is not None and reader.info.kind == ("rl" if ref in RUN else "sft")


@pytest.mark.parametrize("ref", ["demo", "demo@2", "artifacts/model/demo"])
def test_promote_takes_a_run_and_a_step(made: Path, ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (made / "other.yaml").write_text("runtime_info:\n  output:\n")
    assert call(made, ["promote", ref, "--config", "other.yaml"], monkeypatch) == 0
    assert "checkpoint-2" in (made / "other.yaml").read_text()


def call(directory: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command, in this process."""
    monkeypatch.chdir(directory)
    try:
        main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
