"""The view `tokens`: every kind of file by one reader, only what counts, and no more than is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.ipc
import pytest

from helpers.token_exports import PROMPT, Export
from rollbook import Trajectory
from rollbook.errors import BadFileError, BadLineError
from rollbook.query.schema import COLUMNS
from rollbook.query.session import Session
from rollbook.records.token_columns import TOKEN_COLUMNS
from rollbook.records.tokens import read_sequences
from rollbook.records.turns import Turn
from rollbook.runs.run import Run

KEYS = "iteration, rank, sequence_idx, token_idx"
ALL = ", ".join(column.name for column in COLUMNS["tokens"] if column.name not in ("run", "file"))


def rows(sql: str, *paths: Path) -> list[tuple[Any, ...]]:
    return [row for batch in Session(paths).run(sql).batches for row in batch]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    for name, export, is_open in (
        ("lines", Export(), False),
        ("parts", Export(kind="parquet"), False),
        ("stream", Export(kind="parquet", part=10), True),
        ("both", Export(kind="parquet"), True),
        ("elsewhere", Export(path="a/x.jsonl"), True),
    ):
        root = tmp_path / name
        export.write(root, is_open=is_open)
        write_marker(root, [export.path.replace("x.jsonl", "x_manifest.jsonl")] if export.path else None)
    found = {
        name: repr(rows(f"select {ALL} from tokens order by {KEYS}", tmp_path / name))
        for name in ("lines", "parts", "stream", "both", "elsewhere")
    }
    assert {path.suffix for path in (tmp_path / "both" / "token_exports").iterdir()} == {
        ".jsonl", ".parquet", ".arrows", ".lock"
    }  # fmt: skip
    assert len(set(found.values())) == 1
    assert found["lines"].count("'train'") == 3 * 2 * 4 * 24
    assert rows("select distinct run from tokens", tmp_path / "stream") == [("run-1",)]


def write_marker(root: Path, manifests: list[str] | None = None) -> None:
    info: dict[str, Any] = {
        "id": "run-1", "kind": "rl", "started_at": "2026-11-16T09:30:00Z", "host": "h", "pid": 1,
        "layout": "flat", "versions": {}, "attempts": [],
    }  # fmt: skip
    if manifests:
        info["token_exports"] = manifests
    (root / "run.json").write_bytes(orjson.dumps(info))


def test_the_columns_say_what_they_should(tmp_path: Path) -> None:
    Export().write(tmp_path)
    one = "iteration = 1 and rank = 1 and traj_idx = 2"
    found = rows(
        f"select token_idx, step_idx, policy_version, text, loss_mask, temperature from tokens where {one} "
        "order by 1",
        tmp_path,
    )
    assert [row[0] for row in found] == list(range(24))
    assert [row[1] for row in found] == [None] * PROMPT + [0] * 10 + [None] * 2 + [1] * 8
    assert {(row[1], row[2], row[5]) for row in found} == {(None, None, None), (0, 1, 0.5), (1, 0, 0.5)}
    assert [row[3] for row in found[PROMPT : PROMPT + 2]] == ["\\xC3", "\\xA9"]
    assert {row[4] for row in found if row[1] is None} == {False}
    keys = rows(
        f"select distinct run, attempt, split, part, task_id, env_name from tokens where {one}", tmp_path
    )
    assert keys == [(tmp_path.name, 1, "train", 0, "task-1", "words")]
    # Null is a token that nobody sampled; what was not finite is what it was.
    assert rows("select count(*) from tokens where trainer_logprob = 'inf'::FLOAT", tmp_path) == [(1,)]
    assert rows("select count(*) from tokens where (entropy is null) = loss_mask", tmp_path) == [(0,)]
    assert rows(
        "select count(*) from tokens where abs(mismatch_kl - (exp(log_importance_ratio) - 1 "
        "- log_importance_ratio)) > 1e-6",
        tmp_path,
    ) == [(1,)]  # inf - inf


def test_the_view_has_every_column_of_the_list(tmp_path: Path) -> None:
    names = [column.name for column in COLUMNS["tokens"]]
    assert len(set(names)) == len(names)
    assert {column.name for column in TOKEN_COLUMNS} <= set(names)
    Export(columns=["entropy"]).write(tmp_path)
    assert rows(
        "select count(entropy) > 0, count(token_id) = count(*), count(advantage), count(mismatch_kl) "
        "from tokens",
        tmp_path,
    ) == [(True, True, 0, 0)]


def test_only_what_the_manifest_names_counts(tmp_path: Path) -> None:
    files = Export().write(tmp_path)
    with files.lines_of(1).open("ab") as file:
        file.write(
            files.lines_of(1)
            .read_bytes()
            .splitlines(keepends=True)[0]
            .replace(b'"iteration":0', b'"iteration":9')
        )
        file.write(b'{"torn": ')
    assert rows("select max(iteration), count(*) from tokens", tmp_path) == [(2, 3 * 2 * 4 * 24)]
    assert rows("select count(*) from tokens", files.lines_of(1)) == [(3 * 4 * 24,)]
    assert rows("select count(*) from tokens", files.manifest) == [(3 * 2 * 4 * 24,)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_iterations_are_not_read(tmp_path: Path, kind: Any) -> None:
    files = Export(kind=kind, part=1).write(tmp_path)
    damaged = files.lines_of(0) if kind == "jsonl" else files.part_of(0, 0)
    damaged.write_bytes(b"?" * 10 + damaged.read_bytes()[10:])
    whole = "select count(*) from tokens where iteration in (1, 2)"
    assert rows(whole, tmp_path) == [(2 * 2 * 4 * 24,)]
    named = f"{damaged}:1" if kind == "jsonl" else f"{damaged}"
    with pytest.raises(BadLineError if kind == "jsonl" else BadFileError, match=re.escape(named)):
        rows("select count(*) from tokens", tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    files = Export().write(tmp_path)
    files.lines_of(1).unlink()
    with pytest.raises(BadFileError, match=r"rank_1\.jsonl.*is not there"):
        rows("select count(*) from tokens", tmp_path)


def test_a_manifest_names_files_beside_it_and_no_others(tmp_path: Path) -> None:
    files = Export().write(tmp_path)
    files.manifest.write_text(files.manifest.read_text().replace("rank_1.jsonl", "../../rank_1.jsonl"))
    with pytest.raises(BadFileError, match=r"line 1 names .*which is no file beside it"):
        rows("select count(*) from tokens", tmp_path)


def test_tokens_join_themselves_and_others(tmp_path: Path) -> None:
    Export().write(tmp_path)
    pairs = rows(
        "select count(*) from tokens a join tokens b using (run, iteration, group_idx, traj_idx) "
        "where b.token_idx = a.token_idx + 1",
        tmp_path,
    )
    assert pairs == [(3 * 2 * 4 * 23,)]


def test_prime_rl_by_run_directory_and_file(peer_fixtures: Path, tmp_path: Path) -> None:
    exports = peer_fixtures / "prime_rl" / "token_exports"
    count = "select count(*), count(distinct iteration) from tokens"
    whole = rows(count, peer_fixtures / "prime_rl")
    assert whole == rows(count, exports) and whole[0][1] == 2
    step = rows(count, exports / "step_1")
    one, other = (rows(count, exports / "step_1" / f"rank_{rank}.jsonl") for rank in (0, 1))
    assert step == [(one[0][0] + other[0][0], 1)]
    assert rows("select distinct iteration from tokens where iteration = 1", exports) == [(1,)]
    # Its placeholder for tokens that nobody sampled, and its first token, are no values.
    assert rows(
        "select count(*) from tokens where (inference_logprob is not null and not loss_mask) "
        "or (token_idx = 0 and trainer_logprob is not null and not loss_mask)",
        exports,
    ) == [(0,)]
    older = [json.loads(line) for line in (exports / "step_0" / "rank_0.jsonl").open()]
    directory = tmp_path / "older" / "token_exports"
    directory.mkdir(parents=True)
    with (directory / "rank_0.jsonl").open("w") as file:
        for record in older:
            for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
                record.pop(name, None)
            print(json.dumps(record | {"rewards": [1.0] * len(record["token_ids"])}), file=file)
    assert rows("select min(reward), count(rl_weight) from tokens", tmp_path / "older") == [(1.0, 0)]


def test_without_an_export_there_is_the_sampled_side(tmp_path: Path) -> None:
    def turn(step: int, prompt: list[int], said: list[int], new_row: str | None = None) -> Turn:
        return Turn(
            messages=[{"role": "assistant", "content": "x"}],
            prompt_token_ids=prompt,
            token_ids=said,
            logprobs=[-0.5 * (step + 1)] * (len(said) - 1) + [float("nan")],
            temperature=0.7,
            policy_version=step,
            new_row=new_row,
        )

    with Run(tmp_path / "run", total_iterations=1) as run:
        for iteration in range(2):
            with (
                run.rollouts(iteration=iteration) as rollouts,
                rollouts.group(0, task_id="t", size=2) as group,
            ):
                turns = [
                    turn(0, [1, 2], [3, 4]),
                    turn(1, [5], [6]),
                    turn(2, [7], [8, 9], "the template cut it"),
                ]
                group.add(Trajectory(turns=turns))
                group.add(Trajectory.single_turn("a", "b", reward=1.0))  # nobody knows its tokens
    found = rows(
        "select part, token_idx, token_id, step_idx, policy_version, inference_logprob, trainer_logprob, "
        "loss_mask, text from tokens where iteration = 1 order by part, token_idx",
        tmp_path,
    )
    assert [row[:5] for row in found] == [
        (0, 0, 1, None, None), (0, 1, 2, None, None), (0, 2, 3, 0, 0), (0, 3, 4, 0, 0), (0, 4, 5, None, None),
        (0, 5, 6, 1, 1), (1, 0, 7, None, None), (1, 1, 8, 2, 2), (1, 2, 9, 2, 2),
    ]  # fmt: skip
    assert [str(row[5]) for row in found] == [
        "None", "None", "-0.5", "nan", "None", "nan", "None", "-1.5", "nan"
    ]  # fmt: skip
    assert {row[6:] for row in found} == {(None, None, None)}
    transcripts = tmp_path / "run" / "train_iteration_000001_transcripts.jsonl"
    assert rows("select count(*) from tokens", transcripts) == [(9,)]
    joined = "select count(*), max(r.traj_idx) from tokens join rollouts r using (run, split, iteration, group_idx, traj_idx)"  # noqa: E501
    assert rows(joined, tmp_path) == [(18, 0)]


def test_a_stream_that_became_parquet_meanwhile_is_found(tmp_path: Path) -> None:
    files = Export(kind="parquet", part=10).write(tmp_path)
    part = files.part_of(0, 0)
    assert part.exists()
    assert len(list(read_sequences(part.with_suffix(".arrows"), end=1))) == 12


def test_a_stream_cut_anywhere_gives_whole_records(tmp_path: Path) -> None:
    """What a killed process leaves behind the last manifest line is not there for a reader."""
    files = Export(kind="parquet", part=10, iterations=2).write(tmp_path, is_open=True)
    stream = files.part_of(0, 0, ".arrows")
    data = stream.read_bytes()
    with pa.ipc.open_stream(data) as reader:
        assert sum(batch.num_rows for batch in reader) == 12  # one iteration more than the manifest names
    for size in range(0, len(data), 997):
        stream.write_bytes(data[:size])
        assert len(list(read_sequences(stream))) in (0, 4, 8, 12)
