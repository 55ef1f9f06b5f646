"""The settings of a collection, under the names this ecosystem uses.

They come from three places, later ones winning: `rollbook.yaml` in the working directory (or `--config`), a
YAML file given as the argument, and `key=value` words. Agents are named in `agents:`.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.records.columns import USUAL, Columns
from rollbook.rollouts.retry import RetrySettings
from rollbook.runs.settings import merge, parse_words, read_yaml, refuse_unknown, typed

DEFAULT_FILE = Path("rollbook.yaml")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PATHS = ("input_jsonl_fpath", "output_jsonl_fpath")
_OTHER_NAMES = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_output_tokens")
_DURATIONS = ("stop_after", "drain_for")
_OTHER_FORMATS = {".parquet", ".arrow", ".feather", ".csv", ".tsv", ".gz", ".zst", ".bz2", ".xz", ".zip"}
_SIMILAR = 0.85  # of 1: `temprature` is, `min_tokens` beside `max_tokens` is not
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
Resume = Literal["never", "if-possible", "always"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Limit = Annotated[float, msgspec.Meta(gt=0)] | None  # None: no limit


class Prices(msgspec.Struct, kw_only=True, frozen=True):
    """Prices of a million tokens, in any currency."""

    input: Amount
    output: Amount


class AgentSettings(msgspec.Struct, kw_only=True):
    env: dict[str, Any]
    policy: dict[str, Any] | None = None
    max_turns: int = 64


class CollectSettings(msgspec.Struct, kw_only=True):
    agent_name: str
    output_jsonl_fpath: str
    input_jsonl_fpath: str | None = None  # without it, the environment makes `limit` tasks of its own
    columns: Columns = USUAL  # of the input, where its fields have other names
    limit: Count | None = None
    num_repeats: Count = 1
    num_repeats_add_seed: bool = False
    num_samples_in_parallel: Count = 128
    responses_create_params: dict[str, Any] = {}
    agents: dict[str, AgentSettings] = {}
    seed: int = 0  # for tasks that the environment makes
    workers: Count = 1
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    resume: Resume = "if-possible"
    ordered: bool = False
    adaptive: bool = True
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    retry: RetrySettings = msgspec.field(default_factory=RetrySettings)
    max_failure_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    min_samples: Count = 100
    stop_after: str | None = None  # 3h50m
    drain_for: str | None = "10m"  # how long what is in flight may take once nothing new is started
    rollout_timeout_s: Limit = None  # for one attempt at a rollout, whatever it waits for
    call_timeout_s: Limit = None  # for each call of an environment or the policy
    prices: Prices | None = None

    def __post_init__(self) -> None:
        _refuse_other_formats(Path(self.output_jsonl_fpath))
        for name in _DURATIONS:
            if (duration := getattr(self, name)) is not None:
                try:
                    seconds(duration)
                except UsageError as error:
                    raise UsageError(f"{name}: {error}") from None

    @property
    def agent(self) -> AgentSettings:
        try:
            return self.agents[self.agent_name]
        except KeyError:
            if not self.agents:
                raise UsageError(
                    f"agent_name is {self.agent_name!r}, but there are no agents: no `agents:` in --config's "
                    f"file, or, without one, in {Path.cwd() / DEFAULT_FILE}"
                ) from None
            near = difflib.get_close_matches(self.agent_name, self.agents, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.agents)}"
            raise UsageError(f"agent_name {self.agent_name!r} is not among the agents; {hint}") from None


def _refuse_other_formats(output: Path) -> None:
    """An output is read and appended to line by line, so it is never written in another format."""
    if (ending := output.suffix.lower()) in _OTHER_FORMATS:
        plain = str(output)[: -len(ending)].removesuffix(".jsonl")
        raise UsageError(
            f"output_jsonl_fpath={output}: a collection is written as JSON lines, not as {ending}; "
            f"write output_jsonl_fpath={shlex.quote(f'{plain}.jsonl')}"
        )


def load_settings(words: Sequence[str], *, config: Path | Mapping[str, Any] | None = None) -> CollectSettings:
    """`words` are `key=value`; the first may be the path of a YAML file."""
    return settings_of(read_values(words, config=config))


def read_values(words: Sequence[str], *, config: Path | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings as they were given, one source on top of the other."""
    values: dict[str, Any] = {}
    if isinstance(config, Mapping):
        values = dict(config)
    elif config is not None:
        values = _read_config(config)
    elif DEFAULT_FILE.exists():
        values = read_yaml(DEFAULT_FILE)
    if words and "=" not in words[0]:
        values = merge(values, _read_config(Path(words[0])))
        words = words[1:]
    if empty := [
        word.lstrip("+") for word in words if word.endswith("=")
    ]:  # a shell variable that is not set
        raise UsageError(f"{empty[0][:-1]} is empty; give it a value, or leave it out")
    return merge(values, parse_words(words, texts=("agent_name", *_PATHS, *_DURATIONS)))


