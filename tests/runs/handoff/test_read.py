"""The next run reads what the last one handed on, in every shape it may have, or learns what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.errors import BadFileError
from rollbook.runs.handoff import read_handoff, resolve_checkpoint


@pytest.mark.parametrize(
    "written",
    [
        "{description: d, value: a/ckpt, path: wrong}",
        "{value: null, path: a/ckpt}",
        "{value: '', path: a/ckpt}",
        "{description: d, path: a/ckpt}",
        "a/ckpt",
        "b/../a/ckpt",
        "{description: d, value: ABSOLUTE}",
    ],
)
def test_value_then_path_then_the_scalar(tmp_path: Path, written: str) -> None:
    checkpoint = tmp_path / "a/ckpt"
    checkpoint.mkdir(parents=True)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"x: !custom 1\nwhen: 2024-13-45\nruntime_info:\n  output:\n    checkpoint_path: "
        f"{written.replace('ABSOLUTE', str(checkpoint))}\n"
    )
    assert resolve_checkpoint(config) == checkpoint


def test_a_block_that_is_merged_in_is_read(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("base: &b {output: {checkpoint_path: .}}\nruntime_info: {<<: *b, z: 1}\n")
    assert resolve_checkpoint(config) == tmp_path


def test_read_handoff_gives_plain_values(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "runtime_info:\n  output:\n    training_metrics: {description: d, value: {final_loss: 0.3}}\n"
        "    artifacts: {train_results: {value: a.json}, training_log: b.log}\n"
        "    training_curves: {description: d, value: null}\n    mine: {k: 1}\n"
    )
    assert read_handoff(config) == {
        "training_metrics": {"final_loss": 0.3},
        "artifacts": {"train_results": "a.json", "training_log": "b.log"},
        "training_curves": None,
        "mine": {"k": 1},
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\n", "runtime_info is missing; run `rollbook sft"),
        ("", "runtime_info is missing"),
        ("runtime_info: {}\n", "runtime_info.output is missing"),
        ("runtime_info: {output: null}\n", "runtime_info.output.checkpoint_path is missing; run"),
        (
            "runtime_info: {output: {checkpoint_path: null}}\n",
            "runtime_info.output.checkpoint_path is null; run",
        ),
        ("runtime_info: {output: {checkpoint_path: {description: d}}}\n", "checkpoint_path is null"),
        ("runtime_info: {output: {checkpoint_path: ''}}\n", "checkpoint_path is null"),
        ("runtime_info: {output: {checkpoint_path: 12}}\n", "checkpoint_path is 12, not a path"),
        ("runtime_info: {output: {checkpoint_path: [a]}}\n", "not a path"),
        ("runtime_info: {output: {checkpoint_path: gone/x}}\n", "gone/x does not exist"),
        ("runtime_info: {output: [a]}\n", "runtime_info.output is a list"),
        (
            "runtime_info: {output: {checkpoint_path: a, checkpoint_path: b}}\n",
            "'checkpoint_path' is there twice",
        ),
        ("runtime_info:\n  output: {}\n  output: {}\n", "'output' is there twice (lines 2 and 3)"),
        ("runtime_info: {output: {checkpoint_path: !x a}}\n", "not readable"),
        ("runtime_info: {output: \n", "not readable"),
        ("a: 1\n---\nb: 1\n", "not readable"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, why: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(BadFileError) as error:
        resolve_checkpoint(config)
    assert why in str(error.value)
    assert str(config) in str(error.value)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"no\.yaml: cannot be read"):
        resolve_checkpoint(tmp_path / "no.yaml")
