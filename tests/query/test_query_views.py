"""What the views hold, against our own readers of the same files, over real runs and collections."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import collecting
import rollbook
from helpers.sample_run import SampleConfig, write_sample_run
from rollbook import open_run
from rollbook.errors import BadLineError, RollbookError, UsageError, WriteError
from rollbook.query.output import Format, write_file
from rollbook.query.schema import COLUMNS, VIEWS
from rollbook.query.session import Answer, Session
from rollbook.records.datasets import read_manifest
from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status

Row = tuple[Any, ...]


def rows(sql: str, *paths: Path) -> list[Row]:
    return [row for batch in Session(paths).run(sql).batches for row in batch]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 rollouts of which two fail for good."""
    directory = tmp_path_factory.mktemp("collection")
    questions = {3: "please fail"}
    inputs = (collecting.row(f"t{n}", questions.get(n, "What is 1 + 1?")) for n in range(10))
    collecting.write_rows(directory / "in.jsonl", inputs)
    body = "if 'fail' in request.messages[0]['content']:\n    raise ValueError('broken')\nreturn '2'"
    collecting.config(directory, collecting.script(directory, body))
    collecting.run(directory, "num_repeats=2", "retry.bad_answer=1")
    return directory


def test_every_view_has_its_columns_even_without_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    session = Session([tmp_path])
    for view in VIEWS:
        found = session.columns(view)
        hidden = {"row"} if view == "rollouts" else set()
        assert found == [(c.name, c.type) for c in COLUMNS[view] if c.name not in hidden], view
        assert {"run", "file"} <= {name for name, _ in found}
        if view not in ("runs", "history"):
            assert rows(f"select * from {view}", tmp_path) == []


def test_metrics_are_those_of_the_reader(sample_run: Path) -> None:
    expected = [
        (row["step"], row["env/all/reward/total"], row.get("test/env/all/correct"))
        for row in open_run(sample_run).metrics
    ]
    sql = 'select step, "env/all/reward/total", "test/env/all/correct" from metrics order by step'
    assert rows(sql, sample_run) == expected
    run = open_run(sample_run).id
    assert rows("select run, max(step), count(*) from metrics group by run", sample_run) == [(run, 20, 21)]
    assert rows("select step, nonfinite from metrics where kl_sample_train_v2 is null", sample_run) == [
        (3, ["kl_sample_train_v2"])
    ]


def test_rollouts_steps_and_transcripts_join(sample_run: Path) -> None:
    summaries = list(open_run(sample_run).rollouts())
    assert rows("select count(*), sum(reward), sum(output_tokens), sum(turns) from rollouts", sample_run) == [
        (
            len(summaries),
            sum(s.total_reward or 0 for s in summaries),
            sum(s.ac_len for s in summaries),
            sum(len(s.steps) for s in summaries),
        )
    ]
    keys = "run, split, iteration, group_idx, traj_idx"
    joined = (
        f"select count(*), sum(s.ac_len) from steps s join transcripts t using ({keys}, step_idx, task_id) "
        "where role = 'assistant'"
    )
    assert rows(joined, sample_run) == [
        (sum(len(s.steps) for s in summaries), sum(s.ac_len for s in summaries))
    ]
    one = rows(
        "select content, reasoning from transcripts where iteration = 7 and split = 'train' "
        "and group_idx = 2 and traj_idx = 1 and step_idx = 1",
        sample_run,
    )
    transcript = next(
        t for t in open_run(sample_run).transcripts(7, "train") if (t.group_idx, t.traj_idx) == (2, 1)
    )
    assert one == [(transcript.messages[-1]["content"], transcript.messages[-1]["reasoning_content"])]
    failed = rows(f"select kind, reward from failures join rollouts using ({keys}, task_id)", sample_run)
    assert failed == [("TimeoutError", None)]
    assert rows("select iteration, final from checkpoints where final", sample_run) == [(21, True)]


