"""What cannot be is refused by its key, in words that say what to type, before anything is started."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.places import REPOSITORY
from rollbook.errors import UsageError
from rollbook.rl.settings import EnvironmentSettings, EvalSettings, RlSettings, SamplerSettings, load_settings
from rollbook.rl.tasks import GENERATED_TASKS
from rollbook.rollouts.retry import RetrySettings
from rollbook.train.losses import AnyLoss, ReferenceKl
from rollbook.train.model_settings import ModelSettings

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
        ("group_size=2.5", "group_size: must be a whole number, not one with a fraction"),
        ("evals=null", "evals: must be a list, not nothing"),
        ("model=gpt", "model: must be a mapping, not text; its keys are path, from, hub, revision, config"),
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
        ("evals=[{name: a}]", "evals[0]: environment is missing"),
        ("evals=[test]", "evals[0]: must be a mapping, not text; its keys are name, environment, tasks"),
        ("evals={name: a}", "evals: must be a list, not a mapping"),
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
    settings = load("loss_fn=ppo", "loss_fn=ppo")
    assert type(settings.loss).__name__ == "PpoClip"
    assert load_settings(msgspec.to_builtins(settings)) == settings
    with pytest.raises(UsageError, match="loss and loss_fn are the same setting"):
        load("loss_fn=ppo", "loss={name: ppo}")


def table_of_settings() -> dict[str, str]:
    """By the names in the first cell of the table of docs/rl.md the whole row; a prefix holds for a cell."""
    text = (REPOSITORY / "docs/rl.md").read_text().partition("## Settings")[2]
    rows = {}
    for row in re.findall(r"^\| `.*$", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row.split("|")[1])
        prefix = names[0].rpartition(".")[0]
        for name in names:
            rows[name if "." in name or not prefix else f"{prefix}.{name}"] = row
    return rows


# What a mapping or a list of them may hold stands in the row of its key.
NESTED: dict[str, tuple[type[msgspec.Struct], dict[str, str]]] = {
    "model": (ModelSettings, {"handed_over": "from", "compile": ""}),  # which is refused here
    "environments": (EnvironmentSettings, {"label": "as", "settings": ""}),
    "evals": (EvalSettings, {}),
    "retry": (RetrySettings, {}),
}


def test_every_setting_has_a_row_in_the_docs_and_every_row_is_a_setting() -> None:
    rows = table_of_settings()
    fields = {field for field in RlSettings.__struct_fields__ if field not in ("sampler", "trainer")}
    fields |= {f"sampler.{name}" for name in SamplerSettings.__struct_fields__}
    assert set(rows) - {"trainer.experimental.token_export"} == fields
    for key, (kind, other_names) in NESTED.items():
        written = {name.partition(":")[0] for name in re.findall(r"`([^`]+)`", rows[key])} | {""}
        assert {other_names.get(name, name) for name in kind.__struct_fields__} <= written, key
    for loss in typing.get_args(AnyLoss):
        if loss is not ReferenceKl:
            assert all(f"`{name}`" in rows["loss"] for name in loss.__struct_fields__)


def test_the_defaults_of_the_docs_are_those_of_the_code() -> None:
    """Where they are numbers or words that stand in the second cell, in the order of the names."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(RlSettings)}
    defaults |= {f"sampler.{field.name}": field.default for field in msgspec.structs.fields(SamplerSettings)}
    seen = 0
    for name, row in table_of_settings().items():
        names = [one for one, other in table_of_settings().items() if other == row]
        cells = [cell.strip(" `") for cell in row.split("|")[2].split(", ")]
        default = defaults.get(name)
        if len(cells) == len(names) and isinstance(default, int | float | str):
            said = cells[names.index(name)]
            assert (said == default) if isinstance(default, str) else (float(said) == default), name
            seen += 1
    assert seen > 25
    rows = table_of_settings()
    for key, default in (
        ("tasks", GENERATED_TASKS),
        ("max_turns", EnvironmentSettings(name="a", label="a").max_turns),
    ):
        assert re.search(rf"`{key}` \([^)]*\b{default}\)", rows["environments"]), key
