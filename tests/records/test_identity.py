"""One function makes each key, and it makes the same key everywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.records.identity import content_id, derive_seed, rollout_key, split_key, task_digest, task_id

USER = {"role": "user", "content": "2 + 2?"}
FEW_SHOT = [USER, {"role": "assistant", "content": "4"}]
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


def test_a_task_is_named_by_its_own_id() -> None:
    assert task_id({"_rb_key": "gsm8k/17#3", "task_id": "other"}) == "gsm8k/17"
    assert task_id({"task_id": 17, "id": "x"}) == "17"
    assert task_id({"id": "sum-1", "question": "2 + 2?"}) == "sum-1"
    assert task_id({"id": None, "a": 1, "b": 2}) == task_id({"b": 2, "a": 1, "id": None})
    assert task_id({"a": 1}).startswith("row-")
    assert task_id({"a": 1}) == content_id({"a": 1, "_ng_task_index": 5}) != task_id({"a": 2})


def test_prompts_that_begin_alike_are_different_tasks() -> None:
    third = [*FEW_SHOT, {"role": "user", "content": "3 + 3?"}]
    fourth = [*FEW_SHOT, {"role": "user", "content": "4 + 4?"}]
    assert len({task_id(prompt) for prompt in ([USER], FEW_SHOT, third, fourth)}) == 4
    assert len({task_digest(prompt) for prompt in ([USER], FEW_SHOT, third, fourth)}) == 4
    assert task_id([USER], [CALCULATOR]) != task_id([USER])
    assert task_digest([USER], [CALCULATOR]) != task_digest([USER])


def test_keys_that_say_nothing_do_not_count() -> None:
    padded = {"tool_calls": None, "content": "2 + 2?", "role": "user"}
    assert task_id([padded]) == task_id([USER])
    assert task_digest([padded]) == task_digest([USER])


def test_ids_and_seeds_of_earlier_runs_stay() -> None:
    """Written down: a change here would tear apart the runs that are compared by these keys."""
    assert task_id([USER]) == "sha256:13b5c0a52a1b8734"
    assert content_id({"a": 1}) == "row-42a94dc65947f607cfed"
    assert task_digest([USER]) == "d3dc4e6ed5a6d8cd49dbcf32839d248d"
    assert derive_seed(0, 3, "arithmetic", "gsm8k/17", 1, 0) == 2675996655980623261


@given(st.text(), st.integers(0, 10**18 - 1))
def test_a_key_splits_into_what_it_was_made_of(name: str, repeat: int) -> None:
    assert split_key(rollout_key(name, repeat)) == (name, repeat)


@given(st.lists(st.none() | st.text() | st.integers()), st.lists(st.none() | st.text() | st.integers()))
def test_seeds_differ_with_every_part(one: list[str | int | None], other: list[str | int | None]) -> None:
    assert 0 <= derive_seed(*one) < 2**63
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_seeds_tell_kinds_of_parts_apart() -> None:
    assert len({derive_seed(1), derive_seed("1"), derive_seed(None), derive_seed("i", "1")}) == 4
    with pytest.raises(TypeError, match=r"not 0\.5"):
        derive_seed(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not True"):
        derive_seed(True)


def test_seeds_do_not_depend_on_the_process() -> None:
    code = "from rollbook.records.identity import derive_seed; print(derive_seed(7, 'a', None, 2**80))"
    environment = {"PYTHONHASHSEED": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert int(said.stdout) == derive_seed(7, "a", None, 2**80)
