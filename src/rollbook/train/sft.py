"""Supervised fine-tuning: the story of a run, from its settings to its last checkpoint.

Any kill leaves a directory from which the same command with `--resume` goes on, to the same weights and the
same log as a run that was never killed. SIGTERM and Ctrl-C save, and then end; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.errors import RollbookError, UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.records.atomic import make_directory
from rollbook.records.locks import FileLock
from rollbook.runs.jobs.finish import HANDED_OVER
from rollbook.train import checks
from rollbook.train.checkpointing import (
    newest_checkpoint,
    remove_leftovers,
    rotate,
    save_checkpoint,
)
from rollbook.train.continuity import made_from, state_to_go_on_from
from rollbook.train.engine import Engine, StepOutput
from rollbook.train.feed import Feed, make_corpus, told
from rollbook.train.launch import SETTINGS
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.losses import CrossEntropy
from rollbook.train.model import Model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.schedule import learning_rate
from rollbook.train.settings import DatasetSettings, SftSettings
from rollbook.train.state import load_training_state
from rollbook.train.token_store import Corpus
from rollbook.train.trainer_files import NoFiles, TrainerFiles, new_state, own_state
from rollbook.train.window import Window

Say = Callable[[str], None]
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(RollbookError):
    """By a signal: everything is saved, and `--resume` goes on."""

    exit_code = 130


def train(settings: SftSettings, artifacts: Path, *, resume: bool, say: Say) -> dict[str, Any]:
    """Returns the summary that is in train_results.json."""
    processes = Processes()
    if not processes.is_first:
        say = _silence
    directory = settings.output_dir(artifacts)
    make_directory(directory)
    try:
        # Before anything there is touched: a second trainer must not cut the log of the first.
        with FileLock(directory / SETTINGS) if processes.is_first else nullcontext():
            if processes.is_first:
                remove_leftovers(directory)
            processes.wait_for_all()
            checkpoint = newest_checkpoint(directory) if resume else None
            path = checkpoint.path if checkpoint else None
            return Run(settings, artifacts, directory, processes, path, say).to_the_end()
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
        self.chat = ChatFormat(
            self.model.tokenizer, train_on=settings.data.train_on, may_drop=settings.data.may_drop
        )
        self.corpus = self._corpus(settings.data.train, artifacts)
        self.eval_corpus = self._corpus(settings.data.eval, artifacts) if settings.data.eval else None
        self._prove()
        self.processes.shard(self.model.model, self.model.blocks, DTYPES[settings.model.dtype])
        optimizer = Optimizer(self.model.parameters(), training.optimizer)
        if self._compiles:
            # Checkpointing runs blocks again in the backward pass, which a recording does not foresee.
            plain = not processes.are_several and not settings.model.gradient_checkpointing
            self.model.compile_blocks(cuda_graphs=plain and optimizer.frees_model_gradients)
        self.engine = Engine(self.model, optimizer, processes, dropout=True, entropy=False)
        self.feed = Feed(settings, self.model, self.corpus, processes, full_width=self._compiles)
        self.total_steps = training.max_steps or self.feed.steps_in(training.num_train_epochs)
        epochs = self.feed.epoch_at(self.total_steps)
        self.state = new_state(self.total_steps, epochs=epochs, settings=training)
        self._begin_or_resume(checkpoint, optimizer)
        self._stop = False

    @property
    def _compiles(self) -> bool:
        wish = self.settings.model.compile
        return wish == "on" or (wish == "auto" and self.processes.device.type == "cuda")

    def to_the_end(self) -> dict[str, Any]:
        """Every step that is left, then the summary."""
        heard = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            with self._files() as files:
                self._describe()
                window = Window(own_state(self.state)["window"])
                for step in range(int(self.state["global_step"]) + 1, self.total_steps + 1):
                    self._one_step(step, files, window)
                return self._summary(files)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _files(self) -> TrainerFiles | NoFiles:
        return TrainerFiles(self.directory, self.state) if self.processes.is_first else NoFiles()

    def _one_step(self, step: int, files: TrainerFiles | NoFiles, window: Window) -> None:
        training = self.settings.training
        rate = learning_rate(
            step,
            peak=training.learning_rate,
            total=self.total_steps,
            warmup=training.warmup(self.total_steps),
            kind=training.lr_scheduler_type,
        )
        result = self.engine.step(list(self.feed.batches(step)), CrossEntropy(), rate)
        self._account(step, result, window)
        is_last = step == self.total_steps
        if not result.applied:
            text = f"step {step}: loss {result.loss}, grad_norm {result.grad_norm}; the step was skipped"
            self.say(f"NOT FINITE: {text}")
            files.alert("gradients are not finite", text, step)
        if step % training.logging_steps == 0 or is_last or not result.applied:
            self._log(step, rate, files, window)
        if self.eval_corpus is not None and (
            is_last or (training.eval_steps and step % training.eval_steps == 0)
        ):
            self._evaluate(step, files)
        is_stopping = self.processes.any(self._stop)  # asked of all: they must decide the same
        if step % training.save_steps == 0 or is_last or is_stopping:
            self._save(step, files)
        if is_stopping and not is_last:
            raise Stopped(f"stopped after step {step}; it is saved: type the command with --resume")

    def _log(self, step: int, rate: float, files: TrainerFiles | NoFiles, window: Window) -> None:
        values, speed = window.values(rate, self.feed.epoch_at(step)), window.tokens_per_second
        window.clear()
        files.train_point(step, values, self.state["num_input_tokens_seen"])
        loss, norm = values["loss"], values["grad_norm"]
        where = f"step {step}/{self.total_steps}"
        self.say(f"{where}: loss {loss:.4f}, grad_norm {norm:.3g}, lr {rate:.3g}, {speed:,.0f} tok/s")

    def _account(self, step: int, result: StepOutput, window: Window) -> None:
        window.add(result)
        own = own_state(self.state)
        self.state["global_step"] = step
        self.state["epoch"] = self.feed.epoch_at(step)
        self.state["num_input_tokens_seen"] += result.real_tokens
        # Two operations a weight and token forwards, four backwards.
        self.state["total_flos"] += 6.0 * self.model.count()[0] * result.real_tokens
        if result.applied:
            own["loss_sum"] += result.loss
        else:
            own["nonfinite_steps"] += 1

    def _evaluate(self, step: int, files: TrainerFiles | NoFiles) -> None:
        began = time.monotonic()
        assert self.eval_corpus is not None
        loss = self.engine.evaluate(self.feed.eval_batches(self.eval_corpus))
        seconds = time.monotonic() - began
        batches = math.ceil(len(self.eval_corpus) / self.feed.rows_together)
        values = {
            "epoch": self.feed.epoch_at(step),
            "eval_loss": loss,
            "eval_runtime": seconds,
            "eval_samples_per_second": len(self.eval_corpus) / seconds,
            "eval_steps_per_second": batches / seconds,
        }
        best = self.state["best_metric"]
        if math.isfinite(loss) and (best is None or loss < best):
            self.state["best_metric"], self.state["best_global_step"] = loss, step
        files.eval_point(step, values, self.state["num_input_tokens_seen"])
        self.say(f"step {step}: eval_loss {loss:.4f}")

    def _save(self, step: int, files: TrainerFiles | NoFiles) -> None:
        files.before_checkpoint()
        if self.state["best_global_step"] == step:
            self.state["best_model_checkpoint"] = str(self.directory / f"checkpoint-{step}")
        path = save_checkpoint(self.directory, self.model, self.engine.optimizer, self.processes, self.state)
        self.say(f"saved {path}")
        if self.processes.is_first:
            protected = [self.state["best_model_checkpoint"], *_handed_over(self.directory)]
            rotate(self.directory, self.settings.training.save_total_limit, [Path(p) for p in protected if p])

    def _begin_or_resume(self, checkpoint: Path | None, optimizer: Optimizer) -> None:
        origin = made_from(
            self.settings, self.corpus, rows_a_step=self.feed.rows_a_step, packed=self.model.packs
        )
        if checkpoint is not None:
            stored, changes = state_to_go_on_from(checkpoint, origin, self.total_steps)
            load_training_state(checkpoint, self.model, optimizer)
            self.say(f"resuming from {checkpoint}")
            for change in changes:
                self.say(f"changed since then: {change}")
            as_set = ("max_steps", "num_train_epochs", "eval_steps", "logging_steps", "save_steps")
            self.state |= {key: value for key, value in stored.items() if key not in as_set}
        own_state(self.state)["made_from"] = origin

    def _load(self, checkpoint: Path | None) -> Model:
        model = self.settings.model
        # Sharded weights stay in float32 and are computed with in `dtype`; one process keeps copies instead.
        dtype = torch.float32 if self.processes.are_several else DTYPES[model.dtype]
        seed = self.settings.training.seed
        loaded = load_model(model, seed=seed, dtype=dtype, checkpoint=checkpoint)
        loaded.model.to(self.processes.device)
        return loaded

    def _corpus(self, datasets: list[DatasetSettings], artifacts: Path) -> Corpus:
        cache = artifacts / "data" / "tokens"
        corpus = make_corpus(datasets, self.settings, self.chat, cache, self.processes, self.say)
        for dataset, store in zip(datasets, corpus.stores, strict=True):
            self.say(f"{dataset.path}: {told(store.report)}")
        return corpus

    def _prove(self) -> None:
        data, device = self.settings.data, self.processes.device
        longest, most = int(self.corpus.lengths.max()), self.model.positions
        if most is not None and longest > most:
            raise UsageError(
                f"the model has {most} positions and the longest sample {longest} tokens; lower "
                "data.max_length, or raise max_position_embeddings in the model's config"
            )
        self._prove_that_it_stops()
        probes = checks.probes([self.corpus[0], self.corpus[len(self.corpus) - 1]])
        self.model.use_packing(data.packing != "off")
        if self.model.packs:
            try:
                problem = checks.packing_keeps_apart(self.model, probes, device)
            except torch.OutOfMemoryError:
                self.say("that packing keeps sequences apart is proven roughly: no memory for float32")
                problem = None
            if problem is not None and data.packing == "on":
                raise checks.SelfTestError(f"{problem}; set data.packing: off")
            if problem is not None:
                self.say(f"packing is off: {problem}")
                self.model.use_packing(False)
        if not checks.head_matches(self.model, probes, device):
            self.say("the head is run whole: this model does more than a product with it")
            self.model.chunks_head = False

    def _prove_that_it_stops(self) -> None:
        if not self.chat.has_template:
            return
        some = np.linspace(0, len(self.corpus) - 1, 64).astype(int)  # of every dataset
        whole = [self.corpus[number] for number in sorted(set(some.tolist()))]
        data = self.settings.data
        if data.too_long == "truncate":  # one that was cut off has no end to look at
            whole = [sample for sample in whole if len(sample.token_T) < data.max_length]
        if not whole:
            self.say("every sample is cut off, so the model does not learn to stop: raise data.max_length")
        added = self.model.add_eos_tokens(checks.stop_token_is_trained(self.chat, whole))
        if added:
            shown = ", ".join(repr(self.chat.tokenizer.decode([number])) for number in added)
            self.say(f"replies end in {shown}: added to the eos_token_id of generation_config.json")

    def _describe(self) -> None:
        everything, trained = self.model.count()
        tokens = int(self.corpus.lengths.sum())
        room = self.feed.rows_in_epoch * self.settings.data.max_length
        packed = f", packed to {tokens / room:.1%}" if self.model.packs else ""
        self.say(f"{everything:,} parameters, {trained:,} trained")
        self.say(f"{len(self.corpus)} samples, {tokens:,} tokens{packed}")
        self.say(f"{self.total_steps} steps of {self.feed.rows_a_step} rows")

    def _summary(self, files: TrainerFiles | NoFiles) -> dict[str, Any]:
        elapsed, own = files.elapsed_s, own_state(self.state)
        steps = max(1, self.total_steps - int(own["nonfinite_steps"]))
        epochs = self.feed.epoch_at(self.total_steps)
        results = {
            "epoch": epochs,
            "num_input_tokens_seen": self.state["num_input_tokens_seen"],
            "total_flos": self.state["total_flos"],
            "train_loss": own["loss_sum"] / steps,
            "train_runtime": elapsed,
            "train_samples_per_second": self.feed.samples_in_epoch * epochs / elapsed,
            "train_steps_per_second": self.total_steps / elapsed,
            "train_tokens_per_second": self.state["num_input_tokens_seen"] / elapsed,
        }
        files.finish(results)
        return results

    def _hear(self, number: int, _: object) -> None:
        if self._stop and number == signal.SIGINT:  # a second Ctrl-C means it
            raise KeyboardInterrupt
        self._stop = True
        if self.processes.is_first:  # not by `say`: the signal may have come while that was printing
            os.write(2, f"{signal.Signals(number).name}: saving after this step\n".encode())


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
