"""A finished run's result reaches its config file, or the user learns why not; paths come back."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rollbook.runs.handoff import (
    HandoffOutput,
    HandoffResult,
    HandoffState,
    path_from,
    publish,
    read_handoff,
    resolve_checkpoint,
)
from runs.handoff.handoff_samples import (
    CONFIG,
    PUBLISHED,
    demo,
    hand_over,
    make_project,
    only,
    written_checkpoint,
)

NASTY = Path(__file__).parent / "nasty_yaml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


# -- the block -----------------------------------------------------------------------------------------


def test_only_the_block_changes(project: Path) -> None:
    result = hand_over(project)
    assert result == HandoffResult(state=HandoffState.WRITTEN, config=project / "config.yaml")
    assert result.published
    assert (project / "config.yaml").read_text() == PUBLISHED
    assert only(project) == ["artifacts", "config.yaml"]  # no lock, no temporary file, no fallback stays


def test_the_same_again_does_not_touch_the_file(project: Path) -> None:
    hand_over(project)
    os.utime(project / "config.yaml", ns=(1, 1))
    before = (project / "config.yaml").stat()
    assert hand_over(project).state is HandoffState.UNCHANGED
    after = (project / "config.yaml").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_second_run_replaces_the_first(project: Path) -> None:
    hand_over(project)
    config = project / "config.yaml"
    for steps in (25, 26, 27):
        checkpoint = project / f"artifacts/model/demo/checkpoint-{steps}"
        publish(config, demo(project, checkpoint_path=checkpoint, total_steps=steps), fallback=project / "f")
    assert config.read_text() == PUBLISHED.replace("24", "27")


def test_what_is_unknown_is_cleared_where_it_stood_and_left_out_elsewhere(project: Path) -> None:
    config = project / "config.yaml"
    config.write_text("runtime_info:\n  output:\n    training_metrics: {final_loss: 0.1, mine: 1}\n")
    publish(config, HandoffOutput(checkpoint_path=project / "c", total_steps=3), fallback=project / "f")
    assert config.read_text() == (
        "runtime_info:\n  output:\n    training_metrics: {final_loss: null, mine: 1, total_steps: 3}\n"
        "    checkpoint_path: c\n    training_curves: null\n"
    )


def test_a_diverged_loss_is_null(project: Path) -> None:
    config = project / "config.yaml"
    publish(config, demo(project, final_loss=float("nan"), last_loss=float("inf")), fallback=project / "f")
    metrics = read_handoff(config)["training_metrics"]
    assert (metrics["final_loss"], metrics["last_loss"], metrics["mean_loss"]) == (None, None, 0.342)


@pytest.mark.parametrize("path", sorted(NASTY.glob("*.yaml")), ids=lambda path: path.stem)
def test_nasty_files(tmp_path: Path, path: Path) -> None:
    config = tmp_path / "config.yaml"
    shutil.copyfile(path, config)
    output = demo(
        tmp_path, mean_loss=None, train_loss_plot=None, training_log=tmp_path / "artifacts/logs/demo_1.log"
    )
    result = publish(
        config, msgspec.structs.replace(output, training_curves="12e4567"), fallback=tmp_path / "f"
    )
    assert result.state is HandoffState.WRITTEN
    assert config.read_bytes() == path.with_suffix(".after").read_bytes()


@pytest.mark.parametrize("path", sorted((NASTY / "refused").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_cannot_be_done_safely_goes_beside_the_run(tmp_path: Path, path: Path) -> None:
    config, fallback = tmp_path / "config.yaml", tmp_path / "runs/demo/output.yaml"
    shutil.copyfile(path, config)
    result = publish(config, demo(tmp_path), fallback=fallback, retry="rollbook promote demo-1")
    assert config.read_bytes() == path.read_bytes()
    assert (result.state, result.published, result.fallback) == (HandoffState.ASIDE, False, fallback)
    reasons = json.loads((NASTY / "refused/reasons.json").read_text())
    assert reasons.get(path.stem, "not UTF-8") in result.reason
    assert "rollbook promote demo-1" in result.next_step
    block = yaml.safe_load(PUBLISHED)["runtime_info"]["output"]
    assert yaml.safe_load(fallback.read_text()) == {"runtime_info": {"output": block}}


# -- the file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o664, 0o600, 0o644])
def test_the_mode_is_kept(project: Path, mode: int) -> None:
    (project / "config.yaml").chmod(mode)
    assert hand_over(project).published
    assert stat.S_IMODE((project / "config.yaml").stat().st_mode) == mode


def test_a_symlink_keeps_pointing_and_paths_are_seen_from_the_real_file(project: Path) -> None:
    (project / "configs").mkdir()
    (project / "config.yaml").rename(project / "configs/sft.yaml")
    (project / "config.yaml").symlink_to("configs/sft.yaml")
    assert hand_over(project).state is HandoffState.WRITTEN
    assert (project / "config.yaml").is_symlink()
    written = written_checkpoint(project / "configs/sft.yaml")
    assert written == "../artifacts/model/demo/checkpoint-24"
    for name in ("config.yaml", "configs/sft.yaml"):
        assert resolve_checkpoint(project / name).samefile(project / "artifacts/model/demo/checkpoint-24")


def test_a_read_only_file_is_left_alone(project: Path) -> None:
    (project / "config.yaml").chmod(0o444)
    result = hand_over(project)
    assert "read-only" in result.reason
    assert (project / "config.yaml").read_text() == CONFIG


@pytest.mark.parametrize("name", ["missing.yaml", "artifacts", "loop.yaml"])
def test_no_file_to_write_into(project: Path, name: str) -> None:
    (project / "loop.yaml").symlink_to("loop.yaml")
    result = hand_over(project, config=name)
    assert result.state is HandoffState.ASIDE
    assert name in result.reason
    assert result.fallback is not None
    assert result.fallback.exists()


def _publish_as_nobody(project: Path, answers: Any) -> None:
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    answers.put(msgspec.json.encode(hand_over(project), enc_hook=str))


def test_a_read_only_directory_falls_back() -> None:
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        run = project / "artifacts/model/demo"
        run.mkdir(parents=True)
        (project / "config.yaml").write_text(CONFIG)
        (project / "config.yaml").chmod(0o666)
        run.chmod(0o777)
        project.chmod(0o555)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_publish_as_nobody, args=(project, answers))
        child.start()
        result = msgspec.json.decode(answers.get(timeout=60))
        child.join()
        project.chmod(0o755)
        assert result["state"] == "aside"
        assert "config.yaml" in result["reason"]
        assert (project / "config.yaml").read_text() == CONFIG
        assert written_checkpoint(run / "output.yaml") == "artifacts/model/demo/checkpoint-24"


def test_when_the_fallback_cannot_be_written_either_the_block_is_in_the_answer(project: Path) -> None:
    (project / "config.yaml").write_text("- a list\n")
    (project / "file").write_text("")
    result = publish(project / "config.yaml", demo(project), fallback=project / "file/output.yaml")
    assert result.fallback is None
    assert "not a mapping" in result.reason
    assert "file/output.yaml" in result.reason
    assert yaml.safe_load(result.block)["runtime_info"]["output"]["training_curves"] == "ab12cd34"


def test_hostile_names_stay_inside_the_comment_of_the_fallback(project: Path) -> None:
    config = project / "a\nevil: true #\x1b[31m.yaml"
    config.write_text("- a list\n")
    result = publish(config, demo(project), fallback=project / "f.yaml")
    assert result.fallback is not None
    assert list(yaml.safe_load(result.fallback.read_text())) == ["runtime_info"]
    assert "\x1b" not in result.fallback.read_text()


# -- paths ---------------------------------------------------------------------------------------------


def test_paths_are_seen_from_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(os.path.realpath(tmp_path)) / "configs"
    base.mkdir()
    big = base.parent / "big disk"
    (big / "model").mkdir(parents=True)
    (base / "artifacts").symlink_to(big)
    (base.parent / "shared").symlink_to(big)
    assert path_from(base, base / "a/b") == "a/b"
    assert path_from(base, base) == "."
    assert path_from(base, base.parent / "x/y") == "../x/y"
    assert path_from(base, base / "artifacts/model") == "artifacts/model"
    assert path_from(base, base.parent / "shared/model") == "../shared/model"
    assert path_from(base, base / "artifacts/../configs/z") == "z"  # `..` behind a link is the disk's parent
    assert path_from(base, Path("/elsewhere/x")) == "/elsewhere/x"
    assert path_from(Path("/"), Path("/a/b")) == "a/b"
    monkeypatch.chdir(base)
    assert path_from(base, Path("a/b")) == "a/b"
    (base.parent / "alias").symlink_to(base)
    assert path_from(base, base.parent / "alias/a") == "a"


def test_odd_names_come_back(project: Path) -> None:
    config = project / "config.yaml"
    for name in ("1e5", "0755", "yes", "a: b #c", "tab\there", "日本", "'\"\\", "new\nline", "~", " x "):
        checkpoint = project / name
        checkpoint.mkdir()
        assert publish(config, demo(project, checkpoint_path=checkpoint), fallback=project / "f").published
        assert resolve_checkpoint(config) == checkpoint


def test_a_name_that_is_not_utf8_goes_aside(project: Path) -> None:
    odd = project / os.fsdecode(b"ckpt-\xff")
    result = publish(project / "config.yaml", demo(project, checkpoint_path=odd), fallback=project / "f.yaml")
    assert "UTF-8" in result.reason
    assert (project / "config.yaml").read_text() == CONFIG
    assert written_checkpoint(project / "f.yaml") == os.fsdecode(b"ckpt-\xff")


def test_the_next_run_finds_the_checkpoint(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over(project)
    monkeypatch.chdir(project.parent)
    found = resolve_checkpoint(Path(project.name) / "config.yaml")
    assert found == project / "artifacts/model/demo/checkpoint-24"
