"""Two hundred shapes of secrets through all that a user gives rollbook: none is in a file that a run leaves.

They come by a config, a command, the environment, files that git does not know, a header, a URL, and a server
that repeats what it was sent; looked for are they in the files of a recorded command, a collection, a
fine-tuning and an RL run. What only looks like a secret is found again as it was.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from urllib.parse import quote

import pytest
import yaml
from aiohttp import web

from collecting import row, settings, write_rows
from fake_servers import chat_answer, serving
from helpers.rl_runs import settings_of, write_setup
from helpers.secret_shapes import ARGUMENTS, FILES, VARIABLES, YAML, Secrets, harmless
from rollbook import Run, Trajectory, open_run
from rollbook.collect.collect import collect
from rollbook.records import secret_values
from rollbook.records.redact_configs import redact_config
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.supervise import supervise
from tiny_model import write_config

ROLLBOOK = [sys.executable, "-m", "rollbook"]
KEY_VARIABLES = ["MY_KEY", "OPENAI_KEY", "AZURE_OPENAI_KEY", "TOGETHER_KEY", "WANDB_KEY"]
TRACKED = '{\n "headers": {\n  "X-Team": "@"\n }\n}\n'
TELL = """
import base64, json, os, sys, urllib.parse
told = sys.argv[2:] + [os.environ[name] for name in os.environ["TOLD"].split()]
for value in told:
    print("as it is:", value)
    print("in JSON:", json.dumps({"value": value}), json.dumps(json.dumps([value])))
    print("in a URL:", urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value))
    print("shown:", repr(value))
