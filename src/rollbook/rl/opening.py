"""Opens what a run needs, in the right order: settings, weights, trainer, tasks, sampler, record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from rollbook.policies.chat_format import ChatFormat
from rollbook.records.alerts import Level
from rollbook.records.iterations import read_iterations
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.token_files import RunIdentity, export_files
from rollbook.rl.console import Console
from rollbook.rl.limits import Limits
from rollbook.rl.player import Player, enough_for, open_player
from rollbook.rl.room import decide_room, refuse_too_many_slots
from rollbook.rl.schedule import Schedule
from rollbook.rl.settings import RlSettings
from rollbook.rl.sources import Sources, changes_since, inputs_of, sources_of
from rollbook.rl.start import Start
from rollbook.rl.tasks import Pools, TaskPool
from rollbook.rl.watch import Watch
from rollbook.runs.divergence import StepsLeftOut
from rollbook.runs.random_state import seed_generators
from rollbook.runs.reader import open_run
from rollbook.runs.run import Run
from rollbook.runs.stop_signals import StopSignals
from rollbook.samplers.local import LocalPolicy
from rollbook.samplers.sampling import Sampling
from rollbook.samplers.selftest import longest_sequence
from rollbook.train.checks import random_probes
from rollbook.train.engine import Engine
from rollbook.train.export import NoTokenExport, open_export
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.losses import place_of_own
from rollbook.train.machine import choose_micro_batch_tokens, choose_threads, describe_machine
from rollbook.train.memory import refuse_too_large
from rollbook.train.model import Model
from rollbook.train.model_files import model_input
from rollbook.train.model_settings import OptimizerSettings
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.spread import load_once, spread
from rollbook.train.state import frozen_digest, load_training_state

Log = Callable[[str], None]


class Trainer(NamedTuple):
    """The model, and how it is trained."""

    model: Model
    optimizer: Optimizer
    engine: Engine
    processes: Processes
    micro_batch_tokens: int
    frozen_digest: str | None  # of the weights that are not trained, where there are any
    machine: str


class Job(NamedTuple):
    """What the iterations of a run share."""

    settings: RlSettings
    run: Run
    trainer: Trainer
    policy: LocalPolicy
    player: Player
    pools: list[TaskPool]
    held_out: dict[str, TaskPool]
    schedule: Schedule
    watch: Watch
    console: Console
    stalls: JsonlWriter
    sources: Sources
    export: NoTokenExport
    stop: StopSignals
    left_out: StepsLeftOut
    history: dict[str, dict[int, float]]  # by metric and iteration: the rewards so far
    sample_seconds: list[float]
    late_times: dict[str, float]  # of what came after the last line of metrics; the next one has them

    def note(self, i: int, values: Mapping[str, float]) -> None:
        """Remember the rewards of an iteration."""
        for key, value in values.items():
            if key.endswith("env/all/reward/total"):
                self.history[key][i] = value

    def look_back(self) -> None:
        """Take up what the iterations so far say, where the run continues."""
        for record in read_iterations(self.run.files.iterations):
            for step in record.steps or ():
                self.left_out.note(not step.applied and bool(step.trained_tokens))
        for row in open_run(self.run.files.root).metrics.by_step():
            self.note(int(row["step"]), row)
            self.watch.look(row)


def decide(settings: RlSettings, model: Model, device: torch.device) -> RlSettings:
    """How the machine trains, where the settings leave it open; how it samples is decided with the tasks."""
    return msgspec.structs.replace(
        settings,
        threads=settings.threads or choose_threads(model.count()[0], device),
        micro_batch_tokens=settings.micro_batch_tokens or choose_micro_batch_tokens(device),
    )


def open_trainer(start: Start, processes: Processes, log: Log) -> tuple[RlSettings, Trainer]:
    """Load the weights (of the checkpoint, where the run continues) and everything that changes them."""
    settings = start.settings
    with processes.together():
        refuse_too_large(settings.model, processes.device, processes.count)
    seed_generators(settings.seed)
    dtype = DTYPES[settings.model.dtype]
    model = load_once(
        processes,
        lambda: load_model(settings.model, seed=settings.seed, dtype=dtype, checkpoint=start.checkpoint),
    )
    settings = decide(settings, model, processes.device)
    torch.set_num_threads(settings.threads or 1)
    spread(model, processes, random_probes(len(model.tokenizer), model.positions), log=log)
    if settings.model.gradient_checkpointing:
        model.recompute_blocks()
    optimizer = Optimizer(model.parameters(), optimizer_settings(settings))
    engine = Engine(model, optimizer, processes, entropy=True)
    if start.checkpoint is not None:
        load_training_state(start.checkpoint, model, optimizer, processes)
    return settings, Trainer(
        model=model,
        optimizer=optimizer,
        engine=engine,
        processes=processes,
        micro_batch_tokens=settings.micro_batch_tokens or 1,
        frozen_digest=frozen_digest(model) if processes.is_first else None,
        machine=describe_machine(processes.device),
    )


def optimizer_settings(settings: RlSettings) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


@contextmanager
def open_job(
    start: Start, settings: RlSettings, trainer: Trainer, tasks: Pools, log: Log, stop: StopSignals
) -> Iterator[Job]:
    """The sampler first, which may refuse the settings; the record last, which changes files."""
    with ExitStack() as opened:
        pools = tasks.training
        sources = sources_of(pools, trainer.frozen_digest)
        changed = changes_since(start.checkpoint, sources) if start.checkpoint else []
        sampler = opened.enter_context(open_sampler(settings, trainer, tasks, log))
        settings, policy, player = sampler
        run = opened.enter_context(
            Run(
                settings.log_path,
                config=msgspec.to_builtins(settings),
                kind="rl",
                layout=settings.layout,
                total_iterations=settings.iterations,
                num_groups_to_log=settings.num_groups_to_log,
                resume=start.resume,
                trackers=settings.trackers,
            )
        )
        run.note_inputs(inputs_of(pools, tasks.held_out.values()))
        if start.checkpoint is None and (source := model_input(settings.model)) is not None:
            run.note_inputs([source])
        policy.update(run.next_iteration)
        console = Console(log, total=settings.iterations, samples_every=settings.samples_every)
        opened.callback(console.clear)
        job = Job(
            settings=settings,
            run=run,
            trainer=trainer,
            policy=policy,
            player=player,
            pools=pools,
            held_out=tasks.held_out,
            schedule=Schedule(
                settings.seed,
                [pool.settings.weight for pool in pools],
                [len(pool) for pool in pools],
                settings.groups_drawn,
            ),
            watch=Watch(
                trainer.model.vocabulary, Limits.of(settings.sampler, longest_sequence(trainer.model))
            ),
            console=console,
            stalls=run.append_log("stalls.jsonl"),
            sources=sources,
            export=opened.enter_context(open_first_export(settings, run, trainer)),
            stop=stop,
            left_out=StepsLeftOut(
                settings.max_nonfinite_steps, "max_nonfinite_steps", own_loss=place_of_own(settings.loss)
            ),
            history=defaultdict(dict),
            sample_seconds=[],
            late_times={},
        )
        for text in changed:
            run.alert("resumed with another environment", text, level=Level.INFO)
            log(text)
        job.look_back()
        yield job


def open_first_export(settings: RlSettings, run: Run, trainer: Trainer) -> NoTokenExport:
    """The export of the process that writes the run."""
    identity = RunIdentity(run.id, run.attempt)
    export = open_export_of(settings, trainer, identity, alert=run.alert)
    if settings.trainer.token_export is not None:
        run.add_token_export(export_files(run.files.root, settings.trainer.token_export).manifest)
    return export


def open_export_of(
    settings: RlSettings,
    trainer: Trainer,
    identity: RunIdentity | None,
    alert: Callable[[str, str], None] = lambda _title, _text: None,
) -> NoTokenExport:
    """The token export of this process, or one that is off."""
    root = Path(settings.log_path).expanduser().absolute()
    on = settings.trainer.token_export if identity is not None else None
    return open_export(
        on, root, identity, trainer.model.tokenizer, trainer.processes, seed=settings.seed, alert=alert
    )


@contextmanager
def open_sampler(
    settings: RlSettings, trainer: Trainer, tasks: Pools, log: Log
) -> Iterator[tuple[RlSettings, LocalPolicy, Player]]:
    """Who acts and who plays, with the settings in which their room is decided."""
    with open_player(settings) as player, ExitStack() as opened:
        opened.callback(player.close_all, tasks.sources)
        for source in tasks.sources:
            source.open()
        settings = decide_room(settings, trainer, tasks.all, player, log)
        policy = open_policy(settings, trainer)
        player.at_once = enough_for(settings.sampler.slots or 1)
        opened.callback(player.close_all, [policy])
        yield settings, policy, player


def open_policy(settings: RlSettings, trainer: Trainer) -> LocalPolicy:
    refuse_too_many_slots(settings, trainer)
    model, sampler = trainer.model, settings.sampler
    sampling = Sampling(
        max_tokens=sampler.max_tokens,
        max_episode_tokens=sampler.max_episode_tokens,
        temperature=sampler.temperature,
        stop=tuple(sampler.stop),
    )
    return LocalPolicy(
        model,
        ChatFormat(model.tokenizer),
        sampling=sampling,
        slots=sampler.slots or 1,
        max_length=sampler.max_length,
        settings="sampler",
    )
