"""A collection from a model of ours, without a server: `policy: {kind: local, path: DIR}`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from collecting import config, results, row, run, small_input, write_rows
from rollbook.errors import RollbookError, UsageError
from rollbook.policies.registry import describe_policy
from rollbook.samplers.thread import SamplerError
from rollbook.tiny import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "What is 0123456789+?.", layers=1, positions=64)


def local(path: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "local", "path": str(path), "max_tokens": 8, "slots": 4, **options}


def sampled(directory: Path) -> dict[str, list[int]]:
    outputs = {row["_rb_key"]: row["response"]["output"][-1] for row in results(directory / "out.jsonl")}
    return {key: item["generation_token_ids"] for key, item in outputs.items()}


def test_rollouts_are_sampled_with_their_tokens_and_again_the_same(tiny: Path, tmp_path: Path) -> None:
    words = ("num_repeats=2", "num_repeats_add_seed=true")
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory, parallel in zip(directories, (1, 12), strict=True):
        directory.mkdir()
        small_input(directory, 4)
        config(directory, local(tiny))
        run(directory, *words, f"num_samples_in_parallel={parallel}")
    one, two = (sampled(directory) for directory in directories)
    assert one == two
    assert len(one) == 8
    assert one["t0#0"] != one["t0#1"]
    assert one["t0#0"] == one["t1#0"]  # the same question with the same seed
    first = results(directories[0] / "out.jsonl")[0]["response"]
    reply = first["output"][-1]
    assert len(reply["generation_log_probs"]) == len(reply["generation_token_ids"]) <= 8
    assert first["usage"]["output_tokens"] == len(reply["generation_token_ids"])
    assert first["model"] == str(tiny)


def test_a_row_is_sampled_as_it_asks(tiny: Path, tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path, local(tiny))
    run(tmp_path, "+responses_create_params.temperature=0", "+responses_create_params.max_output_tokens=3")
    (tokens, *others) = sampled(tmp_path).values()
    assert all(other == tokens for other in others)
    assert len(tokens) <= 3


def test_other_weights_are_another_policy(tiny: Path, tmp_path: Path) -> None:
    """A collection is not gone on with by a model that has changed; where it is does not matter."""
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    described = describe_policy(local(tiny))
    assert describe_policy(local(copy)) == described
    assert describe_policy(local(copy, slots=9)) == described
    assert describe_policy(local(copy, temperature=0.5)) != described
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert describe_policy(local(copy)) != described


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"kind": "local"}, "name the model by one of path and from"),
        ({"kind": "local", "path": "a", "from": "b"}, "name the model by one of path and from"),
        ({"kind": "local", "path": "nowhere"}, "policy.path nowhere: no such directory"),
        ({"kind": "local", "path": "nowhere", "slot": 3}, "did you mean 'slots'"),
        ({"kind": "local", "path": "nowhere", "top_p": 0}, "top_p must be above 0"),
        ({"kind": "locl", "path": "nowhere"}, "did you mean 'local'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_first_rollout(
    tmp_path: Path, policy: dict[str, Any], why: str
) -> None:
    small_input(tmp_path, 2)
    config(tmp_path, policy)
    with pytest.raises(UsageError, match=why):
        run(tmp_path)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_conversation_longer_than_the_model_fails_alone(tiny: Path, tmp_path: Path) -> None:
    config(tmp_path, local(tiny))
    write_rows(tmp_path / "in.jsonl", [row("t0"), row("long", "1" * 99)])
    progress = run(tmp_path)
    assert sorted(sampled(tmp_path)) == ["t0#0"]
    assert progress.failed == 1
    (failures,) = tmp_path.glob("*failures*")
    why = "the prompt has 102 tokens, and policy.max_length allows 64 with the reply; the model takes no more"
    assert why in failures.read_text()


def test_a_sampler_that_breaks_ends_the_collection(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row would fail; none is recorded as failed, and the same command goes on later."""
    small_input(tmp_path, 6)
    config(tmp_path, local(tiny))
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Any:
            raise MemoryError("no memory left")

        patch.setattr("rollbook.samplers.thread.SamplingThread._work", broken)
        with pytest.raises(SamplerError, match="MemoryError: no memory left"):
            run(tmp_path)
    assert isinstance(SamplerError(""), RollbookError)  # which the command line prints as a sentence
    run(tmp_path)
    assert len(sampled(tmp_path)) == 6
