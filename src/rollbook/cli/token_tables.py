"""The tables of `rollbook tokens`. Texts are model output: they reach the terminal through `visible` only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rollbook.cli.output import console, printable

if TYPE_CHECKING:
    from rich.console import Console

    from rollbook.tokens.by_text import MaskedSide
    from rollbook.tokens.report import TokenReport
    from rollbook.tokens.top import TopToken
    from rollbook.tokens.totals import Row

_SIDES = {"positive": "advantage above 0", "negative": "advantage below 0", "zero": "no advantage"}
# A column of numbers: its title, where it is from, and how it is written.
_Number = tuple[str, str, Callable[[Any], str]]


def share(value: float) -> str:
    return f"{value:.2%}" if value == 0 or value >= 0.0001 else f"{value:.1e}"


def count(value: int) -> str:
    return f"{value:,}"


def amount(value: float) -> str:
    return f"{value:.3g}"


_NUMBERS: Sequence[_Number] = (
    ("tokens", "tokens", count),
    ("masked", "masked_share", share),
    ("high", "masked_high_share", share),
    ("low", "masked_low_share", share),
    ("outside", "outside_share", share),
    ("mean KL", "mismatch_kl", amount),
    ("max KL", "mismatch_kl_max", amount),
    ("entropy", "entropy", amount),
    ("log mu", "inference_logprob", amount),
    ("log pi", "trainer_logprob", amount),
)
_OF_A_TOKEN: Sequence[_Number] = (
    ("KL", "mismatch_kl", amount),
    ("ratio", "importance_ratio", amount),
    ("log mu", "inference_logprob", amount),
    ("log pi", "trainer_logprob", amount),
    ("advantage", "advantage", amount),
    ("masked", "masked", lambda value: "yes" if value else "no"),
)


def visible(text: str) -> str:
    """A token so that it can be told apart: its ends, its line breaks, and nothing a terminal would obey."""
    shown = printable(text).replace("\n", "⏎").replace("\t", "⇥")
    body = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" ")) if body else len(shown)
    return "␣" * before + body + "␣" * (len(shown) - before - len(body))


def print_report(report: TokenReport, most: int) -> None:
    screen = console()
    _print_head(screen, report)
    _print_totals(screen, report)
    for sign, side in report.masked_by_text.items():
        if side.masked:
            _print_side(screen, str(sign), side)
    print_top(screen, report.top)
    _print_rows(screen, "by environment", report.by_environment, most)
    has_kl = report.total.mismatch_kl is not None
    order = ", largest mean KL first" if has_kl else ""
    _print_rows(screen, f"by iteration{order}", _by_kl(report.by_iteration), most)
    _print_rows(screen, "by optimiser step of the iteration", report.by_optim_step, most)
    _print_rows(screen, "by turn", report.by_turn, most)
    _print_rows(screen, "by position in the row", report.by_position, most)
    _print_ranks(screen, report)
    _print_what_if(screen, report)


def _print_head(screen: Console, report: TokenReport) -> None:
    from rollbook.tokens.report import HOW_TO_EXPORT

    first, last = report.iterations or [0, 0]
    what = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    seen = "the loss saw" if report.is_exported else "were sampled"
    size = f"{report.sequences:,} rows; {report.total.tokens:,} tokens {seen}"
    screen.print(Text(f"{printable(report.path)}: {what}, {size}"))
    for loss in report.losses:
        settings = ", ".join(f"{key} {value}" for key, value in loss.items() if key != "name")
        screen.print(Text(printable(f"loss {loss.get('name')}" + (f": {settings}" if settings else ""))))
    if not report.is_exported:
        screen.print(Text(HOW_TO_EXPORT, style="yellow"))
    for gap in report.incomplete[:3]:
        why = "; ".join(gap.errors) or "no reason is known"
        missing = gap.selected - gap.records
        screen.print(
            Text(
                printable(
                    f"iteration {gap.iteration}: {missing:,} of {gap.selected:,} rows are missing: {why}"
                ),
                "red",
            )
        )
    if len(report.incomplete) > 3:
        screen.print(Text(f"and {len(report.incomplete) - 3} more iterations with missing rows", "red"))


def _print_totals(screen: Console, report: TokenReport) -> None:
    rows: list[tuple[str, Any]] = [("all", report.total)]
    if report.first_step is not None:
        rows.append(("first optimiser step", report.first_step))
    floor = report.noise_floor
    if floor is not None:
        rows.append(("trainer to itself", _FloorRow(floor.mismatch_kl, floor.outside_share)))
    _print_numbers(screen, "", rows)
    total = report.total
    if total.masked_pull_share is not None and total.masked:
        screen.print(f"the masked tokens are {share(total.masked_pull_share)} of all |advantage| x ratio")
    if total.outside_share is not None:
        low, high = report.band
        note = f"outside: importance ratio below {low:g} or above {high:g}"
        if floor is not None and tuple(report.band) != (0.9, 1.1):
            note += "; the trainer to itself: below 0.9 or above 1.1"
        screen.print(note)
    if total.nonfinite:
        warning = f"tokens with a value that is not finite: {total.nonfinite:,}; they are in no mean"
        screen.print(Text(warning, style="red"))


class _FloorRow:
    """What the metrics say of the trainer's noise, as a row beside the tokens'."""

    def __init__(self, mismatch_kl: float | None, outside_share: float | None) -> None:
        self.mismatch_kl, self.outside_share = mismatch_kl, outside_share


def _print_numbers(screen: Console, title: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Columns in which no row has a value are left out."""
    used = [
        column for column in _NUMBERS if any(getattr(row, column[1], None) is not None for _, row in rows)
    ]
    table = _table(title)
    for name, _, _ in used:
        table.add_column(name, justify="right")
    for label, row in rows:
        values = [getattr(row, field, None) for _, field, _ in used]
        cells = ["" if value is None else how(value) for value, (_, _, how) in zip(values, used, strict=True)]
        table.add_row(Text(visible(label)), *cells)
    screen.print(table)


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(Text(title), no_wrap=True, overflow="ellipsis")
    return table


