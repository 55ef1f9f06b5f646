"""Settings are typed, unknown names are refused with the nearest one, and words win over files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.collect.settings import CollectSettings, load_settings, seconds
from rollbook.errors import BadFileError, UsageError
from rollbook.runs.settings import merge, parse_words, read_yaml, typed

LEAST = ["agent_name=a", "output_jsonl_fpath=out.jsonl"]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("k=1", 1),
        ("+k=1", 1),
        ("++k=1", 1),
        ("k=1e-5", 1e-5),
        ("k=-2.5E+3", -2500.0),
        ("k=true", True),
        ("k=null", None),
        ("k=", None),
        ("k=[a,1e-3]", ["a", 1e-3]),
        ("k={x: 1}", {"x": 1}),
        ("k='1'", "1"),
        ("k=a=b", "a=b"),
        ("k=http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("k=[", "["),
        ("k=some/path.jsonl", "some/path.jsonl"),
    ],
)
def test_a_word_means_what_it_looks_like(word: str, value: object) -> None:
    assert parse_words([word]) == {"k": value}


def test_dots_descend() -> None:
    assert parse_words(["a.b.c=1", "+a.b.d=2", "a.e=3"]) == {"a": {"b": {"c": 1, "d": 2}, "e": 3}}


@pytest.mark.parametrize("word", ["k", "=1", "+=1"])
def test_a_word_that_is_no_setting(word: str) -> None:
    with pytest.raises(UsageError, match="is not a setting; write key=value"):
        parse_words([word])


def test_a_key_below_a_plain_value() -> None:
    with pytest.raises(UsageError, match=r"'a\.b=2' sets a key below 'a'"):
        parse_words(["a=1", "a.b=2"])


def test_merging_goes_mapping_by_mapping() -> None:
    base = {"a": {"x": 1, "y": [1]}, "b": 1}
    assert merge(base, {"a": {"y": [2]}, "c": 3}) == {"a": {"x": 1, "y": [2]}, "b": 1, "c": 3}
    assert base == {"a": {"x": 1, "y": [1]}, "b": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["num_repeat=2"], "unknown key 'num_repeat'; did you mean 'num_repeats'?"),
        (["retry.rate_limits=2"], r"unknown key 'retry\.rate_limits'; did you mean 'rate_limit'?"),
        (["qqq=2"], "unknown key 'qqq'; known keys: .*workers"),
        (["agents.a.polici={}"], r"unknown key 'agents\.a\.polici'; did you mean 'policy'?"),
        (["limit=many"], "limit: must be a whole number or nothing, not text"),
        (["retry.timeout=x"], r"retry\.timeout: must be a whole number, not text"),
        (["engine=slurm"], "engine: invalid enum value 'slurm'"),
        (["resume=perhaps"], "resume: invalid enum value"),
        (["workers=0"], "workers: must be at least 1"),
        (["requests_per_minute=0"], "requests_per_minute: must be more than 0"),
        (["stop_after=soon"], "'soon' is not a duration"),
        (["prices.input=1"], r"prices: output is missing"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("|", r"\|").replace("?", r"\?")):
        load_settings([*LEAST, *words])


@pytest.mark.parametrize("missing", [0, 1])
def test_what_must_be_there(missing: int) -> None:
    name = LEAST[missing].partition("=")[0]
    with pytest.raises(UsageError, match=f"{name} is missing; add {name}="):
        load_settings([LEAST[1 - missing]])


def test_later_places_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rollbook.yaml").write_text(
        "agents: {a: {env: {name: arithmetic}}}\nlimit: 1\nnum_repeats: 1\nworkers: 1\n"
    )
    Path("job.yaml").write_text("limit: 2\nnum_repeats: 2\nretry: {timeout: 9}\n")
    Path("other.yaml").write_text("workers: 7\n")
    settings = load_settings(["job.yaml", *LEAST, "+num_repeats=3", "retry.connect=4"])
    assert (settings.limit, settings.num_repeats, settings.workers) == (2, 3, 1)
    assert (settings.retry.timeout, settings.retry.connect, settings.retry.server_error) == (9, 4, 8)
    assert settings.agent.env == {"name": "arithmetic"}
    assert load_settings(LEAST, config=Path("other.yaml")).workers == 7


def test_the_sources_own_spelling() -> None:
    settings = load_settings(
        [
            "+agent_name=simple_agent",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
            "+limit=null",
            "+num_repeats=16",
            "+num_samples_in_parallel=64",
            "+responses_create_params.temperature=0.6",
            "+responses_create_params.max_output_tokens=8192",
        ]
    )
    assert (settings.num_repeats, settings.num_samples_in_parallel, settings.limit) == (16, 64, None)
    assert settings.responses_create_params == {"temperature": 0.6, "max_output_tokens": 8192}


def test_an_agent_that_is_not_there() -> None:
    settings = load_settings([*LEAST, "agents.aa.env.name=arithmetic"])
    with pytest.raises(UsageError, match=r"agent_name 'a' is not among .*; did you mean 'aa'\?"):
        _ = settings.agent
    with pytest.raises(UsageError, match=r"there are no agents: .*rollbook\.yaml"):
        _ = load_settings(LEAST).agent


@pytest.mark.parametrize(
    ("content", "said"),
    [("a: [}", "line 1: not valid YAML"), ("- 1\n", "must hold a mapping of settings, not list")],
)
def test_a_file_that_holds_no_settings(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(BadFileError, match=said):
        read_yaml(tmp_path / "x.yaml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.yaml: no such file"):
        load_settings([str(tmp_path / "no.yaml"), *LEAST])


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory; name a file of settings in it"):
        read_yaml(tmp_path)


def test_an_empty_file_and_numbers_in_one(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    assert read_yaml(tmp_path / "x.yaml") == {}
    (tmp_path / "x.yaml").write_text("lr: 1e-5\nlist: [1e3, x]\n")
    assert read_yaml(tmp_path / "x.yaml") == {"lr": 1e-5, "list": [1e3, "x"]}


def test_typed_settings_keep_their_defaults() -> None:
    settings = typed({"agent_name": "a", "output_jsonl_fpath": "o"}, CollectSettings)
    assert (settings.num_samples_in_parallel, settings.resume, settings.engine) == (
        128,
        "if-possible",
        "local",
    )


@pytest.mark.parametrize(
    ("text", "value"), [("3h50m", 13_800), ("90s", 90), ("1d", 86_400), ("1.5m", 90), (" 2H ", 7_200)]
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "5", "h", "1..5s", "3h50", "-1s", "1 h", "٣s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration; write"):
        seconds(text)