print(open(sys.argv[1]).read())
raise SystemExit("the end: " + " ".join(told))
"""


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_values, "_remembered", set())


def files_below(*roots: Path, but: str = ".git") -> Iterator[tuple[str, str]]:
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.is_file() and but not in path.parts:
                yield str(path.relative_to(root)), path.read_bytes().decode("utf-8", "replace")


def git(directory: Path, *words: str) -> None:
    words = ("-c", "user.email=a@b", "-c", "user.name=a", *words)
    subprocess.run(["git", *words], cwd=directory, check=True, capture_output=True)


def yaml_of(secrets: Secrets, where: str) -> str:
    return "".join(f"p{number}: {secrets.fill(part, where)}\n" for number, part in enumerate(YAML))


def echoing(number: int, sent: str) -> str:
    """A key as servers repeat it."""
    forms = [
        sent,
        json.dumps({"error": {"message": f"Incorrect API key provided: {sent}"}}),
        json.dumps(json.dumps({"error": sent})),
        quote(sent, safe=""),
        quote(sent, safe="").lower() if sent.isascii() else sent,
        repr(sent.encode()),
        f"<p>{sent.replace('&', '&amp;').replace('<', '&lt;')}</p>",
        "x" * (298 - len(sent) // 2) + sent,  # where the message is cut
    ]
    return forms[number % len(forms)]


class Echo:
    """Refuses with what it was sent, in another form each time; or answers, if told to, every second time."""

    def __init__(self, answer: str | None = None) -> None:
        self.answer, self.asked = answer, 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        number, self.asked = self.asked, self.asked + 1
        values = [
            value
            for name, value in request.headers.items()
            if name.startswith("X-") or name in ("Authorization", "Cookie")
        ]
        told = " ".join(echoing(number, value.removeprefix("Bearer ")) for value in values)
        if self.answer is not None and number % 2:
            return web.json_response(chat_answer(f"{told} {self.answer}"))
        return web.Response(text=told, status=401)


def test_there_are_enough_of_them() -> None:
    shapes = [*YAML, *ARGUMENTS, *VARIABLES, *FILES, *KEY_VARIABLES, *(echoing(n, "x") for n in range(8))]
    assert len(shapes) >= 150
    assert len(harmless()) >= 60


def test_a_recorded_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets, project = Secrets(), tmp_path / "project"
    project.mkdir()
    git(project, "init", "--quiet")
    for name in ("tracked.yaml", "gone.yml"):
        (project / name).write_text(yaml_of(secrets, "committed"))
    (project / "tracked.json").write_text(
        secrets.fill('{\n "headers": {\n  "X-A": "@"\n }\n}\n', "committed")
    )
    git(project, "add", "-A")
    git(project, "commit", "--quiet", "-m", "first")
    (project / "tracked.yaml").write_text("added: 1\n" + yaml_of(secrets, "edited"))
    (project / "tracked.json").write_text(secrets.fill(TRACKED, "edited"))
    (project / "gone.yml").unlink()
    for name, content in FILES.items():
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(secrets.fill(content, f"untracked {name}"), newline="")
    config = project / "config.yaml"
    config.write_text(yaml_of(secrets, "config"))
    for name, shape in VARIABLES:
        monkeypatch.setenv(name, secrets.fill(shape, f"variable {name}"))
    monkeypatch.setenv("TOLD", " ".join(name for name, _ in VARIABLES))
    words = [secrets.fill(word, "argument") for words in ARGUMENTS for word in words]
    job = Job(
        name="demo",
        command=[sys.executable, "-c", TELL, str(config), *words],
        artifacts=tmp_path / "artifacts",
        cwd=project,
        config_path=config,
        config=yaml.safe_load(config.read_text()),
        env={"SOME_OTHER_API_KEY": secrets.fill("@", "given variable")},
        extra={"told": words},
    )
    end = supervise(job, terminal=None)
    assert end.exit_code == 1
    found = secrets.found_in(files_below(tmp_path / "artifacts"))
    assert found == []
    log = next(path for path in (tmp_path / "artifacts").rglob("*.log")).read_text()
    assert log.count("in JSON: ") == len(words) + len(VARIABLES)
    archive = next((tmp_path / "artifacts" / "archives").iterdir())
    kept = yaml.safe_load((archive / "config.yaml").read_text())
    assert set(kept) == {f"p{number}" for number in range(len(YAML))}
    for name in ("tracked.yaml", "tracked.json", "gone.yml", "config.yaml", "code.py", "conf/two.yaml"):
        assert f"diff --git a/{name} b/{name}" in (archive / "code.diff").read_text()


def test_keys_that_a_collection_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets, said = Secrets(), []
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}") for number in range(8)))

    async def session(number: int, variable: str) -> None:
        policy_key = secrets.fill("k/@+=%&?", f"key in {variable}")
        judge_key = secrets.fill("@", "key of a judge")
        monkeypatch.setenv(variable, policy_key)
        monkeypatch.setenv(f"JUDGE_{variable}", judge_key)
        login = base64.b64encode(secrets.fill("me:@", "login in base64").encode()).decode()
        headers = {
            "X-Anything": secrets.fill("@", "header"),
            "X-Login": f"Basic {login}",
            "X-Cookie": secrets.fill("session=@; theme=dark", "cookie"),
        }
        async with serving(Echo("2")) as policy, serving(Echo("VERDICT: CORRECT")) as judge:
            env = {
                "name": "dataset",
                "grader": "judge",
                "judge": {"base_url": judge, "model": "j", "api_key_env": f"JUDGE_{variable}"},
            }
            asked = {"base_url": policy, "model": "m", "api_key_env": variable, "headers": headers}
            (tmp_path / "rollbook.yaml").write_text(
                yaml.safe_dump({"agents": {"a": {"env": env, "policy": asked}}})
            )
            words = (f"output_jsonl_fpath={tmp_path / f'out{number}.jsonl'}", "retry.judge=1")
            await asyncio.to_thread(in_its_own_thread, words)
        for name, text in files_below(tmp_path):
            assert login not in text or name == "rollbook.yaml"

    def in_its_own_thread(words: tuple[str, ...]) -> None:
        collect(settings(tmp_path, *words), log=said.append)

    for number, variable in enumerate(KEY_VARIABLES):
        asyncio.run(session(number, variable))
    (tmp_path / "rollbook.yaml").unlink()
    texts = list(files_below(tmp_path))
    assert sum(text.count("[redacted]") for _, text in texts) >= 40
    assert secrets.found_in([*texts, ("said", "\n".join(said))]) == []


class Judged:
    """A judge in a thread of its own, which repeats the key, and refuses every second time."""

    def __enter__(self) -> str:
        self._url: Queue[str] = Queue()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        return self._url.get(timeout=20)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        async with serving(Echo("VERDICT: CORRECT")) as url:
            self._url.put(url)
            await self._over.wait()


def test_an_rl_run_with_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollbook.rl.train import train

    secrets = Secrets()
    monkeypatch.setenv("MY_KEY", secrets.fill("@", "key of a judge"))
    monkeypatch.setenv("SOME_API_KEY", secrets.fill("@", "variable"))
    headers = {"X-Team": secrets.fill("@", "header of a judge")}
    setup, project = write_setup(tmp_path / "setup"), tmp_path / "project"
    project.mkdir()
    git(project, "init", "--quiet")
    (project / "own.yaml").write_text(yaml_of(secrets, "untracked"))
    monkeypatch.chdir(project)
    with Judged() as url:
        judge = {"base_url": url, "model": "j", "api_key_env": "MY_KEY", "headers": headers}
        environment = {
            "name": "dataset", "as": "vowels", "tasks": str(setup / "tasks.jsonl"), "grader": "judge",
            "judge": judge,
        }  # fmt: skip
        train(
            settings_of(
                setup,
                tmp_path / "run",
                environments=[environment],
                evals=[],
                iterations=2,
                retry={"judge": 1},
            )
        )
    texts = list(files_below(tmp_path / "run", project / "artifacts"))
    assert sum(text.count("[redacted]") for _, text in texts) >= 10
    assert secrets.found_in(texts) == []


def test_a_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets()
    config = write_config(tmp_path, training__num_train_epochs=1)
    content = yaml.safe_load(config.read_text())
    notes = "".join(f"    {line}\n" for line in yaml_of(secrets, "config").splitlines())
    config.write_text(yaml.safe_dump(content) + f"meta_info:\n  of_mine:\n{notes}")
    config.chmod(0o600)
    secret = secrets.fill("@", "variable")
    done = subprocess.run(
        [*ROLLBOOK, "sft", "config.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "SOME_API_KEY": secret},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = list(files_below(tmp_path / "artifacts"))
    assert secrets.found_in([*texts, ("printed", done.stdout + done.stderr)]) == []
    (archived,) = (tmp_path / "artifacts" / "archives").rglob("config.yaml")
    assert archived.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(archived.read_text())["runtime_info"]["input"] == content["runtime_info"]["input"]


def test_a_recorded_loop(tmp_path: Path) -> None:
    secrets = Secrets()
    config = yaml.safe_load(yaml_of(secrets, "config"))
    with Run(tmp_path, config=config, code=tmp_path) as run:
        told = json.dumps({name: value for name, value in config.items() if "note" not in str(value)})
        with run.rollouts(0) as rollouts, rollouts.group(0, task_id="t") as group:
            group.add(Trajectory.single_turn("q", told, 1.0, logs={"stdout": [told, {"again": told}]}))
            group.fail(ValueError(told))
        run.log_metrics({"note": told}, step=0)
        run.alert("odd", told)
    assert secrets.found_in(files_below(tmp_path)) == []


def test_what_only_looks_like_a_secret_stays(tmp_path: Path) -> None:
    text = "".join(f"{line}\n" for line in harmless())
    assert redact_config("config.yaml", text) == text
    assert redact_config("config.toml", text) == text
    config = yaml.safe_load(text)
    (tmp_path / "config.yaml").write_text(text)
    git(tmp_path, "init", "--quiet")
    job = Job(
        name="demo",
        command=[sys.executable, "-c", "print(open('config.yaml').read())", *harmless()],
        artifacts=tmp_path / "artifacts",
        cwd=tmp_path,
        config_path=tmp_path / "config.yaml",
        config=config,
    )
    supervise(job, terminal=None)
    archive = next((tmp_path / "artifacts" / "archives").iterdir())
    assert (archive / "config.yaml").read_text() == text
    assert json.loads((archive / "config.json").read_text()) == config
    assert json.loads((archive / "command.json").read_text())["command"][3:] == harmless()
    patch = (archive / "code.diff").read_text()
    assert [line for line in harmless() if f"+{line}\n" not in patch] == []
    log = next((tmp_path / "artifacts" / "logs").iterdir()).read_text()
    assert text in log
    run = Run(tmp_path / "run", config=config, code=tmp_path)
    with run, run.rollouts(0) as rollouts, rollouts.group(0, task_id="t") as group:
        group.add(Trajectory.single_turn(text, json.dumps(config), 1.0, logs={"stdout": harmless()}))
    (transcript,) = open_run(tmp_path / "run").transcripts()
    assert [message["content"] for message in transcript.messages] == [text, json.dumps(config)]
