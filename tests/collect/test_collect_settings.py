"""What people type at first, and what they are told when it is not quite that."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from collecting import config, settings
from rollbook.errors import UsageError

OPENAI = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}


def test_a_model_other_than_the_policys_is_refused_with_the_key_that_sets_it(tmp_path: Path) -> None:
    config(tmp_path, OPENAI)
    with pytest.raises(
        UsageError, match=r"responses_create_params\.model .*write agents\.a\.policy\.model=z "
    ):
        settings(tmp_path, "+responses_create_params.model=z")
    assert settings(tmp_path, "+responses_create_params.model=m").responses_create_params == {"model": "m"}


def test_an_agent_server_is_told_which_model(tmp_path: Path) -> None:
    agent = {"env": {"name": "gym", "url": "http://127.0.0.1:1"}}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    assert settings(tmp_path, "+responses_create_params.model=z").responses_create_params == {"model": "z"}
