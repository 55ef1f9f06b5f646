"""What people type at first, and what they are told when it is not quite that."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import yaml

from collecting import config, row, settings, small_input, words, write_rows
from rollbook.cli.main import main
from rollbook.collect.collect import collect
from rollbook.collect.settings import load_settings, misspelled_params
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


def test_a_misspelt_parameter_is_told_and_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_input(tmp_path, 1)
    config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["collect", *words(tmp_path, "+responses_create_params.temprature=0.3")])
    assert ended.value.code == 0
    said = capsys.readouterr().err
    assert said.count("responses_create_params.temprature is sent as it is; did you mean 'temperature'?") == 1


@pytest.mark.parametrize("name", ["max_ouput_tokens", "topp", "top-p", "Temperature", "max_token", "seeds"])
def test_names_that_look_like_a_slip(name: str) -> None:
    assert len(misspelled_params({name: 1})) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "max_tokens", "max_output_tokens", "top_logprobs", "reasoning", "n", "metadata"),
        *(
            "min_p",
            "min_tokens",
            "top_a",
            "repeat_penalty",
            "prompt_logprobs",
            "length_penalty",
            "ignore_eos",
        ),
        *("stop_token_ids", "max_new_tokens", "guided_json", "best_of", "typical_p", "priority"),
    ],
)
def test_known_names_and_those_of_engines_are_no_slips(name: str) -> None:
    assert misspelled_params({name: 1}) == []


def test_the_home_directory_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config(tmp_path, input_jsonl_fpath="~/tasks.jsonl")
    given = load_settings(
        ["agent_name=a", "+output_jsonl_fpath=~/x.jsonl"], config=tmp_path / "rollbook.yaml"
    )
    assert given.input_jsonl_fpath == f"{tmp_path}/tasks.jsonl"
    assert given.output_jsonl_fpath == f"{tmp_path}/x.jsonl"


@pytest.mark.parametrize("name", ["input_jsonl_fpath", "output_jsonl_fpath"])
def test_a_stream_is_refused_where_a_file_is_needed(name: str, tmp_path: Path) -> None:
    config(tmp_path)
    with pytest.raises(UsageError, match=f"{name}=- is no file, .*write {name}=NAME.jsonl"):
        settings(tmp_path, f"{name}=-")


def test_a_misspelt_key_is_named_before_the_one_that_is_missing_for_it() -> None:
    with pytest.raises(UsageError, match="unknown key 'agent_nam'; did you mean 'agent_name'"):
        load_settings(["+agent_nam=chat", "+output_jsonl_fpath=x.jsonl"])


def beside(directory: Path) -> Path:
    """A config with an environment and a script named by files that stand beside it."""
    agent = {"env": {"name": "my.py:graded"}, "policy": {"kind": "scripted", "script": "my.py:act"}}
    directory.mkdir()
    (directory / "rb.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    (directory / "my.py").write_text(
        "from rollbook.envs import single_turn\n\n\n@single_turn\ndef graded(task, answer):\n"
        "    return answer == task.row['expected_answer']\n\n\ndef act(request):\n    return '2'\n"
    )
    return directory / "rb.yaml"


def test_a_file_beside_its_config_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beside(tmp_path / "conf")
    given = ["agent_name=a", f"input_jsonl_fpath={small_input(tmp_path, 4)}"]
    given += [f"output_jsonl_fpath={tmp_path / 'out.jsonl'}", "workers=2"]
    monkeypatch.chdir(tmp_path)
    assert collect(load_settings([*given, "limit=2"], config=Path("conf/rb.yaml"))).reward_mean == 1.0
    manifest = orjson.loads((tmp_path / "out_manifest.json").read_bytes())
    assert manifest["meaning"]["agent"]["env"]["name"] == "my.py:graded"
    monkeypatch.chdir(path.parent)
    assert collect(load_settings(given, config=Path("rb.yaml"))).done == 4


def test_a_file_in_the_working_directory_comes_before_one_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beside(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text((path.parent / "my.py").read_text())
    given = load_settings(["agent_name=a", "output_jsonl_fpath=out.jsonl"], config=path)
    assert given.agent.env == {"name": "my.py:graded"}


def test_a_file_that_is_nowhere_is_refused_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beside(tmp_path / "conf")
    (path.parent / "my.py").unlink()
    write_rows(tmp_path / "in.jsonl", [row("t0")])
    monkeypatch.chdir(tmp_path)
    words = ["agent_name=a", "input_jsonl_fpath=in.jsonl", "output_jsonl_fpath=out.jsonl"]
    places = f"{tmp_path}/my.py and {tmp_path}/conf/my.py"
    with pytest.raises(UsageError, match=f"'my.py:graded': no file my.py; looked for {places}$"):
        collect(load_settings(words, config=path))
