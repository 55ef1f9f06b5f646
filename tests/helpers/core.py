"""A tiny model, examples for it and an engine around it: what tests of the training core begin with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollbook.train.batch import Example, ExampleKey
from rollbook.train.engine import Engine
from rollbook.train.model import Model
from rollbook.train.model_settings import OptimizerSettings
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from tiny_model import LLAMA

VOCABULARY = 61
CPU = torch.device("cpu")


def core_model(kind: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**LLAMA, "vocab_size": VOCABULARY, **changes}
    values.pop("model_type")
    torch.manual_seed(3)
    config: Any = AutoConfig.for_model(kind, **values)
    model = Model(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer=None)
    model.use_packing(True)
    return model


def core_engine(model: Model | None = None, *, processes: Processes | None = None, **options: Any) -> Engine:
    model = core_model() if model is None else model
    optimizer = Optimizer(model.parameters(), OptimizerSettings(learning_rate=0.01))
    return Engine(model, optimizer, Processes() if processes is None else processes, **options)


def sampled_examples(lengths: list[int], *, seed: int = 0, temperature: bool = True) -> list[Example]:
    """Rollouts with everything that a loss can ask for, off policy by some tenths of a nat."""
    chance = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        trained_T = chance.random(length) < 0.6
        trained_T[-1] = True  # something to train in each
        columns_T = {
            "advantage": chance.normal(size=length).astype(np.float32),
            "sampled_logprob": (chance.normal(size=length) * 0.5 - np.log(VOCABULARY)).astype(np.float32),
            "reference_logprob": (chance.normal(size=length) * 0.5 - np.log(VOCABULARY)).astype(np.float32),
            "turn": np.arange(length, dtype=np.int32),
        }
        if temperature:
            columns_T["temperature"] = chance.choice([0.5, 1.0, 1.7], length).astype(np.float32)
        token_T = chance.integers(0, VOCABULARY, length).astype(np.int32)
        made.append(Example(token_T, trained_T, columns_T, ExampleKey("train", 0, 0, number)))
    return made


def step_gradients(engine: Engine, batches: Any, loss: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result of a step and its gradients before clipping; the weights stay as they are."""
    kept: dict[str, torch.Tensor] = {}
    clip = engine.optimizer.clip

    def looking() -> float:
        kept.update(
            {
                name: weight.grad.clone()
                for (name, _), weight in zip(_trained(engine), engine.optimizer.weights, strict=True)
                if weight.grad is not None
            }
        )
        return clip()

    engine.optimizer.clip = looking  # type: ignore[method-assign]
    try:
        return engine.step(batches, loss, 0.0), kept
    finally:
        engine.optimizer.clip = clip  # type: ignore[method-assign]


def _trained(engine: Engine) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.model.model.named_parameters() if p.requires_grad]
