"""Makes the rows of the data benchmark: rollouts of about 2 KB in `rollouts_chunk_NN.jsonl`, task after task.

    python bench/data_rows.py DIRECTORY --rows 1000000 --chunks 100

Tasks have four repeats each. The text differs from row to row, so nothing gains from looking alike.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

REPEATS = 4
_WORDS = """
    the of and to in that we first then so because number equation solve divide multiply add take
    result check answer therefore value both sides given hence which x y sum product remainder \\frac
""".split()  # noqa: SIM905
_TEXTS = 512
_ANSWER_CHARACTERS, _QUESTION_CHARACTERS = 880, 360


def rows(count: int, seed: int = 1) -> Iterator[str]:
    generator = random.Random(seed)
    answers = [_text(generator, _ANSWER_CHARACTERS) for _ in range(_TEXTS)]
    questions = [_text(generator, _QUESTION_CHARACTERS) for _ in range(_TEXTS)]
    draw = generator.random
    for index in range(count):
        task, repeat = divmod(index, REPEATS)
        reward = 1.0 if draw() < 0.2 + 0.6 * (task % 97) / 97 else 0.0
        tokens = int(200 + 300 * draw())
        answer = answers[int(draw() * _TEXTS)]
        yield (
            f'{{"_rb_key":"task-{task:07d}#{repeat}","_ng_task_index":{task},"_ng_rollout_index":{repeat},'
            f'"reward":{reward},"responses_create_params":{{"input":[{{"role":"user","content":'
            f'"{questions[task % _TEXTS]} {task}"}}],"temperature":0.7,"max_output_tokens":512}},'
            f'"response":{{"id":"resp_{index:08d}","object":"response","created_at":1790000000.25,'
            f'"model":"instant","status":"completed","incomplete_details":null,"error":null,"output":['
            f'{{"type":"message","role":"assistant","status":"completed","content":[{{"type":"output_text",'
            f'"text":"{answer} {draw()}","annotations":[]}}]}}],"tools":[],"tool_choice":"auto",'
            f'"parallel_tool_calls":true,"usage":{{"input_tokens":120,"input_tokens_details":'
            f'{{"cached_tokens":0}},"output_tokens":{tokens},"output_tokens_details":'
            f'{{"reasoning_tokens":0}},"total_tokens":{tokens + 120}}}}},"stop_reason":"stop","num_turns":1,'
            f'"correct":{"true" if reward else "false"},"task_id":"task-{task:07d}"}}\n'
        )


def _text(generator: random.Random, length: int) -> str:
    words = " ".join(generator.choices(_WORDS, k=length // 2))
    return json.dumps(words[:length].rstrip("\\"))[1:-1]


def make_chunks(directory: Path, count: int, chunks: int) -> list[Path]:
    """The rows in equal consecutive pieces, as `split -l` leaves them."""
    directory.mkdir(parents=True, exist_ok=True)
    source = rows(count)
    paths = []
    for chunk in range(chunks):
        path = directory / f"rollouts_chunk_{chunk:02d}.jsonl"
        wanted = count * (chunk + 1) // chunks - count * chunk // chunks
        with path.open("w", encoding="utf-8") as file:
            file.writelines(next(source) for _ in range(wanted))
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the rows of the data benchmark.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chunks", type=int, default=100)
    arguments = parser.parse_args()
    make_chunks(arguments.directory, arguments.rows, arguments.chunks)


if __name__ == "__main__":
    main()
