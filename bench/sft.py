"""Fine-tuning speed on one GPU: rollbook's engine, TRL's SFTTrainer with packing, a plain transformers loop.

The same model (the architecture of SmolLM2-135M with random weights), the same data, bfloat16, AdamW,
sequences of at most 1,024 tokens, 16 rows a step; each side in a process of its own, warm-up left out. What
counts is trained tokens a second without padding. Run it on a machine with a GPU:

    python bench/sft.py            # all sides in one run, rows into bench/RESULTS.md
    python bench/sft.py --side rollbook      # one side, its numbers as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SIDES = ("rollbook", "trl", "plain")
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
TINY = SMOLLM2 | {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
PEAK_FLOPS = 989e12  # dense bfloat16 of an H200 by its datasheet


def lengths(count: int, longest: int) -> np.ndarray[Any, Any]:
    """Lengths like those of chat data: many short ones, some that fill the row."""
    drawn = np.random.default_rng(7).lognormal(mean=np.log(longest / 3.5), sigma=0.6, size=count)
    return np.clip(drawn.astype(int), 16, longest)


def sequences(count: int, longest: int, vocabulary: int) -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(11)
    return [chance.integers(5, vocabulary, size).astype(np.int32) for size in lengths(count, longest)]


def build(config: dict[str, Any], dtype: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(config)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype
    )


def measured(
    times: list[float], tokens: list[int], config: dict[str, Any], parameters: int
) -> dict[str, Any]:
    """Medians over the timed steps; MFU counts six operations a weight and token, without attention."""
    import torch

    speed = float(np.sum(tokens) / np.sum(times))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        "tokens_per_second": speed,
        "median_step_s": float(np.median(times)),
        "mfu": 6 * parameters * speed / PEAK_FLOPS,
        "peak_gib": peak,
    }


def run_rollbook(options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    import torch

    from rollbook.train.batch import Example, Shape, best_fit, packed_batch
    from rollbook.train.engine import Engine
    from rollbook.train.losses import CrossEntropy
    from rollbook.train.model import Model
    from rollbook.train.model_settings import OptimizerSettings
    from rollbook.train.optimizer import Optimizer
    from rollbook.train.processes import Processes

    processes = Processes()
    dtype = torch.bfloat16 if processes.device.type == "cuda" else torch.float32
    model = Model(build(config, dtype).to(processes.device), tokenizer=None)
    model.use_packing(True)
    if processes.device.type == "cuda" and not options.no_compile:
        model.compile_blocks(cuda_graphs=True)
    optimizer = Optimizer(model.parameters(), OptimizerSettings(learning_rate=1e-5))
    engine = Engine(model, optimizer, processes, dropout=True, entropy=False)
    data = sequences(options.samples, options.length, config["vocab_size"])
    samples = [Example(tokens, np.ones(len(tokens), bool)) for tokens in data]
    bins = best_fit([len(sample.token_T) for sample in samples], options.length)
    np.random.default_rng(0).shuffle(bins)
    shape = Shape(options.rows * options.length, options.length)
    times, tokens = [], []
    began = time.perf_counter()
    for step in range(options.warmup + options.steps):
        rows = [bins[(step * options.rows + place) % len(bins)] for place in range(options.rows)]
        start = time.perf_counter()
        chosen = [samples[number] for row in rows for number in row]
        result = engine.step([packed_batch(chosen, shape=shape)], CrossEntropy(), 1e-5)
        times.append(time.perf_counter() - start)
        tokens.append(result.real_tokens)
        if step + 1 == options.warmup:
            warm = time.perf_counter() - began
    kept = slice(options.warmup, None)
    return {"warm_up_s": warm} | measured(times[kept], tokens[kept], config, model.count()[0])


def run_plain(options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """What one writes first: padded rows, the model's own loss, AdamW."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(config, torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    data = sequences(options.samples, options.length, config["vocab_size"])
    times, tokens = [], []
    began = time.perf_counter()
    for step in range(options.warmup + options.steps):
        start = time.perf_counter()
        rows = [data[(step * options.rows + place) % len(data)] for place in range(options.rows)]
        width = max(map(len, rows))
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.from_numpy(row)
            mask[place, : len(row)] = 1
        ids, mask = ids.to(device), mask.to(device)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
        tokens.append(sum(map(len, rows)))
        if step + 1 == options.warmup:
            warm = time.perf_counter() - began
    kept = slice(options.warmup, None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"warm_up_s": warm} | measured(times[kept], tokens[kept], config, parameters)


