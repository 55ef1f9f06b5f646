"""What cannot be is refused by its key, in words that say what to type, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import UsageError
from rollbook.rl.settings import RlSettings, load_settings

LEAST: dict[str, Any] = {
    "log_path": "run",
    "model": {"path": "model"},
    "environments": ["arithmetic"],
    "evals": [{"name": "test", "environment": "arithmetic"}],
}


def load(*words: str) -> RlSettings:
    return load_settings(LEAST, words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learning_rat=1", "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
        ("sampler.max_token=1", "unknown key 'sampler.max_token'; did you mean 'max_tokens'?"),
        ("learning_rate=.inf", "learning_rate must be a finite number, not inf"),
        ("environments=[{name: arithmetic, weight: .nan}]", "environments.0.weight must be a finite number"),
        ("learning_rate=fast", "learning_rate: must be a number, not text"),
        ("group_size=1", "group_size: must be at least 2"),
        ("evals=null", "evals: must be a list, not nothing"),
        ("model=gpt", "model: must be a mapping, not text"),
        ("model.lora=true", "model.lora: must be a mapping or nothing, not true or false"),
        ("model.compile='on'", "model.compile is a setting of `rollbook sft`"),
        ("truncated=no", "truncated: must be text, not true or false; choose one of: train, mask, drop"),
        (
            "advantage=median",
            "advantage: invalid enum value 'median'; choose one of: mean, std, leave_one_out",
        ),
        ("loss=ppo", "loss must be a mapping; write loss: {name: ppo}"),
        ("loss.name=pp", "there is no loss 'pp'; there are: cross_entropy, importance_sampling, ppo, "),
        (
            "loss.clip_high=0.3",
            "loss.name is missing; choose one of: cross_entropy, importance_sampling, ppo",
        ),
        ("loss={name: ppo, clip_hihg: 1}", "unknown key 'loss.clip_hihg'; did you mean 'clip_high'?"),
        ("loss={name: ppo, clip_low: 2}", "loss.clip_low: must be at most 1"),
        ("loss.name=reference_kl", "loss reference_kl needs the log-probabilities of a reference model"),
        ("sampler.top_p=0.9", "top_p and top_k are not supported in training"),
        ("sampler.top_k=4", "top_p and top_k are not supported in training"),
        ("sampler.temperature=0", "sampler.temperature: must be more than 0"),
        ("sampler.stop=['']", "stop: a stop string must not be empty"),
        ("environments=arithmetic", "environments must be a list; write environments: [{name: arithmetic}]"),
        ("environments=[verifiers:gsm8k]", "asks an endpoint itself, so the tokens it samples are not known"),
        ("environments=[{name: gym, as: arithmetic}]", "`rollbook collect`, not yet with `rollbook rl`"),
        ("environments=[arithmetic, arithmetic]", "give one of them another name with `as:`"),
        ("evals=[{name: a, environment: b}]", "'a' names the environment 'b', which is not among"),
        ("evals=[{name: a, environment: arithmetic, evry: 2}]", "unknown key 'evals[0].evry'"),
        ("retry.environment=0", "retry.environment must be at least 1, not 0"),
        ("nonsense", "'nonsense' is not a setting; write key=value"),
    ],
)
def test_a_bad_setting_is_refused_by_its_key(word: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(word)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", ["log_path", "model", "environments"])
def test_what_a_config_must_have(key: str) -> None:
    with pytest.raises(UsageError, match=f"{key} is missing; write {key}: "):
        load_settings({name: value for name, value in LEAST.items() if name != key})


def test_a_config_may_be_the_one_of_a_run_and_name_losses_as_others_do(tmp_path: Path) -> None:
    import msgspec

    settings = load("loss_fn=ppo", "loss_fn=ppo")
    assert type(settings.loss).__name__ == "PpoClip"
    assert load_settings(msgspec.to_builtins(settings)) == settings
    with pytest.raises(UsageError, match="loss and loss_fn are the same setting"):
        load("loss_fn=ppo", "loss={name: ppo}")
