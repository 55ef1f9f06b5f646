"""A training loop that starts, or goes on from its newest checkpoint, and can be killed anywhere.

    python training_process.py LOG_PATH ITERATIONS LAYOUT

Everything it records follows from the iteration and from the "weights", which are what the last checkpoint
said plus one digest an iteration: a resume that loses or repeats anything ends with other weights.
"""

from __future__ import annotations

import hashlib
import random
import signal
import sys
from pathlib import Path

import rollbook
from rollbook import logtree
from rollbook.records.iterations import Fate, IterationRecord, RolloutFate
from rollbook.records.turns import Turn


def rollout(choose: random.Random, turns: int) -> rollbook.Trajectory:
    prompt = [{"role": "user", "content": f"What is {choose.randrange(100)} + {choose.randrange(100)}?"}]
    return rollbook.Trajectory(
        prompt=prompt,
        turns=[
            Turn(
                messages=[
                    {"role": "assistant", "content": f"I say {choose.randrange(200)} \u2028 <b>é</b>"},
                    {"role": "user", "content": "Sure?"},
                ],
                reward=choose.random(),
                metrics={"turn": turn},
                logs={"expected": choose.randrange(9)},
                prompt_token_ids=[1, 2 + turn],
                token_ids=[choose.randrange(100) for _ in range(5)],
                logprobs=[-choose.random() for _ in range(5)],
                policy_version=turn,
            )
            for turn in range(turns)
        ],
        final_reward=choose.random(),
        stop_reason=choose.choice(["stop", "length"]),
    )


def sample(run: rollbook.Run, iteration: int, split: str, weights: str) -> dict[str, float]:
    groups = list(range(3))
    random.SystemRandom().shuffle(groups)  # rollouts finish in any order
    with run.rollouts(iteration, split) as rollouts:
        logtree.text(f"weights {weights}")
        for index in groups:
            choose = random.Random(f"{weights} {split} {iteration} {index}")
            with rollouts.group(index, task_id=f"t{index}", size=2) as group:
                logtree.text(f"group {index}")
                ended = [rollout(choose, turns=1 + index), rollout(choose, turns=1)]
                if choose.random() < 0.2:
                    group.fail(TimeoutError("the sampler did not answer"), 1)
                else:
                    group.add(ended[1], 1)
                group.add(ended[0], 0)
    return rollouts.metrics()


def train(path: Path, iterations: int, layout: str) -> None:
    random.seed(7)
    with rollbook.Run(
        path,
        config={"lr": 1e-5},
        total_iterations=iterations,
        layout=layout,
        resume=True,
        code=path.parent,  # no repository: what a checkout holds must not decide where kills land
    ) as run:
        exports = run.append_log("token_exports/rank_0.jsonl")
        weights = "initial"
        if run.resumed_from is not None:
            assert run.resumed_from.state_path is not None
            weights = (path / run.resumed_from.state_path / "weights").read_text()
        for i in range(run.next_iteration, iterations):
            if i % 3 == 1:  # after the checkpoint, of an iteration before it
                sample(run, i - 1, "eval/late", weights)
            metrics = sample(run, i, "eval/held out", weights) if i % 3 == 0 else {}
            metrics |= sample(run, i, "train", weights)
            if i % 4 == 1:
                run.alert("the loss is odd", f"at {i}", step=i)
                metrics["loss"] = float("nan")
            exports.append(b'{"step": %d, "weights": "%s"}' % (i, weights.encode()))
            weights = hashlib.sha256(
                f"{weights} {i} {random.random()} {sorted(metrics.items())}".encode()
            ).hexdigest()
            if i % 2:
                fates = [RolloutFate(group, 0, Fate.TRAINED, 0.5) for group in range(3)]
                record = IterationRecord(split="train", iteration=i, rollouts=fates, weights_digest=weights)
                run.finish_iteration(record)
            run.log_metrics(metrics, step=i)
            run.log_metrics({"weights/digest": int(weights[:8], 16)}, step=i)
            with run.checkpoint(f"{i + 1:06d}", batch=i + 1, final=i + 1 == iterations) as directory:
                (directory / "weights").write_text(weights)


if __name__ == "__main__":
    signal.alarm(120)  # whoever was to kill it is gone
    print("ready", flush=True)
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
