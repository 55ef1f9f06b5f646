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


def rollout(choose: random.Random, turns: int) -> rollbook.Trajectory:
    messages = [{"role": "user", "content": f"What is {choose.randrange(100)} + {choose.randrange(100)}?"}]
    steps = []
    for turn in range(turns):
        messages.append({"role": "assistant", "content": f"I say {choose.randrange(200)} \u2028 <b>é</b>"})
        steps.append(
            rollbook.Step(ob_len=10 * turn + 7, ac_len=5, reward=choose.random(), metrics={"turn": turn})
        )
    stop = choose.choice(["stop", "length"])
    return rollbook.Trajectory(steps=steps, messages=messages, final_reward=choose.random(), stop_reason=stop)


def sample(run: rollbook.Run, iteration: int, split: str, weights: str) -> dict[str, float]:
    with run.rollouts(iteration, split) as rollouts:
        logtree.text(f"weights {weights}")
        for index in range(3):
            choose = random.Random(f"{weights} {split} {iteration} {index}")
            with rollouts.group(index, size=2) as group:
                group.add(rollout(choose, turns=1 + index))
                if choose.random() < 0.2:
                    group.fail(TimeoutError("the sampler did not answer"))
                else:
                    group.add(rollout(choose, turns=1))
    return rollouts.metrics()


def train(path: Path, iterations: int, layout: str) -> None:
    with rollbook.Run(
        path,
        config={"lr": 1e-5},
        total_iterations=iterations,
        layout=layout,
        resume=True,
        code=path.parent,  # no repository: what a checkout holds must not decide where kills land
    ) as run:
        weights = "initial"
        if run.resumed_from is not None:
            assert run.resumed_from.state_path is not None
            weights = (path / run.resumed_from.state_path / "weights").read_text()
        for i in range(run.next_iteration, iterations):
            metrics = sample(run, i, "eval/held out", weights) if i % 3 == 0 else {}
            metrics |= sample(run, i, "train", weights)
            if i % 4 == 1:
                run.alert("the loss is odd", f"at {i}", step=i)
                metrics["loss"] = float("nan")
            weights = hashlib.sha256(f"{weights} {i} {sorted(metrics.items())}".encode()).hexdigest()
            run.log_metrics(metrics, step=i)
            run.log_metrics({"weights/digest": int(weights[:8], 16)}, step=i)
            with run.checkpoint(f"{i + 1:06d}", batch=i + 1, final=i + 1 == iterations) as directory:
                (directory / "weights").write_text(weights)


if __name__ == "__main__":
    signal.alarm(120)  # whoever was to kill it is gone
    print("ready", flush=True)
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
