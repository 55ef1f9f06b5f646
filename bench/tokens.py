"""The token export: tokens per second of all that is written, beside an exporter as the field has it.

The same batch on both sides, 64 sequences of 2,048 tokens in micro-batches of 8. The other side does what the
exporter of prime-rl does, written here from its description: each array becomes a Python list value by value,
a record is `json.dumps`, and every record opens its file, appends and closes. It writes neither text nor
the keys that join a record with its rollout, and it does not wait for the disk. Ours is timed from the first
micro-batch to the line of the manifest, everything fsynced, and on until the file is closed: what is Parquet
then was an Arrow stream before.

    python bench/tokens.py                    # both sides, rows into bench/RESULTS.md
    python bench/tokens.py --rounds 1 --dry   # prints only

The share of an iteration is that of `rollbook demo`'s reinforcement learning: `time/token_export` by
`time/total`. The same training runs with the export off too, in turn, so that iterations stand side by side:
what the writer's thread takes from the training is in these and not in the share. Of each iteration of that
training the median of the rounds is taken, and these are added up. How long sampling takes, which the export
has no part in, differs by more from round to round than the export costs, so what is compared is the time of
training and export.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

SEQUENCES, LENGTH, TOGETHER, PROMPT = 64, 2048, 8, 256
HIGH, LOW = 0.2, 0.2


def tokenizer_of(text: str) -> Any:
    """Byte-level, some thousand tokens, trained on this repository's pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def make_batches(tokenizer: Any, text: str) -> list[tuple[Any, Any, Any]]:
    """Micro-batches with the outputs and the facts of a loss, as the trainer has them."""
    from rollbook.train.batch import Example, ExampleKey, packed_batch
    from rollbook.train.losses import Dppo, LossInputs
    from rollbook.train.token_math import TokenOutputs

    chance = np.random.default_rng(0)
    ids = np.array(tokenizer.encode(text), np.int32)
    examples = []
    for number in range(SEQUENCES):
        start = int(chance.integers(0, len(ids) - LENGTH))
        trained_T = np.arange(LENGTH) >= PROMPT
        sampled_T = np.where(trained_T, -chance.exponential(0.8, LENGTH), np.nan).astype(np.float32)
        columns_T = {
            "reward": np.full(LENGTH, number % 2, np.float32),
            "advantage": np.full(LENGTH, number % 2 - 0.5, np.float32),
            "sampled_logprob": sampled_T,
            "temperature": np.ones(LENGTH, np.float32),
            "turn": np.zeros(LENGTH, np.int32),
            "version": np.zeros(LENGTH, np.int32),
        }
        key = ExampleKey("train", 0, number // 8, number % 8)
        examples.append(Example(ids[start : start + LENGTH], trained_T, columns_T, key))
    made = []
    for start in range(0, SEQUENCES, TOGETHER):
        batch = packed_batch(examples[start : start + TOGETHER])
        sampled_N = batch.columns_N["sampled_logprob"]
        logprob_N = sampled_N + torch.from_numpy(chance.normal(0, 0.02, len(sampled_N)).astype(np.float32))
        entropy_N = torch.from_numpy(chance.exponential(0.8, len(sampled_N)).astype(np.float32))
        loss = Dppo()(LossInputs(logprob_N, batch.example_N, batch.columns_N))
        made.append((batch, TokenOutputs(logprob_N, entropy_N), loss))
    return made


def ours(directory: Path, tokenizer: Any, batches: list[tuple[Any, Any, Any]], kind: Any) -> dict[str, float]:
    from rollbook.records.token_files import RunIdentity
    from rollbook.records.token_settings import TokenExportSettings
    from rollbook.train.export import TokenExport
    from rollbook.train.losses import Dppo
    from rollbook.train.processes import Processes
    from rollbook.train.token_records import Noted

    notes = {group: Noted(f"task-{group}", "bench") for group in range(8)}
    with TokenExport(
        TokenExportSettings(format=kind),
        directory,
        RunIdentity("bench", 1),
        tokenizer,
        Processes(),
        seed=0,
        alert=print,
    ) as export:
        in_loop = 0.0
        began = time.perf_counter()
        take = export.seen(0, 0, notes)
        for batch, outputs, loss in batches:
            at = time.perf_counter()
            take(batch, outputs, loss)
            in_loop += time.perf_counter() - at
        export.commit(0, Dppo(), [], batch=1)
        export.end_part()
        committed = time.perf_counter() - began
    seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in directory.rglob("rank_0*"))
    return {"seconds": seconds, "committed": committed, "bytes": size, "in_loop": in_loop}


