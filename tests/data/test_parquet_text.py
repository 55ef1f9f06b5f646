"""Text in Parquet is the text that was written, whatever it looks like."""

from __future__ import annotations

from pathlib import Path

import orjson

from rollbook.data.output import RowOutput
from rollbook.data.rows import read_rows


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
    with RowOutput(tmp_path / "rows.parquet") as output:
        for row in rows:
            output.write(orjson.dumps(row))
    assert [row.value() for row in read_rows(tmp_path / "rows.parquet")] == rows
