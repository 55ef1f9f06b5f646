"""config.json says what a run was configured with, for every kind of config object people use."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import logging
import math
import os
import sys
import threading
import types
import uuid
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.errors import BadFileError, UsageError
from rollbook.records.config import (
    ABSENT,
    ConfigChange,
    diff_configs,
    dump_config,
    key_path,
    read_config,
    write_config,
)

HERE = __name__
FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"


class Mode(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.Enum):
    RED = (1, 2)


class Bits(enum.Flag):
    A = 1
    B = 2


def reward(x: float) -> float:
    return x


double = lambda x: 2 * x  # noqa: E731


class Env:
    def step(self) -> None: ...

    @classmethod
    def make(cls) -> Env:
        return cls()

    @staticmethod
    def helper() -> None: ...


@dataclasses.dataclass
class Adam:
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    kind: ClassVar[str] = "not a field"


@dataclasses.dataclass
class Config:
    model: str = "m"
    optimizer: Adam = dataclasses.field(default_factory=Adam)
    api_key: str = "sk-secret"
    evaluators: list[Any] = dataclasses.field(default_factory=lambda: [double, reward])


class Point(NamedTuple):
    x: int
    y: int


class Struct(msgspec.Struct):
    b: int = 1
    a: Path = Path("x/y")


def dumped(value: Any) -> Any:
    """One value, through the whole file format."""
    config = dump_config({"v": value})
    assert json.loads(json.dumps(config, allow_nan=False)) == config
    orjson.loads(orjson.dumps(config))
    return config["v"]


def test_a_dataclass_with_everything_peers_lose() -> None:
    assert dump_config(Config()) == {
        "__type__": f"{HERE}.Config",
        "model": "m",
        "optimizer": {"__type__": f"{HERE}.Adam", "lr": 1e-5, "betas": [0.9, 0.95]},
        "api_key": "[redacted]",
        "evaluators": [f"{HERE}.<lambda>", f"{HERE}.reward"],
    }
    assert next(iter(dump_config(Config()))) == "__type__"


def test_a_plain_dict_has_no_type_and_keeps_its_order() -> None:
    config = {"z": 1, "a": {"y": None, "b": [True, "x", 2.5]}}
    assert dump_config(config) == config
    assert json.dumps(dump_config(config)) == json.dumps(config)
    for mapping in (collections.OrderedDict(config), types.MappingProxyType(config)):
        assert dump_config(mapping) == config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Mode.FAST, "fast"),
        (Level.HIGH, 3),
        (Colour.RED, {"__type__": f"{HERE}.Colour", "name": "RED", "value": [1, 2]}),
        (Bits.A | Bits.B, {"__type__": f"{HERE}.Bits", "name": "A|B", "value": 3}),
        (Path("runs") / "a", "runs/a"),
        ({3, 20, 1}, [1, 3, 20]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset(), []),
        ((1, (2, 3)), [1, [2, 3]]),
        (collections.deque([1, 2]), [1, 2]),
        ({"k": 1}.keys(), ["k"]),
        (Point(1, 2), {"__type__": f"{HERE}.Point", "x": 1, "y": 2}),
        (datetime.datetime(2024, 5, 6, 7, tzinfo=datetime.UTC), "2024-05-06T07:00:00+00:00"),
        (datetime.date(2024, 5, 6), "2024-05-06"),
        (datetime.timedelta(minutes=1.5), {"__type__": "datetime.timedelta", "seconds": 90.0}),
        (decimal.Decimal("0.10"), "0.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"abc", {"__type__": "builtins.bytes", "text": "abc"}),
        (b"\xff\x00", {"__type__": "builtins.bytes", "hex": "ff00"}),
        (b"\xff" * 300, {"__type__": "builtins.bytes", "hex": "ff" * 256 + "... (300 bytes)"}),
        (2**70, 2**70),
        (reward, f"{HERE}.reward"),
        (double, f"{HERE}.<lambda>"),
        (Env, f"{HERE}.Env"),
        (Env().step, f"{HERE}.Env.step"),
        (Env.make, f"{HERE}.Env.make"),
        (Env.helper, f"{HERE}.Env.helper"),
        (len, "builtins.len"),
        (str.upper, "builtins.str.upper"),
        (math.sqrt, "math.sqrt"),
        ([].append, "builtins.list.append"),
        (functools.lru_cache(reward), f"{HERE}.reward"),
        (math, "math"),
        (os.path, os.path.__name__),
        (list[int], "list[int]"),
        (int | None, "int | None"),
        (Env(), {"__type__": f"{HERE}.Env"}),
        (range(3), {"__type__": "builtins.range", "repr": "range(0, 3)"}),
        (1 + 2j, {"__type__": "builtins.complex", "repr": "(1+2j)"}),
        (types.SimpleNamespace(a=1, _b=2), {"__type__": "types.SimpleNamespace", "a": 1, "_b": 2}),
        (argparse.Namespace(lr=1), {"__type__": "argparse.Namespace", "lr": 1}),
        (Struct(), {"__type__": f"{HERE}.Struct", "b": 1, "a": "x/y"}),
        ("caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        ("bad \udc80 name", "bad \ufffd name"),
    ],
)
def test_values(value: Any, expected: Any) -> None:
    if isinstance(value, int) and value > 2**64:
        assert dump_config({"v": value})["v"] == expected
    else:
        assert dumped(value) == expected


def test_a_partial_is_more_than_its_name() -> None:
    assert dumped(functools.partial(reward, 1, scale=functools.partial(len, "a"))) == {
        "__type__": "functools.partial",
        "func": f"{HERE}.reward",
        "args": [1],
        "kwargs": {
            "scale": {"__type__": "functools.partial", "func": "builtins.len", "args": ["a"], "kwargs": {}}
        },
    }


def test_the_top_level_may_be_anything() -> None:
    assert dump_config(None) == {}
    assert dump_config([1, 2]) == {"__type__": "builtins.list", "value": [1, 2]}
    assert dump_config(argparse.Namespace(a=1)) == {"__type__": "argparse.Namespace", "a": 1}
    assert dump_config(float("nan")) == {
        "__type__": "builtins.float",
        "value": None,
        "nonfinite": {"": "nan"},
    }


def test_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        model_config = {"extra": "allow"}
        lr: float = 1.0
        login: pydantic.SecretStr = pydantic.SecretStr("hunter2")

        @pydantic.computed_field
        @property
        def computed(self) -> int:
            raise AssertionError("evaluated")

    name = f"{HERE}.test_pydantic.<locals>.Model"
    assert dumped(Model(extra_key=3)) == {
        "__type__": name,
        "lr": 1.0,
        "login": {"__type__": "pydantic.types.SecretStr", "value": "[redacted]"},
        "extra_key": 3,
    }


def test_attrs() -> None:
    attrs = pytest.importorskip("attrs")
    with_slots = attrs.make_class("WithSlots", {"b": attrs.field(default=1), "a": attrs.field(default=(2,))})
    with_dict = attrs.make_class("WithDict", ["x"], slots=False)
    assert list(dumped(with_slots()).items())[1:] == [("b", 1), ("a", [2])]
    assert dumped(with_dict(5))["x"] == 5


def test_chz() -> None:
    chz = pytest.importorskip("chz")
    config = chz.chz(type("C", (), {"__annotations__": {"a": int, "b": str}, "a": 1, "b": "x"}))(b="y")
    assert list(dumped(config).items())[1:] == [("a", 1), ("b", "y")]


def test_a_class_that_stores_its_fields_as_chz_does() -> None:
    class Chz:
        __chz_fields__: ClassVar[dict[str, object]] = {"a": object(), "b": object()}

        def __init__(self) -> None:
            self.__dict__.update(X_a=1, X_b="raw", b="munged")

        @property
        def a(self) -> int:
            raise AssertionError("evaluated")

    assert list(dumped(Chz()).items())[1:] == [("a", 1), ("b", "munged")]


def test_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": {"b": "${x}"}, "x": 3, "l": [1, 2], "missing": "???"})
    assert dump_config(config) == {"a": {"b": 3}, "x": 3, "l": [1, 2], "missing": "???"}
    broken = omegaconf.OmegaConf.create({"a": "${nowhere}"})
    assert dump_config({"c": broken}) == {"c": {"a": "${nowhere}"}}


def test_an_omegaconf_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_container(config: Any, resolve: bool) -> dict[str, Any]:
        if resolve:
            raise ValueError("a value is missing")
        return {"a": 1, "lr": float("nan")}

    node = type("DictConfig", (), {"__module__": "omegaconf.dictconfig"})()
    module = types.SimpleNamespace(OmegaConf=types.SimpleNamespace(to_container=to_container))
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    assert dump_config(node) == {"a": 1, "lr": None, "nonfinite": {"lr": "nan"}}


def test_numpy() -> None:
    np = pytest.importorskip("numpy")
    assert dumped(np.float32(0.5)) == 0.5
    assert dumped(np.int64(3)) == 3
    assert dumped(np.bool_(True)) is True
    assert dumped(np.longdouble(1.5)) == 1.5
    assert dumped(np.array(2.0)) == 2.0
    assert dumped(np.str_("x")) == "x"
    assert dumped(np.datetime64("2024-05-06")) == "2024-05-06"
    assert dumped(np.arange(6).reshape(2, 3)) == [[0, 1, 2], [3, 4, 5]]
    big = {"__type__": "numpy.ndarray", "shape": [1000, 1000], "dtype": "float16"}
    assert dumped(np.zeros((1000, 1000), "float16")) == big
    assert dumped(np.dtype("int8")) == "int8"
    assert dumped(np.float32) == "numpy.float32"
    assert dumped(np.add) == "numpy.add"
    assert dump_config({"v": np.array([1.0, np.nan, -np.inf])}) == {
        "v": [1.0, None, None],
        "nonfinite": {"v[1]": "nan", "v[2]": "-inf"},
    }
    assert dump_config({"v": np.float64("inf")}) == {"v": None, "nonfinite": {"v": "inf"}}


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    assert dumped(torch.bfloat16) == "torch.bfloat16"
    assert dumped(torch.device("cuda:1")) == "cuda:1"
    assert dumped(torch.tensor(2.5)) == 2.5
    assert dumped(torch.nn.Parameter(torch.ones(2))) == [1.0, 1.0]
    assert dumped(torch.Size([2, 3])) == [2, 3]
    assert dumped(torch.nn.functional.relu) == "torch.nn.functional.relu"
    big = {"__type__": "torch.Tensor", "shape": [200, 200], "dtype": "torch.float32"}
    assert dumped(torch.zeros(200, 200)) == big
    assert dumped(torch.zeros(2, device="meta")) == {**big, "shape": [2]}
    assert dumped(torch.nn.Linear(2, 2))["__type__"] == "torch.nn.modules.linear.Linear"


def test_tensors_and_dtypes_of_a_library_that_is_not_here() -> None:
    class FakeTensor:
        shape = (2,)
        dtype = "torch.float32"

        def tolist(self) -> list[float]:
            raise RuntimeError("no storage")

    FakeTensor.__module__, FakeTensor.__qualname__ = "torch", "Tensor"
    assert dumped(FakeTensor()) == {"__type__": "torch.Tensor", "shape": [2], "dtype": "torch.float32"}
    fake_dtype = type("dtype", (), {"__module__": "torch", "__str__": lambda self: "torch.float16"})
    assert dumped(fake_dtype()) == "torch.float16"


def test_nan_and_inf_are_null_and_named() -> None:
    config = Adam(lr=math.nan, betas=(math.inf, -math.inf))
    dump = dump_config({"a": {"b": [config]}, "x.y": {"": math.nan}, "np": {1: math.inf}})
    assert dump["nonfinite"] == {
        "a.b[0].lr": "nan",
        "a.b[0].betas[0]": "inf",
        "a.b[0].betas[1]": "-inf",
        '["x.y"][""]': "nan",
        "np.1": "inf",
    }
    assert list(dump)[-1] == "nonfinite"
    assert dump["a"]["b"][0]["betas"] == [None, None]
    assert "nonfinite" not in dump_config({"lr": 1.0})


def test_a_key_of_ones_own_named_nonfinite_is_kept() -> None:
    assert dump_config({"nonfinite": "mine", "lr": math.nan}) == {
        "nonfinite": "mine",
        "lr": None,
        "__nonfinite__": {"lr": "nan"},
    }


def test_secrets_are_redacted_and_names_of_variables_are_not() -> None:
    config = {
        "api_key": "x",
        "api_key_env": "OPENAI_API_KEY",
        "password": math.nan,
        "hub": {"token": "a1b2c3d4e5f6g7h8i9", "max_tokens": 5},
        "secret": b"raw",
        "command": ["serve", "--api-key", "x"],
    }
    text = json.dumps(dump_config(config))
    assert '"x"' not in text
    assert "raw" not in text
    assert "a1b2c3" not in text
    assert dump_config(config)["api_key_env"] == "OPENAI_API_KEY"
    assert dump_config(config)["nonfinite"] == {"password": "nan"}


def test_cycles_and_depth_do_not_crash() -> None:
    config: dict[str, Any] = {"a": [1]}
    config["a"].append(config)
    assert dump_config(config) == {"a": [1, "[circular]"]}
    node = types.SimpleNamespace()
    node.me = node
    assert dump_config(node) == {"__type__": "types.SimpleNamespace", "me": "[circular]"}
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "[too deep: builtins.list]" in json.dumps(dump_config({"deep": deep}))
    shared = [1]
    assert dump_config({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_a_config_that_holds_a_dataset_is_cut_and_says_so() -> None:
    dump = dump_config({"prompts": list(range(300_000)), "after": 1})
    assert len(dump["prompts"]) < 201_000
    assert "left out" in dump["prompts"][-1]
    assert "200000" in dump["[left out]"]


def test_keys_become_strings() -> None:
    key = uuid.UUID(int=2)
    config = {2: "a", None: "b", True: "c", 1.5: "d"}
    assert dump_config(config) == {"2": "a", "null": "b", "true": "c", "1.5": "d"}
    assert dump_config({Mode.FAST: 1, Colour.RED: 2, Level.HIGH: 3}) == {"fast": 1, "RED": 2, "3": 3}
    assert dump_config({Path("a/b"): 1, key: 2, (1, "x"): 3, Env: 4, b"raw": 5}) == {
        "a/b": 1,
        str(key): 2,
        '[1, "x"]': 3,
        f"{HERE}.Env": 4,
        "raw": 5,
    }


def test_colliding_keys_are_an_error_that_names_both() -> None:
    with pytest.raises(UsageError, match=r"a\.1: 1 \(int\) and '1' \(str\) are both written as '1'; rename"):
        dump_config({"a": {1: "x", "1": "y"}})


def test_nothing_in_an_object_can_stop_a_run() -> None:
    class Hostile:
        __slots__ = ("held",)

        def __init__(self) -> None:
            self.held = 1

        def __repr__(self) -> str:
            raise RuntimeError("no repr")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no attributes")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no equality")

        def __hash__(self) -> int:
            return 1

        def __bool__(self) -> bool:
            raise RuntimeError("no truth")

        @property
        def evaluated(self) -> int:
            raise AssertionError("evaluated")

    class NoRepr:
        __slots__ = ()

        def __repr__(self) -> str:
            raise RuntimeError

    class LyingClass:
        @property
        def __class__(self) -> Any:
            raise RuntimeError

    class BadMapping(collections.UserDict):
        def items(self) -> Any:
            raise RuntimeError

    class BadText(str):
        def __str__(self) -> str:
            raise RuntimeError

        __slots__ = ()

    class BadNumber(float):
        def __float__(self) -> float:
            raise RuntimeError

    config = {
        "hostile": Hostile(),
        "set": {Hostile()},
        "key": {Hostile(): 1},
        "no_repr": NoRepr(),
        "lying": LyingClass(),
        "mapping": BadMapping(),
        "text": BadText("t"),
        "number": BadNumber(1),
        "iterator": iter([1]),
        "generator": (x for x in [1]),
        "object": object(),
        "after": 1,
    }
    dump = dump_config(config)
    here = f"{HERE}.test_nothing_in_an_object_can_stop_a_run.<locals>"
    assert dump["hostile"] == {"__type__": f"{here}.Hostile", "held": 1}
    assert dump["no_repr"]["repr"].startswith("<no repr: RuntimeError")
    assert dump["mapping"] == {"__type__": f"{here}.BadMapping", "unreadable": "RuntimeError"}
    assert dump["text"] == "t"
    assert dump["number"] == {"__type__": f"{here}.BadNumber", "unreadable": "RuntimeError"}
    assert dump["object"] == {"__type__": "builtins.object"}
    assert dump["after"] == 1
    assert "0x" not in json.dumps(dump)
    assert next(config["iterator"]) == 1, "an iterator in a config is not used up"


def test_declared_fields_that_are_not_there_are_said_to_be() -> None:
    @dataclasses.dataclass(slots=True)
    class Late:
        a: int = 1
        later: int = dataclasses.field(init=False)

    assert dumped(Late()) == {
        "__type__": f"{HERE}.{Late.__qualname__}",
        "a": 1,
        "later": "[not stored]",
    }


def test_plain_objects_show_what_is_public() -> None:
    class Plain:
        default = "of the class"

        def __init__(self) -> None:
            self.a, self._session = 1, object()

    class Private:
        def __init__(self) -> None:
            self._lr = 0.1

        def __repr__(self) -> str:
            return f"Private(lr={self._lr}, at 0x7f00)"

    class Slotted:
        __slots__ = ("_hidden", "a", "unset")

        def __init__(self) -> None:
            self.a = 1

    assert list(dumped(Plain()).items())[1:] == [("a", 1)]
    assert dumped(Private())["repr"].startswith("Private(lr=0.1")
    assert list(dumped(Slotted()).items())[1:] == [("a", 1)]


def test_a_logger_or_a_client_does_not_bring_the_process_with_it() -> None:
    class Node:
        def __init__(self, depth: int) -> None:
            self.depth, self.inner = depth, Node(depth - 1) if depth else None

    logging.getLogger("a.b.c")
    assert dumped(logging.getLogger("a")) == {"__type__": "logging.Logger", "repr": "<Logger a (WARNING)>"}
    assert len(json.dumps(dumped([sys.stdout, threading.current_thread(), threading.Lock()]))) < 600
    node = dumped(Node(10))
    assert [node["depth"], node["inner"]["inner"]["inner"]["depth"]] == [10, 7]
    assert "depth" not in node["inner"]["inner"]["inner"]["inner"]


def test_objects_as_keys_are_told_apart() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    assert dump_config({"a": {Key(): 1, Key(): 2, (1, Key()): 3}}) == {
        "a": {"key": 1, "key (1)": 2, "(1, key)": 3}
    }


def test_a_script_run_as_a_module_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name="recipes.train")
    monkeypatch.setitem(sys.modules, "__main__", main)
    scripted = type("Config", (), {"__module__": "__main__"})
    assert dump_config(scripted()) == {"__type__": "recipes.train.Config"}


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_config(path, Config(model="caf\u00e9"))
    text = path.read_text("utf-8")
    assert text.startswith('{\n  "__type__": ')
    assert text.endswith("}\n")
    assert "caf\u00e9" in text
    assert read_config(path) == dump_config(Config(model="caf\u00e9"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "a": 1,\n  "b" 2\n}', r"line 3, column 7: .*correct it there"),
        (b"", r"line 1, column 1: "),
        (b'{"a": 1} {}', r"line 1, column 10: Extra data"),
        (b"[1, 2]", r"holds a list where an object \{\.\.\.\} is due"),
        (b'{"a": "\xff"}', r"cannot be parsed .*utf-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"cannot be parsed"),
        (b"[" * 200_000, r"cannot be parsed"),
    ],
)
def test_a_broken_file_is_named_with_line_and_column(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadFileError, match=message) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="No such file"):
        read_config(tmp_path / "config.json")
    with pytest.raises(BadFileError, match="cannot be read"):
        read_config(tmp_path)


def test_peers_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"lr": NaN, "clip": Infinity}')
    config = read_config(path)
    assert math.isnan(config["lr"])
    assert config["clip"] == math.inf


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="the recorded runs of other systems are not here")
def test_recorded_configs_are_read() -> None:
    found = [read_config(path) for path in FIXTURES.glob("tinker_*/config.json")]
    assert len(found) == 3
    assert all(dump_config(config) == config for config in found)


def test_diff_names_what_was_added_removed_and_changed() -> None:
    old = {"a": {"b": 1, "gone": 2}, "l": [1, {"x": 1}], "same": 1, "n": 1, "t": True, "e": [1]}
    new = {"a": {"b": 3, "new": None}, "l": [1, {"x": 2}], "same": 1.0, "n": 1, "t": 1, "e": [1, 2], "k.d": 0}
    assert diff_configs(old, new) == [
        ConfigChange("a.b", 1, 3),
        ConfigChange("a.gone", 2, ABSENT),
        ConfigChange("a.new", ABSENT, None),
        ConfigChange("l[1].x", 1, 2),
        ConfigChange("t", True, 1),
        ConfigChange("e", [1], [1, 2]),
        ConfigChange('["k.d"]', ABSENT, 0),
    ]
    assert str(ConfigChange("a.gone", 2, ABSENT)) == "a.gone: 2 -> (absent)"


def test_diff_sees_through_nonfinite(tmp_path: Path) -> None:
    nan, number = dump_config({"lr": math.nan, "x": None}), dump_config({"lr": 0.1, "x": None})
    assert diff_configs(nan, dump_config({"lr": math.nan, "x": None})) == []
    (change,) = diff_configs(nan, number)
    assert (change.key, change.new) == ("lr", 0.1)
    assert math.isnan(change.old)
    assert [change.key for change in diff_configs(nan, dump_config({"lr": math.inf, "x": None}))] == ["lr"]
    assert diff_configs({"lr": math.nan}, {"lr": math.nan}) == []
    assert [c.key for c in diff_configs({"nonfinite": "mine"}, {"nonfinite": "yours"})] == ["nonfinite"]


def test_diff_of_types_and_of_deep_trees() -> None:
    changes = diff_configs(dump_config({"o": Adam()}), dump_config({"o": argparse.Namespace()}))
    assert changes[0].key == "o.__type__"
    deep_a: Any = 1
    deep_b: Any = 2
    for _ in range(3_000):
        deep_a, deep_b = [deep_a], [deep_b]
    assert len(diff_configs({"a": deep_a}, {"a": deep_b})) == 1


def test_key_paths() -> None:
    assert key_path(("a", "b", 0, "c")) == "a.b[0].c"
    assert key_path(("a", "b.c", "d e", "")) == 'a["b.c"]["d e"][""]'


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | st.decimals()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | inner.map(lambda value: types.SimpleNamespace(held=value))
        | inner.map(lambda value: functools.partial(reward, value))
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=4))
def test_any_config_becomes_strict_json_and_is_stable(config: dict[str, Any]) -> None:
    dump = dump_config(config)
    text = json.dumps(dump, allow_nan=False, ensure_ascii=False)
    text.encode()
    assert json.loads(text) == dump
    assert diff_configs(dump, json.loads(text)) == []
    assert dump_config(dump) == dump
    assert json.dumps(dump_config(config)) == json.dumps(dump)
