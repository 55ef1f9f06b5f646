"""The state of training goes to a directory and comes back to the bit; nothing that is read can run code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollbook.errors import BadFileError, RollbookError, WriteError
from rollbook.train.loading import load_model
from rollbook.train.model import Model
from rollbook.train.model_settings import LoraSettings, ModelSettings, OptimizerSettings
from rollbook.train.optimizer import Optimizer
from rollbook.train.state import load_training_state, save_training_state
from tiny_model import LLAMA, VOCABULARY, make_tokenizer

Trained = tuple[Model, Optimizer]
KINDS = ["float32", "bfloat16", "adapters"]


def settings_of(kind: str, directory: Path) -> ModelSettings:
    tokenizer = str(directory / "tokenizer")
    if not (directory / "tokenizer").exists():
        make_tokenizer(directory / "tokenizer")
    if kind != "adapters":
        return ModelSettings(config={**LLAMA, "vocab_size": VOCABULARY}, tokenizer=tokenizer)
    base = directory / "base"
    if not base.exists():
        whole = load_model(settings_of("float32", directory), seed=0, dtype=torch.float32)
        whole.model.save_pretrained(base)
    return ModelSettings(path=str(base), tokenizer=tokenizer, lora=LoraSettings(rank=2, dropout=0.1))


def load(kind: str, directory: Path, checkpoint: Path | None = None) -> Trained:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = load_model(settings_of(kind, directory), seed=0, dtype=dtype, checkpoint=checkpoint)
    return model, Optimizer(model.parameters(), OptimizerSettings(learning_rate=2e-5, weight_decay=0.1))


def step(trained: Trained, times: int) -> None:
    """Steps that draw from every generator."""
    model, optimizer = trained
    model.model.train()
    for _ in range(times):
        shift = random.randrange(100) + int(np.random.randint(100))
        tokens = (torch.randint(0, VOCABULARY, (2, 8)) + shift) % VOCABULARY
        torch.autograd.backward(model.model(input_ids=tokens, labels=tokens).loss)
        optimizer.accumulate()
        optimizer.step(1e-3)


def weights(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained[0].model.state_dict().items()}


def save(directory: Path, trained: Trained, extra: dict[str, Any] | None = None) -> dict[str, bytes]:
    directory.mkdir()
    save_training_state(directory, *trained, extra)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["random_state.json", "optimizer.safetensors"])
def test_a_checkpoint_that_cannot_be_written_says_so_and_what_is_left(tmp_path: Path, name: str) -> None:
    """As on a full disk: by a file of ours, or by the library that writes tensors."""
    trained = load("float32", tmp_path)
    (tmp_path / "saved" / name).mkdir(parents=True)
    with pytest.raises(WriteError, match=r"could not be written to .*saved .*Those before it are complete"):
        save_training_state(tmp_path / "saved", *trained)


def test_a_padding_token_that_a_model_writes_is_trained_before_and_after_a_save(tmp_path: Path) -> None:
    trained = load("float32", tmp_path)
    save(tmp_path / "saved", trained)
    pad = trained[0].tokenizer.pad_token_id
    for model, _ in (trained, load("float32", tmp_path, tmp_path / "saved")):
        embedded = model.model.get_input_embeddings()(torch.tensor([pad]))
        (gradient,) = torch.autograd.grad(embedded.sum(), model.model.get_input_embeddings().weight)
        assert gradient[pad].tolist() == [1.0] * gradient.shape[1]


@pytest.mark.parametrize("more", [8, 24])
def test_where_a_file_has_the_weights_does_not_show_in_a_product(more: int, tmp_path: Path) -> None:
    save(tmp_path / "saved", load("float32", tmp_path))
    path = tmp_path / "saved" / "model.safetensors"
    save_file(load_file(path), tmp_path / "other", metadata={"format": "pt", "more": "x" * more})
    (tmp_path / "other").replace(path)
    model, _ = load("float32", tmp_path, tmp_path / "saved")
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_goes_on_to_the_bit_like_what_was_saved(kind: str, tmp_path: Path) -> None:
    trained = load(kind, tmp_path)
    step(trained, 2)
    extra = {"step": 2, "sum": 0.1 + 0.2, "name": "é"}
    save(tmp_path / "saved", trained, extra)
    step(trained, 2)

    other = load(kind, tmp_path, tmp_path / "saved")
    assert load_training_state(tmp_path / "saved", *other) == extra
    step(other, 2)
    ours, theirs = weights(trained), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
    assert save(tmp_path / "a", trained) == save(tmp_path / "b", other)  # moments and copies too


def test_equal_states_give_equal_bytes_in_another_process(tmp_path: Path) -> None:
    """peft keeps names in sets, which have another order under another hash seed."""
    program = (
        "import sys; from pathlib import Path; from train.test_state import load, save\n"
        "save(Path(sys.argv[1], 'other'), load('adapters', Path(sys.argv[1])))"
    )
    here = save(tmp_path / "here", load("adapters", tmp_path))
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True)
    there = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    assert {name for name in here if here[name] != there[name]} == {"random_state.json"}


class Planted:
    """Whoever unpickles it runs this."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "rng_state.pth", "random_state.json", "training_state.json"]
)
def test_a_planted_pickle_does_not_run(tmp_path: Path, name: str) -> None:
    trained = load("float32", tmp_path)
    step(trained, 1)
    save(tmp_path / "saved", trained)
    (tmp_path / "saved" / name).write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    if name == "rng_state.pth":  # nobody reads it
        load_training_state(tmp_path / "saved", *trained)
    else:
        with pytest.raises(RollbookError, match=name):
            load_training_state(tmp_path / "saved", *trained)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    for kind in ("bfloat16", "float32"):
        trained = load(kind, tmp_path)
        step(trained, 1)
        save(tmp_path / kind, trained)
    with pytest.raises(BadFileError, match=r"another precision; set model\.dtype as it was"):
        load_training_state(tmp_path / "float32", *load("bfloat16", tmp_path))
    with pytest.raises(BadFileError, match="is not a trained parameter of this model"):
        load_training_state(tmp_path / "bfloat16", *load("adapters", tmp_path))


