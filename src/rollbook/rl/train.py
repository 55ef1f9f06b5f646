"""Reinforcement learning: the story of a run, from its settings to its last checkpoint.

One iteration samples groups of rollouts with the present weights, compares the rollouts of each group, takes
optimiser steps on those that differ, and records all of it. A kill at any moment leaves a directory from
which `--resume` continues to the same weights and the same files as a run that was never killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

from rollbook.errors import RollbookError, UsageError
from rollbook.records.alerts import Level
from rollbook.records.checkpoints import Choice, newest_complete, read_checkpoints
from rollbook.records.identity import derive_seed
from rollbook.records.iterations import IterationRecord
from rollbook.records.plain import encode
from rollbook.records.token_files import RunIdentity
from rollbook.rl import metrics
from rollbook.rl.noise import NOISE_FLOOR_EVERY, NOTHING, measure_noise
from rollbook.rl.open_groups import GroupPlan
from rollbook.rl.opening import Job, Log, open_export_of, open_job, open_trainer
from rollbook.rl.player import AbandonedError, Played, Stall
from rollbook.rl.saving import checkpoint_name, rotate, save
from rollbook.rl.schedule import Schedule, is_evaluated
from rollbook.rl.settings import EvalSettings, RlSettings
from rollbook.rl.start import Start, complete_text, settle
from rollbook.rl.steps import (
    assemble,
    assist,
    finish_export,
    is_saved_after,
    is_stopping,
    rate_of,
    take_steps,
    trained_record,
)
from rollbook.rl.tasks import TaskPool, read_pools
from rollbook.runs.divergence import DivergedError
from rollbook.runs.launch import GRACE_S
from rollbook.runs.reader import open_run
from rollbook.runs.rollout_log import RolloutLog
from rollbook.runs.run_logs import log_lengths
from rollbook.runs.stop_signals import Stopped, StopSignals
from rollbook.samplers.local import LocalPolicy
from rollbook.train.processes import Processes
from rollbook.train.state import weights_digest
from rollbook.train.token_records import Noted

_STALL_FACTOR, _LEAST_STALL_S, _FIRST_STALL_S = 5.0, 30.0, 300.0


# A stop waits this long for the rollouts of an iteration: half of what the supervisor waits for the process.
_STOP_WAITS_S = GRACE_S / 2


class FailedRolloutsError(RollbookError):
    """Raised where every rollout of an iteration failed: nothing can be learned, and nothing was trained."""


class AlertError(RollbookError):
    """Raised after an alert where `on_alert` is stop: the checkpoint is saved and --resume continues."""


def run_iteration(job: Job, i: int, before: str) -> str:
    """Evaluate if it is time, sample, select, train, hand the weights to the sampler, record.

    `before` is the digest of the weights that sample; that of the new ones is returned.
    """
    settings, run, trainer, clock = job.settings, job.run, job.trainer, metrics.Clock()
    values = run_evals(job, i, clock)
    with clock("sample"), run.rollouts(i) as log:
        plans = plans_of(settings, job.pools, job.schedule, i)
        rollouts = len(plans) * settings.group_size
        played = play(job, plans, rollouts, log, version=i, stage=f"iteration {i}")
        if played.all_failed:
            why = f"iteration {i}: {played.why_failed}. Fix it, then continue with --resume"
            raise FailedRolloutsError(why)
    with clock("assemble"):
        assembled = assemble(
            trainer, settings, played.groups, i, processes=trainer.processes.count, notes=notes_of(plans)
        )
        selection = assembled.selection
    with clock("train"):
        job.console.now(f"iteration {i}: training on {len(selection.examples)} sequences")
        measured = NOTHING
        if i % NOISE_FLOOR_EVERY == 0:
            measured = measure_noise(trainer, settings.loss, selection.examples)
        share = trainer.processes.scatter(assembled.plan)
        assert share is not None
        steps = take_steps(trainer, settings, [share], job.export)
        for step in steps:
            job.left_out.note(step.is_left_out)
    with clock("sync"):
        values |= job.policy.update(version=i + 1)
    record = trained_record(settings, i, assembled, steps, before=before, after=weights_digest(trainer.model))
    record.timeouts, record.retries = played.timeouts, played.retries
    record.frozen_digest, record.machine = trainer.frozen_digest, trainer.machine
    record.noise = measured.noise
    clock.add("token_export", finish_export(settings, job.export, i, steps))
    run.finish_iteration(record)
    values |= log.metrics() | measured.metrics
    values |= metrics.of_sampling(played.groups, selection, settings.sampler.max_tokens)
    values |= metrics.of_training(steps, rate_of(settings, i)) | clock.metrics() | job.late_times
    values["tokens_per_second"] = values["tokens/sampled"] / clock.without("eval")
    run.log_metrics(values, step=i)
    job.console.iteration(i, values, played)
    job.sample_seconds.append(clock.seconds["sample"])
    job.note(i, values)
    report_findings(job, i, values)
    job.late_times.clear()
    return str(record.weights_digest)


def save_if_due(job: Job, i: int) -> bool:
    """Save if it is time; returns whether the run is to stop here, for which it is saved as well.

    What has diverged is not saved.
    """
    stops = is_stopping(job.trainer.processes, job.stop)
    if (why := job.left_out.problem(is_last=i + 1 == job.settings.iterations)) is not None:
        job.run.alert("the run has diverged", why, level=Level.ERROR, step=i)
        dismiss(job)
        raise DivergedError(why)
    if stops or is_saved_after(job.settings, i):
        clock = metrics.Clock()
        with clock("save"):
            job.console.now(f"iteration {i}: saving checkpoint {checkpoint_name(i + 1)}")
            save(job, i + 1)
        job.late_times["time/save"] = clock.seconds["save"]
    return stops


def plans_of(settings: RlSettings, pools: Sequence[TaskPool], schedule: Schedule, i: int) -> list[GroupPlan]:
    """The groups of an iteration: a task each, and the seed that all its rollouts follow from."""
    plans = []
    for group_idx, draw in enumerate(schedule.draws(i)):
        pool = pools[draw.environment]
        label = pool.settings.label
        seed = derive_seed(settings.seed, i, label, draw.task, group_idx)
        task, turns = pool.task(draw.task), pool.settings.max_turns
        plans.append(GroupPlan(group_idx, task, settings.group_size, seed, pool.make, turns, (label,)))
    return plans


def notes_of(plans: Sequence[GroupPlan]) -> dict[int, Noted]:
    """What the token export says of each group."""
    return {plan.group_idx: Noted(plan.task.id, plan.tags[0]) for plan in plans}


def run_evals(job: Job, i: int, clock: metrics.Clock) -> dict[str, float]:
    """The evaluations that are due before iteration i, or after the last one. They change nothing."""
    values: dict[str, float] = {}
    for evaluation in job.settings.evals:
        if not is_evaluated(evaluation.every, i, job.settings.iterations):
            continue
        split = f"eval/{evaluation.name}"
        policy = job.policy.with_sampling(training=False, temperature=evaluation.temperature)
        plans, rollouts = eval_plans(job, evaluation), len(job.held_out[evaluation.name]) * evaluation.samples
        with clock("eval"), job.run.rollouts(i, split) as log:
            played = play(job, plans, rollouts, log, version=i, stage=split, policy=policy)
        record = IterationRecord(
            split=split, iteration=i, version=i, timeouts=played.timeouts, retries=played.retries
        )
        job.run.finish_iteration(record)
        found = log.metrics()
        job.console.evaluation(evaluation.name, i, found, played)
        if played.all_failed:
            job.run.alert(f"every rollout of eval {evaluation.name} failed", played.why_failed, step=i)
        values |= found
    return values


def eval_plans(job: Job, evaluation: EvalSettings) -> Iterator[GroupPlan]:
    """Every held-out task, with seeds that are the same in every iteration."""
    pool = job.held_out[evaluation.name]
    environment = pool.settings
    for number in range(len(pool)):
        yield GroupPlan(
            number,
            pool.task(number),
            evaluation.samples,
            derive_seed(job.settings.seed, "eval", evaluation.name, number),
            pool.make,
            environment.max_turns,
            (environment.label,),
        )


def play(
    job: Job,
    plans: Iterable[GroupPlan],
    rollouts: int,
    log: RolloutLog,
    *,
    version: int,
    stage: str,
    policy: LocalPolicy | None = None,
) -> Played:
    """Sample the groups with the present weights; with a policy of its own, as an evaluation does, nothing is
    kept to be trained on."""
    return job.player.groups(
        plans,
        policy or job.policy,
        log,
        version=version,
        rollouts=rollouts,
        keep_episodes=policy is None,
        stall_after_s=stall_after(job),
        on_stall=lambda stall: report_stall(job, stage, stall),
        progress=lambda done, expected: job.console.progress(stage, done, expected),
        is_over=lambda: job.stop.asked_for_s > _STOP_WAITS_S,
    )


def report_stall(job: Job, stage: str, stall: Stall) -> None:
    """Name what is waited for: the oldest in the terminal, all in stalls.jsonl.

    It is no alert: equal runs have equal alerts, and another one may have had a faster machine.
    """
    job.console.log(f"STALL in {stage}: {stall}")
    blocked = None if stall.blocked is None else stall.blocked._asdict()
    waiting = [item._asdict() for item in stall.waiting]
    job.stalls.append(encode({"stage": stage, "waiting": waiting, "blocked": blocked}))


def stall_after(job: Job) -> float:
    """Seconds without a finished rollout after which what is waited for is named."""
    if job.settings.stall_after_s is not None:
        return job.settings.stall_after_s
    if not job.sample_seconds:
        return _FIRST_STALL_S
    return max(_LEAST_STALL_S, _STALL_FACTOR * median(job.sample_seconds[-20:]))


class RlResult(NamedTuple):
    """How a run ended."""

    log_path: Path
    checkpoint: Path | None
    iterations: int
    reward: float | None  # the mean of the last iteration
    evals: dict[str, float]  # the mean reward of each evaluation after the last iteration


def train(settings: RlSettings, *, resume: bool | str = False, log: Log = print) -> RlResult:
    """Run every iteration that is left.

    `resume` is True for the newest complete checkpoint, a checkpoint's name, or "start-over".
    """
    processes = Processes()
    try:
        log = log if processes.is_first else _silent
        with processes.together():  # all have seen the run as it is before the first one changes it
            start = settle(settings, resume, verify=processes.is_first)
            if processes.count != settings.processes:
                raise UsageError(
                    f"processes is {settings.processes}, and this is one of {processes.count}; the command "
                    "`rollbook rl` starts them all"
                )
        start = start._replace(**processes.share(_chosen(start)))
        for text in start.resume.passed_over if isinstance(start.resume, Choice) else ():
            log(text)
        if resume is True and start.checkpoint is None:
            log(f"{settings.log_path} has no checkpoint to resume: starting from the beginning")
        if start.is_complete:
            log(complete_text(settings))
            return result_of(settings)
        with processes.together():
            tasks = read_pools(start.settings, log) if processes.is_first else None
        settings, trainer = open_trainer(start, processes, log)
        with ExitStack() as opened:
            stop = opened.enter_context(StopSignals("saving after this iteration"))
            job = None
            with processes.together():
                if tasks is not None:
                    job = opened.enter_context(open_job(start, settings, trainer, tasks, log, stop))
            identity = processes.share(job and RunIdentity(job.run.id, job.run.attempt))
            if job is not None:
                run_iterations(job)
            else:
                export = opened.enter_context(open_export_of(settings, trainer, identity))
                assist(trainer, settings, export, stop)
        return result_of(settings)
    finally:
        processes.close()


def _chosen(start: Start) -> dict[str, Any]:
    """What the first process has decided for all, having looked at every byte."""
    return {"resume": start.resume, "checkpoint": start.checkpoint, "is_complete": start.is_complete}


def run_iterations(job: Job) -> None:
    settings, run = job.settings, job.run
    rotate(job)  # which a kill may have cut short
    weights = weights_digest(job.trainer.model)
    for i in range(run.next_iteration, settings.iterations):
        beginning = log_lengths(run.files, run.info)
        try:
            weights = run_iteration(job, i, weights)
        except AbandonedError:
            stop_within(job, i, beginning)
        except FailedRolloutsError:
            dismiss(job)
            raise
        if save_if_due(job, i) and i + 1 < settings.iterations:
            dismiss(job)
            error = AlertError if job.stop.by_job else Stopped
            reason = job.stop.reason or "a signal to another process"
            raise error(f"stopped after iteration {i} ({reason}), checkpoint saved; --resume continues")
    clock = metrics.Clock()
    try:
        values = run_evals(job, settings.iterations, clock)
    except AbandonedError:
        dismiss(job)
        raise Stopped(f"stopped in the last evaluation ({job.stop.reason}); --resume runs it") from None
    if values:
        run.log_metrics(values | clock.metrics() | job.late_times, step=settings.iterations)
    dismiss(job)


def result_of(settings: RlSettings) -> RlResult:
    """The result of a run that is at its end, from its files."""
    run = open_run(settings.log_path)
    newest = newest_complete(read_checkpoints(run.files.checkpoints), run.files.root)
    checkpoint = run.files.root / str(newest.record.state_path) if newest else None
    rows = {int(row["step"]): row for row in run.metrics.by_step()}
    last, final = (rows.get(step, {}) for step in (settings.iterations - 1, settings.iterations))
    evals = {
        evaluation.name: final[key]
        for evaluation in settings.evals
        if (key := f"{evaluation.name}/env/all/reward/total") in final
    }
    reward = last.get("env/all/reward/total")
    return RlResult(run.files.root, checkpoint, settings.iterations, reward, evals)


def stop_within(job: Job, i: int, beginning: Mapping[str, int]) -> NoReturn:
    """Stop where the rollouts of iteration i take too long: save what was there when it began."""
    if i > job.run.next_iteration:
        saved = {stored.record.name for stored in read_checkpoints(job.run.files.checkpoints)}
        if checkpoint_name(i) not in saved:
            save(job, i, log_lengths=beginning)
    dismiss(job)
    raise Stopped(
        f"stopped in iteration {i} ({job.stop.reason}), whose rollouts took more than {_STOP_WAITS_S:.0f} s; "
        f"the checkpoint before it is saved; --resume continues"
    )


def dismiss(job: Job) -> None:
    """Tell the other processes that it is over."""
    processes = job.trainer.processes
    processes.scatter([None] * processes.count)


def _silent(_: str) -> None:
    """The log of the processes that nobody reads."""


def report_findings(job: Job, i: int, values: Mapping[str, float]) -> None:
    for finding in job.watch.look(values):
        job.run.alert(finding.title, finding.text, step=i)
        job.console.alert(i, finding)
        if job.settings.on_alert == "stop":
            job.stop.ask(f"alert: {finding.title}")
