"""Supervised fine-tuning: the story of a run, from its settings to its last checkpoint.

Any kill leaves a directory from which the same command with `--resume` goes on, to the same weights and the
same log as a run that was never killed. SIGTERM saves, and then ends.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.errors import RollbookError, UsageError
from rollbook.runs.jobs.finish import HANDED_OVER
from rollbook.train import selftests
from rollbook.train.chat import ChatTokenizer, has_template
from rollbook.train.checkpointing import (
    load_training_state,
    newest_checkpoint,
    remove_unfinished,
    rotate,
    save_checkpoint,
)
from rollbook.train.engine import Engine, StepResult
from rollbook.train.feed import Feed, make_corpus, told
from rollbook.train.model import DTYPES, TrainedModel, load_model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.schedule import learning_rate, warmup_steps
from rollbook.train.settings import DatasetSettings, SftSettings
from rollbook.train.token_store import Corpus
from rollbook.train.trainer_files import NoFiles, TrainerFiles, new_state
from rollbook.train.window import Window

Say = Callable[[str], None]


class Stopped(RollbookError):
    """SIGTERM: everything is saved, and `--resume` goes on."""

    exit_code = 130


def train(settings: SftSettings, artifacts: Path, *, resume: bool, say: Say) -> dict[str, Any]:
    """Returns the summary that is in train_results.json."""
    processes = Processes()
    if not processes.is_first:
        say = _silence
    directory = settings.output_dir(artifacts)
    directory.mkdir(parents=True, exist_ok=True)
    remove_unfinished(directory) if processes.is_first else None
    checkpoint = newest_checkpoint(directory) if resume else None
    try:
        run = Run(settings, artifacts, directory, processes, checkpoint.path if checkpoint else None, say)
        return run.to_the_end()
    finally:
        processes.close()


class Run:
    def __init__(
        self,
        settings: SftSettings,
        artifacts: Path,
        directory: Path,
        processes: Processes,
        checkpoint: Path | None,
        say: Say,
    ) -> None:
        self.settings, self.directory, self.processes, self.say = settings, directory, processes, say
        training = settings.training
        _seed(training.seed + processes.rank)
        self.model = self._load(checkpoint)
        self.chat = ChatTokenizer(self.model.tokenizer, train_on=settings.data.train_on)
        self.corpus = self._corpus(settings.data.train, artifacts)
        self.eval_corpus = self._corpus(settings.data.eval, artifacts) if settings.data.eval else None
        self._prove()
        self.processes.shard(self.model.model, self.model.blocks, DTYPES[settings.model.dtype])
        optimizer = Optimizer(self.model.parameters(), training)
        if self._compiles:
            # Checkpointing runs blocks again in the backward pass, which a recording does not foresee.
            plain = not processes.are_several and not settings.model.gradient_checkpointing
            self.model.compile_blocks(replayed=plain and optimizer.takes_over_gradients)
        self.engine = Engine(self.model, optimizer, processes, max_grad_norm=training.max_grad_norm)
        self.feed = Feed(settings, self.model, self.corpus, processes, full_width=self._compiles)
        self.total_steps = training.max_steps or max(
            1, math.ceil(training.num_train_epochs * self.feed.steps_in_epoch)
        )
        self.state = new_state(self.total_steps, epochs=self._epoch_at(self.total_steps), settings=training)
        if checkpoint is not None:
            self._resume(checkpoint, optimizer)
        self._stop = False

    @property
    def _compiles(self) -> bool:
        wish = self.settings.model.compile
        return wish == "on" or (wish == "auto" and self.processes.device.type == "cuda")

    def to_the_end(self) -> dict[str, Any]:
        """Every step that is left, then the summary."""
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            with self._files() as files:
                self._describe()
                began = time.monotonic()
                window = Window()
                for step in range(int(self.state["global_step"]) + 1, self.total_steps + 1):
                    self._one_step(step, files, window)
                    if self._stop or self.processes.any(self._stop):
                        self._save(step)
                        raise Stopped(
                            f"stopped after step {step}; it is saved: type the command with --resume"
                        )
                return self._summary(files, time.monotonic() - began)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _files(self) -> TrainerFiles | NoFiles:
        return TrainerFiles(self.directory, self.state) if self.processes.is_first else NoFiles()

    def _one_step(self, step: int, files: TrainerFiles | NoFiles, window: Window) -> None:
        training = self.settings.training
        rate = learning_rate(
            step,
            peak=training.learning_rate,
            total=self.total_steps,
            warmup=warmup_steps(training, self.total_steps),
            kind=training.lr_scheduler_type,
        )
        result = self.engine.step(list(self.feed.batches(step)), rate)
        self._account(step, result, window)
        if not result.applied:
            text = f"step {step}: loss {result.loss}, grad_norm {result.grad_norm}; the step was skipped"
            self.say(f"NOT FINITE: {text}")
            files.alert("gradients are not finite", text, step)
        if step % training.logging_steps == 0 or step == self.total_steps or not result.applied:
            files.train_point(
                step, window.values(rate, self._epoch_at(step)), self.state["num_input_tokens_seen"]
            )
            self.say(f"step {step}/{self.total_steps}: {window.line(rate)}")
            window.clear()
        is_last = step == self.total_steps
        if self.eval_corpus is not None and (
            is_last or (training.eval_steps and step % training.eval_steps == 0)
        ):
            self._evaluate(step, files)
        if step % training.save_steps == 0 or is_last:
            self._save(step)

    def _account(self, step: int, result: StepResult, window: Window) -> None:
        window.add(result)
        self.state["global_step"] = step
        self.state["epoch"] = self._epoch_at(step)
        self.state["num_input_tokens_seen"] += result.real_tokens
        # Two operations a weight and token forwards, four backwards.
        self.state["total_flos"] += 6.0 * self.model.count()[0] * result.real_tokens
        if result.applied:
            self.state["loss_sum"] += result.loss
        else:
            self.state["nonfinite_steps"] += 1

    def _evaluate(self, step: int, files: TrainerFiles | NoFiles) -> None:
        began = time.monotonic()
        assert self.eval_corpus is not None
        loss = self.engine.evaluate(self.feed.eval_batches(self.eval_corpus))
        seconds = time.monotonic() - began
        values = {
            "epoch": self._epoch_at(step),
            "eval_loss": loss,
            "eval_runtime": seconds,
            "eval_samples_per_second": len(self.eval_corpus) / seconds,
        }
        best = self.state["best_metric"]
        if math.isfinite(loss) and (best is None or loss < best):
            self.state["best_metric"], self.state["best_global_step"] = loss, step
        files.eval_point(step, values, self.state["num_input_tokens_seen"])
        self.say(f"step {step}: eval_loss {loss:.4f}")

    def _save(self, step: int) -> None:
        if self.state["best_global_step"] == step:
            self.state["best_model_checkpoint"] = str(self.directory / f"checkpoint-{step}")
        path = save_checkpoint(self.directory, self.model, self.engine.optimizer, self.processes, self.state)
        self.say(f"saved {path}")
        if self.processes.is_first:
            protected = [self.state["best_model_checkpoint"], *_handed_over(self.directory)]
            rotate(self.directory, self.settings.training.save_total_limit, [Path(p) for p in protected if p])

    def _resume(self, checkpoint: Path, optimizer: Optimizer) -> None:
        import orjson

        stored = orjson.loads((checkpoint / "trainer_state.json").read_bytes())
        if stored["max_steps"] != self.total_steps:
            raise UsageError(
                f"{checkpoint} is of a run of {stored['max_steps']} steps, this one of {self.total_steps}: "
                "the data or the settings changed; restore them, or start over with --overwrite"
            )
        self.state.update(stored)
        load_training_state(checkpoint, optimizer, self.model, self.processes)
        self.say(f"resuming from {checkpoint}")

    def _load(self, checkpoint: Path | None) -> TrainedModel:
        model = self.settings.model
        # Sharded weights stay in float32 and are computed with in `dtype`; one process keeps copies instead.
        dtype = torch.float32 if self.processes.are_several else DTYPES[model.dtype]
        seed = self.settings.training.seed
        loaded = load_model(model, seed=seed, dtype=dtype, checkpoint=checkpoint)
        loaded.model.to(self.processes.device)
        return loaded

    def _corpus(self, datasets: list[DatasetSettings], artifacts: Path) -> Corpus:
        cache = artifacts / "data" / "tokens"
        corpus = make_corpus(datasets, self.settings, self.chat, cache, self.processes)
        for dataset, store in zip(datasets, corpus.stores, strict=True):
            self.say(f"{dataset.path}: {told(store.report)}")
        return corpus

    def _prove(self) -> None:
        data, device = self.settings.data, self.processes.device
        samples = [self.corpus[number] for number in range(min(64, len(self.corpus)))]
        if has_template(self.model.tokenizer):
            selftests.stop_token_is_trained(self.chat, samples)
        probes = selftests.probes(samples)
        self.model.use_packing(data.packing != "off")
        if self.model.packs:
            problem = selftests.packing_keeps_apart(self.model, probes, device)
            if problem is not None and data.packing == "on":
                raise selftests.SelfTestError(f"{problem}; set data.packing: off")
            if problem is not None:
                self.say(f"packing is off: {problem}")
                self.model.use_packing(False)
        if not selftests.head_matches(self.model, probes, device):
            self.say("the head is run whole: this model does more than a product with it")
            self.model.chunks_head = False

    def _epoch_at(self, step: int) -> float:
        return step / self.feed.steps_in_epoch

    def _describe(self) -> None:
        everything, trained = self.model.count()
        tokens = int(self.corpus.lengths.sum())
        room = self.feed.rows_in_epoch * self.settings.data.max_length
        packed = f", packed to {tokens / room:.1%}" if self.model.packs else ""
        self.say(f"{everything:,} parameters, {trained:,} trained")
        self.say(f"{len(self.corpus)} samples, {tokens:,} tokens{packed}")
        self.say(f"{self.total_steps} steps of {self.feed.rows_a_step} rows")

    def _summary(self, files: TrainerFiles | NoFiles, seconds: float) -> dict[str, Any]:
        elapsed = files.elapsed_s
        steps = max(1, self.total_steps - int(self.state["nonfinite_steps"]))
        results = {
            "epoch": self._epoch_at(self.total_steps),
            "num_input_tokens_seen": self.state["num_input_tokens_seen"],
            "total_flos": self.state["total_flos"],
            "train_loss": self.state["loss_sum"] / steps,
            "train_runtime": elapsed,
            "train_samples_per_second": len(self.corpus) * self._epoch_at(self.total_steps) / elapsed,
            "train_steps_per_second": self.total_steps / elapsed,
            "train_tokens_per_second": self.state["num_input_tokens_seen"] / elapsed,
        }
        files.finish(results)
        return results

    def _hear(self, number: int, _: object) -> None:
        self.say("SIGTERM: saving after this step")
        self._stop = True


def _handed_over(directory: Path) -> list[Path]:
    """Checkpoints that somebody was told to use."""
    marker = directory / HANDED_OVER
    return [Path(line) for line in marker.read_text().splitlines()] if marker.exists() else []


def _seed(seed: int) -> None:
    """All generators, ours and those that a model's code may ask."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _silence(_: str) -> None:
    return None
