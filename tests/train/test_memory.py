"""What training will hold is known before it is taken, and what does not fit is refused with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.samplers.local import LocalPolicy
from rollbook.samplers.sampling import Sampling
from rollbook.tiny import write_tiny_model
from rollbook.train import memory
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.memory import Peak, cache_bytes, free_bytes, needs_of, refuse_too_large
from rollbook.train.model_settings import LoraSettings, ModelSettings, OptimizerSettings
from rollbook.train.optimizer import Optimizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 16, "heads": 2, "intermediate": 32, "positions": 64}
    return write_tiny_model(tmp_path_factory.mktemp("model"), "abc", **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_what_is_worked_out_is_what_is_taken(directory: Path, dtype: Any, lora: LoraSettings | None) -> None:
    settings = ModelSettings(path=str(directory), dtype=dtype, lora=lora)
    model = load_model(settings, seed=0, dtype=DTYPES[dtype])
    optimizer = Optimizer(model.parameters(), OptimizerSettings(learning_rate=1e-3))
    first = optimizer.bytes_to_come
    for weight in optimizer.weights:
        weight.grad = torch.ones_like(weight)
    gradients = sum(weight.grad.nbytes for weight in optimizer.weights if weight.grad is not None)
    optimizer.step(0.0)
    kept = [t for state in optimizer.tensors() for name, t in state.items() if name != "step"]
    assert first == gradients + sum(t.nbytes for state in optimizer.tensors()
                                    for name, t in state.items() if name.startswith("exp_avg"))  # fmt: skip
    assert optimizer.bytes_to_come == gradients
    weights = sum(weight.nbytes for weight in model.model.parameters())
    assert needs_of(settings) == (weights, gradients + sum(t.nbytes for t in kept))


def test_keys_and_values_are_worked_out(directory: Path) -> None:
    model = load_model(ModelSettings(path=str(directory), dtype="float32"), seed=0, dtype=torch.float32)
    policy = LocalPolicy(
        model, ChatFormat(model.tokenizer), sampling=Sampling(max_tokens=4), slots=3, max_length=32
    )
    assert cache_bytes(model.base.config.get_text_config(), torch.float32, 3 * 32) == policy.cache_bytes


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    sizes = {"vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
    settings = ModelSettings(config={"model_type": "llama", **sizes}, tokenizer="nowhere")
    with pytest.raises(
        UsageError, match=r"not enough memory: 131\.4 GiB of weights, 1,051\.3 GiB for the opt"
    ):
        refuse_too_large(settings, CPU)


def test_copies_of_a_model_share_the_memory_of_a_machine(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ModelSettings(path=str(directory), dtype="float32")
    needs = needs_of(settings)
    assert needs is not None
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2 * needs.total)
    refuse_too_large(settings, CPU, 2)
    with pytest.raises(UsageError, match=r"3 processes, each with .* or set model\.lora"):
        refuse_too_large(settings, CPU, 3)


def test_what_cannot_be_read_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert needs_of(ModelSettings(path=str(tmp_path))) is None
    refuse_too_large(ModelSettings(path=str(tmp_path)), CPU)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, inside = tmp_path / "proc", tmp_path / "cgroup" / "box"
    (proc / "self").mkdir(parents=True)
    inside.mkdir(parents=True)
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemFree: 60 kB\nMemAvailable: 70 kB\n")
    assert free_bytes(CPU) == 70 << 10
    (proc / "self/cgroup").write_text("0::/box\n")
    for name, text in (("max", "max"), ("current", "30000"), ("stat", "anon 20000\nfile 10000\n")):
        (inside / f"memory.{name}").write_text(text)
    assert free_bytes(CPU) == 70 << 10
    (inside / "memory.max").write_text("40000\n")
    assert free_bytes(CPU) == 40_000 - 30_000 + 10_000


def test_a_peak_is_that_of_the_block() -> None:
    with Peak(CPU) as peak:
        block = torch.ones(50_000_000)
        del block
    if peak.bytes is None:
        pytest.skip("this kernel does not let a process forget its peak")
    assert 150e6 < peak.bytes < 400e6
