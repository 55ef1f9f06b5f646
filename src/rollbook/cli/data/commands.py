"""One function per verb of `rollbook data`, with its options.

A verb returns the call to make; `verb` adds `--overwrite` and `--json`, shows progress, makes the call and
prints what came of it. Heavy imports stay inside the functions, so no verb pays for those of another.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rollbook.cli.data import results
from rollbook.cli.data.verb import Call, verb
from rollbook.data.shares import Shortfall

Inputs = Annotated[list[str], typer.Argument(help="files, directories or 'globs'")]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="the new dataset: .jsonl, .jsonl.zst or .parquet")
]
PassReward = Annotated[float, typer.Option(help="a rollout passes with at least this reward")]
KeepTruncated = Annotated[
    bool, typer.Option("--keep-truncated", help="include answers cut off by a limit of tokens or turns")
]
Seed = Annotated[int, typer.Option(help="the same seed gives the same bytes")]


@verb("merging", lines=results.of_merge, exit_code=results.exit_code_of_merge)
def merge(
    inputs: Inputs,
    output: Output,
    ordered: Annotated[bool, typer.Option("--ordered", help="by task and repeat, not as they come")] = False,
    duplicates: Annotated[
        Literal["error", "first"],
        typer.Option(help="where a key is there twice: stop, or keep its first row"),
    ] = "error",
    tasks: Annotated[
        Path | None, typer.Option(help="what was to be collected: for the coverage, and for --ordered")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="how often each of --tasks was to be collected; by default as the manifests say"),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="exit with 0 even if rollouts are missing")
    ] = False,
) -> Call:
    """Merge files and check the whole: rollbook data merge 'rollouts_chunk_*.jsonl' -o rollouts.jsonl"""
    from rollbook.data.merge import Duplicates, merge

    chosen = Duplicates(duplicates)
    return partial(merge, inputs, output, ordered=ordered, duplicates=chosen, tasks=tasks, repeats=repeats)


@verb("mix", lines=results.of_mix)
def mix(
    sources: Annotated[
        list[str], typer.Argument(metavar="NAME=PATH[,PATH...]:SHARE ...", help="the shares sum to 1")
    ],
    output: Output,
    total: Annotated[
        int | None, typer.Option(min=1, help="rows of the mix; by default as many as the shares allow")
    ] = None,
    seed: Seed = 0,
    shortfall: Annotated[
        Shortfall,
        typer.Option(help="where a source has too few rows: stop, take less of all, or repeat its rows"),
    ] = Shortfall.ERROR,
    source_key: Annotated[str, typer.Option(help="the field that names the source on every row")] = "source",
) -> Call:
    """Mix in exact shares: rollbook data mix good=a.jsonl:0.7 hard=b.jsonl:0.3 --total 10000 -o m.jsonl"""
    from rollbook.data.mix import mix

    options: dict[str, Any] = {"total": total, "seed": seed, "shortfall": shortfall, "source_key": source_key}
    return partial(mix, sources, output, **options)


@verb("filter", lines=results.of_filter)
def filter(
    inputs: Inputs,
    where: Annotated[
        str, typer.Option(help="SQL, such as 'reward >= 0.8 and turns < 4 and row.answer is not null'")
    ],
    output: Output,
    rejected: Annotated[Path | None, typer.Option(help="a file for the rows that are left out")] = None,
) -> Call:
    """Keep the rows for which a condition holds: SQL over the columns of `rollouts` (see query --schema).

    Any other field is row.a.b[0], for texts row->>'$.a.b[0]'. A row that has no answer (a missing field, a
    text where a number should be) is not kept and is counted as unanswerable.
    """
    from rollbook.data.filter import filter_rows

    return partial(filter_rows, inputs, output, where=where, rejected=rejected)


@verb("split", lines=results.of_split)
def split(
    words: Annotated[list[str], typer.Argument(help="files, directories or 'globs', then train=0.9 val=0.1")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the directory of train.jsonl, val.jsonl")],
    by: Annotated[
        str, typer.Option(help="what stays together: task, row (nothing does), or a field")
    ] = "task",
    seed: Seed = 0,
) -> Call:
    """Split rows by task, so that the repeats of a task are all in one part.

    Shares are exact over tasks, to the nearest whole one. A name may have an ending: train.jsonl.zst=0.9.
    """
    from rollbook.data.split import parse_shares, split

    inputs, shares = parse_shares(words)
    return partial(split, inputs, shares, output, by=by, seed=seed)


@verb("dedup", lines=results.of_dedup)
def dedup(
    inputs: Inputs,
    output: Output,
    on: Annotated[
        str | None, typer.Option(help="what to compare: task, prompt or a field; the whole row by default")
    ] = None,
    near: Annotated[
        float | None, typer.Option(help="also texts as similar as this, such as 0.8 (Jaccard, 5-word runs)")
    ] = None,
    rejected: Annotated[
        Path | None,
        typer.Option(help="a file for the repeated rows, each with the key of the row it repeats"),
    ] = None,
) -> Call:
    """Keep the first of equal, or with --near nearly equal, rows; keys, ids and times of collecting aside."""
    from rollbook.data.dedup import dedup

    return partial(dedup, inputs, output, on=on, near=near, rejected=rejected)


@verb("sampling")
def sample(
    inputs: Inputs,
    output: Output,
    count: Annotated[int | None, typer.Option("-n", "--count", help="how many")] = None,
    fraction: Annotated[float | None, typer.Option(help="or which share of them, such as 0.1")] = None,
    by_task: Annotated[
        bool, typer.Option("--by-task", help="whole tasks with all their repeats; -n counts tasks")
    ] = False,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="not in the order of the input")] = False,
    seed: Seed = 0,
) -> Call:
    """Take a uniform sample without replacement: rollbook data sample rollouts.jsonl -n 1000 -o some.jsonl"""
    from rollbook.data.sample import sample

    options: dict[str, Any] = {"count": count, "fraction": fraction, "by_task": by_task}
    return partial(sample, inputs, output, **options, shuffle=shuffle, seed=seed)


@verb("stats", has_output=False, lines=results.of_stats)
def stats(
    inputs: Inputs,
    field: Annotated[
        list[str] | None, typer.Option("-f", "--field", help="only these, such as metrics.score; repeatable")
    ] = None,
) -> Call:
    """Rows, tasks, coverage and failures; of every number its count, mean, deviation and quantiles.

    Without --field: the reward, the numbers at the top of a row and the token counts of the response.
    """
    from rollbook.data.stats import stats

    return partial(stats, inputs, fields=field or ())


@verb("profile", lines=results.of_profile)
def profile(
    inputs: Inputs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="one line per task: .jsonl, .jsonl.zst or .parquet")
    ] = None,
    pass_reward: PassReward = 1.0,
    k: Annotated[
        list[int] | None,
        typer.Option("-k", min=1, help="a k of pass@k; repeatable; powers of two by default"),
    ] = None,
    band: Annotated[
        str | None, typer.Option(help="a curriculum: only tasks whose pass rate is in, for example, 0.1..0.9")
    ] = None,
) -> Call:
    """Pass rate, pass@k, reward and lengths of every task; without -o, the summary alone."""
    from rollbook.data.profile import Band, profile

    options: dict[str, Any] = {"ks": k or (), "band": Band.parse(band) if band else None}
    return partial(profile, inputs, output, pass_reward=pass_reward, **options)


@verb("sft")
def sft(
    inputs: Inputs,
    output: Output,
    min_reward: Annotated[float | None, typer.Option(help="leave out rollouts below this reward")] = None,
    best_of: Annotated[
        int | None, typer.Option(min=1, help="keep at most this many of each task, the best first")
    ] = None,
    as_format: Annotated[
        Literal["messages", "llamafactory"],
        typer.Option("--format", help="messages, or llamafactory (sharegpt with dataset_info.json)"),
    ] = "messages",
    keep_truncated: KeepTruncated = False,
) -> Call:
    """Prompt, reasoning, tool calls and results of good rollouts, as conversations."""
    from rollbook.data.sft import sft

    options: dict[str, Any] = {"min_reward": min_reward, "best_of": best_of, "as_format": as_format}
    return partial(sft, inputs, output, **options, keep_truncated=keep_truncated)


@verb("pairs", lines=results.of_pairs)
def pairs(
    inputs: Inputs,
    output: Output,
    min_gap: Annotated[float, typer.Option(min=0, help="the least difference in reward")] = 0.0,
    per_task: Annotated[int, typer.Option(min=1, help="the most pairs of one task")] = 1,
    as_format: Annotated[
        Literal["trl", "llamafactory"], typer.Option("--format", help="trl or llamafactory")
    ] = "trl",
    keep_truncated: KeepTruncated = False,
    allow_different_graders: Annotated[
        bool,
        typer.Option(
            "--allow-different-graders",
            help="also answers that different graders graded, as the manifests of the inputs say",
        ),
    ] = False,
) -> Call:
    """A better and a worse answer to the same prompt, for DPO and similar methods."""
    from rollbook.data.pairs import pairs

    options: dict[str, Any] = {"min_gap": min_gap, "per_task": per_task, "as_format": as_format}
    options |= {"keep_truncated": keep_truncated, "allow_different_graders": allow_different_graders}
    return partial(pairs, inputs, output, **options)


@verb("rl")
def rl(
    inputs: Inputs,
    output: Output,
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, help="the file the tasks came from; its rows are kept as they are"),
    ] = None,
    pass_reward: PassReward = 1.0,
    band: Annotated[
        str | None, typer.Option(help="only tasks whose pass rate is in, for example, 0.1..0.9")
    ] = None,
) -> Call:
    """One row per task, with the pass rate its rollouts showed."""
    from rollbook.data.profile import Band
    from rollbook.data.rl import rl

    chosen = Band.parse(band) if band else None
    return partial(rl, inputs, output, tasks=tasks, pass_reward=pass_reward, band=chosen)


@verb("reverify", lines=results.of_reverify, exit_code=results.exit_code_of_reverify)
def reverify(
    inputs: Inputs,
    output: Output,
    agent: Annotated[
        str | None, typer.Option(help="grade with the environment of this agent of rollbook.yaml")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="name=..., then settings as key=value; repeatable: --env name=dataset --env grader=exact"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="where the agents are; rollbook.yaml by default")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also an environment that does not say it is stateless")
    ] = False,
    pass_reward: PassReward = 1.0,
) -> Call:
    """Run the grader on stored responses, to a new file, with a table of what changed.

    Stopped or killed, the same command resumes. Lines of a failures file that hold a reply become rows.
    """
    from rollbook.collect.regrade import environment_of, regrade

    chosen = environment_of(agent, env or [], config)
    return partial(regrade, inputs, output, chosen, force=force, pass_reward=pass_reward)
