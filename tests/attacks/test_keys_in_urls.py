"""A key that somebody put into a URL: refused before anything is written, with the setting it belongs to."""

from __future__ import annotations

import pytest

from rollbook.envs.gym_bridge import GymAgent
from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings


@pytest.mark.parametrize("rest", ["?key=k3y-0123456789", "/?sig=k3y-0123456789", "#k3y-0123456789", "?"])
def test_a_query_string(rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        OpenAIPolicy(OpenAISettings(base_url=f"http://h/v1{rest}", model="m"))
    assert "policy.base_url has a query" in str(caught.value)
    assert "policy.api_key_env" in str(caught.value)
    assert "k3y" not in str(caught.value)


def test_a_query_string_of_an_agent_server() -> None:
    with pytest.raises(UsageError, match=r"env\.url has a query"):
        GymAgent("http://h/run?key=k3y-0123456789")


def test_a_password_beside_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    settings = OpenAISettings(base_url="http://me:p4ssw0rd@h/v1", model="m", api_key_env="SOME_KEY")
    with pytest.raises(UsageError) as caught:
        OpenAIPolicy(settings)
    assert "only one of them can be sent; write http://h/v1 or leave out policy.api_key_env" in str(
        caught.value
    )
    assert "p4ssw0rd" not in str(caught.value)


def test_a_password_alone_is_sent() -> None:
    OpenAIPolicy(OpenAISettings(base_url="http://me:p4ssw0rd@h/v1", model="m"))
