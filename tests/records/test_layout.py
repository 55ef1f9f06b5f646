"""The names of a run directory, to the letter, in both layouts, and back from name to meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import UsageError
from rollbook.records.layout import Artifact, IterationFile, Layout, RunFiles, base_name, eval_split, sanitize

ROOT = Path("run")

FLAT_NAMES = {
    ("train", 10, Artifact.HTML): "train_iteration_000010.html",
    ("train", 10, Artifact.LOGTREE): "train_iteration_000010_logtree.json",
    ("train", 10, Artifact.SUMMARIES): "train_iteration_000010_rollout_summaries.jsonl",
    ("train", 10, Artifact.TRANSCRIPTS): "train_iteration_000010_transcripts.jsonl",
    ("eval/gsm8k", 0, Artifact.HTML): "eval_gsm8k_iteration_000000.html",
    ("eval/gsm8k", 0, Artifact.LOGTREE): "eval_gsm8k_iteration_000000_logtree.json",
    ("eval/gsm8k", 0, Artifact.SUMMARIES): "eval_gsm8k_iteration_000000_rollout_summaries.jsonl",
    ("eval/gsm8k", 0, Artifact.TRANSCRIPTS): "eval_gsm8k_iteration_000000_transcripts.jsonl",
    ("eval/my eval/(v1)!", 999_999, Artifact.HTML): "eval_my_eval_v1_iteration_999999.html",
    ("train", 1_234_567, Artifact.HTML): "train_iteration_1234567.html",
}
NESTED_NAMES = {
    ("train", 10, Artifact.HTML): "iteration_000010/train.html",
    ("train", 10, Artifact.LOGTREE): "iteration_000010/train_logtree.json",
    ("train", 10, Artifact.SUMMARIES): "iteration_000010/train_rollout_summaries.jsonl",
    ("train", 10, Artifact.TRANSCRIPTS): "iteration_000010/train_transcripts.jsonl",
    ("eval/gsm8k", 0, Artifact.HTML): "iteration_000000/eval_gsm8k.html",
    ("eval/gsm8k", 0, Artifact.LOGTREE): "iteration_000000/eval_gsm8k_logtree.json",
    ("eval/gsm8k", 0, Artifact.SUMMARIES): "iteration_000000/eval_gsm8k_rollout_summaries.jsonl",
    ("eval/my eval/(v1)!", 5, Artifact.TRANSCRIPTS): "iteration_000005/eval_my_eval_v1_transcripts.jsonl",
    ("train", 1_234_567, Artifact.HTML): "iteration_1234567/train.html",
}
CASES = [(Layout.FLAT, *case) for case in FLAT_NAMES.items()]
CASES += [(Layout.NESTED, *case) for case in NESTED_NAMES.items()]


@pytest.mark.parametrize(("layout", "what", "name"), CASES, ids=[name for _, _, name in CASES])
def test_names_to_the_letter(layout: Layout, what: tuple[str, int, Artifact], name: str) -> None:
    assert RunFiles(ROOT, layout).iteration(*what) == ROOT / name


def test_the_files_of_the_run_itself() -> None:
    files = RunFiles(ROOT)
    assert files.layout is Layout.FLAT
    assert [files.run, files.config, files.code_diff] == [
        ROOT / "run.json",
        ROOT / "config.json",
        ROOT / "code.diff",
    ]
    assert [files.metrics, files.checkpoints, files.alerts] == [
        ROOT / "metrics.jsonl",
        ROOT / "checkpoints.jsonl",
        ROOT / "alerts.jsonl",
    ]
    assert files.superseded == ROOT / "superseded"
    assert files.checkpoint("000010") == ROOT / "checkpoints" / "000010"


@pytest.mark.parametrize(
    ("name", "sanitized"),
    [
        ("my eval/(v1)!", "my_eval_v1"),
        ("gsm8k", "gsm8k"),
        ("math-500.v2", "math-500.v2"),
        ("../../etc/passwd", "etc_passwd"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("///", "unnamed"),
        ("数学", "unnamed"),
        ("a\nb\0c", "a_b_c"),
        ("__x__", "x"),
    ],
)
def test_names_of_evaluators_are_made_safe(name: str, sanitized: str) -> None:
    assert sanitize(name) == sanitized
    assert base_name(eval_split(name)) == f"eval_{sanitized}"


@pytest.mark.parametrize("split", ["", "test", "eval", "Train", "train/x"])
def test_an_unknown_split_is_refused(split: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"split {split!r} is neither 'train' nor 'eval/<name>'")):
        RunFiles(ROOT).iteration(split, 0, Artifact.HTML)


def test_a_negative_iteration_is_refused() -> None:
    with pytest.raises(UsageError, match="iteration -1 is negative"):
        RunFiles(ROOT).iteration("train", -1, Artifact.HTML)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_a_checkpoint_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a file name; try"):
        RunFiles(ROOT).checkpoint(name)


def test_files_of_both_layouts_are_found_in_one_directory(tmp_path: Path) -> None:
    expected = set()
    for layout in Layout:
        for what in FLAT_NAMES:
            path = RunFiles(tmp_path, layout).iteration(*what)
            path.parent.mkdir(exist_ok=True)
            path.touch()
            split, iteration, artifact = what
            expected.add(IterationFile(path, base_name(split), iteration, artifact))
    for other in (
        "metrics.jsonl",
        "config.json",
        "train_iteration_10.html",
        "train_iteration_000010.html.tmp",
        ".train_iteration_000010_logtree.json.lock",
        "train_iteration_000010_other.json",
        "iteration_000010/notes.txt",
        "iteration_000010/.train.html.1a2b.tmp",
    ):
        (tmp_path / other).touch()
    (tmp_path / "iteration_000011").touch()
    (tmp_path / "checkpoints").mkdir()
    assert set(RunFiles(tmp_path).iteration_files()) == expected


@settings(deadline=None)
@given(
    name=st.none()
    | st.text(max_size=40)
    | st.sampled_from(["a_iteration_000001", "x_logtree.json", "t.html"]),
    iteration=st.integers(0, 10**9),
    artifact=st.sampled_from(Artifact),
    layout=st.sampled_from(Layout),
)
def test_any_name_leads_back_to_what_it_was_made_of(
    name: str | None,
    iteration: int,
    artifact: Artifact,
    layout: Layout,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("names")
    split = "train" if name is None else eval_split(name)
    path = RunFiles(root, layout).iteration(split, iteration, artifact)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert path.resolve().is_relative_to(root.resolve())
    (found,) = RunFiles(root).iteration_files()
    assert found == IterationFile(path, base_name(split), iteration, artifact)
    assert found.split == ("train" if name is None else eval_split(sanitize(name)))
    assert RunFiles(root, layout).iteration(found.split, iteration, artifact) == path