def test_a_model_in_float32_goes_on_from_the_float32_copies_of_another(tmp_path: Path) -> None:
    """Sharded weights are float32, those of one process perhaps not."""
    trained = load("bfloat16", tmp_path)
    step(trained, 2)
    save(tmp_path / "saved", trained)
    model, optimizer = load("float32", tmp_path, tmp_path / "saved")
    load_training_state(tmp_path / "saved", model, optimizer)
    for ours, theirs in zip(optimizer.weights, trained[1].weights, strict=True):
        assert torch.equal(ours, theirs)
    assert [kept.keys() for kept in optimizer.tensors()] == [{"step", "exp_avg", "exp_avg_sq"}] * len(
        optimizer.weights
    )


@pytest.mark.parametrize(
    "damage", [{"random": [3, [1], None]}, {"torch": "AAAA"}, {"numpy": {}}, {"torch": 1}]
)
def test_damaged_random_states_are_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    trained = load("float32", tmp_path)
    save(tmp_path / "saved", trained)
    path = tmp_path / "saved" / "random_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(BadFileError, match=r"random_state\.json: is not the state of random generators"):
        load_training_state(tmp_path / "saved", *trained)


def test_a_truncated_optimiser_is_named(tmp_path: Path) -> None:
    trained = load("float32", tmp_path)
    step(trained, 1)
    save(tmp_path / "saved", trained)
    path = tmp_path / "saved" / "optimizer.safetensors"
    for size in (path.stat().st_size - 1, 4, 0):
        os.truncate(path, size)
        with pytest.raises(BadFileError, match=r"optimizer\.safetensors: .*header"):
            load_training_state(tmp_path / "saved", *trained)
    path.unlink()
    with pytest.raises(BadFileError, match=r"optimizer\.safetensors: No such file"):
        load_training_state(tmp_path / "saved", *trained)


def test_other_settings_of_the_optimiser_hold_after_a_resume(tmp_path: Path) -> None:
    """Weight decay is a setting, which may change; it does not come out of the checkpoint."""
    trained = load("float32", tmp_path)
    step(trained, 1)
    save(tmp_path / "saved", trained)
    model = copy.deepcopy(trained[0])
    plain = Optimizer(model.parameters(), OptimizerSettings(learning_rate=2e-5, weight_decay=0.0))
    load_training_state(tmp_path / "saved", model, plain)
    step((model, plain), 1)
    load_training_state(tmp_path / "saved", *trained)
    step(trained, 1)
    different = [
        name
        for name, value in weights(trained).items()
        if not torch.equal(value, model.model.state_dict()[name])
    ]
    assert different
