"""`rollbook sft CONFIG`: fine-tune a model, supervised, with the artifacts and the handoff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, Detach, Overrides, Overwrite, Resume, print_json

if TYPE_CHECKING:
    from rollbook.sft.settings import SftSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sft(
    config: Annotated[Path, typer.Argument(help="config.yaml; its runtime_info.output gets the result")],
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything and show one sample with its mask")
    ] = False,
    detach: Detach = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Fine-tune: model, data and training come from CONFIG, changes as training.learning_rate=1e-5."""
    from rollbook.cli.launched import run_job, say_complete
    from rollbook.sft.launch import plan_start, prepare_job
    from rollbook.sft.resumable import finished_text
    from rollbook.sft.settings import load_settings

    settings = load_settings(config, overrides or [])
    plan = plan_start(settings, artifacts, resume=resume, overwrite=overwrite)
    if plan.is_finished and not dry_run:
        text = finished_text(plan.output_dir, settings)
        say_complete(text, settings.run_name, plan.output_dir, artifacts, config, as_json)
        return
    if not as_json:
        print("\n".join(plan.lines()))
    if dry_run:
        _preview(settings, as_json)
        return
    job = prepare_job(plan, settings, artifacts, config, log=_nothing if as_json else print)
    run_job(job, detach=detach, as_json=as_json, on_stop="it saves first; --resume continues")


def _nothing(_: str) -> None:
    return


def _preview(settings: SftSettings, as_json: bool) -> None:
    from rollbook.cli.output import console, printable
    from rollbook.sft.preview import preview

    found = preview(settings)
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    shown = Text()
    for text, learned in found.pieces:
        shown.append(printable(text), style="bold green" if learned else "dim")
    out = console()
    for line in found.messages:
        out.print(printable(line), markup=False)
    out.print(f"{found.total_steps} steps; packing {'on' if found.packed else 'off'}")
    out.print("sample 0 (green is learned):", markup=False)
    out.print(shown)
    if not out.is_terminal:  # colours are lost in a file; brackets are not
        marked = "".join(f"[[{text}]]" if learned else text for text, learned in found.pieces)
        out.print("the same with [[learned]] parts:", markup=False)
        out.print(printable(marked), markup=False)
