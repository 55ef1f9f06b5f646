"""One run of the real loop: every file of the source is there, valid, and says the same as the others."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from helpers.equal_runs import differences
from helpers.metric_docs import documented_keys
from helpers.rl_runs import config_of, settings_of, write_setup
from helpers.source_document import run_in, snippet
from rollbook.errors import UsageError
from rollbook.records.complete import is_complete
from rollbook.records.iterations import Fate, IterationRecord
from rollbook.rl.groups import examples_of
from rollbook.rl.opening import optimizer_settings
from rollbook.rl.settings import load_settings
from rollbook.rl.train import RlResult, train
from rollbook.rollouts.types import Episode
from rollbook.train.batch import ExampleKey, packed_batch
from rollbook.train.engine import Engine
from rollbook.train.loading import load_model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.state import load_training_state, weights_digest

ITERATIONS, EVERY, SAVE_EVERY = 21, 10, 5  # the snippets read iterations 10 and 20
GROUPS, SIZE = 4, 4
DOCUMENTED = {
    "progress/batch",
    "progress/done_frac",
    "env/all/reward/total",
    "env/all/correct",
    "ac_tokens_per_turn",
    "entropy",
    "kl_sample_train_v1",
    "kl_sample_train_v2",
    "optim/lr",
    "time/total",
}

SUMMARY = {
    "schema_version", "split", "iteration", "group_idx", "traj_idx", "tags", "sampling_client_step",
    "total_reward", "final_reward", "trajectory_metrics", "final_ob_len", "steps",
}  # fmt: skip


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def result(setup: Path) -> RlResult:
    evals = [
        {"name": "test", "environment": "vowels", "tasks": str(setup / "held-out.jsonl"), "every": EVERY}
    ]
    config = config_of(
        setup, setup / "run", iterations=ITERATIONS, save_every=SAVE_EVERY, evals=evals, learning_rate=1e-3
    )
    return rollbook.rl(config, log=lambda _: None)


@pytest.fixture(scope="module")
def run(result: RlResult) -> Path:
    return result.log_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_records(run: Path) -> list[IterationRecord]:
    return [record for record in rollbook.open_run(run).finished_iterations() if record.split == "train"]


def test_every_file_of_the_source_is_there(run: Path) -> None:
    names = {entry.name for entry in run.iterdir()}
    wanted = {"metrics.jsonl", "config.json", "checkpoints.jsonl", "code.diff", "run.json", "alerts.jsonl",
              "iterations.jsonl", "checkpoints", "stalls.jsonl"}  # fmt: skip
    bases = [f"train_iteration_{i:06d}" for i in range(ITERATIONS)]
    bases += [f"eval_test_iteration_{i:06d}" for i in (0, 10, 20, 21)]
    for base in bases:
        wanted |= {f"{base}{end}" for end in (".html", "_logtree.json", "_rollout_summaries.jsonl")}
        wanted.add(f"{base}_transcripts.jsonl")
    assert names - {".lock"} == wanted


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.seen[tag] += 1


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        assert set(node) >= {"tag", "attrs", "children"}
        yield node
        for child in node["children"]:
            yield from nodes(child)
    else:
        assert isinstance(node, str)


def test_every_file_is_what_the_source_says(run: Path) -> None:
    for path in run.glob("*_rollout_summaries.jsonl"):
        for line in lines(path):
            assert set(line) >= SUMMARY
            assert line["tags"] == ["vowels"]
            assert line["sampling_client_step"] == line["iteration"]  # the version of the policy
            assert [step["step_idx"] for step in line["steps"]] == list(range(len(line["steps"])))
            assert line["steps"][-1]["episode_done"] is True
    for path in run.glob("*_logtree.json"):
        tree = json.loads(path.read_text())
        assert set(tree) >= {"title", "started_at", "path", "root"}
        data = [node["data"]["type"] for node in nodes(tree["root"]) if "data" in node]
        assert "conversation" in data
    for path in run.glob("*.html"):
        tags = _Tags()
        tags.feed(path.read_text())
        assert tags.seen["html"] == tags.seen["body"] == 1
    config = json.loads((run / "config.json").read_text())
    assert config["loss"] == {"name": "importance_sampling"} and config["group_size"] == SIZE


def test_the_report_has_the_verdict_and_the_parts_of_the_reward(run: Path) -> None:
    text = json.dumps(json.loads((run / "train_iteration_000010_logtree.json").read_text()))
    for word in ("Trajectory Details", "reward", "correct"):
        assert word in text
    assert {f"Group {index}" for index in range(GROUPS)} <= set(re.findall(r"Group \d+", text))
    conversations = sum(
        node.get("data", {}).get("type") == "conversation"
        for node in nodes(json.loads((run / "train_iteration_000010_logtree.json").read_text())["root"])
    )
    assert conversations == 2 * SIZE


def test_the_snippets_of_the_source_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    shutil.copytree(run, tmp_path / "path" / "to", ignore=shutil.ignore_patterns("checkpoints"))
    check = "\nprint(df['progress/batch'].tolist(), df['env/all/reward/total'].notna().sum())"
    printed = run_in(tmp_path, snippet("metrics") + check)
    assert printed.split("\n")[0] == f"{list(range(ITERATIONS + 1))} {ITERATIONS}"
    check = "\nprint(len(trajectories), {len(t['steps']) for t in trajectories})"
    assert run_in(run, snippet("summaries") + check) == f"{GROUPS * SIZE} {{1}}\n"
    printed = run_in(run, snippet("logtree"))
    assert "user: " in printed and "assistant: " in printed


def test_the_metrics_have_the_names_of_the_source(run: Path) -> None:
    rows = lines(run / "metrics.jsonl")
    assert [row["progress/batch"] for row in rows] == list(range(ITERATIONS + 1))
    assert [row["progress/done_frac"] for row in rows[:-1]] == pytest.approx(
        [(i + 1) / ITERATIONS for i in range(ITERATIONS)]
    )
    assert all(set(row) >= DOCUMENTED for row in rows[:-1])
    assert set(rows[-1]) >= {"test/env/all/reward/total", "progress/batch"}


def test_every_key_of_the_docs_is_measured_and_every_measured_key_is_in_the_docs(run: Path) -> None:
    measured = {key for row in lines(run / "metrics.jsonl") for key in row}
    assert documented_keys() - measured == set()
    own = {key for key in measured if not re.match(r"(test/)?env/|test/", key)}
    assert own - documented_keys() == {"step", "logged_at"}


def test_the_noise_floor_is_measured_on_the_first_and_every_tenth_iteration(run: Path) -> None:
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "noise_floor/k3" in row] == [0, 10, 20]
    assert [row["noise_floor/outside"] for row in rows if "noise_floor/outside" in row] == [0.0] * 3


def test_the_means_are_those_of_the_rollouts(run: Path) -> None:
    for row in lines(run / "metrics.jsonl")[:-1]:
        summaries = lines(run / f"train_iteration_{row['step']:06d}_rollout_summaries.jsonl")
        rewards = [line["total_reward"] for line in summaries]
        assert row["env/all/reward/total"] == pytest.approx(sum(rewards) / len(rewards))
        lengths = [step["ac_len"] for line in summaries for step in line["steps"]]
        assert row["ac_tokens_per_turn"] == pytest.approx(sum(lengths) / len(lengths))
        cut = sum(line["stop_reason"] == "length" for line in summaries)
        assert (row["truncated/count"], row["tokens/sampled"]) == (cut, sum(lengths))


def test_the_fate_of_every_rollout_is_told(run: Path) -> None:
    assert balanced_books(run) == {Fate.TRAINED, Fate.CONSTANT}


def balanced_books(run: Path) -> set[Fate]:
    """Each rollout has one fate, and what was trained is what the steps say; returns the fates there are."""
    metrics = lines(run / "metrics.jsonl")
    seen: set[Fate] = set()
    for record in train_records(run):
        summaries = lines(run / f"train_iteration_{record.iteration:06d}_rollout_summaries.jsonl")
        places = [(line["group_idx"], line["traj_idx"]) for line in summaries]
        assert places == [(group, index) for group in range(GROUPS) for index in range(SIZE)]
        assert record.rollouts is not None and record.steps is not None
        assert [(fate.group_idx, fate.traj_idx) for fate in record.rollouts] == places
        rewards = dict(zip(places, (line["total_reward"] for line in summaries), strict=True))
        for fate in record.rollouts:
            group = [rewards[fate.group_idx, index] for index in range(SIZE)]
            assert fate.advantage == pytest.approx(rewards[fate.group_idx, fate.traj_idx] - sum(group) / SIZE)
            assert (fate.fate is Fate.CONSTANT) == (len(set(group)) == 1)
        trained = {(f.group_idx, f.traj_idx) for f in record.rollouts if f.fate is Fate.TRAINED}
        for step in record.steps:
            rows = [(row.group_idx, row.traj_idx) for batch in step.micro_batches for row in batch]
            assert sorted(rows) == sorted(trained)
        row = metrics[record.iteration]
        assert row["rollouts/trained"] == len(trained)
        assert row["groups/trained"] == len({group for group, _ in trained})
        seen.update(fate.fate for fate in record.rollouts)
    return seen


def test_t25_what_was_cut_off_has_its_reward_and_is_trained_as_the_settings_say(
    setup: Path, tmp_path: Path
) -> None:
    masked = tmp_path / "masked"
    train(settings_of(setup, masked, truncated="mask", iterations=3), log=lambda _: None)
    assert Fate.TRUNCATED in balanced_books(masked)
    for record in train_records(masked):
        told = {(line.group_idx, line.traj_idx): line
                for line in rollbook.open_run(masked).rollouts(record.iteration, "train")}  # fmt: skip
        for fate in record.rollouts or ():
            line = told[fate.group_idx, fate.traj_idx]
            assert line.total_reward is not None and line.status == "ok"
            if fate.fate is not Fate.CONSTANT:
                assert (fate.fate is Fate.TRUNCATED) == (line.stop_reason == "length")


def test_an_evaluation_before_an_iteration_stands_in_its_line_and_the_last_in_a_line_of_its_own(
    run: Path, result: RlResult
) -> None:
    rows = lines(run / "metrics.jsonl")
    key = "test/env/all/reward/total"
    assert [row["step"] for row in rows if key in row] == [0, 10, 20, 21]
    assert len(rows) == ITERATIONS + 1 and "env/all/reward/total" not in rows[-1]
    for row in rows:
        if key in row:
            summaries = lines(run / f"eval_test_iteration_{row['step']:06d}_rollout_summaries.jsonl")
            assert row[key] == pytest.approx(sum(line["total_reward"] for line in summaries) / 6)
            assert {line["split"] for line in summaries} == {"eval/test"}
            assert {line["sampling_client_step"] for line in summaries} == {row["step"]}
    assert result.evals == {"test": rows[-1][key]}
    assert result.reward == rows[-2]["env/all/reward/total"]


def test_nothing_is_trained_on_that_an_evaluation_holds_out(run: Path) -> None:
    reader = rollbook.open_run(run)
    trained = {line.task_id for line in reader.rollouts(split="train")}
    held_out = {line.task_id for line in reader.rollouts(split="eval/test")}
    assert len(held_out) == 6 and trained.isdisjoint(held_out)


def test_a_checkpoint_is_a_model_that_others_load(run: Path, result: RlResult) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = [line["name"] for line in lines(run / "checkpoints.jsonl")]
    assert stored == ["000005", "000010", "000015", "000020", "000021"]
    assert all(is_complete(run / "checkpoints" / name, verify=True) for name in stored)
    assert result.checkpoint == run / "checkpoints/000021"
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert model(torch.tensor([tokenizer.encode("abc")])).logits.isfinite().all()
    last = train_records(run)[-1].weights_digest
    settings = load_settings(run / "config.json")
    again = load_model(settings.model, seed=0, dtype=torch.float32, checkpoint=result.checkpoint)
    assert weights_digest(again) == last


def test_a_step_can_be_computed_again_from_the_record_alone(run: Path) -> None:
    """From a checkpoint, the transcripts and iterations.jsonl to the weights after the next iteration."""
    i = 2 * SAVE_EVERY
    settings = load_settings(run / "config.json")
    checkpoint = run / f"checkpoints/{i:06d}"
    model = load_model(settings.model, seed=0, dtype=torch.float32, checkpoint=checkpoint)
    model.use_packing(True)
    optimizer = Optimizer(model.parameters(), optimizer_settings(settings))
    load_training_state(checkpoint, model, optimizer)
    engine = Engine(model, optimizer, Processes(), entropy=True)

    (record,) = [record for record in train_records(run) if record.iteration == i]
    fates = {(fate.group_idx, fate.traj_idx): fate for fate in record.rollouts or ()}
    rows = {}
    for told in rollbook.open_run(run).transcripts(i, "train"):
        place = (told.group_idx, told.traj_idx)
        if fates[place].fate is Fate.TRAINED:
            key = ExampleKey("train", i, *place)
            for part in examples_of(Episode(prompt=[], turns=told.to_turns()), fates[place].advantage, key):
                rows[*place, part.key.part] = part
    for step in record.steps or ():
        batches = [
            packed_batch([rows[row.group_idx, row.traj_idx, row.part] for row in batch])
            for batch in step.micro_batches
        ]
        made = engine.step(batches, settings.loss, step.learning_rate)
        assert (made.loss, made.grad_norm) == (step.loss, step.grad_norm)
    assert weights_digest(model) == record.weights_digest


def test_two_environments_with_weights(setup: Path, tmp_path: Path) -> None:
    vowels = {"name": "dataset", "as": "vowels", "tasks": str(setup / "tasks.jsonl"), "grader": "contains"}
    sums = {"name": "arithmetic", "as": "sums", "digits": 1, "prompt": "{problem}", "weight": 0.5}
    evals = [
        {"name": "words", "environment": "vowels", "tasks": 4},
        {"name": "sums", "environment": "sums", "tasks": 3, "samples": 2},
    ]
    settings = settings_of(
        setup, tmp_path / "run", environments=[vowels, sums], evals=evals, groups_per_batch=12, group_size=2
    )
    train(settings, log=lambda _: None)
    rows = lines(tmp_path / "run/metrics.jsonl")
    drawn: Counter[str] = Counter()
    for row in rows[:-1]:
        summaries = lines(tmp_path / f"run/train_iteration_{row['step']:06d}_rollout_summaries.jsonl")
        for name in ("vowels", "sums"):
            rewards = [line["total_reward"] for line in summaries if line["tags"] == [name]]
            drawn[name] += len(rewards) // 2
            assert row[f"env/{name}/reward/total"] == pytest.approx(sum(rewards) / len(rewards))
            assert row[f"env/{name}/rollouts/ok"] == len(rewards)
            assert f"env/{name}/correct" in row
        assert row["env/all/rollouts/expected"] == 24
    assert drawn.total() == 72 and 36 < drawn["vowels"] < 60  # two of three
    assert rows[0]["words/env/all/rollouts/ok"] == 4 and rows[-1]["sums/env/all/rollouts/ok"] == 6
    tasks = {
        (line.tags[0], line.split, line.task_id) for line in rollbook.open_run(tmp_path / "run").rollouts()
    }
    held_out = {(tag, task) for tag, split, task in tasks if split != "train"}
    assert held_out.isdisjoint((tag, task) for tag, split, task in tasks if split == "train")


def test_an_iteration_draws_more_groups_than_it_trains(setup: Path, tmp_path: Path) -> None:
    train(settings_of(setup, tmp_path / "run", oversample=2.0, iterations=3), log=lambda _: None)
    for record, row in zip(
        train_records(tmp_path / "run"), lines(tmp_path / "run/metrics.jsonl"), strict=False
    ):
        by_group: dict[int, set[Fate]] = {}
        for fate in record.rollouts or ():
            by_group.setdefault(fate.group_idx, set()).add(fate.fate)
        assert len(by_group) == row["groups/drawn"] == 8
        mixed = [index for index, fates in by_group.items() if fates & {Fate.TRAINED, Fate.SURPLUS}]
        assert [index for index in mixed if by_group[index] == {Fate.TRAINED}] == mixed[:4]
        assert (row["groups/trained"], row["groups/surplus"]) == (min(4, len(mixed)), max(0, len(mixed) - 4))
        assert row["env/all/rollouts/expected"] == 32


def test_every_group_that_was_drawn_is_counted_once(setup: Path, tmp_path: Path) -> None:
    """Where what was cut off is dropped, whole groups go; the audit counts them, too."""
    dropping = {"truncated": "drop", "oversample": 2.0, "group_size": 2, "iterations": 3}
    train(settings_of(setup, tmp_path / "run", **dropping), log=lambda _: None)
    rows = lines(tmp_path / "run/metrics.jsonl")[:-1]
    for row in rows:
        counts = {key: value for key, value in row.items() if key.startswith("groups/")}
        assert sum(counts.values()) == 2 * counts["groups/drawn"] == 2 * 8
    assert all(row["groups/truncated"] > 0 for row in rows)
    audit = rollbook.audit(tmp_path / "run")
    assert (audit.verdict, audit.findings) == ("balanced", [])


def test_no_iterations_are_evaluations_only(setup: Path, tmp_path: Path) -> None:
    result = train(settings_of(setup, tmp_path / "run", iterations=0), log=lambda _: None)
    assert result.checkpoint is None and result.evals.keys() == {"test"}
    assert [row["step"] for row in lines(tmp_path / "run/metrics.jsonl")] == [0]
    assert not list((tmp_path / "run").glob("train_*"))


def test_the_files_of_an_iteration_may_be_in_a_directory_of_its_own(setup: Path, tmp_path: Path) -> None:
    nested = {"layout": "nested", "iterations": 2}
    train(settings_of(setup, tmp_path / "run", **nested), log=lambda _: None)
    train(
        settings_of(setup, tmp_path / "run", **(nested | {"iterations": 3})), resume=True, log=lambda _: None
    )
    directories = {path.name for path in (tmp_path / "run").glob("iteration_*")}
    assert directories == {f"iteration_{i:06d}" for i in range(4)}  # the last is the evaluation's
    assert (tmp_path / "run/iteration_000002/train_transcripts.jsonl").exists()
    assert not list((tmp_path / "run").glob("train_*"))
    reader = rollbook.open_run(tmp_path / "run")
    assert len(list(reader.rollouts(split="train"))) == 3 * GROUPS * SIZE
    with pytest.raises(UsageError, match="settings changed since it was started: layout: 'nested' -> 'flat'"):
        train(settings_of(setup, tmp_path / "run", iterations=4), resume=True, log=lambda _: None)


def test_a_finished_run_is_resumed_to_the_same_files_and_not_to_fewer_iterations(
    setup: Path, tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    train(settings_of(setup, run, iterations=4), log=lambda _: None)
    shutil.copytree(run, copy)
    train(settings_of(setup, run, iterations=4), resume=True, log=lambda _: None)
    assert differences(run, copy) == []
    with pytest.raises(UsageError, match="has done 4 iterations; iterations: 3 would take some back"):
        train(settings_of(setup, run, iterations=3), resume=True, log=lambda _: None)
    assert differences(run, copy) == []
    train(settings_of(setup, run, iterations=3), resume="000002", log=lambda _: None)
    assert [record.iteration for record in train_records(run)] == [0, 1, 2]


def test_what_is_waited_for_is_named_and_changes_nothing_else(setup: Path, tmp_path: Path) -> None:
    said: list[str] = []
    train(settings_of(setup, tmp_path / "slow", iterations=2, stall_after_s=1e-3), log=said.append)
    train(settings_of(setup, tmp_path / "other", iterations=2), log=lambda _: None)
    stalls = lines(tmp_path / "slow/stalls.jsonl")
    assert any(text.startswith("STALL in iteration 0: ") for text in said)
    assert {stall["stage"] for stall in stalls} >= {"iteration 0", "iteration 1", "eval/test"}
    assert re.fullmatch(r"group \d, rollout \d \(.*\)", stalls[-1]["waiting"][0]["name"])
    unlike = differences(tmp_path / "slow", tmp_path / "other")
    assert [line.partition(":")[0] for line in unlike] == ["config.json"]
