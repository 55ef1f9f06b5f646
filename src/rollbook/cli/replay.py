"""`rollbook replay RUN --iteration N`: a recorded step again, from the record to the new weights.

Exit codes: 0 all that was compared is equal, or within the tolerance that was promised; 1 something differs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, directory_or_run, number, print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.rl.replay.compare import Promise
    from rollbook.rl.replay.findings import StageFound
    from rollbook.rl.replay.replayer import Replayed
    from rollbook.rl.replay.what_if import Side

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_SAID = {"equal": "equal to the bit", "within": "within the tolerance", "differs": "DIFFERS"}


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="a run of the history, a run directory, or a bundle.zip")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="what would this batch have done: learning_rate=1e-4"),
    ] = None,
    iteration: Annotated[
        str | None, typer.Option("--iteration", "-i", help="which one: 3, or a range: 3-7")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="every iteration of the run")] = False,
    loss: Annotated[str | None, typer.Option("--loss", help="another loss, as '{name: ppo}'")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="cut one micro-batch, with all it needs, into this zip")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="which one, counted through the iteration")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="where the model of the settings is now, if it moved")
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Take recorded steps again and compare; or, with other settings, show what they would have done."""
    path = _path(run, artifacts)
    changes = [*(words or []), *([f"loss={loss}"] if loss is not None else [])]
    if changes and bundle is not None:
        raise UsageError("--bundle cuts what was recorded; leave out the other settings")
    if micro_batch is not None and bundle is None:
        raise UsageError("--micro-batch says what --bundle cuts; add --bundle out.zip")
    span = _span(path, iteration, every)
    if changes:
        _what_if(path, _only(span), changes, model, as_json)
    elif bundle is not None:
        _cut(path, _only(span), bundle, micro_batch or 0, model, as_json)
    else:
        _replay(path, span, model, as_json)


def _path(run: str, artifacts: Path) -> Path:
    if Path(run).is_file():
        return Path(run)
    directory, record = directory_or_run(run, artifacts)
    if directory is None:
        raise UsageError(f"{record.id if record else run} did not say where it writes; give its directory")
    return directory


def _span(path: Path, iteration: str | None, every: bool) -> range | None:
    """The iterations that are asked for; None for all of them."""
    if iteration is not None:
        match = _SPAN.fullmatch(iteration)
        if every or match is None:
            raise UsageError("write one iteration as --iteration 3, several as 3-7, all of them as --all")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--iteration {iteration} ends before it begins")
        return range(first, last + 1)
    if not every and not path.is_file():
        raise UsageError(f"which iteration? type: rollbook replay {path} --iteration N, or --all")
    return None


def _only(span: range | None) -> int | None:
    if span is not None and len(span) != 1:
        raise UsageError("this is about one iteration; write it as --iteration N")
    return span[0] if span is not None else None


def _replay(path: Path, span: range | None, model: Path | None, as_json: bool) -> None:
    from rollbook.rl.replay.findings import Verdict
    from rollbook.rl.replay.replay import replay

    where = sys.stderr if as_json else sys.stdout
    found = replay(path, span, model=model, tell=lambda one: print(_line(one), file=where, flush=True))
    if as_json:
        print_json(found)
    else:
        if len(found.iterations) == 1 or (span is not None and len(span) == 1):
            _show_stages(found.iterations[-1].stages)
        print(_promised(found.iterations[-1].promise))
        print(_printable(str(found.first) if found.first else f"verdict: {_SAID[found.verdict]}"))
    if found.verdict is Verdict.DIFFERS:
        sys.exit(1)


def _line(one: Replayed) -> str:
    text = f"iteration {one.iteration}, from {one.origin}: {_SAID[one.verdict]}"
    if one.loss:
        losses, norms = (", ".join(map(number, values)) for values in (one.loss, one.grad_norm))
        text += f"; loss {losses}, gradient norm {norms}, weights {str(one.weights_digest)[:8]}"
    return _printable(text)


def _show_stages(stages: list[StageFound]) -> None:
    for found in stages:
        text = f"  {found.stage:<15} {found.verdict}"
        if found.verdict == "not compared":
            text += f": {found.why}"
        elif found.differing:
            text += f": {found.differing:,} of {found.compared:,} values"
        elif found.distance:
            text += f": {found.compared:,} values, at most {found.distance:.2g} apart"
        else:
            text += f": {found.compared:,} value{'s' * (found.compared != 1)}"
        print(_printable(text))


def _promised(promise: Promise) -> str:
    if promise.bits or promise.noise is None:
        return f"promised: equal to the bit; {promise.why}"
    noise = promise.noise
    return (
        f"promised: within ten times what the run measured, once more for each step on the way "
        f"(log-probabilities {noise.logprob:.2g}, gradient {noise.gradient:.2g} of its norm); {promise.why}"
    )


def _what_if(path: Path, iteration: int | None, words: list[str], model: Path | None, as_json: bool) -> None:
    from rollbook.rl.replay.what_if import what_if

    found = what_if(path, iteration, *words, model=model)
    if as_json:
        print_json(found)
        return
    print(f"iteration {found.iteration}, with its rollouts and the weights before it")
    for key, value in found.changes.items():
        print(_printable(f"  {key}: {value}"))
    print(f"{'':<22}{'recorded':>14}{'changed':>14}")
    for name in found.recorded.__struct_fields__:
        sides = [_cell(side, name) for side in (found.recorded, found.changed)]
        print(f"{name:<22}{sides[0]:>14}{sides[1]:>14}")


def _cell(side: Side, name: str) -> str:
    value = getattr(side, name)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _cut(
    path: Path, iteration: int | None, bundle: Path, micro_batch: int, model: Path | None, as_json: bool
) -> None:
    from rollbook.rl.replay.cut import cut_bundle

    cut = cut_bundle(path, iteration, bundle, micro_batch=micro_batch, model=model)
    if as_json:
        print_json(cut)
        return
    print(
        f"{cut.path}: micro-batch {cut.micro_batch} of iteration {cut.iteration} (optimiser step "
        f"{cut.optim_step}), {cut.rows} rows, {cut.trained_tokens:,} trained tokens, {cut.bytes:,} bytes; it "
        "holds their text and the weights"
    )
    print(f"replay it anywhere with: rollbook replay {bundle}")


def _printable(text: str) -> str:
    from rollbook.cli.output import printable

    return printable(text)
