"""Curves are drawn without a trace in the caller's own matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot
import pytest

from rollbook.errors import UsageError
from rollbook.runs.plots import draw
from rollbook.runs.series import Curve


def test_drawing_leaves_the_figures_and_the_backend_of_a_notebook_alone(tmp_path: Path) -> None:
    before = matplotlib.get_backend()
    matplotlib.pyplot.switch_backend("svg")
    try:
        own = matplotlib.pyplot.figure()
        draw([Curve("loss", [1, 2, 3], [3.0, float("nan"), 1.0])], tmp_path / "loss.png", "demo")
        assert matplotlib.get_backend() == "svg"
        assert matplotlib.pyplot.get_fignums() == [own.number]
    finally:
        matplotlib.pyplot.close("all")
        matplotlib.pyplot.switch_backend(before)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no picture could be written there"):
        draw([Curve("loss", [1], [1.0])], tmp_path / "file" / "loss.png", "demo")
