"""Resume is a rewind: a killed and resumed run leaves the files of one that was never killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook import Run, Trajectory, open_run
from rollbook.errors import BadFileError, UsageError
from rollbook.records.record import Record

TIMES = {"logged_at", "saved_at", "raised_at", "log_lengths", "run_id", "started_at", "files"}


def train(
    path: Path, upto: int, *, stop_after: int | None = None, resume: bool | str = False, **options: str
) -> None:
    """A loop that checkpoints every second iteration and dies, if told to, after `stop_after`."""
    run = Run(path, total_iterations=upto, resume=resume, **options)
    for i in range(run.next_iteration, upto):
        if i % 2 == 0:
            record(run, i, "eval/test")
        metrics = record(run, i, "train")
        run.log_metrics(metrics, step=i)
        if i % 2 == 1:
            run.alert("saved", step=i)
            with run.checkpoint(f"{i + 1:06d}", batch=i + 1, final=i + 1 == upto) as directory:
                (directory / "weights").write_text(f"weights after {i + 1}")
        if i == stop_after:
            run.sync()
            run._opened.close()  # gone without a word, as far as run.json can tell
            return
    run.close()


def record(run: Run, i: int, split: str) -> dict[str, float]:
    with run.rollouts(i, split) as rollouts:
        for g in range(3):
            with rollouts.group(g, task_id=f"t{g}") as group:
                group.add(Trajectory.single_turn(f"{g} + {i}?", str(g + i), reward=g / 2))
    return rollouts.metrics()


def content(path: Path) -> dict[str, object]:
    """Every file of the run, times and ids aside."""
    found: dict[str, object] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if (
            not file.is_file()
            or name.startswith(("superseded", "run.json", "code.diff"))
            or name.endswith(".html")
        ):
            continue
        if file.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in file.read_text().splitlines()]
        elif file.suffix == ".json":
            found[name] = without_times(json.loads(file.read_text()))
        else:
            found[name] = None if file.name == "COMPLETE" else file.read_bytes()
    return found


def without_times(value: dict[str, object]) -> dict[str, object]:
    return {key: item for key, item in value.items() if key not in TIMES}


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3, 4])
def test_resumed_equals_uninterrupted(tmp_path: Path, stop_after: int, layout: str) -> None:
    train(tmp_path / "whole", 6, layout=layout)
    train(tmp_path / "killed", 6, stop_after=stop_after, layout=layout)
    train(tmp_path / "killed", 6, resume=True, layout=layout)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_attempts_are_told_apart(tmp_path: Path) -> None:
    train(tmp_path, 6, stop_after=4)
    train(tmp_path, 6, resume=True)
    run = open_run(tmp_path)
    assert [(a.attempt, a.resumed_from, a.outcome) for a in run.attempts] == [
        (1, None, None),
        (2, "000004", "completed"),
    ]
    assert [(row["step"], row["attempt"]) for row in run.metrics] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
    ]


def test_going_back_further_each_time(tmp_path: Path) -> None:
    train(tmp_path, 8, stop_after=6)
    train(tmp_path, 8, stop_after=5, resume="000004")
    train(tmp_path, 8, resume="000002")
    run = open_run(tmp_path)
    assert [a.resumed_from for a in run.attempts] == [None, "000004", "000002"]
    assert [row["attempt"] for row in run.metrics] == [1, 1, 3, 3, 3, 3, 3, 3]
    assert [c.name for c in run.checkpoints()] == ["000002", "000004", "000006", "000008"]


def test_what_was_cut_is_kept(tmp_path: Path) -> None:
    train(tmp_path, 6, stop_after=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    page = (tmp_path / "train_iteration_000004.html").read_bytes()
    train(tmp_path, 6, stop_after=4, resume=True)
    kept = tmp_path / "superseded/attempt_001"
    (tail,) = kept.glob("metrics.jsonl.from_byte_*")
    start = int(tail.name.rsplit("_", 1)[1])
    assert before[start:] == tail.read_bytes()
    assert (kept / "train_iteration_000004.html").read_bytes() == page


def test_falls_back_to_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, 8, stop_after=6)
    (tmp_path / "checkpoints/000006/COMPLETE").unlink()
    assert open_run(tmp_path).latest_checkpoint().name == "000004"
    run = Run(tmp_path, resume=True)
    assert (run.resumed_from.name, run.next_iteration) == ("000004", 4)
    run.close()
    assert not (tmp_path / "checkpoints/000006").exists()
    assert (tmp_path / "superseded/attempt_001/checkpoints/000006/weights").exists()


def test_without_a_checkpoint_it_starts_over(tmp_path: Path) -> None:
    train(tmp_path, 6, stop_after=0)
    run = Run(tmp_path, resume=True)
    assert (run.resumed_from, run.next_iteration, run.attempt) == (None, 0, 2)
    run.close()
    assert list(open_run(tmp_path).metrics) == []


def test_an_evaluation_before_the_checkpoint_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record(run, 2, "eval/test")
    run.record_checkpoint("000002", batch=2, state_path="tinker://elsewhere/2")
    record(run, 2, "train")
    run.close()
    Run(tmp_path, resume=True).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert "eval_test_iteration_000002.html" in names
    assert "train_iteration_000002.html" not in names


def test_a_checkpoint_of_nested_paths_stays(tmp_path: Path) -> None:
    """A resume moved away `checkpoints/step1` because no record named exactly that."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = Run(tmp_path / "link")
    for name in ("step1", "step2"):
        for part in ("state", "sampler"):
            (tmp_path / "run/checkpoints" / name / part).mkdir(parents=True)
            (tmp_path / "run/checkpoints" / name / part / "weights").write_text(name)
    paths = {"state_path": "checkpoints/step1/state", "sampler_path": "checkpoints/step1/./sampler"}
    run.record_checkpoint("step1", batch=1, **paths)
    run.close()
    with Run(tmp_path / "link", resume=True) as resumed:
        assert resumed.resumed_from.name == "step1"
        assert (resumed.files.root / resumed.resumed_from.state_path / "weights").read_text() == "step1"
        assert sorted(path.name for path in (tmp_path / "run/checkpoints/step1").iterdir()) == [
            "sampler",
            "state",
        ]
    assert not (tmp_path / "run/checkpoints/step2").exists()
    assert (tmp_path / "run/superseded/attempt_001/checkpoints/step2/state/weights").exists()
    assert open_run(tmp_path / "run").latest_checkpoint().name == "step1"


