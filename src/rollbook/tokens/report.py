"""What the loss did with the tokens of a run: one pass over its export, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollbook.errors import UsageError
from rollbook.records.token_files import ExportedStep
from rollbook.records.token_places import TokenSource
from rollbook.tokens.by_text import MaskedSide, Sign, TextCounts
from rollbook.tokens.chunks import Chunk, chunks_of
from rollbook.tokens.noise_floor import NoiseFloor, noise_floor
from rollbook.tokens.not_exported import not_exported
from rollbook.tokens.ranks import RankComparison, RankRow
from rollbook.tokens.top import TopToken, TopTokens, mismatch_of, surprise_of
from rollbook.tokens.totals import (
    REPLY_POSITIONS,
    UNKNOWN,
    Band,
    Breakdown,
    Row,
    Totals,
    position_buckets,
    position_label,
    sums_of,
)
from rollbook.tokens.what_if import Loss, Scenario, WhatIf

HOW_TO_EXPORT = (
    "this run has no token export, so only the sampled side is known; add to the config\n"
    "trainer:\n  experimental:\n    token_export:\nand run or resume it"
)


_GAPS = 3  # that are told in words


class Incomplete(msgspec.Struct, kw_only=True):
    """An exported iteration of which records are missing."""

    iteration: int
    selected: int
    records: int
    errors: list[str]

    def summary(self) -> str:
        why = "; ".join(self.errors) or "no reason is known"
        missing = self.selected - self.records
        return f"iteration {self.iteration}: {missing:,} of {self.selected:,} rows are missing: {why}"


class NotApplied(msgspec.Struct, kw_only=True):
    """An exported iteration with optimiser steps that left the weights as they were."""

    iteration: int
    optim_steps: list[int]


class TokenReport(msgspec.Struct, kw_only=True):
    path: str
    is_exported: bool
    iterations: list[int]  # the first and the last one; empty where there are no tokens
    losses: list[dict[str, Any]]  # the ones that the manifest names, in the order of training
    sequences: int
    band: Band
    total: Totals
    first_step: Totals | None  # of the first optimiser step of each iteration, where there are several
    noise_floor: NoiseFloor | None
    masked_by_text: dict[Sign, MaskedSide]
    top: list[TopToken]  # by mismatch KL; where there is none by -log of the probability
    by_environment: list[Row]
    by_iteration: list[Row]
    by_position: list[Row]  # in the row
    by_reply_position: list[Row]  # in what the turn sampled
    by_turn: list[Row]
    by_optim_step: list[Row]
    by_rank: list[RankRow]
    what_if: list[WhatIf]
    incomplete: list[Incomplete]
    not_exported: list[int]  # iterations that are complete, and in no line of a manifest
    not_applied: list[NotApplied]


def token_report(
    source: TokenSource,
    *,
    iteration: int | None = None,
    most: int = 10,
    band: Band | None = None,
    what_if: Sequence[str] = (),
) -> TokenReport:
    """Reads everything once; the memory it takes does not depend on the number of tokens."""
    steps = [step for step in source.steps() if iteration is None or step.iteration == iteration]
    lost = [number for number in not_exported(source) if iteration in (None, number)]
    report = _Report(source, steps, lost, most, band or Band(), what_if)
    for chunk in chunks_of(source, iteration):
        report.add(chunk)
    if not report.sequences:
        raise UsageError("\n".join([_nothing(source, iteration), *gaps_of(report.incomplete, lost)]))
    return report.made(noise_floor(source.root, source.info, iteration))


_BREAKDOWNS = ("environment", "iteration", "position", "reply position", "turn", "step")


class _Report:
    """The sums of a report while it is read."""

    def __init__(
        self,
        source: TokenSource,
        steps: Sequence[ExportedStep],
        lost: list[int],
        most: int,
        band: Band,
        what_if: Sequence[str],
    ) -> None:
        self._source, self._steps, self._most, self._band = source, steps, most, band
        self._lost, self.incomplete = lost, [_incomplete(step) for step in steps if not step.complete]
        losses: Mapping[int, Loss] = {step.iteration: step.loss for step in steps}
        self._scenarios = [Scenario(words, losses) for words in what_if]
        self.sequences = 0
        self._environments: dict[str, int] = {}
        self._by = {name: Breakdown() for name in _BREAKDOWNS}
        self._texts, self._ranks = TextCounts(), RankComparison()
        self._mismatched, self._surprising = TopTokens(most, mismatch_of), TopTokens(most, surprise_of)

    def add(self, chunk: Chunk) -> None:
        self.sequences += len(chunk.sequences)
        if not len(chunk):
            return
        sums_FN, kl_N = sums_of(chunk, self._band), chunk.floats("mismatch_kl")
        keys = {
            "environment": chunk.spread([self._environment(one) for one in chunk.sequences]),
            "iteration": chunk.spread([sequence.iteration for sequence in chunk.sequences]),
            "position": position_buckets(chunk.offset_N),
            "reply position": position_buckets(chunk.reply_offset_N(), REPLY_POSITIONS),
            "turn": chunk.turn_N(),
            "step": chunk.spread([_or_unknown(sequence.optim_step) for sequence in chunk.sequences]),
        }
        for name, breakdown in self._by.items():
            breakdown.add(keys[name], sums_FN, kl_N)
        self._texts.add(chunk)
        self._ranks.add(chunk)
        self._mismatched.add(chunk)
        self._surprising.add(chunk)
        for scenario in self._scenarios:
            scenario.add(chunk)

    def made(self, floor: NoiseFloor | None) -> TokenReport:
        iterations = [row.key for row in self._by["iteration"].rows() if isinstance(row.key, int)]
        environments = list(self._environments)
        by_step = self._by["step"].rows()
        return TokenReport(
            path=str(self._source.only or self._source.root),
            is_exported=self._source.is_exported,
            iterations=[iterations[0], iterations[-1]] if iterations else [],
            losses=_distinct([step.loss for step in self._steps]),
            sequences=self.sequences,
            band=self._band,
            total=self._by["iteration"].total(),
            first_step=by_step[0] if len(by_step) > 1 else None,
            noise_floor=floor,
            masked_by_text={sign: self._texts.side(sign, self._most) for sign in Sign},
            top=self._mismatched.tokens() or self._surprising.tokens(),
            by_environment=self._by["environment"].rows(lambda number: environments[number]),
            by_iteration=self._by["iteration"].rows(),
            by_position=self._by["position"].rows(position_label),
            by_reply_position=self._by["reply position"].rows(
                lambda first: position_label(first, REPLY_POSITIONS)
            ),
            by_turn=self._by["turn"].rows(),
            by_optim_step=by_step,
            by_rank=self._ranks.rows(),
            what_if=[scenario.result() for scenario in self._scenarios],
            incomplete=self.incomplete,
            not_exported=self._lost,
            not_applied=[
                NotApplied(
                    iteration=step.iteration,
                    optim_steps=[number for number, applied in enumerate(step.applied) if not applied],
                )
                for step in self._steps
                if step.applied is not None and not all(step.applied)
            ],
        )

    def _environment(self, sequence: Any) -> int:
        """The number of an environment; where nobody named one, the split."""
        name = sequence.env_name or sequence.split
        return self._environments.setdefault(name, len(self._environments))


def gaps_of(incomplete: Sequence[Incomplete], lost: Sequence[int]) -> list[str]:
    """What is missing, in words: the first gaps, and how many more there are."""
    said = [gap.summary() for gap in incomplete[:_GAPS]]
    if len(incomplete) > _GAPS:
        said.append(f"and {len(incomplete) - _GAPS} more iterations with missing rows")
    if lost:
        more = f" and {len(lost) - _GAPS} more" if len(lost) > _GAPS else ""
        said.append(
            f"complete, and not in the export: iteration {', '.join(map(str, lost[:_GAPS]))}{more}; a full "
            "disk may have refused even their lines. rollbook replay computes a step again"
        )
    return said


def _or_unknown(value: int | None) -> int:
    return UNKNOWN if value is None else value


def _distinct(losses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [loss for number, loss in enumerate(losses) if loss not in losses[:number]]


def _incomplete(step: ExportedStep) -> Incomplete:
    errors = [f"process {part.rank}: {part.error}" for part in step.ranks if part.error]
    return Incomplete(iteration=step.iteration, selected=step.selected, records=step.records, errors=errors)


def _nothing(source: TokenSource, iteration: int | None) -> str:
    place = source.only or source.root
    if not source.is_exported:
        return f"{place}: no tokens here, neither in an export nor in transcripts; {HOW_TO_EXPORT}"
    if iteration is None:
        return f"{place}: the export has no records yet"
    known = sorted({step.iteration for step in source.steps()})
    held = f"it has {known[0]} to {known[-1]}" if known else "leave --iteration out to see all"
    return f"{place}: the export has no records of iteration {iteration}; {held}"
