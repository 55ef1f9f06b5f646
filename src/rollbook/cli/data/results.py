"""What is printed about a dataset that was made: rows in and out, counts, and what each verb adds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollbook.cli.common import number
from rollbook.records.numbers import mean_text

if TYPE_CHECKING:
    from rollbook.data.stats import DataStats, Histogram
    from rollbook.records.datasets import DataManifest

_BAR = 40
_LONGEST = 60  # characters shown of a text from the data
_INCOMPLETE = 3
# What to type where no row is left: by the first of these counts that is not 0 ...
_DROPPED_ALL = {
    "below_min_reward": "lower --min-reward; `rollbook data stats` shows the rewards",
    "truncated": "every answer was cut off by a limit; --keep-truncated includes them",
    "dropped": "loosen --where; `rollbook data stats` shows what the fields hold",
    "tasks_outside_band": "widen --band; `rollbook data profile` shows the pass rates",
    "without_reward": "no reward is a number; `rollbook data reverify` grades stored responses",
    "without_prompt": "the rows hold no responses_create_params.input",
    "nothing_answered": "no response.output holds text or a tool call",
}
# ... and, of pairs, by the first that is 0.
_PAIRLESS = (
    ("tasks_with_two_rewards", "no task has two rewards; collect with num_repeats=2 or more"),
    (
        "pairs_found",
        "no usable answers to one prompt lie that far apart; lower --min-gap, or see --keep-truncated",
    ),
)


def warn(manifest: DataManifest) -> None:
    """On stderr: of rewards that do not compare, and of an output without rows."""
    from rollbook.cli.output import printable
    from rollbook.data.mixed_graders import warning_of

    if (mixed := warning_of(manifest.details)) is not None:
        print(f"warning: {printable(mixed)}", file=sys.stderr)
    if manifest.output is not None and not manifest.rows_out:
        _warn_of_nothing(manifest)


def _warn_of_nothing(manifest: DataManifest) -> None:
    counts, rows = manifest.counts, manifest.rows_in
    hints = [text for name, text in _PAIRLESS if counts.get(name) == 0]
    hints += [text for name, text in _DROPPED_ALL.items() if counts.get(name)]
    if counts.get("without_reward") == rows:
        hints = [_DROPPED_ALL["without_reward"]]
    listed = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count)
    why = "; ".join(filter(None, [listed, *hints[:1]])) if rows else ""
    of = f"none of {rows} rows is left" if rows else "the inputs hold no rows"
    print(f"warning: {manifest.output} is empty: {of}{': ' + why if why else ''}", file=sys.stderr)


def summary(manifest: DataManifest) -> list[str]:
    files = f" of {len(manifest.inputs)} files" if len(manifest.inputs) > 1 else ""
    if manifest.output is None:
        lines = [f"{manifest.rows_in} rows{files}"]
    else:
        lines = [f"{manifest.output}: {manifest.rows_out} rows, from {manifest.rows_in}{files}"]
    if manifest.counts:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in manifest.counts.items())
        lines.append(f"  {counts}")
    if manifest.coverage:
        coverage = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in manifest.coverage.items())
        lines.append(f"  {coverage}")
    return lines + [f"  skipped {path}: {why}" for path, why in manifest.left_out.items()]


def of_merge(manifest: DataManifest) -> list[str]:
    lines = []
    if not manifest.coverage:
        lines.append("  coverage unknown: not every file has a manifest; --tasks FILE says what to expect")
    if manifest.counts.get("sharing_an_index"):
        lines.append(
            "  different tasks share an index, as chunks counted from 0 do; --tasks FILE orders them"
        )
    return lines


def exit_code_of_merge(manifest: DataManifest, options: Mapping[str, Any]) -> int:
    return _INCOMPLETE if manifest.coverage.get("missing") and not options["allow_missing"] else 0


def of_mix(manifest: DataManifest) -> list[str]:
    return [_share(source, manifest.rows_out) for source in manifest.details["sources"]]


def _share(source: dict[str, Any], rows: int) -> str:
    share, wanted = source["taken"] / max(1, rows), f"{source['share']:.4g}"
    real = f"{share:.4g}" if f"{share:.4g}" == wanted else f"{share:.4g}, of {wanted} asked for"
    none = "; too small a share for one row" if not source["taken"] else ""
    return f"  {source['name']}: {source['taken']} of {source['available']} ({real} of the mix{none})"


def of_filter(manifest: DataManifest) -> list[str]:
    return [f"  unanswerable: {place}" for place in manifest.details.get("first_places", [])]


def of_split(manifest: DataManifest) -> list[str]:
    return [
        f"  {name}: " + ", ".join(f"{kind} {count}" for kind, count in part.items())
        for name, part in manifest.details.items()
    ]


def of_dedup(manifest: DataManifest) -> list[str]:
    clusters, most = manifest.details["clusters"], manifest.details["largest_cluster"]
    return [f"  {clusters} rows have repeats; the most alike: {most} rows"] if clusters else []


def of_pairs(manifest: DataManifest) -> list[str]:
    details = manifest.details
    mean = mean_text(details["gap_mean"], details["gap_std_error"])
    least, most = (number(details[f"gap_{name}"]) for name in ("min", "max"))
    return [f"  gap in reward: mean {mean}, {least} to {most}"]


def of_profile(manifest: DataManifest) -> list[str]:
    details = manifest.details
    lines = [
        f"  {details['tasks']} tasks: {details['always_passed']} always passed, "
        f"{details['never_passed']} never, {details['without_reward']} without a reward"
    ]
    if details.get("tasks_without_rollouts"):
        lines.append(f"  {details['tasks_without_rollouts']} more were planned and have no rollout here")
    for k, estimate in details["pass_at_k"].items():
        shown = mean_text(estimate["mean"], estimate["std_error"])
        lines.append(f"  pass@{k:<4} {shown} over {estimate['tasks']} tasks")
    most = max(details["pass_rate_histogram"]) or 1
    for place, count in enumerate(details["pass_rate_histogram"]):
        bar = "#" * round(40 * count / most)
        end = "]" if place == 9 else ")"
        lines.append(f"  pass rate [{place / 10:.1f}, {(place + 1) / 10:.1f}{end} {count:>8} {bar}")
    return lines


def of_reverify(manifest: DataManifest) -> list[str]:
    details = manifest.details
    mean, later = (
        mean_text(details[f"mean_{when}"], details[f"std_error_{when}"]) for when in ("before", "after")
    )
    lines = [
        f"  mean reward {mean} -> {later} over {details['compared']} rows",
        f"  {'unchanged':<14} {details['unchanged']:>8}",
        f"  {'raised':<14} {details['raised']:>8}   of them now pass {details['now_pass']}",
        f"  {'lowered':<14} {details['lowered']:>8}   of them now fail {details['now_fail']}",
        f"  {'had no reward':<14} {details['had_no_reward']:>8}",
        f"  {'not graded':<14} {details['failed']:>8}",
    ]
    for example in details["examples"]:
        lines.append(f"    {example['key']}: {number(example['before'])} -> {number(example['after'])}")
    return lines


def exit_code_of_reverify(manifest: DataManifest, options: Mapping[str, Any]) -> int:
    return _INCOMPLETE if manifest.details["failed"] else 0


def of_stats(found: DataStats) -> list[str]:
    files = f" in {len(found.inputs)} files" if len(found.inputs) > 1 else ""
    per_task = found.rows_per_task
    repeats = ""
    if per_task:
        least, mean, most = (number(per_task[name]) for name in ("min", "mean", "max"))
        repeats = f" ({least} to {most} rows each, mean {mean})"
    lines = [f"{found.rows} rows{files}, {found.tasks} tasks{repeats}"]
    if found.rows_without_task:
        lines.append(f"rows that name no task: {found.rows_without_task}")
    if found.coverage:
        lines.append(f"coverage: {_counts(found.coverage)}")
    else:
        lines.append(
            f"coverage: not known, {len(found.without_manifest)} of {len(found.inputs)} "
            "without a manifest that says what to expect"
        )
    if found.failures:
        lines.append(f"failures: {sum(found.failures.values())} ({_counts(found.failures)})")
    if found.stop_reasons:
        lines.append(f"stop reasons: {_counts(found.stop_reasons)}")
    lines += [f"skipped {path}: {why}" for path, why in found.left_out.items()]
    return [*lines, "", *_table(found), *_bars(found.reward_histogram)]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name[:_LONGEST]} {count}" for name, count in counts.items())


def _table(found: DataStats) -> list[str]:
    names = next((list(one.quantiles) for one in found.fields if one.quantiles), [])
    cells = [["field", "ok", "missing", "not a number", "mean", "std error", "std", "min", *names, "max"]]
    for one in found.fields:
        quantiles = [number(one.quantiles.get(name)) for name in names]
        counts = [str(one.ok), str(one.missing), str(one.not_a_number)]
        cells.append(
            [
                one.field,
                *counts,
                number(one.mean),
                number(one.std_error),
                number(one.std),
                number(one.min),
                *quantiles,
                number(one.max),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    if found.quantiles != "exact":
        lines.append("quantiles are approximate (t-digest)")
    return lines


def _bars(histogram: Histogram | None) -> list[str]:
    if histogram is None:
        return []
    counts = histogram.counts
    step = (histogram.high - histogram.low) / len(counts)
    most = max(counts) or 1
    lines = ["", "reward"]
    for place, count in enumerate(counts):
        low, high = (number(histogram.low + step * end) for end in (place, place + 1))
        end = "]" if place == len(counts) - 1 else ")"
        lines.append(f"  {f'[{low}, {high}{end}':<18}{count:>9} {'#' * round(_BAR * count / most)}".rstrip())
    return lines
