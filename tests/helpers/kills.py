"""A run of `rollbook rl` that is killed and resumed, again and again, and compared with an untouched one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from helpers.equal_runs import differences
from helpers.places import REPOSITORY
from helpers.rl_runs import start_all
from helpers.self_kill import WATCH
from helpers.trainer import PATIENCE_S
from rollbook.records.checkpoints import read_checkpoints
from rollbook.rl.settings import RlSettings

TESTS = REPOSITORY / "tests"
ROLLBOOK = str(Path(sys.executable).with_name("rollbook"))


class KilledRun:
    """Each call but `end` is the life of one process. The first one starts the run, all others resume it."""

    def __init__(self, settings: RlSettings, *, words: tuple[str, ...] = ()) -> None:
        self.settings, self.root = settings, Path(settings.log_path)
        self.kills = self.stops = 0
        self._words = words  # of the next process
        self._metrics: set[bytes] = set()  # every line that was ever there

    def kill_at(self, moment: str, nth: int = 1, *, rank: int = 0) -> bool:
        """False if the run ended before this moment came."""
        return self._killed(None, rank, kill_at=moment, nth=nth)

    def kill_after(self, seconds: float, *, rank: int = 0) -> bool:
        return self._killed(seconds, rank)

    def stop_at(
        self, moment: str, nth: int = 1, *, rank: int = 0, how: signal.Signals = signal.SIGTERM
    ) -> bool:
        """Send one of its processes a signal at this moment, upon which all of them save and end.

        False if the run ended: because the moment did not come, or in the last iteration.
        """
        codes, output = self._live(None, rank, kill_at=moment, nth=nth, how=how)
        stopped = codes[0] == 130
        assert not any(codes[stopped:]), f"{codes}: {output}"
        assert stopped == ("checkpoint saved; --resume continues" in output), output
        self.stops += stopped
        return stopped

    def end(self, whole: Path, *, but: tuple[str, ...] = ()) -> None:
        """Resume to the good end: the run is now like the untouched one, and nothing was lost on the way.

        `but` are files that may differ.
        """
        codes, output = self._live(None, 0)
        assert not any(codes), f"{codes}: {output}"
        # A stop saves where nothing would be saved otherwise.
        more = [name for name in _checkpoints(self.root) if int(name) % self.settings.save_every]
        assert len(more) <= self.stops
        unlike = differences(self.root, whole, more_checkpoints=more)
        unlike = [line for line in unlike if not line.startswith(but)]
        assert not unlike, f"{unlike}: {output}"
        kept = set(_lines(self.root / "metrics.jsonl"))
        for tail in self.root.glob("superseded/*/metrics.jsonl.*"):
            kept.update(_lines(tail))
        assert self._metrics <= kept
        left = [path for path in self.root.rglob(".*") if path.name.endswith((".tmp", ".making"))]
        assert left == []

    def _killed(self, seconds: float | None, rank: int, **watched: Any) -> bool:
        codes, output = self._live(seconds, rank, **watched)
        killed = codes[rank] == -signal.SIGKILL
        assert killed or not any(codes), f"{codes}: {output}"
        self.kills += killed
        return killed

    def _live(self, seconds: float | None, rank: int, **watched: Any) -> tuple[list[int], str]:
        """The exit codes of one life and what was printed in it."""
        with ExitStack() as opened:
            started = start_all(self.settings, *self._words, rank=rank, **watched)
            trainers = [opened.enter_context(trainer) for trainer in started]
            if seconds is not None:
                time.sleep(seconds)
                trainers[rank].send_signal(signal.SIGKILL)
            if trainers[rank].wait() == -signal.SIGKILL:
                for trainer in trainers:
                    trainer.send_signal(signal.SIGTERM)  # as torchrun does
            codes = [trainer.wait() for trainer in trainers]
            output = "".join(trainer.output for trainer in trainers)
        self._words = ("--resume",)
        self._metrics.update(_lines(self.root / "metrics.jsonl"))
        return codes, output


class LaunchedRun(KilledRun):
    """The same with `rollbook rl`: its supervisor, torchrun, and the processes that this starts."""

    def __init__(self, settings: RlSettings, *, watched: Path | None = None) -> None:
        """`watched` is the directory that moments are named in, where it is not that of the run."""
        super().__init__(settings)
        self._watched = watched or self.root
        self._config = self.root.with_name(f"{self.root.name}-config.json")
        self._config.write_bytes(msgspec.json.encode(settings))

    def _live(self, seconds: float | None, rank: int, **watched: Any) -> tuple[list[int], str]:
        assert seconds is None
        paths = [str(TESTS / "helpers" / "at_start"), str(TESTS)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if watched:
            environment[WATCH] = json.dumps({"root": str(self._watched), "rank": rank, **watched})
        artifacts = self.root.parent / "artifacts"
        command = [ROLLBOOK, "rl", str(self._config), *self._words, "--artifacts", str(artifacts)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        self._words = ("--resume",)
        self._metrics.update(_lines(self.root / "metrics.jsonl"))
        output = done.stdout + done.stderr
        codes = [done.returncode] * self.settings.processes
        if f"process {rank} of this job was ended by SIGKILL" in output:
            codes[rank] = -signal.SIGKILL
        return codes, output


def moments_of(log: Path) -> Counter[str]:
    """How often each moment came."""
    return Counter(log.read_text().splitlines())


def _checkpoints(root: Path) -> list[str]:
    return [stored.record.name for stored in read_checkpoints(root / "checkpoints.jsonl")]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