def settings_of(given: Mapping[str, Any]) -> CollectSettings:
    """The settings, typed and checked."""
    values = dict(given)
    values |= {name: _file(name, values[name]) for name in _PATHS if isinstance(values.get(name), str)}
    _refuse_unknown_names(values)  # before what is missing, which may be there misspelt
    for name in ("agent_name", "output_jsonl_fpath"):
        if values.get(name) is None:
            raise UsageError(f"{name} is missing; add {name}=...")
    values["agents"] = _agents(values.get("agents") or {})
    fields = {field.name: field for field in msgspec.structs.fields(CollectSettings)}
    # Null means the default where it is no value of its own.
    own_default = {name for name in values if values[name] is None and fields[name].default is not None}
    plain = {name: value for name, value in values.items() if name not in own_default}
    settings = typed(_as_json(plain), CollectSettings)
    _refuse_another_model(settings)
    return settings


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML has dates and keys of any kind; records and other processes know them as text."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _refuse_unknown_names(values: Mapping[str, Any]) -> None:
    from rollbook.policies.conversion import KNOWN_PARAMS

    params = KNOWN_PARAMS.difference(CollectSettings.__struct_fields__)
    for name, value in values.items():
        if (meant := _OTHER_NAMES.get(name, name)) in params:
            word = f"responses_create_params.{meant}={value}"
            raise UsageError(f"unknown key {name!r}; what is asked of the model is typed like this: {word}")
    refuse_unknown(values, CollectSettings)


def _refuse_another_model(settings: CollectSettings) -> None:
    """A policy asks for its own model, whatever is typed here; results must not name one that nobody asked.

    An agent server (`gym`) brings a policy of its own, and is told which model.
    """
    model = settings.responses_create_params.get("model")
    agent = settings.agents.get(settings.agent_name)
    own = agent.policy.get("model") if agent and agent.policy else None
    if model is not None and own is not None and model != own:
        key = f"agents.{settings.agent_name}.policy.model"
        raise UsageError(
            f"responses_create_params.model is {model!r}, but the model asked is that of {key}, {own!r}; "
            f"write {key}={model} instead"
        )


def _read_config(path: Path) -> dict[str, Any]:
    """Files of code that it names are looked for in the working directory, then beside it."""
    values = read_yaml(path)
    directory = path.parent.resolve()
    agents = values.get("agents")
    if directory == Path.cwd() or not isinstance(agents, Mapping):
        return values
    for agent in agents.values():
        for part, key in (("env", "name"), ("policy", "script")):
            below = agent.get(part) if isinstance(agent, Mapping) else None
            if isinstance(below, dict) and _is_file_elsewhere(below.get(key)):
                from rollbook.rollouts.user_code import named_beside

                below[key] = named_beside(below[key], directory)
    return values


def _is_file_elsewhere(name: Any) -> bool:
    place = Path(name.rpartition(":")[0]) if isinstance(name, str) else Path()
    return place.suffix == ".py" and not place.is_absolute() and not place.exists()


def misspelled_params(params: Mapping[str, Any]) -> list[str]:
    """A line for each parameter that looks like a known one misspelt; others may be an engine's own."""
    if not params:
        return []
    from rollbook.policies.conversion import KNOWN_PARAMS

    warnings = []
    for name in params.keys() - KNOWN_PARAMS:
        plain = name.lower().replace("-", "_")
        if near := difflib.get_close_matches(plain, KNOWN_PARAMS, n=1, cutoff=_SIMILAR):
            warnings.append(f"responses_create_params.{name} is sent as it is; did you mean {near[0]!r}?")
    return sorted(warnings)


def _file(name: str, path: str) -> str:
    """The shell leaves a `~` after `name=` as it is."""
    if path == "-":
        raise UsageError(
            f"{name}=- is no file, and a collection needs one, to be resumed; write {name}=NAME.jsonl"
        )
    with suppress(RuntimeError):  # nobody has that name: it is a file's
        return str(Path(path).expanduser()) if path.startswith("~") else path
    return path


def _agents(agents: Any) -> dict[str, Any]:
    """The agents by their names, which YAML may take for numbers; each is checked, so that errors name it."""
    shape = "write agents: {my_agent: {env: {name: ...}, policy: {kind: ...}}}"
    if not isinstance(agents, Mapping):
        raise UsageError(f"agents: must be a mapping of names, not {type(agents).__name__}; {shape}")
    for name, agent in agents.items():
        if not isinstance(agent, Mapping):
            raise UsageError(f"agents.{name}: must be an env and a policy, not {agent!r}; {shape}")
        typed(agent, AgentSettings, f"agents.{name}")
    return {str(name): agent for name, agent in agents.items()}


def seconds(duration: str) -> float:
    """`3h50m`, `90s`, `1d` in seconds."""
    text = duration.strip().lower()
    if not re.fullmatch(rf"({_PART.pattern})+", text):
        like = f"{text}s or {text}m" if _NUMBER.fullmatch(text) else "it like 3h50m or 90s"
        raise UsageError(f"{duration!r} is not a duration; write {like}")
    return sum(float(part[1]) * _UNITS[part[2]] for part in _PART.finditer(text))


def encode_settings(settings: CollectSettings) -> bytes:
    return msgspec.json.encode(settings)


def decode_settings(data: bytes) -> CollectSettings:
    return msgspec.json.decode(data, type=CollectSettings)
