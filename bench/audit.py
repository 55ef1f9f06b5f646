"""The audit of a million rollouts beside one pass of msgspec over the same bytes.

A run of one-turn rollouts with 32 sampled tokens each is made with the writer that loops use: summaries,
transcripts with every token and logprob, iterations.jsonl with fates and steps, metrics. Then, in turn and
each in a process of its own, with the files in the page cache, in seconds of processor time, which neighbours
do not change:

- one pass: every line of every .jsonl file of the run is given to `msgspec.json.decode`, and forgotten;
- the audit: `rollbook.audit(run)`.

    python bench/audit.py                       # a million rollouts, rows into bench/RESULTS.md
    python bench/audit.py --rollouts 20000 --rounds 1 --dry

The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GROUP, TOKENS, PROMPT, VOCABULARY = 8, 32, 24, 50_000
WORDS = ["the", "answer", "is", "four", "because", "two", "and", "two", "are"]
MOST_TIMES, MOST_MEMORY = 2.0, 1 << 30

ONE_PASS = """
import msgspec
decode = msgspec.json.Decoder().decode
for path in sorted(root.rglob("*.jsonl")):
    with path.open("rb") as file:
        for line in file:
            decode(line)
            lines += 1
"""
AUDIT = """
import rollbook
audit = rollbook.audit(root)
assert audit.verdict == "balanced", audit.findings[:3]
lines = sum(place.rollouts for place in audit.places)
"""
MEASURE = """
import json, resource, sys, time
from pathlib import Path
root, lines = Path(sys.argv[1]), 0
began = time.process_time()
{body}
seconds = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "peak": peak, "lines": lines}}))
"""


def write_run(root: Path, rollouts: int, per_iteration: int) -> None:
    """The run: each iteration is recorded and finished as `rollbook rl` does it."""
    from rollbook import Run
    from rollbook.records.iterations import IterationRecord

    iterations, groups = rollouts // per_iteration, per_iteration // GROUP
    chance = random.Random(0)
    with Run(
        root, config=config_of(groups, iterations), total_iterations=iterations, num_groups_to_log=0
    ) as run:
        for i in range(iterations):
            rewards = sample(run, i, groups, chance)
            fates, steps = judged(rewards)
            run.finish_iteration(IterationRecord(split="train", iteration=i, rollouts=fates, steps=steps))
            run.log_metrics({**counts_of(fates, groups), **run_metrics.pop()}, step=i)


run_metrics: list[dict[str, float]] = []  # of the iteration that was just sampled


def sample(run: Any, i: int, groups: int, chance: random.Random) -> list[list[float]]:
    from rollbook.records.rollouts import Trajectory
    from rollbook.records.turns import Turn, Usage

    rewards = []
    with run.rollouts(i) as log:
        for index in range(groups):
            prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
            easy, own = chance.random(), []
            with log.group(index, task_id=f"task-{chance.randrange(5000)}", tags="sums", size=GROUP) as group:
                for _ in range(GROUP):
                    own.append(float(chance.random() < easy))
                    turn = Turn(
                        messages=[
                            {"role": "assistant", "content": " ".join(chance.choices(WORDS, k=TOKENS - 8))}
                        ],
                        reward=own[-1],
                        metrics={"correct": own[-1]},
                        prompt_token_ids=prompt,
                        token_ids=[chance.randrange(VOCABULARY) for _ in range(TOKENS)],
                        logprobs=[-chance.expovariate(1.2) for _ in range(TOKENS)],
                        temperature=1.0,
                        policy_version=i,
                        finish_reason="stop",
                        seed=chance.getrandbits(62),
                        usage=Usage(PROMPT, TOKENS),
                    )
                    asked = [{"role": "user", "content": "What is 17 + 25? Answer with the number alone."}]
                    group.add(Trajectory(prompt=asked, turns=[turn], stop_reason="stop"))
            rewards.append(own)
    run_metrics.append(log.metrics())
    return rewards


def judged(rewards: list[list[float]]) -> tuple[list[Any], list[Any]]:
    """The fate of each rollout, and one step over those that are trained, in micro-batches of 64."""
    from rollbook.records.iterations import Fate, RolloutFate, TrainRow, TrainStep

    fates, rows = [], []
    for index, own in enumerate(rewards):
        mean = sum(own) / GROUP
        for place, reward in enumerate(own):
            is_trained = min(own) < max(own)
            fate = Fate.TRAINED if is_trained else Fate.CONSTANT
            fates.append(RolloutFate(index, place, fate, reward - mean))
            if is_trained:
                rows.append(TrainRow(index, place))
    batches = [rows[start : start + 64] for start in range(0, len(rows), 64)]
    step = TrainStep(
        micro_batches=batches,
        learning_rate=1e-5,
        loss=0.01,
        grad_norm=0.5,
        trained_tokens=TOKENS * len(rows),
    )
    return fates, [step]


def counts_of(fates: list[Any], groups: int) -> dict[str, float]:
    trained = sum(fate.fate == "trained" for fate in fates)
    return {
        "groups/drawn": groups,
        "groups/trained": trained // GROUP,
        "rollouts/trained": trained,
        "tokens/sampled": TOKENS * len(fates),
        "tokens/trained": TOKENS * trained,
        "optim/steps": 1,
    }


def config_of(groups: int, iterations: int) -> dict[str, Any]:
    """The settings that say what there is to account for."""
    return {
        "seed": 0,
        "environments": [{"label": "sums", "weight": 1.0}],
        "groups_per_batch": groups,
        "group_size": GROUP,
        "oversample": 1.0,
        "iterations": iterations,
        "epochs": 1,
        "evals": [],
        "save_total_limit": None,
        "trainer": {},
    }


def measure(body: str, root: Path) -> dict[str, float]:
    code = MEASURE.format(body=body)
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    import msgspec
    from report import markdown_table, provenance, write_section

    import rollbook

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--per-iteration", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path, help="a run made before, or where to make and keep it")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = given.run or Path(name) / "run"
        if not root.exists():
            write_run(root, given.rollouts, given.per_iteration)
        size = sum(path.stat().st_size for path in root.rglob("*.jsonl"))
        sides: dict[str, list[dict[str, float]]] = {ONE_PASS: [], AUDIT: []}
        for body in sides:
            measure(body, root)  # the files are in the page cache from here on
        for _ in range(given.rounds):
            for body, found in sides.items():
                found.append(measure(body, root))
    seconds = {body: statistics.median(one["seconds"] for one in found) for body, found in sides.items()}
    peak = {body: max(one["peak"] for one in found) for body, found in sides.items()}
    ratio = seconds[AUDIT] / seconds[ONE_PASS]
    rollouts = int(sides[AUDIT][0]["lines"])
    goals = f"at most {MOST_TIMES:g} times: {'met' if ratio <= MOST_TIMES else 'missed'}; "
    goals += f"under 1 GB: {'met' if peak[AUDIT] < MOST_MEMORY else 'missed'}"
    rows = [
        [
            label,
            f"{seconds[body]:.2f} s",
            f"{size / seconds[body] / 1e6:,.0f} MB/s",
            f"{peak[body] >> 20:,} MB",
            *more,
        ]
        for label, body, more in (
            ("one pass of msgspec over every line", ONE_PASS, ["1.00x", ""]),
            ("rollbook audit", AUDIT, [f"{ratio:.2f}x", goals]),
        )
    ]
    versions = {"rollbook": rollbook.__version__, "msgspec": msgspec.__version__}
    table = markdown_table(["side", "processor time", "speed", "peak memory", "ratio", "goals"], rows)
    body = (
        f"## Audit (`bench/audit.py`)\n\n{provenance(versions, given.rounds)}\n\n{table}\n\n"
        f"{rollouts:,} rollouts of one turn and {TOKENS} tokens, {given.per_iteration:,} per iteration: "
        f"{size / 1e9:.2f} GB in summaries, transcripts, iterations.jsonl and metrics.jsonl. The pass "
        "decodes every line into Python objects and forgets it. The audit also takes the digest of every "
        "file, compares summaries, transcripts, fates and micro-batches rollout by rollout, and counts the "
        "metrics again. Both run in one process, with the files in the page cache.\n"
    )
    print(body)
    if not given.dry:
        write_section("audit", body)
    print(json.dumps({"ratio": ratio, "seconds": seconds[AUDIT], "peak": peak[AUDIT], "rollouts": rollouts}))


if __name__ == "__main__":
    main()
