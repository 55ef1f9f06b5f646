"""The progress of a collection in words: one line for a log, several for a summary and `rollbook status`."""

from __future__ import annotations

from rollbook.cli.common import duration, local_time, number
from rollbook.records.numbers import mean_text
from rollbook.records.progress import Progress


def progress_line(progress: Progress) -> str:
    parts = [_rollouts(progress), _tokens(progress), _reward(progress), _failures(progress)]
    return f"Collecting rollouts: {'; '.join(filter(None, parts))}"


def progress_lines(progress: Progress) -> list[str]:
    lost = ""
    if progress.lost_input_tokens or progress.lost_output_tokens:
        lost = f"{progress.lost_input_tokens} in, {progress.lost_output_tokens} out, in attempts that failed"
        lost += "; the cost counts them" if progress.cost is not None else ""
    named = {
        "rollouts": _rollouts(progress),
        "reward": _reward(progress).removeprefix("reward "),
        "tokens": _tokens(progress),
        "lost": lost,
        "failures": _failures(progress).removeprefix("failures: "),
    }
    return [f"{name + ':':<11} {text}" for name, text in named.items() if text]


def _rollouts(progress: Progress) -> str:
    parts = [f"{progress.done} of {progress.expected}"]
    if progress.done_before:
        parts[0] += f" ({progress.done_before} by earlier sessions)"
    if progress.expected:
        parts.append(f"{100 * progress.done / progress.expected:.1f} %")
    if progress.status == "running":
        parts.append(f"{number(progress.rate_per_s)}/s")
        if progress.eta_s is not None:
            parts.append(f"{duration(progress.eta_s)} left")
        parts.append(f"{progress.in_flight} in flight")
        if progress.waiting:
            parts.append(f"{progress.waiting} waiting for a retry")
    elif progress.missing:
        parts.append(f"{progress.missing} missing")
    if progress.status == "lost":
        parts.append(f"as last heard at {local_time(progress.updated_at)}")
    return ", ".join(parts)


def _reward(progress: Progress) -> str:
    if progress.reward_mean is None:
        return ""
    over = f", mean over {progress.reward_count} rollouts" if progress.reward_count else ""
    return f"reward {mean_text(progress.reward_mean, progress.reward_std_error)}{over}"


def _tokens(progress: Progress) -> str:
    if progress.output_tokens is None:
        return ""
    cost, left_out = "", ""
    if progress.cost is not None:
        cost = f", cost {progress.cost:.2f}" if progress.cost >= 1 else f", cost {progress.cost:.4f}"
    if count := progress.without_usage:
        rollouts = "1 rollout" if count == 1 else f"{count} rollouts"
        left_out = f" (without {rollouts} whose answers came without usage)"
    return f"{progress.input_tokens} tokens in, {progress.output_tokens} out{cost}{left_out}"


def _failures(progress: Progress) -> str:
    if not progress.failures and not progress.failed:
        return ""
    kinds = ", ".join(f"{kind} {count}" for kind, count in progress.failures.items())
    by_kind = f"; attempts by kind: {kinds}" if kinds else ""
    return f"failures: {progress.failed} given up{by_kind}"
