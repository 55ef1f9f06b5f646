"""The package openai takes the `response` of a collected line for one of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from collect.test_response_objects import EPISODES, responses

pytestmark = pytest.mark.interop
PYTHON = Path(__file__).resolve().parents[2] / ".venvs" / "verifiers" / "bin" / "python"  # which needs openai
CHECK = """\
import sys
from openai.types.responses import Response
Response.model_validate_json(sys.stdin.buffer.read())
"""


@pytest.mark.parametrize("name", EPISODES)
def test_it_is_valid_for_its_own_model(name: str) -> None:
    checked = subprocess.run([PYTHON, "-c", CHECK], input=responses()[name], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()
