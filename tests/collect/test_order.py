"""The finished output in input order, every line as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rollbook.collect.order import put_in_order
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.plan import Plan


def test_lines_come_in_input_order_and_strangers_last(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"id": f"t{i}", "responses_create_params": {"input": "q"}} for i in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = CollectionFiles(tmp_path / "out.jsonl")
    lines = [f'{{"_rb_key":"t{i}#{repeat}","text":"{"x" * i}"}}\n' for i in range(50) for repeat in range(2)]
    shuffled = [*lines, '{"_rb_key":"stranger#0"}\n']
    random.Random(1).shuffle(shuffled)
    files.output.write_text("".join(shuffled))
    files.journal.write_bytes(b"old")
    plan = Plan(source, limit=None, repeats=2)
    put_in_order(files, plan)
    assert files.output.read_text() == "".join([*lines, '{"_rb_key":"stranger#0"}\n'])
    assert not files.journal.exists()
    before = files.output.stat().st_ino
    put_in_order(files, plan)
    assert files.output.stat().st_ino == before  # in order already: nothing is rewritten
