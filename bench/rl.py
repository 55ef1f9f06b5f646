"""Reinforcement learning: rollbook, TRL's GRPO, and the matrix products alone as the floor.

On one CPU thread: the same tiny models (random weights, one token per character), the same prompts of 13
tokens, 32 groups of 8, at most 32 new tokens, the same reward, one update per batch, no reference model,
float32. On a GPU: the shape of SmolLM2-135M, at most 128 new tokens, bfloat16. Each side runs in a process of
its own, one after the other in one run; warm-up iterations are left out. What counts is generated tokens by
the wall-clock time of whole iterations: for rollbook that includes everything it records.

    make bench-rl                            # sets up TRL, runs all sides, rows into bench/RESULTS.md
    python bench/rl.py --gpu                 # the same on a GPU
    python bench/rl.py --side rollbook --size 1.05   # one side, its numbers as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
GROUPS, GROUP_SIZE, PROMPT = 32, 8, 13
WARM_UP = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=?"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SPECIAL = ["<pad>", "<end>", "<unk>"]


class Size(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    new: int  # tokens
    dtype: str
    on_gpu: bool = False


SIZES = {
    "0.13": Size(64, 256, 2, 4, 4, len(SPECIAL) + len(LETTERS), 32, "float32"),
    "1.05": Size(128, 512, 4, 4, 4, len(SPECIAL) + len(LETTERS), 32, "float32"),
    "135": Size(576, 1536, 30, 9, 3, 49152, 128, "bfloat16", on_gpu=True),
}


def write_model(directory: Path, size: str) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = SIZES[size]
    tokens = [*SPECIAL, *LETTERS]
    tokens += [f"<{number}>" for number in range(shape.vocabulary - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=2 * shape.new,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<pad>"],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    model.save_pretrained(directory)


def prompts(count: int) -> list[str]:
    import random

    chance = random.Random(3)
    return ["".join(chance.choice(LETTERS) for _ in range(PROMPT)) for _ in range(count)]


def reward_of(text: str, new: int) -> float:
    return sum(letter in "aeiou" for letter in text) / new


def run_rollbook(size: str, iterations: int) -> dict[str, Any]:
    from rollbook.rl.settings import load_settings
    from rollbook.rl.train import train

    shape = SIZES[size]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "model", size)
        (directory / "vowels.py").write_text(
            "from rollbook.envs import single_turn\n\n\n@single_turn\ndef vowels(task, answer):\n"
            f"    return sum(letter in 'aeiou' for letter in answer) / {shape.new}\n"
        )
        rows = [json.dumps({"id": str(n), "prompt": text}) for n, text in enumerate(prompts(1000))]
        (directory / "tasks.jsonl").write_text("\n".join(rows) + "\n")
        settings = load_settings(
            {
                "log_path": str(directory / "run"),
                "model": {"path": str(directory / "model"), "dtype": shape.dtype},
                "environments": [
                    {"name": f"{directory}/vowels.py:vowels", "tasks": str(directory / "tasks.jsonl")}
                ],
                "sampler": {"max_tokens": shape.new, "max_length": 2 * shape.new},
                "groups_per_batch": GROUPS,
                "group_size": GROUP_SIZE,
                "iterations": iterations,
                "learning_rate": 1e-4,
                "save_every": iterations,
                "samples_every": 0,
            }
        )
        train(settings, log=lambda _: None)
        rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").open()]
    ended = [datetime.fromisoformat(row["logged_at"]).timestamp() for row in rows]
    # An iteration lasts from the line of the one before to its own: reports, records and all.
    seconds = [after - before for before, after in pairwise(ended)][WARM_UP - 1 : -1]
    tokens = [row["tokens/sampled"] for row in rows][WARM_UP:-1]
    parts = {
        key: statistics.median(row[key] for row in rows[WARM_UP:-1])
        for key in sorted(rows[WARM_UP])
        if key.startswith("time/")
    }
    import torch
    import transformers

    import rollbook

    versions = {
        "rollbook": rollbook.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return measured(tokens, seconds) | {"parts": parts, "versions": versions}


def run_trl(size: str, iterations: int, rows_at_once: int) -> dict[str, Any]:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    shape = SIZES[size]
    if not shape.on_gpu:
        torch.set_num_threads(1)
    tokens: list[int] = []
    ended: list[float] = []

    def vowels(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [reward_of(text, shape.new) for text in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "model", size)
        batch = GROUPS * GROUP_SIZE
        settings = GRPOConfig(
            output_dir=f"{name}/out",
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=batch // rows_at_once,
            generation_batch_size=batch,
            num_generations=GROUP_SIZE,
            max_completion_length=shape.new,
            max_steps=iterations,
            learning_rate=1e-4,
            beta=0.0,
            temperature=1.0,
            bf16=shape.on_gpu,
            use_cpu=not shape.on_gpu,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(f"{name}/model", dtype=getattr(torch, shape.dtype)),
            processing_class=AutoTokenizer.from_pretrained(f"{name}/model"),
            reward_funcs=vowels,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts(1000)}),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = [after - before for before, after in pairwise(ended)][WARM_UP - 1 :]
    versions = {"TRL": trl.__version__, "transformers (TRL)": transformers.__version__}
    return measured(tokens[WARM_UP:], seconds) | {"rows_at_once": rows_at_once, "versions": versions}


def run_floor(size: str, iterations: int) -> dict[str, Any]:
    """Nothing but the products with weights: a decode step per new token, and three times a forward pass."""
    import torch

    shape = SIZES[size]
    device = torch.device("cuda" if shape.on_gpu else "cpu")
    dtype = getattr(torch, shape.dtype)
    if not shape.on_gpu:
        torch.set_num_threads(1)
    width = shape.hidden // shape.heads
    attention = shape.hidden + 2 * shape.key_heads * width
    layer = [
        (shape.hidden, attention),
        (shape.hidden, shape.hidden),
        (shape.hidden, 2 * shape.inner),
        (shape.inner, shape.hidden),
    ]
    shapes = [*layer * shape.layers, (shape.hidden, shape.vocabulary)]
    weights = [torch.randn(given, dtype=dtype, device=device) for given in shapes]
    rows = GROUPS * GROUP_SIZE
    whole = 16_384 if shape.on_gpu else 720  # micro-batches that stay in the cache

    def products(count: int, passes: int) -> None:
        inputs = {
            weight.shape[0]: torch.randn(count, weight.shape[0], dtype=dtype, device=device)
            for weight in weights
        }
        for _ in range(passes):
            for weight in weights:
                inputs[weight.shape[0]] @ weight

    seconds = []
    for _ in range(max(4, iterations)):
        began = time.perf_counter()
        products(rows, shape.new)
        products(whole, round(3 * rows * (PROMPT + shape.new) / whole))
        if shape.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return measured([rows * shape.new] * len(seconds), seconds)


def measured(tokens: list[int], seconds: list[float]) -> dict[str, Any]:
    speeds = [count / took for count, took in zip(tokens, seconds, strict=False)]
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens": statistics.median(tokens),
        "iterations": len(speeds),
    }


def side(name: str, size: str, iterations: int, python: str, *more: str) -> dict[str, Any]:
    command = [python, str(Path(__file__).resolve()), "--side", name, "--size", size]
    done = subprocess.run(
        [*command, "--iterations", str(iterations), *more], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{size} M, {name} {' '.join(more)}: {found['tokens_per_second']:,.0f} tok/s", flush=True)
    return found


def compare(iterations: int, rounds: int, peer: str, *, on_gpu: bool) -> None:
    from report import markdown_table, provenance, write_section

    rows, versions = [], {}
    rows_at_once = (256, 64) if on_gpu else (256, 32)
    for size, shape in SIZES.items():
        if shape.on_gpu != on_gpu:
            continue
        speeds: dict[str, list[float]] = {"rollbook": [], "trl": [], "floor": []}
        for _ in range(rounds):
            ours = side("rollbook", size, iterations, sys.executable)
            theirs = [side("trl", size, iterations, peer, "--rows-at-once", str(n)) for n in rows_at_once]
            floor = side("floor", size, iterations, sys.executable)
            best = max(theirs, key=lambda found: found["tokens_per_second"])
            for name, found in (("rollbook", ours), ("trl", best), ("floor", floor)):
                speeds[name].append(found["tokens_per_second"])
                versions |= found.get("versions", {})
        us, them, most = (statistics.median(speeds[name]) for name in ("rollbook", "trl", "floor"))
        goal = 12 if on_gpu else 1.3
        ratio = f"{us / them:.2f}x TRL (goal {goal}x), {us / most:.0%} of the products"
        rows.append([f"{size} M", f"{us:,.0f}", f"{them:,.0f}", f"{most:,.0f}", ratio])
    header = ["model", "rollbook tok/s", "TRL GRPO tok/s", "products alone", "ratio"]
    table = markdown_table(header, rows)
    where, new, dtype = ("a GPU", 128, "bfloat16") if on_gpu else ("one CPU thread", 32, "float32")
    body = (
        f"## Reinforcement learning on {where} (`bench/rl.py{' --gpu' if on_gpu else ''}`)\n\n"
        f"{provenance(versions, rounds)}\n\n{table}\n\n"
        f"{GROUPS} groups of {GROUP_SIZE}, prompts of {PROMPT} tokens, at most {new} new ones, one update "
        f"per batch, {dtype}. Generated tokens by the time of whole iterations; rollbook's include every "
        f"record and report. TRL with micro-batches of {rows_at_once[0]} and of {rows_at_once[1]} rows, "
        "whichever was faster.\n"
    )
    write_section("rl-gpu" if on_gpu else "rl", body)
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("rollbook", "trl", "floor"))
    parser.add_argument("--size", choices=list(SIZES), default="0.13")
    parser.add_argument(
        "--gpu", action="store_true", help="the size for a GPU, with 12 times TRL as the goal"
    )
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-at-once", type=int, default=256)
    parser.add_argument("--peer", default=str(HERE.parent / ".venvs" / "trl" / "bin" / "python"))
    given = parser.parse_args()
    if given.side is None:
        compare(given.iterations, given.rounds, given.peer, on_gpu=given.gpu)
        return
    if given.side == "trl":
        found = run_trl(given.size, given.iterations, given.rows_at_once)
    else:
        found = {"rollbook": run_rollbook, "floor": run_floor}[given.side](given.size, given.iterations)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
