"""What is written to Parquet comes back as it was, whatever it looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.data.output import new_dataset
from rollbook.records.rows import read_rows


def round_trip(directory: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with new_dataset(directory / "rows.parquet") as output:
        for row in rows:
            output.write(orjson.dumps(row))
    return [row.value() for row in read_rows(directory / "rows.parquet")]


def test_objects_whose_keys_are_data_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        {"id": f"t{number}", "tests": {f"test_{number}": "passes"}, "none": {}, "in": {"deep": {}}}
        for number in range(300)
    ]
    assert round_trip(tmp_path, rows) == rows


def test_rows_of_hundreds_of_fields_keep_them(tmp_path: Path) -> None:
    rows = [{"task_id": f"t{number}", "reward": 1.0, f"only_{number}": number} for number in range(300)]
    back = round_trip(tmp_path, rows)
    assert [{name: value for name, value in row.items() if value is not None} for row in back] == rows


def test_a_map_of_another_writer_is_an_object(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.map_(pa.int64(), pa.int64())))
    pq.write_table(pa.table({"m": pa.array([[("a", [[(1, 2)]])], None], kind)}), tmp_path / "m.parquet")
    assert [row.value() for row in read_rows(tmp_path / "m.parquet")] == [
        {"m": {"a": [{"1": 2}]}},
        {"m": None},
    ]


def test_what_looks_like_a_date_or_an_id_stays_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"ABCDEF01-834C-4AEA-995B-6AA84283A55{place}",
            "chosen": [{"role": "assistant", "content": f"2024-1-{place + 1}"}],
            "rejected": [{"role": "assistant", "content": f"12:3{place}", "at": "2024-01-01T10:00:00Z"}],
            "odd": {'a "name" of date': "2024-01-01", "n": 1.5},
        }
        for place in range(3)
    ]
    assert round_trip(tmp_path, rows) == rows