def test_the_record_itself_is_there_when_named(sample_run: Path) -> None:
    with_row = rows("select row->>'run_id', reward, (row->>'total_reward')::double from rollouts", sample_run)
    assert {row[0] for row in with_row} == {open_run(sample_run).id}
    assert [row[1] for row in with_row] == [row[2] for row in with_row]
    assert "row" not in Session([sample_run]).run("select * from rollouts").columns


def test_both_layouts_and_several_runs(tmp_path: Path) -> None:
    for name, layout in (("flat", "flat"), ("nested", "nested")):
        write_sample_run(tmp_path / name, config=SampleConfig(iterations=2), layout=layout)
    counted = rows("select run, split, iteration, count(*) from rollouts group by all order by all", tmp_path)
    ids = sorted(open_run(tmp_path / name).id for name in ("flat", "nested"))
    assert counted == [
        (run, split, iteration, 24)
        for run in ids
        for split, iteration in (("eval/test", 0), ("train", 0), ("train", 1))
    ]
    given_twice = rows("select count(*) from runs", tmp_path, tmp_path / "flat")
    assert given_twice == [(2,)]


def test_collections(collection: Path) -> None:
    found = rows(
        "select task_id, traj_idx, reward, output_tokens is null, split from rollouts order by all",
        collection,
    )
    expected = collecting.results(collection / "out.jsonl")
    assert [(f"{task}#{repeat}", reward) for task, repeat, reward, _, _ in found] == sorted(
        (row["_rb_key"], row["reward"]) for row in expected
    )
    assert {row[4] for row in found} == {"collect"}
    assert rows("select task_id, traj_idx, message from failures order by all", collection)[0][:2] == (
        "t3",
        0,
    )
    assert rows("select kind, expected, ok, failed from runs", collection) == [("collect", 20, 18, 2)]
    said = rows(
        "select role, content from transcripts where task_id = 't1' and traj_idx = 0 order by message_idx",
        collection,
    )
    assert said == [("user", "What is 1 + 1?"), ("assistant", "2")]
    one_turn = "select step_idx, reward, episode_done from steps where task_id = 't1' and traj_idx = 0"
    assert rows(one_turn, collection) == [(0, 1.0, True)]


def test_steps_of_collections(tmp_path: Path) -> None:
    step = {"ob_len": 5, "ac_len": 3, "reward": 0.25, "episode_done": False, "metrics": {"valid": 1}}
    steps = [{"step_idx": 0, **step}, {"step_idx": 1, **step, "reward": 0.5, "episode_done": True}]
    usage = {"input_tokens": 7, "output_tokens": 2}
    written = [
        {"_rb_key": "t#0", "reward": 0.75, "_rb_steps": steps, "num_turns": 2},
        {"_rb_key": "t#1", "reward": 1.0, "num_turns": 1, "response": {"usage": usage}},
        {"_rb_key": "t#2", "reward": 1.0, "num_turns": 3},  # played elsewhere: its turns are not known
    ]
    collecting.write_rows(tmp_path / "out.jsonl", written)
    found = rows(
        "select task_id, traj_idx, step_idx, ob_len, ac_len, reward, episode_done, metrics->>'valid' "
        "from steps order by all",
        tmp_path / "out.jsonl",
    )
    assert found == [
        ("t", 0, 0, 5, 3, 0.25, False, "1"),
        ("t", 0, 1, 5, 3, 0.5, True, "1"),
        ("t", 1, 0, 7, 2, 1.0, True, None),
    ]


def test_a_collection_under_way_says_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"_rb_key":"t#0","reward":1}\n')
    (tmp_path / "out_manifest.json").write_text('{"rows": 4, "repeats": 2, "meaning": {}}')
    (tmp_path / "out_progress.json").write_text('{"expected": 8, "done": 1, "failed": 0, "missing": 7}')
    found = rows("select kind, expected, ok, failed, missing, ended_at from runs", tmp_path)
    assert found == [("collect", 8, 1, 0, 7, None)]


