"""`rollbook data sft`: rollouts as chat messages to learn from."""

from __future__ import annotations

from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import (
    InputFiles,
    KeepTruncated,
    Output,
    Overwrite,
    one_of,
    print_manifest,
    reading,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sft(
    inputs: InputFiles,
    output: Output,
    min_reward: Annotated[float | None, typer.Option(help="leave out rollouts below this reward")] = None,
    best_of: Annotated[
        int | None, typer.Option(min=1, help="keep at most this many of each task, the best first")
    ] = None,
    as_format: Annotated[
        str, typer.Option("--format", help="messages, or llamafactory (sharegpt with dataset_info.json)")
    ] = "messages",
    keep_truncated: KeepTruncated = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Prompt, reasoning, tool calls and results of good rollouts, as conversations."""
    from rollbook.data.sft import sft as make_sft

    with reading("sft", quiet=as_json) as progress:
        manifest = make_sft(
            inputs,
            output,
            min_reward=min_reward,
            best_of=best_of,
            as_format=one_of(as_format, ("messages", "llamafactory"), "--format"),
            keep_truncated=keep_truncated,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json)
