"""`rollbook data stats`: what a dataset holds, with what is missing beside every mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import AsJson, number, print_json
from rollbook.cli.data.common import InputFiles, reading

if TYPE_CHECKING:
    from rollbook.data.stats import DataStats, Histogram

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BAR = 40
_LONGEST = 60  # characters shown of a text from the data


@app.command()
def stats(
    inputs: InputFiles,
    field: Annotated[
        list[str] | None, typer.Option("-f", "--field", help="only these, such as metrics.score; repeatable")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rows, tasks, coverage and failures; of every number its count, mean, deviation and quantiles.

    Without --field: the reward, the numbers at the top of a row and the token counts of the response.
    """
    from rollbook.data.stats import stats as make_stats

    with reading("stats", quiet=as_json) as progress:
        found = make_stats(inputs, fields=field or (), progress=progress)
    if as_json:
        print_json(found)
        return
    from rollbook.cli.output import printable

    for line in [*_summary(found), "", *_table(found), *_bars(found.reward_histogram)]:
        print(printable(line))


def _summary(found: DataStats) -> list[str]:
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
    return lines + [f"skipped {path}: {why}" for path, why in found.left_out.items()]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name[:_LONGEST]} {count}" for name, count in counts.items())


def _table(found: DataStats) -> list[str]:
    names = next((list(one.quantiles) for one in found.fields if one.quantiles), [])
    cells = [["field", "ok", "missing", "not a number", "mean", "std", "min", *names, "max"]]
    for one in found.fields:
        quantiles = [number(one.quantiles.get(name)) for name in names]
        counts = [str(one.ok), str(one.missing), str(one.not_a_number)]
        cells.append(
            [
                one.field,
                *counts,
                number(one.mean),
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