def test_rewind_can_be_killed_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", 6)
    train(tmp_path / "killed", 6, stop_after=4)
    import rollbook.runs.rewind as rewind

    real = rewind.set_aside
    calls = 0

    def dies_in_the_middle(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(rewind, "set_aside", dies_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "killed", resume=True)
    monkeypatch.undo()
    train(tmp_path / "killed", 6, resume=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_shortened_log_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    train(tmp_path, 6, stop_after=4)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(BadFileError, match=r"metrics\.jsonl.*older checkpoint"):
        Run(tmp_path, resume=True)


def test_unknown_checkpoint_names_the_known_ones(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(UsageError, match="000002, 000004"):
        Run(tmp_path, resume="000003")


def test_config_of_each_attempt_is_kept(tmp_path: Path) -> None:
    Run(tmp_path, config={"lr": 0.1}).close()
    Run(tmp_path, config={"lr": 0.2}, resume=True).close()
    assert open_run(tmp_path).config == {"lr": 0.2}
    assert json.loads((tmp_path / "superseded/attempt_001/config.json").read_text()) == {"lr": 0.1}
    (alert,) = open_run(tmp_path).alerts()
    assert "lr: 0.1 -> 0.2" in alert.text


def test_unknown_keys_survive_a_round_trip() -> None:
    from rollbook.records.checkpoints import CheckpointRecord
    from rollbook.records.rollouts import RolloutSummary

    kinds: list[tuple[type[Record], dict[str, object]]] = [
        (CheckpointRecord, {"name": "000001", "batch": 1, "elapsed_tokens": 40, "rolling": True}),
        (
            RolloutSummary,
            {"split": "train", "iteration": 0, "group_idx": 0, "traj_idx": 0, "theirs": {"a": [1]}}
            | {"steps": [{"step_idx": 0, "ob_len": 1, "ac_len": 1, "reward": 0.0, "note": "kept"}]},
        ),
    ]
    for kind, plain in kinds:
        again = kind.from_plain(plain).to_plain()
        assert plain.items() <= {**again, "steps": plain.get("steps")}.items() or plain.keys() <= again.keys()
        for key in plain.keys() - {"steps"}:
            assert again[key] == plain[key]
    assert again["steps"][0]["note"] == "kept"