def test_tool_calls_of_collections_have_the_form_of_chat(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
    row = {"_rb_key": "t#0", "responses_create_params": {"input": "hi"}, "response": {"output": [call]}}
    (tmp_path / "out.jsonl").write_bytes(orjson.dumps(row))
    [(found,)] = rows(
        "select tool_calls from transcripts where tool_calls is not null", tmp_path / "out.jsonl"
    )
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert orjson.loads(found) == [{"id": "c", "type": "function", "function": function}]


def test_patterns_that_no_shell_expanded(collection: Path, tmp_path: Path) -> None:
    assert rows("select count(*) from rollouts", collection / "o*.jsonl") == [(18,)]
    assert rows("select count(*) from failures", collection / "o*") == [(2,)]
    with pytest.raises(UsageError, match="no such file"):
        Session([tmp_path / "n*.jsonl"])


@pytest.mark.parametrize("name", ["rows.jsonl.zst", "rows.jsonl.gz", "rows.parquet"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "good.jsonl.gz").write_bytes(gzip.compress(b'{"reward": 1}'))
    (tmp_path / name).write_bytes(b"this is something else")
    with pytest.raises(RollbookError, match=name):
        rows("select count(*) from rollouts", tmp_path / "good.jsonl.gz", tmp_path / name)


def test_collections_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollouts.jsonl").write_text('{"_rb_key":"t#0","reward":1}\n')
    paths = [tmp_path / name / "rollouts.jsonl" for name in ("a", "b")]
    assert rows("select run from rollouts order by run", *paths) == [("a/rollouts",), ("b/rollouts",)]


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.gz", ".jsonl"])
def test_rows_in_other_formats(tmp_path: Path, ending: str) -> None:
    records = [
        {"task_id": f"t{n}", "_ng_rollout_index": 0, "reward": n / 2, "more": {"x": n}} for n in range(3)
    ]
    path = tmp_path / f"rows{ending}"
    text = b"".join(orjson.dumps(record) + b"\n" for record in records)
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    assert rows("select task_id, reward, row->>'$.more.x' from rollouts order by task_id", path) == [
        ("t0", 0.0, "0"),
        ("t1", 0.5, "1"),
        ("t2", 1.0, "2"),
    ]


RECORD: dict[str, Any] = {
    "schema_version": 1,
    "step": 3,
    "rank": 0,
    "export_sequence_idx": 5,
    "env_name": "math",
    "token_ids": [7, 8, 9],
    "loss_mask": [False, True, True],
    "advantages": [0.0, 0.5, 0.5],
    "trainer_logprobs": [-1.0, None, -3.0],
    "is_masked": None,
    "task_id": "t1",
    "group_idx": 2,
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_tokens(tmp_path: Path, ending: str) -> None:
    exports = tmp_path / "run" / "token_exports"
    exports.mkdir(parents=True)
    if ending == "jsonl":
        (exports / "rank_0.jsonl").write_bytes(orjson.dumps(RECORD) + b"\n")
    else:
        pq.write_table(pa.Table.from_pylist([RECORD]), exports / "rank_0.parquet")
    sql = "select run, iteration, group_idx, task_id, sequence_idx, token_idx, token_id, loss_mask, trainer_logprob, is_masked from tokens order by token_idx"  # noqa: E501
    key = ("run", 3, 2, "t1", 5)
    assert rows(sql, tmp_path) == [
        (*key, 0, 7, False, None, None),  # what was packed before predicted it
        (*key, 1, 8, True, None, None),
        (*key, 2, 9, True, -3.0, None),
    ]


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    write_sample_run(tmp_path / "run", config=SampleConfig(iterations=2))
    for path in (tmp_path / "run").glob("*.jsonl"):
        with path.open("ab") as file:
            file.write(b'{"step": 99, "split": "tra')
    assert rows("select max(step), count(*) from metrics", tmp_path) == [(1, 2)]
    assert rows("select count(*), count(reward), min(split) from rollouts", tmp_path) == [
        (72, 72, "eval/test")
    ]
    assert rows("select count(*) from steps where reward is null", tmp_path) == [(0,)]
    assert rows("select name from checkpoints", tmp_path) == [("000002",)]


@pytest.mark.parametrize("torn", [b"", b'{"split": '], ids=["whole", "torn"])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{nonsense}", "not valid JSON"),
        (b'{"a": 1}{"a": 2}', "not valid JSON"),
        (b"[3]", "not a JSON object"),
    ],
)
def test_any_other_bad_line_is_named(
    sample_run: Path, tmp_path: Path, bad: bytes, why: str, torn: bytes
) -> None:
    good = next(sample_run.glob("train_*_rollout_summaries.jsonl")).read_bytes().splitlines(keepends=True)
    path = tmp_path / "train_iteration_000000_rollout_summaries.jsonl"
    path.write_bytes(b"".join([*good[:5], bad + b"\n", *good[5:], torn]))
    with pytest.raises(BadLineError, match=f"{path.name}:6: {why}"):
        rows("select avg(reward), max(split) from rollouts", tmp_path)


def test_a_word_where_a_number_should_be_is_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [{"task_id": "a", "num_turns": "many", "reward": "much"}, {"task_id": "b", "num_turns": 2.5}]
    lines.append({"task_id": "c", "num_turns": 1, "reward": True})
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    asked = "select task_id, turns, reward from rollouts order by all"
    assert rows(asked, path) == [("a", None, None), ("b", None, None), ("c", 1, 1.0)]
    assert rows("select task_id, step_idx, reward from steps", path) == [("c", 0, 1.0)]
    (tmp_path / "train_iteration_000000_rollout_summaries.jsonl").write_text('{"total_reward": "much"}\n')
    assert rows("select status, reward from rollouts where iteration = 0", tmp_path) == [("ok", None)]


def test_whole_numbers_of_any_size_keep_their_digits(tmp_path: Path) -> None:
    line = '{"task_id": "a", "big": 123456789012345678901234567890, "f": 0.10000000000000000555}'
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text(line + "\n")
    sql = "select row, row->'big' as big, [row->'big'] as l from rollouts"
    write_file(Session([path]), sql, out, Format.JSONL, overwrite=False)
    number = "123456789012345678901234567890"
    assert out.read_text() == f'{{"row":{line},"big":{number},"l":["{number}"]}}\n'


def test_a_session_that_is_used_again_sees_what_a_new_one_sees(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"reward": 1}\n{"rew')
    session = Session([path])
    count = "select count(*) from rollouts"
    assert list(session.run(count).batches) == [[(1,)]]
    path.write_text('{"reward": 1}\n{"reward": 2}\nnonsense\n{"reward": 4}\n')
    with pytest.raises(BadLineError, match=r"rows\.jsonl:3"):
        session.run(count)
    path.write_text('{"reward": 1}\n{"reward": 2}\n{"reward": 3}\n')
    assert list(session.run(count).batches) == [[(3,)]]


def test_a_file_that_appears_during_the_query_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"reward": 1}\n')
    output = tmp_path / "out.csv"

    class Slow(Session):
        def run(self, sql: str) -> Answer:
            output.write_text("somebody else's")
            return super().run(sql)

    with pytest.raises(WriteError, match=r"out\.csv"):
        write_file(Slow([tmp_path]), "select reward from rollouts", output, Format.CSV, overwrite=False)
    assert output.read_text() == "somebody else's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "rows.jsonl"]


def test_an_output_has_a_manifest(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"reward": 1}\n{"reward": 2}\n')
    sql = "select reward from rollouts where reward > 1"
    assert write_file(Session([source]), sql, output, Format.JSONL, overwrite=False) == 1
    manifest = read_manifest(output)
    assert (manifest["command"], manifest["rows_out"], manifest["arguments"]) == ("query", 1, {"sql": sql})
    digest = xxhash.xxh3_128_hexdigest
    (read,) = manifest["inputs"]
    assert (read["path"], read["xxh3_128"]) == (str(source), digest(source.read_bytes()))
    assert manifest["output_xxh3_128"] == digest(output.read_bytes())
    # A directory stands for what was collected, not for what was made from it.
    assert rows("select count(*) from rollouts", tmp_path) == [(2,)]


def test_files_of_other_iterations_are_not_opened(tmp_path: Path) -> None:
    for iteration, text in enumerate(['{"total_reward": 1}', "nonsense"]):
        name = f"train_iteration_{iteration:06d}_rollout_summaries.jsonl"
        (tmp_path / name).write_text(text + "\n")
    assert rows("select reward from rollouts where iteration = 0", tmp_path) == [(1.0,)]
    with pytest.raises(BadLineError, match="000001"):
        rows("select reward from rollouts", tmp_path)


def test_the_history(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "artifacts")
    one = ledger.start(RunStart(name="first", kind="sft", output_dir=str(tmp_path / "artifacts" / "first")))
    ledger.end(one, RunEnd(status=Status.COMPLETED, duration_s=2.5, metrics={"last_loss": 0.5}))
    two = ledger.start(RunStart(name="second", kind="collect"))
    ledger.note(two, "slow")
    sql = (
        "select run, name, kind, status, duration_s, metrics->>'last_loss', notes->>'$[0].text', output_dir "
        "from history order by started_at, name"
    )
    for thing in (tmp_path / "artifacts", tmp_path / "artifacts" / "index.yaml"):
        assert rows(sql, thing) == [
            (one, "first", "sft", "completed", 2.5, "0.5", None, "artifacts/first"),
            (two, "second", "collect", "running", None, None, "slow", None),
        ]
    (tmp_path / "artifacts" / "first").mkdir()
    (tmp_path / "artifacts" / "first" / "metrics.jsonl").write_text('{"step": 1}\n')
    joined = "select name, step from history h join metrics m on h.name = m.run"
    assert rows(joined, tmp_path / "artifacts" / "first") == [("first", 1)]


def test_numbers_of_other_writers(tmp_path: Path) -> None:
    lines = ['{"step": 0, "loss": 1, "n": 1}', '{"step": 1, "loss": NaN, "Loss": -Infinity, "word": "x"}']
    lines.append('{"step": 2, "loss": 2.5, "word": 3, "filename": "f", "run": "mine", "optim/entropy": 0.5}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    columns = 'step, loss, "Loss_", word, filename, run_, entropy, "optim/entropy"'
    found = rows(f"select {columns} from metrics order by step", tmp_path)
    assert str(found[1][1:3]) == "(nan, -inf)"
    assert found[0][:2] == (0, 1.0)
    assert found[2] == (2, 2.5, None, "3", "f", "mine", 0.5, 0.5)
    assert rows("select sum(loss) from metrics where isfinite(loss)", tmp_path) == [(3.5,)]


def test_a_metric_of_the_last_line_is_a_column(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(3000)]
    lines.append(json.dumps({"step": 3000, "late": 5}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert rows("select step, late from metrics where late is not null", tmp_path) == [(3000, 5)]


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    for name, loss in (("r[1]", 1), ("r1", 2), ("it's*", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 0, "loss": {loss}}}\n')
    for name, loss in (("r[1]", 1), ("r1", 2), ("it's*", 3)):
        assert rows("select run, loss from metrics", tmp_path / name) == [(name, loss)]


def test_records_larger_than_the_usual_buffer(tmp_path: Path) -> None:
    text = "x" * (17 << 20)
    path = tmp_path / "big.jsonl"
    path.write_bytes(
        b"".join(orjson.dumps({"reward": n, "response": {"model": text}}) + b"\n" for n in range(2))
    )
    assert rows("select sum(reward), max(length(model)) from rollouts", path) == [(1.0, 17 << 20)]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    """A query never fails because of a line that is under way, and never sees less than the one before."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.jsonl"
    stop = threading.Event()

    def write_on() -> None:
        with path.open("ab", buffering=0) as file:
            for step in itertools.count():
                line = orjson.dumps({"step": step, "text": "x" * 5000}) + b"\n"
                file.write(line[:2500])
                if stop.wait(0.001):  # most of the time the last line is half there
                    return
                file.write(line[2500:])

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        seen = 0
        while not path.exists() or path.stat().st_size < 10_000:
            pass
        for _ in range(5):
            ((count, steps),) = rows("select count(*), max(step) + 1 from metrics", tmp_path)
            assert count == steps >= seen
            seen = count
    finally:
        stop.set()
        thread.join()


def test_nothing_to_query(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match="nothing to read here"):
        Session([tmp_path])
    with pytest.raises(UsageError, match="no such file"):
        Session([tmp_path / "none"])
    with pytest.raises(UsageError, match=r"neither a file of a run nor rows"):
        Session([tmp_path / "notes.txt"])


def test_sql_of_a_run(sample_run: Path) -> None:
    result = rollbook.query(
        "select iteration, avg(reward) as mean from rollouts group by all order by 1", sample_run
    )
    assert result.columns == ["iteration", "mean"]
    assert len(result.fetchall()) == len(result.fetchall()) == 21
    assert "mean" in str(result)
    frame = pytest.importorskip("pandas").DataFrame(result.df())
    assert frame.shape == (21, 2)
    with pytest.raises(UsageError, match="near it: reward"):
        rollbook.query("select rewardd from rollouts", sample_run)


def test_files_of_other_systems(peer_fixtures: Path) -> None:
    counted = dict(rows("select run, count(*) from metrics group by run", peer_fixtures))
    for run in ("tinker_sync", "tinker_async", "tinker_sft"):
        assert counted[run] == len(list(open_run(peer_fixtures / run).metrics))
    assert rows("select max(step), count(loss) from metrics", peer_fixtures / "llamafactory_crashed") == [
        (2, 2)
    ]
    both = "select run, entropy from metrics where run = 'tinker_sync' and step = 0"
    assert rows(both, peer_fixtures)[0][1] == pytest.approx(0.97270536)
    summaries = list(open_run(peer_fixtures / "tinker_sync").rollouts())
    assert rows(
        "select count(*), avg(reward), min(stop_reason) from rollouts", peer_fixtures / "tinker_sync"
    ) == [
        (
            len(summaries),
            pytest.approx(sum(s.total_reward or 0 for s in summaries) / len(summaries)),
            "completed",
        )
    ]
    exports = sorted((peer_fixtures / "prime_rl").rglob("*.jsonl"))
    records = [orjson.loads(line) for path in exports for line in path.read_bytes().splitlines()]
    tokens = "select count(*), count(*) filter (is_masked), sum(token_id) from tokens"
    assert rows(tokens, peer_fixtures / "prime_rl") == [
        (
            sum(len(record["token_ids"]) for record in records),
            sum(sum(record["is_masked"] or []) for record in records),
            sum(sum(record["token_ids"]) for record in records),
        )
    ]
    for path in (peer_fixtures / "nemo_gym").glob("*_rollouts.jsonl"):
        lines = path.read_bytes().splitlines()
        assert rows("select count(*), avg(reward), count(model) from rollouts", path)[0][0] == len(lines)
        assert rows("select count(*) from transcripts where role is null", path) == [(0,)]


def test_metrics_of_rollouts_are_one_column_for_collections_and_runs(tmp_path: Path) -> None:
    """Under one name whatever recorded them: of the turns the last value, then those of the episode."""
    odd = {"_rb_metrics": ["correct", "a/b~c"], "correct": True, "a/b~c": {"x": [1]}, "task": "no metric"}
    lines = [{"_rb_key": "t#0", "reward": 1.0} | odd, {"_rb_key": "t#1", "reward": 0.0, "correct": True}]
    collecting.write_rows(tmp_path / "c.jsonl", lines)
    collected = "select metrics from rollouts order by key"
    assert rows(collected, tmp_path / "c.jsonl") == [('{"correct":true,"a/b~c":{"x":[1]}}',), (None,)]
    with rollbook.Run(tmp_path / "run") as run, run.rollouts(iteration=0) as log, log.group(size=1) as group:
        steps = [
            rollbook.Step(metrics={"correct": 0.0, "tries": 1}),
            rollbook.Step(metrics={"correct": 1.0}),
        ]
        group.add(rollbook.Trajectory(steps=steps, metrics={"length": 2}))
    question = "select metrics->>'correct', metrics->>'tries', metrics->>'length' from rollouts"
    assert rows(question, tmp_path / "run") == [("1.0", "1", "2")]