def theirs(directory: Path, batches: list[tuple[Any, Any, Any]]) -> dict[str, float]:
    path = directory / "token_exports" / "step_0" / "rank_0.jsonl"
    seconds = 0.0
    for number, (batch, outputs, loss) in enumerate(batches):
        columns, bounds = flat_columns(batch, outputs, loss)  # tensors, as that trainer has them: not timed
        began = time.perf_counter()
        values = {name: to_list(column) for name, column in columns.items()}
        for place, (start, end) in enumerate(bounds):
            record: dict[str, Any] = {
                "schema_version": 1,
                "step": 0,
                "rank": 0,
                "micro_step": number,
                "micro_sequence_idx": place,
                "export_sequence_idx": number * TOGETHER + place,
                "env_name": "bench",
            }
            record |= {name: column[start:end] for name, column in values.items()}
            line = json.dumps(record, separators=(",", ":"), allow_nan=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        seconds += time.perf_counter() - began
    return {"seconds": seconds, "bytes": path.stat().st_size}


def to_list(column: torch.Tensor) -> list[Any]:
    """Value by value, what is not finite as null."""
    if column.dtype is torch.bool:
        return [bool(value) for value in column.tolist()]
    if not column.is_floating_point():
        return [int(value) for value in column.tolist()]
    values = column.float().tolist()
    return [float(value) if math.isfinite(value) else None for value in values]


def flat_columns(batch: Any, outputs: Any, loss: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The full-length tensors that the other exporter starts from."""
    starts, lengths = batch.starts, batch.lengths
    place_N = torch.tensor(starts)[batch.example_N] + batch.offset_N
    total = sum(lengths)

    def full(value_N: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        value_F = torch.full((total,), fill)
        value_F[place_N] = value_N.float()
        return value_F

    trained_F = full(torch.ones(len(place_N))).bool()
    mu_F, pi_F = full(batch.columns_N["sampled_logprob"]), full(outputs.logprob_N)
    advantage_F, log_F = full(batch.columns_N["advantage"]), pi_F - mu_F
    delta_F = pi_F.exp() - mu_F.exp()
    high_F = trained_F & (advantage_F > 0) & (delta_F > HIGH)
    low_F = trained_F & (advantage_F < 0) & (delta_F < -LOW)
    columns = {
        "token_ids": batch.forward.input_ids.flatten(),
        "position_ids": batch.forward.position_ids.flatten(),
        "loss_mask": trained_F,
        "rewards": full(batch.columns_N["reward"]),
        "advantages": advantage_F,
        "inference_logprobs": mu_F,
        "trainer_logprobs": pi_F,
        "entropy": full(outputs.entropy_N),
        "mismatch_kl": log_F.exp() - log_F - 1,
        "log_importance_ratio": log_F,
        "importance_ratio": log_F.exp(),
        "prob_delta": delta_F,
        "is_masked": high_F | low_F,
        "is_masked_high": high_F,
        "is_masked_low": low_F,
    }
    return columns, [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def demo_iterations(rounds: int) -> dict[str, list[list[dict[str, float]]]]:
    """The metrics of iterations of the demo's reinforcement learning, without the export and with each kind:
    the same training in every round, in turn."""
    from rollbook.demo.files import write_files
    from rollbook.rl.settings import load_settings
    from rollbook.rl.train import train
    from rollbook.sft import settings as sft_settings
    from rollbook.sft.train import train as fine_tune

    exports = {"off": "false", "jsonl": "{format: jsonl}", "parquet": "{format: parquet}"}
    found: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in exports}
    with tempfile.TemporaryDirectory() as name:
        before = Path.cwd()
        os.chdir(name)
        try:
            write_files(Path())
            fine_tune(sft_settings.load_settings(Path("sft.yaml")), log=lambda _: None)
            model = next(Path("artifacts").rglob("checkpoint-*"))
            for number in range(rounds):
                for kind, export in exports.items():
                    words = [
                        "model.from=null",
                        f"model.path={model}",
                        "iterations=12",
                        "evals=[]",
                        f"log_path=runs/{kind}-{number}",
                        f"trainer={{experimental: {{token_export: {export}}}}}",
                    ]
                    settings = load_settings(Path("rl.yaml"), words)
                    train(settings, log=lambda _: None)
                    lines = (Path(settings.log_path) / "metrics.jsonl").read_text().splitlines()
                    found[kind].append([json.loads(line) for line in lines[2:11]])  # warm, before the end
        finally:
            os.chdir(before)
    return found


def mean_of_medians(rounds: list[list[dict[str, float]]], *names: str) -> float:
    """The seconds of an iteration that these metrics add up to."""
    sums = [[sum(one.get(name, 0.0) for name in names) for one in own] for own in rounds]
    return statistics.mean(statistics.median(same) for same in zip(*sums, strict=True))


def main() -> None:
    from report import markdown_table, provenance, write_section

    import rollbook

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    tokenizer = tokenizer_of(text)
    batches = make_batches(tokenizer, text)
    tokens = SEQUENCES * LENGTH
    found: dict[str, list[dict[str, float]]] = {"peer": [], "jsonl": [], "parquet": []}
    for _ in range(given.rounds):
        for side, runs in found.items():
            with tempfile.TemporaryDirectory() as name:
                run = (
                    theirs(Path(name), batches)
                    if side == "peer"
                    else ours(Path(name), tokenizer, batches, side)
                )
                runs.append(run)
    speed = {side: statistics.median(tokens / run["seconds"] for run in runs) for side, runs in found.items()}
    size = {side: runs[0]["bytes"] / tokens for side, runs in found.items()}
    iterations = demo_iterations(given.rounds)
    whole = mean_of_medians(iterations["off"], "time/total")
    train = {
        kind: mean_of_medians(own, "time/train", "time/token_export") for kind, own in iterations.items()
    }
    shares = {
        kind: mean_of_medians(own, "time/token_export") / whole
        for kind, own in iterations.items()
        if kind != "off"
    }
    longer = {kind: (train[kind] - train["off"]) / whole for kind in shares}
    rows = []
    for side, label, wanted, most in (
        ("peer", "value by value, json.dumps, open-append", 0, None),
        ("jsonl", "rollbook, JSON lines", 20, None),
        ("parquet", "rollbook, Parquet", 30, 25),
    ):
        ratio = speed[side] / speed["peer"]
        goals = []
        if wanted:
            goals.append(f"{wanted}x: {'met' if ratio >= wanted else 'missed'}")
            goals.append(f"under 2 % of an iteration: {'met' if longer[side] < 0.02 else 'missed'}")
        if most:
            goals.append(f"at most {most} bytes: {'met' if size[side] <= most else 'missed'}")
        share = f"{shares[side]:.1%}" if side in shares else ""
        more = f"{longer[side]:+.1%}" if side in shares else ""
        committed = statistics.median(tokens / run.get("committed", run["seconds"]) for run in found[side])
        in_loop = statistics.median(run.get("in_loop", 0.0) for run in found[side])
        held = f"{in_loop * 1e9 / tokens:.0f} ns" if in_loop else ""
        rows.append(
            [
                label,
                f"{speed[side]:,.0f}",
                f"{ratio:.1f}x",
                f"{committed:,.0f} ({committed / speed['peer']:.1f}x)" if side in shares else "",
                f"{size[side]:.1f}",
                held,
                share,
                more,
                "; ".join(goals),
            ]
        )
    header = [
        "exporter",
        "tokens/s",
        "ratio",
        "until the manifest",
        "bytes/token",
        "in the loop, per token",
        "of a demo iteration",
        "longer by",
        "goals",
    ]
    table = markdown_table(header, rows)
    versions = {"rollbook": rollbook.__version__, "torch": torch.__version__, "numpy": np.__version__}
    body = (
        "## Token export (`bench/tokens.py`)\n\n"
        f"{provenance(versions, given.rounds)}\n\n{table}\n\n"
        f"{SEQUENCES} sequences of {LENGTH:,} tokens. Ours is timed until all of it is on the disk, in the "
        "manifest and closed, and writes more: the text, the place of each token, and the keys that join a "
        "record with its rollout. *Until the manifest*: the same without the closing, which turns the Arrow "
        "stream that holds the records of a checkpoint interval into Parquet. *In the loop*: how long the "
        "training waits for what is handed over. *Of a demo iteration*: how much of it the loop waits. "
        "*Longer by*: how much longer training and export take than training alone, as a part of the "
        f"iteration of {whole:.3f} s: 9 iterations, of each the median of {given.rounds} rounds.\n"
    )
    print(body)
    if not given.dry:
        write_section("tokens", body)


if __name__ == "__main__":
    sys.exit(main())
