"""Models that are hostile or broken: their code is not run, and the error names what is wrong."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollbook.errors import RollbookError, UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.policies.chat_template import TemplateError
from rollbook.runs.settings import typed
from rollbook.tiny import write_tiny_model
from rollbook.train.loading import load_model
from rollbook.train.model_files import directory_of
from rollbook.train.model_settings import LoraSettings, ModelSettings

COMMIT = "0123456789" * 4
CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 16, "heads": 2, "intermediate": 32, "positions": 64}
    return write_tiny_model(tmp_path_factory.mktemp("good") / "model", "abc", **sizes)


def load(directory: Path, **more: Any) -> Any:
    settings = ModelSettings(path=str(directory), dtype="float32", **more)
    return load_model(settings, seed=0, dtype=torch.float32)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def own_code(directory: Path) -> None:
    (directory / "evil.py").write_text(CODE)
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit(directory / "config.json", model_type="evil", auto_map=names)


def own_tokenizer(directory: Path) -> None:
    (directory / "evil.py").write_text(CODE)
    change = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    edit(directory / "tokenizer_config.json", **change)


class Planted:
    def __reduce__(self) -> Any:
        return exec, (f"__file__ = {os.environ['PLANTED']!r}\n{CODE}",)


def pickled(directory: Path) -> None:
    os.environ["PLANTED"] = str(directory / "evil.py")
    weights = load_file(directory / "model.safetensors")
    torch.save({**weights, "planted": Planted()}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def half_a_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_nan(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def more_layers(directory: Path) -> None:
    edit(directory / "config.json", num_hidden_layers=3)


def other_shapes(directory: Path) -> None:
    edit(directory / "config.json", intermediate_size=48)


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "code of its own": (own_code, "code of its own"),
    "a tokenizer of its own": (own_tokenizer, "tokenizer of .* code of its own"),
    "a pickle": (pickled, r"as a pickle \(pytorch_model.bin\)"),
    "no weights": (without_weights, "has no weights: model.safetensors is not there"),
    "half a file": (half_a_file, "SafetensorError"),
    "a NaN": (with_nan, "model.layers.1.mlp.up_proj.weight holds values that are not finite"),
    "more layers than weights": (more_layers, "9 are missing or have another shape"),
    "other shapes": (other_shapes, "6 are missing or have another shape.*mlp"),
    "a config that is no JSON": (broken_config, "not a valid JSON file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_hostile_is_refused(good: Path, tmp_path: Path, name: str) -> None:
    break_it, why = BROKEN[name]
    directory = Path(shutil.copytree(good, tmp_path / "model"))
    break_it(directory)
    with pytest.raises(UsageError, match=why) as refused:
        load(directory)
    assert "trust_remote_code" not in str(refused.value)
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("good-modl", r"model\.path .*/good-modl: no such directory; did you mean .*/good-model\?"),
        (
            "nowhere/model",
            "no such directory; name a directory with the config.json, the weights and",
        ),
        ("", r"it holds no config\.json; name a directory with the config\.json"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(good: Path, tmp_path: Path, path: str, why: str) -> None:
    shutil.copytree(good, tmp_path / "good-model")
    with pytest.raises(UsageError, match=why):
        load(tmp_path / path)


def test_a_name_of_the_hub_is_told_from_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"for a model of the hub set model\.hub and model\.revision"):
        directory_of(ModelSettings(path="Qwen/Qwen3-0.6B"))


def test_a_model_that_names_code_and_does_not_need_it_is_loaded_without(good: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(good, tmp_path / "model"))
    (directory / "evil.py").write_text(CODE)
    edit(directory / "config.json", auto_map={"AutoModelForCausalLM": "evil.Evil"})
    assert load(directory).base.config.model_type == "llama"
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10**7 }}", "{{ 'x' * 10**15 }}", "{% for i in range(10**8) %}"]
)
def test_a_chat_template_that_never_comes_to_an_end_is_refused(good: Path, template: str) -> None:
    tokenizer = load(good).tokenizer
    end = "{% endfor %}" if "for" in template else ""
    with pytest.raises(TemplateError, match=r"10,000,000 characters|MemoryError|OverflowError"):
        ChatFormat(tokenizer, chat_template=template + end).prompt([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({}, "give exactly one of path"),
        ({"path": "x", "hub": "a/b"}, "path and hub are set"),
        ({"hub": "a/b"}, "revision is None; write the 40 hex digits"),
        ({"hub": "a/b", "revision": "main"}, "revision is 'main'; write the 40 hex digits"),
        ({"path": "x", "revision": COMMIT}, "revision is set without hub"),
        ({"config": {"model_type": "llama"}}, "tokenizer is missing"),
    ],
)
def test_the_settings_name_one_source(model: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        typed(model, ModelSettings, "model")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    directory: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {}
        if path == f"/api/models/a/b/tree/{COMMIT}":
            files = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                     for f in self.directory.iterdir()]  # fmt: skip
            body = json.dumps(files).encode()
        elif path.startswith(f"/a/b/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            self.asked.append(name)
            body = (self.directory / name).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(good: Path, tmp_path: Path) -> Iterator[str]:
    Hub.directory, Hub.asked = Path(shutil.copytree(good, tmp_path / "on-the-hub")), []
    for name in ("evil.py", "pytorch_model.bin", "consolidated.safetensors"):
        (Hub.directory / name).write_text(CODE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_model_of_the_hub_is_read_at_one_commit_without_pickles_and_code(hub: str, tmp_path: Path) -> None:
    code = f"""
