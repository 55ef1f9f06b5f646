"""Run in vLLM's environment: what token ids say, and how likely the model itself holds them to be.

Standard input: {"model": DIR, "texts": [[ids], ...], "samples": [[prompt ids, generated ids], ...]}.
Standard output: {"texts": [...], "log_probs": [[...], ...]}.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in asked["texts"]]
    numbers = [log_probs(model, *pair) for pair in asked["samples"]]
    json.dump({"texts": texts, "log_probs": numbers}, sys.stdout)


@torch.inference_mode()
def log_probs(model: torch.nn.Module, prompt: list[int], generated: list[int]) -> list[float]:
    scores = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores[range(len(generated)), generated].tolist()


if __name__ == "__main__":
    main()