def _print_side(screen: Console, sign: str, side: MaskedSide) -> None:
    screen.print()
    part = f"{side.masked:,} of {side.seen:,} tokens ({share(side.masked / side.seen)})"
    screen.print(Text(f"masked, {_SIDES[sign]}: {part}, {side.texts:,} different ones", style="bold"))
    table = _table("token")
    for name in ("masked", "of these", "of its own"):
        table.add_column(name, justify="right")
    for one in side.top:
        table.add_row(Text(visible(one.text)), count(one.masked), share(one.share), share(one.masked_share))
    screen.print(table)


def print_top(screen: Console, top: Sequence[TopToken]) -> None:
    if not top:
        return
    used = [column for column in _OF_A_TOKEN if any(getattr(one, column[1]) is not None for one in top)]
    has_kl = any(name == "mismatch_kl" for _, name, _ in used)
    screen.print()
    screen.print(Text("largest mismatch KL" if has_kl else "least likely tokens", style="bold"))
    table = _table("at")
    for title, _, _ in used:
        table.add_column(title, justify="right")
    table.add_column("token", no_wrap=True, overflow="ellipsis")
    for one in top:
        values = [(getattr(one, name), how) for _, name, how in used]
        cells = ["-" if value is None else how(value) for value, how in values]
        table.add_row(Text(place_of(one)), *cells, _in_context(one))
    screen.print(table)


def place_of(token: TopToken) -> str:
    """As `--at` takes it, with the offset of the token."""
    group, trajectory = token.group_idx, token.traj_idx
    if group is None:
        group, trajectory = token.rank, token.sequence_idx
    part = f"/{token.part}" if token.part else ""
    return f"{token.iteration}/{group}/{trajectory}{part}:{token.token_idx}"


def _in_context(token: TopToken) -> Text:
    text = Text(printable(token.before).replace("\n", "⏎"), style="dim")
    text.append(f" {visible(token.text)} ", style="bold reverse not dim")
    text.append(printable(token.after).replace("\n", "⏎"))
    return text


def _by_kl(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-(row.mismatch_kl or 0.0), row.key))


def _print_rows(screen: Console, title: str, rows: Sequence[Row], most: int) -> None:
    if len(rows) < 2:
        return
    screen.print()
    _print_numbers(screen, title, [(str(row.key), row) for row in rows[:most]])
    if len(rows) > most:
        screen.print(f"({len(rows) - most} more: --top {len(rows)}, or --json)")


def _print_ranks(screen: Console, report: TokenReport) -> None:
    if not report.by_rank:
        return
    screen.print()
    table = _table("by process")
    for name in ("rows", "tokens", "mean KL", "typical", "standard errors"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in report.by_rank:
        table.add_row(
            str(row.rank),
            count(row.sequences),
            count(row.tokens),
            amount(row.mismatch_kl),
            amount(row.typical),
            f"{row.errors:.1f}",
            Text("differs from the others", "red") if row.is_outlier else "",
        )
    screen.print(table)


def _print_what_if(screen: Console, report: TokenReport) -> None:
    if not report.what_if:
        return
    screen.print()
    table = _table("what if")
    for name in ("masked", "high", "low", "of |advantage| x ratio", "by the loss", "more", "fewer"):
        table.add_column(name, justify="right")
    for one in report.what_if:

        def part(value: int | None, of: int = one.tokens) -> str:
            return "-" if value is None or not of else f"{value:,} ({share(value / of)})"

        table.add_row(
            Text(printable(one.scenario)),
            part(one.masked),
            part(one.high),
            part(one.low),
            "-" if one.pull_share is None else share(one.pull_share),
            part(one.was_masked),
            "-" if one.more is None else count(one.more),
            "-" if one.fewer is None else count(one.fewer),
        )
    screen.print(table)
