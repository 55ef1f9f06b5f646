"""Tiny models of many families, and the slow obvious way to get what the sampler says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollbook.samplers.engine import Engine, Sampled, Wanted

VOCABULARY = 45
CLOSE = 1e-5  # of two ways to add up float32 numbers of this size


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """Random weights, larger than usual, so that likely and unlikely tokens differ."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**values, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def wanted(count: int, *, seed: int = 0, longest: int = 40, most: int = 30, **options: Any) -> list[Wanted]:
    """Requests of many lengths, in groups of four with one prompt."""
    chosen = random.Random(seed)
    requests = []
    for number in range(count):
        if number % 4 == 0:
            prompt = [chosen.randrange(2, VOCABULARY) for _ in range(chosen.randint(1, longest))]
        tokens = chosen.randint(1, most)
        temperature = chosen.choice([0.7, 1.0, 1.3])
        given = {"temperature": temperature, "max_tokens": tokens, **options}
        requests.append(Wanted(prompt, seed=chosen.getrandbits(62), **given))
    return requests


def engine_of(
    model: Any, *, slots: int, length: int = 80, stop_ids: Sequence[int] = (), **options: Any
) -> Engine:
    options = {"decode": lambda ids: "".join(chr(97 + number) for number in ids), **options}
    return Engine(model, slots=slots, length=length, stop_ids=stop_ids, **options)


def run(engine: Engine, requests: Sequence[Wanted]) -> list[Sampled]:
    for request in requests:
        engine.add(request)
    done = {}
    with engine.model.sampling():
        while engine.busy:
            done.update(engine.step())
    return [done[request] for request in requests]


@torch.no_grad()
def plain(model: Any, request: Wanted, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of every token at every place of a reply, from one forward pass over all of it."""
    ids = torch.tensor([[*request.prompt, *tokens]])
    logits = model(ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    return (logits / (request.temperature or 1.0)).log_softmax(-1)


def largest_difference(model: Any, requests: Sequence[Wanted], results: Sequence[Sampled]) -> float:
    worst = 0.0
    for request, result in zip(requests, results, strict=True):
        all_logprobs = plain(model, request, result.token_ids)
        chosen = all_logprobs.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(result.logprobs)).abs().max()))
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        worst = max(worst, float((entropies - torch.tensor(result.entropies)).abs().max()))
    return worst