import torch
from rollbook.train.loading import load_model
from rollbook.train.model_settings import ModelSettings
settings = ModelSettings(hub="a/b", revision="{COMMIT}", dtype="float32")
print(load_model(settings, seed=0, dtype=torch.float32).base.name_or_path)
"""
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert directory.name == COMMIT and (directory / "model.safetensors").exists()
    unwanted = {"evil.py", "pytorch_model.bin", "consolidated.safetensors"}
    assert not unwanted & {*Hub.asked, *(path.name for path in directory.iterdir())}


def adapters(directory: Path, base: Path) -> Path:
    """Adapters on the base, that change what it says."""
    model = load(base, lora=LoraSettings(rank=2))
    for name, weight in model.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(weight, 0.1)
    model.model.save_pretrained(directory)
    model.tokenizer.save_pretrained(directory)
    return directory


def test_adapters_on_adapters_stand_on_both(good: Path, tmp_path: Path) -> None:
    first = adapters(tmp_path / "first", good)
    second = adapters(tmp_path / "second", first)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [load(path).base.state_dict()[name] for path in (good, first, second)]
    step = weights[1] - weights[0]
    assert step.abs().max() > 0
    assert torch.allclose(weights[2] - weights[1], step, atol=1e-6)
    config = json.loads((second / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(first)


@pytest.mark.parametrize("base", ["someone/something", "nowhere", None])
def test_adapters_whose_base_is_not_here_are_refused(good: Path, tmp_path: Path, base: str | None) -> None:
    directory = adapters(tmp_path / "adapters", good)
    edit(directory / "adapter_config.json", base_model_name_or_path=base, revision="main")
    with pytest.raises(RollbookError, match=r"base_model_name_or_path is .*no directory here"):
        load(directory)


def test_adapters_of_a_checkpoint_keep_the_base_they_were_trained_on(good: Path, tmp_path: Path) -> None:
    """`from` may lead to another result by the time a run is resumed."""
    checkpoint = adapters(tmp_path / "checkpoint", good)
    other = write_tiny_model(
        tmp_path / "other", "abc", seed=1, hidden=16, heads=2, intermediate=32, positions=64
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"runtime_info: {{output: {{checkpoint_path: {other}}}}}\n")
    settings = ModelSettings(handed_over=str(config), dtype="float32", lora=LoraSettings(rank=2))
    model = load_model(settings, seed=0, dtype=torch.float32, checkpoint=checkpoint)
    name = "model.layers.0.mlp.up_proj.base_layer.weight"
    expected = load_file(good / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(model.base.state_dict()[name], expected)


@pytest.mark.parametrize("place", ["model", "adapters", "checkpoint of adapters"])
def test_truncated_weights_are_named(good: Path, tmp_path: Path, place: str) -> None:
    directory = tmp_path / "damaged"
    if place == "model":
        shutil.copytree(good, directory)
    else:
        adapters(directory, good)
    (weights,) = directory.glob("*.safetensors")
    for size in (weights.stat().st_size // 2, 4, 0):
        os.truncate(weights, size)
        with pytest.raises(UsageError, match=rf"model: {directory}: SafetensorError: "):
            if place == "checkpoint of adapters":
                settings = ModelSettings(path=str(good), dtype="float32", lora=LoraSettings(rank=2))
                load_model(settings, seed=0, dtype=torch.float32, checkpoint=directory)
            else:
                load(directory)
