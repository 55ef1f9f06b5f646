"""A small synthetic run: arithmetic problems, a policy that gets better, and everything that goes wrong.

It is made with the public API alone, and holds one of each thing a reader must cope with: single- and
multi-turn rollouts, reasoning, tool calls, truncation, failures, a NaN, an evaluation, checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollbook.records.layout import Layout
from rollbook.records.rollouts import Step, Trajectory
from rollbook.runs.run import Run

GROUP_SIZE = 4


@dataclass
class SampleConfig:
    model_name: str = "synthetic/arithmetic"
    learning_rate: float = 4e-5
    group_size: int = GROUP_SIZE
    groups_per_batch: int = 6
    iterations: int = 10
    seed: int = 0


def write_sample_run(
    path: Path,
    *,
    config: SampleConfig | None = None,
    layout: Layout | str = Layout.FLAT,
    on_iteration: Callable[[int], None] = lambda _: None,
) -> None:
    config = config or SampleConfig()
    with Run(path, config=config, total_iterations=config.iterations, layout=layout) as run:
        for iteration in range(run.next_iteration, config.iterations):
            metrics = {"optim/lr": config.learning_rate}
            if iteration % 4 == 0:
                metrics |= _sample(run, config, iteration, split="eval/test")
            metrics |= _sample(run, config, iteration, split="train")
            skill = _skill(config, iteration)
            metrics |= {
                "entropy": 0.9 - 0.5 * skill,
                "kl_sample_train_v1": 0.002,
                "kl_sample_train_v2": 0.001,
            }
            if iteration == 3:
                metrics["kl_sample_train_v2"] = float("nan")
                run.alert("KL is not finite", "one of 24 sequences had no overlap with the policy", step=3)
            run.log_metrics(metrics, step=iteration)
            if (iteration + 1) % 5 == 0 or iteration + 1 == config.iterations:
                final = iteration + 1 == config.iterations
                with run.checkpoint(f"{iteration + 1:06d}", batch=iteration + 1, final=final) as directory:
                    (directory / "skill.txt").write_text(f"{skill}\n")
            on_iteration(iteration)


def _skill(config: SampleConfig, iteration: int) -> float:
    return 0.2 + 0.7 * iteration / max(1, config.iterations - 1)


def _sample(run: Run, config: SampleConfig, iteration: int, split: str) -> dict[str, float]:
    skill = _skill(config, iteration)
    with run.rollouts(iteration, split) as rollouts:
        for index in range(config.groups_per_batch):
            random_number = random.Random(f"{config.seed} {split} {iteration} {index}")
            a, b = random_number.randint(2, 99), random_number.randint(2, 99)
            tags = ["calculator" if index % 3 == 2 else "mental"]
            with rollouts.group(index, task_id=f"add-{a}-{b}", tags=tags, size=config.group_size) as group:
                for place in range(config.group_size):
                    if iteration == 2 and index == 1 and place == 3:
                        group.fail(TimeoutError("the sampler did not answer within 60 s"), place)
                    else:
                        group.add(_rollout(a, b, skill, random_number, with_tool=index % 3 == 2), place)
    return rollouts.metrics()


def _rollout(a: int, b: int, skill: float, chance: random.Random, *, with_tool: bool) -> Trajectory:
    question = {"role": "user", "content": f"What is {a} + {b}? End with 'Answer: <number>'."}
    right = chance.random() < skill
    truncated = chance.random() < 0.1
    value = a + b if right else a + b + chance.choice([-10, -1, 1, 10])
    answer = f"{a} plus {b} makes" if truncated else f"{a} + {b} = {value}\nAnswer: {value}"
    reward = float(right and not truncated)
    said = {
        "role": "assistant",
        "content": answer,
        "reasoning_content": f"Add the tens, then the ones of {a}.",
    }
    last = Step(
        ob_len=24,
        ac_len=len(answer) // 3,
        reward=reward,
        metrics={"correct": reward, "format_parse": float(not truncated)},
        logs={"expected": a + b, "given": None if truncated else value},
    )
    stop_reason = "length" if truncated else "stop"
    if not with_tool:
        return Trajectory(steps=[last], messages=[question, said], stop_reason=stop_reason)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "calculator", "arguments": f'{{"expression": "{a} + {b}"}}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": str(value)}
    first = Step(ob_len=24, ac_len=18, reward=0.0)
    last.ob_len = 61
    return Trajectory(
        steps=[first, last], messages=[question, call, result, said], stop_reason=stop_reason, final_ob_len=80
    )
