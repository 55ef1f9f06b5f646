"""Opens everything a fine-tuning needs before its first step, in the order in which it can be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.runs.random_state import seed_generators
from rollbook.sft.epochs import Batches, Epochs
from rollbook.sft.settings import SftSettings
from rollbook.sft.token_store import Corpus, open_corpus
from rollbook.train import checks
from rollbook.train.batch import Example, Shape
from rollbook.train.checks import SelfTestError
from rollbook.train.engine import Engine
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.machine import choose_threads
from rollbook.train.model import Model
from rollbook.train.model_files import read_template
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.spread import load_once, spread

Log = Callable[[str], None]


class Job(NamedTuple):
    """A model, its data, and how it is trained."""

    settings: SftSettings
    directory: Path
    processes: Processes
    model: Model
    corpus: Corpus
    eval_corpus: Corpus | None
    epochs: Epochs
    total_steps: int
    log: Log

    @property
    def compiles(self) -> bool:
        wish = self.settings.model.compile
        return wish == "on" or (wish == "auto" and self.processes.device.type == "cuda")

    def batches(self, corpus: Corpus, *, full_width: bool = False) -> Batches:
        """`full_width` fills every packed batch up to one size, for compiled kernels."""
        longest = self.settings.data.max_length
        shape = Shape(longest * self.settings.training.per_device_train_batch_size, longest)
        return Batches(corpus, self.model, self.processes, shape if full_width else None)


def open_job(
    settings: SftSettings, artifacts: Path, processes: Processes, checkpoint: Path | None, log: Log
) -> Job:
    """Load the model (of the checkpoint, where the run is resumed), tokenise the data, check both."""
    training, data, cache = settings.training, settings.data, artifacts / "data" / "tokens"
    seed_generators(training.seed + processes.rank)
    # Sharded weights stay in float32 and are computed with in `dtype`; one process keeps copies instead.
    computed = DTYPES[settings.model.dtype]
    dtype = torch.float32 if processes.are_several else computed
    model = load_once(
        processes, lambda: load_model(settings.model, seed=training.seed, dtype=dtype, checkpoint=checkpoint)
    )
    torch.set_num_threads(choose_threads(model.count()[0], processes.device))
    with processes.together():
        chat = ChatFormat(
            model.tokenizer,
            chat_template=_chat_template(settings),
            train_on=data.train_on,
            may_drop=data.may_drop,
        )
        corpus = open_corpus(data.train, data, chat, cache, log)
        eval_corpus = open_corpus(data.eval, data, chat, cache, log) if data.eval else None
        _check_lengths(corpus, model)
        _check_stop_tokens(corpus, chat, model, settings, log)
    probes = checks.probes([corpus[0], corpus[len(corpus) - 1]])
    spread(model, processes, probes, sharded=computed, packing=data.packing, log=log)
    if settings.model.gradient_checkpointing:
        model.recompute_blocks()
    epochs = Epochs(settings, corpus, packed=model.packs)
    total_steps = training.max_steps or epochs.steps_for(training.num_train_epochs)
    directory = settings.output_dir(artifacts)
    return Job(settings, directory, processes, model, corpus, eval_corpus, epochs, total_steps, log)


def open_engine(job: Job) -> Engine:
    """Put the optimiser on the model."""
    settings, processes, model = job.settings, job.processes, job.model
    optimizer = Optimizer(model.parameters(), settings.training.optimizer)
    if job.compiles:
        # Checkpointing runs blocks again in the backward pass, which a recording does not foresee.
        plain = not processes.are_several and not settings.model.gradient_checkpointing
        model.compile_blocks(cuda_graphs=plain and optimizer.frees_model_gradients)
    return Engine(model, optimizer, processes, dropout=True, entropy=False)


def _chat_template(settings: SftSettings) -> str | None:
    path = settings.model.chat_template
    return None if path is None else read_template(Path(path))


def _check_lengths(corpus: Corpus, model: Model) -> None:
    longest, most = int(corpus.lengths.max()), model.positions
    if most is not None and longest > most:
        raise UsageError(
            f"the model has {most} positions and the longest sample {longest} tokens; lower "
            "data.max_length, or raise max_position_embeddings in the model's config"
        )


def _check_stop_tokens(
    corpus: Corpus, chat: ChatFormat, model: Model, settings: SftSettings, log: Log
) -> None:
    if not chat.has_template:
        return
    some = np.linspace(0, len(corpus) - 1, 64).astype(int)  # of every dataset
    samples = [corpus[number] for number in sorted(set(some.tolist()))]
    if settings.data.too_long == "truncate":  # one that was cut off has no end to look at
        samples = [sample for sample in samples if len(sample) < settings.data.max_length]
    if not samples:
        log("every sample is cut off, so the model does not learn to stop: raise data.max_length")
    added = model.add_eos_tokens(stop_token_is_trained(chat, samples))
    if added:
        shown = ", ".join(repr(chat.tokenizer.decode([number])) for number in added)
        log(f"replies end in {shown}: added to the eos_token_id of generation_config.json")


def stop_token_is_trained(chat: ChatFormat, samples: Sequence[Example]) -> set[int]:
    """The last learned token of a reply must be one that ends it. Returns those there are."""
    found = set()
    for sample in samples:
        places = sample.trained_T.nonzero()[0]
        if not len(places):
            raise SelfTestError("a sample has no token to learn; look at it with --dry-run")
        last = int(sample.token_T[places[-1]])
        if last not in chat.stop_ids:
            shown = chat.tokenizer.decode([last])
            raise SelfTestError(
                f"replies end in {shown!r}, which is no stop token, so the model would not learn to stop. "
                "Set model.chat_template to a template that ends each reply with one"
            )
        found.add(last)
    return found
