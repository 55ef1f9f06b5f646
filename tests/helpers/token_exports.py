"""Token exports made by the real writers, without a training: what is in them is known to the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollbook.records.jsonl import JsonlWriter
from rollbook.records.token_files import ExportedStep, ExportFiles, RankPart, export_files
from rollbook.records.token_settings import TokenExportSettings
from rollbook.records.token_writers import TokenRecords, TokenWriter, open_token_writer

# A character in two tokens, an escape sequence, and words.
PIECES = [b" the", b"<think>", b"</think>", b"\xc3", b"\xa9", b"\n", b"\x1b[31m", b"42"]
HALF, OTHER_HALF = 3, 4
PROMPT = 4
CLIP = 0.1
NAN_AT = (0, 0, 0)  # iteration, process, record: its last token has a trainer logprob that is not finite


@dataclass
class Export:
    """The shape of an export. Each process has `records` rows of `tokens` tokens in every iteration."""

    kind: Literal["jsonl", "parquet"] = "jsonl"
    iterations: int = 3
    processes: int = 2
    records: int = 4
    tokens: int = 24
    part: int = 2  # iterations between two checkpoints
    path: str | None = None
    columns: list[str] | None = None
    seed: int = 0
    loud: int | None = None  # a process whose trainer disagrees more than the others

    @property
    def settings(self) -> TokenExportSettings:
        return TokenExportSettings(format=self.kind, path=self.path, columns=self.columns)

    def write(self, root: Path, *, is_open: bool = False) -> ExportFiles:
        """`is_open`: the last part is left as a killed process leaves it."""
        files = export_files(root, self.settings)
        manifest = JsonlWriter(files.manifest, check=False)
        writers = [open_token_writer(files, self.settings, rank) for rank in range(self.processes)]
        for iteration in range(self.iterations):
            parts = [self._write(writer, iteration, rank) for rank, writer in enumerate(writers)]
            manifest.append(self._step(iteration, parts).encode())
            manifest.sync()
            if (iteration + 1) % self.part == 0:
                for writer in writers:
                    writer.end_part()
        if is_open:
            for rank, writer in enumerate(writers):  # of an iteration that no manifest names
                writer.write(self.made(self.iterations, rank), self.iterations)
                writer.sync()
        else:
            for writer in writers:
                writer.close()
        manifest.close()
        return files

    def _write(self, writer: TokenWriter, iteration: int, rank: int) -> RankPart:
        made = self.made(iteration, rank)
        writer.write(made, iteration)
        writer.sync()
        return RankPart(
            rank=rank,
            file=writer.file,
            sequences=len(made.heads),
            selected=len(made.heads),
            records=len(made.heads),
            complete=True,
            tokens=len(made.token_F),
            trained_tokens=int(made.trained_F.sum()),
            end=writer.end,
        )

    def _step(self, iteration: int, parts: list[RankPart]) -> ExportedStep:
        records = sum(part.records for part in parts)
        return ExportedStep(
            run_id="run-1",
            attempt=1,
            split="train",
            iteration=iteration,
            batch=iteration + 1,
            format=self.kind,
            loss={"name": "ppo", "clip_low": CLIP, "clip_high": CLIP},
            applied=[True],
            columns=[],
            fraction=1.0,
            sequences=records,
            selected=records,
            records=records,
            tokens=sum(part.tokens for part in parts),
            trained_tokens=sum(part.trained_tokens for part in parts),
            complete=True,
            ranks=parts,
        )

    def made(self, iteration: int, rank: int) -> TokenRecords:
        """Two turns a row: the second begins after a tool's answer of two tokens."""
        chance = np.random.default_rng([self.seed, iteration, rank])
        size, length = self.records * self.tokens, self.tokens
        token_F = chance.integers(0, len(PIECES), size).astype(np.int32)
        token_F[(token_F == HALF) | (token_F == OTHER_HALF)] = 0
        for row in range(self.records):
            token_F[row * length + PROMPT : row * length + PROMPT + 2] = HALF, OTHER_HALF
        place_F = np.arange(size) % length
        middle = (PROMPT + length) // 2
        trained_F = (place_F >= PROMPT) & ((place_F < middle) | (place_F >= middle + 2))
        spread = 0.6 if rank == self.loud else 0.1
        mu_F = np.where(trained_F, -chance.exponential(0.8, size), np.nan).astype(np.float32)
        pi_F = (mu_F + chance.normal(0, spread, size)).astype(np.float32)
        advantage_F = np.repeat(chance.choice([-0.5, 0.5], self.records), length)
        advantage_F = np.where(trained_F, advantage_F, np.nan).astype(np.float32)
        ratio_F = np.exp(pi_F - mu_F).astype(np.float32)
        high_F = (advantage_F > 0) & (ratio_F > 1 + CLIP)
        low_F = (advantage_F < 0) & (ratio_F < 1 - CLIP)
        if (iteration, rank) == NAN_AT[:2]:
            pi_F[(NAN_AT[2] + 1) * length - 1] = np.inf
        texts, offsets = zip(
            *(text_of(token_F[at : at + length]) for at in range(0, size, length)), strict=True
        )
        return TokenRecords(
            heads=[self._head(iteration, rank, row, middle) for row in range(self.records)],
            texts=list(texts),
            bound_R=np.arange(self.records + 1) * length,
            text_offset_F=np.concatenate(offsets),
            token_F=token_F,
            trained_F=trained_F,
            floats_F={
                "rewards": np.where(trained_F, advantage_F > 0, np.nan).astype(np.float32),
                "advantages": advantage_F,
                "inference_logprobs": mu_F,
                "trainer_logprobs": pi_F,
                "entropy": np.where(trained_F, chance.exponential(0.8, size), np.nan).astype(np.float32),
                "importance_ratio": ratio_F,
            },
            masks_F={"is_masked": high_F | low_F, "is_masked_high": high_F, "is_masked_low": low_F},
        )

    def _head(self, iteration: int, rank: int, row: int, middle: int) -> dict[str, Any]:
        def turn(step_idx: int, start: int, end: int) -> dict[str, Any]:
            return {
                "step_idx": step_idx, "start": start, "end": end,
                "policy_version": iteration - step_idx, "temperature": 0.5,
            }  # fmt: skip

        return {
            "schema_version": 1, "run_id": "run-1", "attempt": 1, "split": "train", "iteration": iteration,
            "step": iteration, "optim_step": 0, "rank": rank, "micro_step": 0, "micro_sequence_idx": row,
            "export_sequence_idx": row, "group_idx": rank, "traj_idx": row, "part": 0,
            "task_id": f"task-{rank}", "env_name": "sums" if rank == 0 else "words",
            "policy_version": iteration,
            "turns": [turn(0, PROMPT, middle), turn(1, middle + 2, self.tokens)],
        }  # fmt: skip


def text_of(token_T: np.ndarray[Any, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    pieces = [PIECES[token] for token in token_T]
    offset_T = np.cumsum([0, *map(len, pieces[:-1])]).astype(np.int32)
    return b"".join(pieces).decode(), offset_T