def run_trl(options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """SFTTrainer with packing on; its own defaults for the rest, but for what must be the same."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    cuda = torch.cuda.is_available()
    model = build(config, torch.bfloat16 if cuda else torch.float32)
    data = sequences(options.samples, options.length, config["vocab_size"])
    dataset = Dataset.from_dict({"input_ids": [row.tolist() for row in data]})
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as directory:
        arguments = SFTConfig(
            output_dir=directory, packing=True, max_length=options.length,
            per_device_train_batch_size=options.rows, max_steps=options.warmup + options.steps,
            bf16=cuda, learning_rate=1e-5, max_grad_norm=1.0,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10, use_cpu=not cuda,
            gradient_checkpointing=options.trl_checkpointing, optim="adamw_torch_fused",
            eos_token=None, pad_token=None,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            processing_class=_tokenizer(),
            callbacks=[Clock()],
        )
        packed = [len(row) for row in trainer.train_dataset["input_ids"]]
        began = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - began
    kept = times[options.warmup :]
    # Real tokens a packed row holds, on average: what a step of this many rows trains.
    real = float(np.mean(packed)) * options.rows
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = measured(kept, [int(real)] * len(kept), config, parameters)
    return {"warm_up_s": whole - sum(kept), "attention": model.config._attn_implementation} | found


def _tokenizer() -> Any:
    """A tokenizer only because a trainer wants one: the data comes as numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = []
    for name in ("torch", "transformers", "trl", "datasets", "accelerate", "peft"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} -")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"Python {sys.version.split()[0]} · {', '.join(found)} · {where}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model for trying the script on a CPU")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL's default; off is kinder to it")
    parser.add_argument("--sides", nargs="*", default=list(SIDES))
    parser.add_argument("--no-write", action="store_true", help="leave bench/RESULTS.md alone")
    options = parser.parse_args()
    config = TINY if options.tiny else SMOLLM2
    if options.side:
        run = {"rollbook": run_rollbook, "trl": run_trl, "plain": run_plain}[options.side]
        print("RESULT " + json.dumps(run(options, config)))
        return
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    for number in range(options.rounds):
        for side in options.sides:
            results[side].append(_in_its_own_process(side))
            print(f"round {number + 1}, {side}: {json.dumps(results[side][-1])}", flush=True)
    _report(results, options)


def _in_its_own_process(side: str) -> dict[str, Any]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "sft.py"), *sys.argv[1:], "--side", side],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    from report import write_section

    def median(side: str, key: str) -> float:
        return float(np.median([found[key] for found in results[side]])) if side in results else float("nan")

    speed = {side: median(side, "tokens_per_second") for side in SIDES}
    lines = [
        "## SFT (`bench/sft.py`)",
        "",
        f"{time.strftime('%Y-%m-%d')} · {versions()} · SmolLM2-135M's architecture, "
        f"{options.rows} x {options.length}, bfloat16, medians of {options.rounds} rounds "
        f"of {options.steps} steps",
        "",
        "| what | rollbook | TRL, packing | plain transformers loop | vs TRL | vs plain | goal |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ratio = speed["rollbook"] / speed["trl"]
    fast, far = speed["rollbook"] >= 2e5, ratio >= 5
    goal = f"5x TRL: {'met' if far else 'missed'}; 200,000: {'met' if fast else 'missed'}"
    lines.append(
        f"| trained tokens/s without padding | {speed['rollbook']:,.0f} | {speed['trl']:,.0f} "
        f"| {speed['plain']:,.0f} | {ratio:.1f}x | {speed['rollbook'] / speed['plain']:.1f}x | {goal} |"
    )
    for key, name, form in (
        ("mfu", "MFU", "{:.1%}"),
        ("peak_gib", "peak memory, GiB", "{:.1f}"),
        ("warm_up_s", "warm-up, s", "{:.0f}"),
    ):
        cells = " | ".join(form.format(median(side, key)) for side in SIDES)
        lines.append(f"| {name} | {cells} | | | |")
    print("\n".join(lines))
    if not options.no_write:
        write_section("sft", "\n".join(lines))


if __name__ == "__main__":
    main()
