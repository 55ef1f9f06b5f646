"""Every row of every epoch is learned once, also where epochs are of different length."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.sft.epochs import epoch_order, to_rows
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config


def rows_of_any_length(count: int) -> list[dict[str, Any]]:
    chance = random.Random(0)
    return [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a" * chance.choice([1, 2, 3, 20, 30, 34])},
            ]
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(("weight", "epochs"), [(0.5, 4.0), (1.5, 2.5)])
def test_part_of_a_dataset_packs_differently_in_each_epoch(
    tmp_path: Path, weight: float, epochs: float
) -> None:
    write_config(tmp_path, data__eval=[], training__per_device_train_batch_size=1)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_any_length(30)))
    words = [f"training.num_train_epochs={epochs}", f"data.train=[{{path: {path}, weight: {weight}}}]"]
    train(
        load_settings(tmp_path / "config.yaml", words),
        tmp_path / "artifacts",
        resume=False,
        log=lambda _: None,
    )
    output = tmp_path / "artifacts/model/demo"
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    learned = [line for line in lines if "loss" in line]
    assert all(line["loss"] > 0 and line["packing_efficiency"] == 1.0 for line in learned)
    whole = list(range(1, int(epochs) + 1))
    assert [line["epoch"] for line in learned if line["epoch"] in whole] == whole
    results = json.loads((output / "train_results.json").read_text())
    seen = results["train_samples_per_second"] * results["train_runtime"]
    assert seen == pytest.approx(results["epoch"] * 30 * weight)


def test_every_token_of_every_epoch_is_seen(tmp_path: Path) -> None:
    """A step takes four rows of an epoch of eleven: the last one of each is smaller, and none is empty."""
    write_config(tmp_path, data__eval=[], training__num_train_epochs=3, data__packing="off")
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_any_length(11)))
    said: list[str] = []
    train(load_settings(tmp_path / "config.yaml"), tmp_path / "artifacts", resume=False, log=said.append)
    (count,) = {line.split(", ")[1] for line in said if "11 of 11 rows" in line}
    state = json.loads((tmp_path / "artifacts/model/demo/trainer_state.json").read_text())
    assert state["num_input_tokens_seen"] == 3 * int(count.removesuffix(" tokens").replace(",", ""))
    assert state["global_step"] == 9 and state["epoch"] == 3.0


def test_an_epoch_sees_everything_by_weight_and_is_the_same_for_the_same_seed() -> None:
    order = epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=1)
    assert sorted(order[order < 10].tolist()) == sorted([*range(10), *range(10)])
    half = order[order >= 10].tolist()
    assert len(half) == len(set(half)) == 10
    assert order.tolist() == epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=1).tolist()
    assert order.tolist() != epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=2).tolist()
    lengths = np.arange(1, 31)
    rows = to_rows(order, lengths, capacity=40, packed=True)
    assert sorted(number for row in rows for number in row) == sorted(order.tolist())
    assert all(sum(lengths[number] for number in row) <= 40 for row in rows)
