"""The common way to mix rollouts, step by step as guides show it: load all, sample, shuffle, write.

python bench/data_mix_script.py OUTPUT TOTAL name=file:share ...
"""

from __future__ import annotations

import json
import random
import sys


def main() -> None:
    output, total, *sources = sys.argv[1:]
    mixed = []
    for source in sources:
        name, _, rest = source.partition("=")
        path, _, share = rest.rpartition(":")
        with open(path) as file:  # noqa: PTH123
            loaded = [json.loads(line) for line in file]
        wanted = int(int(total) * float(share))
        taken = random.sample(loaded, min(wanted, len(loaded)))
        mixed.extend(taken)
        print(f"{name}: {len(taken)} of {len(loaded)}")
    random.shuffle(mixed)
    with open(output, "w") as file:  # noqa: PTH123
        for rollout in mixed:
            file.write(json.dumps(rollout) + "\n")


if __name__ == "__main__":
    main()
