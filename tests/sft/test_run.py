"""A whole fine-tuning by the command: it learns, leaves the source's files, hands over, and can be used."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import preloaded
from rollbook.cli.main import main
from rollbook.runs.divergence import DivergedError
from rollbook.sft.preview import preview
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config


def rollbook(directory: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = preloaded.run("rollbook", *words, cwd=directory)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sft")
    config = write_config(directory, training__save_total_limit=2, training__eval_steps=20)
    before = config.read_text()
    done = rollbook(directory, "sft", "config.yaml")
    (directory / "printed").write_text(done.stdout)
    (directory / "before").write_text(before)
    return directory


def output(directory: Path) -> Path:
    return directory / "artifacts" / "model" / "demo"


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output(directory) / "trainer_log.jsonl").read_text().splitlines()]


def test_a_tiny_model_learns(finished: Path) -> None:
    losses = [line["loss"] for line in log_of(finished) if "loss" in line]
    assert len(losses) == 60
    assert losses[0] > 5.0
    assert losses[-1] < 0.5
    results = json.loads((output(finished) / "train_results.json").read_text())
    assert results["train_loss"] == pytest.approx(sum(losses) / len(losses))


def test_the_tree_is_that_of_the_source(finished: Path) -> None:
    names = {path.name for path in output(finished).iterdir()}
    assert names >= {
        "checkpoint-60", "trainer_log.jsonl", "trainer_state.json", "train_results.json", "all_results.json",
        "training_loss.png",
    }  # fmt: skip
    assert (finished / "artifacts" / "index.yaml").exists()
    (log,) = (finished / "artifacts" / "logs").glob("demo_*.log")
    assert "\r" not in log.read_text()
    assert (output(finished) / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    saved = sorted(path.name for path in output(finished).glob("checkpoint-*"))
    assert "checkpoint-60" in saved and len(saved) <= 3  # two, and the best one if it is another


def test_keys_are_those_the_dashboards_read(finished: Path) -> None:
    train = next(line for line in log_of(finished) if "loss" in line)
    assert set(train) >= {
        "current_steps", "total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time",
        "throughput", "total_tokens",
    }  # fmt: skip
    state = json.loads((output(finished) / "trainer_state.json").read_text())
    assert set(state) >= {
        "best_global_step", "best_metric", "best_model_checkpoint", "epoch", "eval_steps", "global_step",
        "is_hyper_param_search", "is_local_process_zero", "is_world_process_zero", "log_history",
        "logging_steps", "max_steps", "num_input_tokens_seen", "num_train_epochs", "save_steps",
        "stateful_callbacks", "total_flos", "train_batch_size", "trial_name", "trial_params",
    }  # fmt: skip
    assert state["global_step"] == state["max_steps"] == 60
    assert [point["step"] for point in state["log_history"] if "eval_loss" in point] == [20, 40, 60]
    assert set(state["log_history"][0]) >= {"step", "epoch", "loss", "grad_norm", "learning_rate"}
    evaluated = next(point for point in state["log_history"] if "eval_loss" in point)
    assert set(evaluated) >= {
        "epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "step",
    }  # fmt: skip
    results = json.loads((output(finished) / "all_results.json").read_text())
    assert set(results) >= {"epoch", "train_loss", "train_runtime", "train_samples_per_second", "total_flos"}
    assert results["eval_loss"] < 1.0


def test_the_trainer_of_transformers_reads_the_state(finished: Path) -> None:
    from transformers.trainer_callback import TrainerState

    for place in (output(finished), output(finished) / "checkpoint-60"):
        state: Any = TrainerState.load_from_json(str(place / "trainer_state.json"))
        assert state.global_step == state.max_steps == 60 and state.best_metric is not None


def test_only_the_output_block_of_the_config_changed(finished: Path) -> None:
    after = yaml.safe_load((finished / "config.yaml").read_text())
    handed = after["runtime_info"]["output"]
    assert handed["checkpoint_path"] == "artifacts/model/demo/checkpoint-60"
    assert handed["training_metrics"]["total_steps"] == 60
    before = yaml.safe_load((finished / "before").read_text())
    assert after["runtime_info"]["input"] == before["runtime_info"]["input"]
    assert (finished / "config.yaml").read_text().startswith("# what we train\n")


def test_status_and_history_say_so(finished: Path) -> None:
    status = json.loads(rollbook(finished, "status", "--json").stdout)
    assert status["status"] == "completed" and status["kind"] == "sft"
    assert status["progress"]["step"] == 60 and status["progress"]["trend"] == "falling"
    (record,) = json.loads(rollbook(finished, "history", "--json").stdout)
    assert record["checkpoint"]["step"] == 60


def test_the_checkpoint_loads_in_transformers_and_answers(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = output(finished) / "checkpoint-60"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is")
    assert answer[-1] == tokenizer.eos_token_id  # it learned to stop
    for file in path.iterdir():
        assert file.stat().st_mode & stat.S_IROTH, file


def test_a_directory_with_a_run_in_it_is_refused(finished: Path) -> None:
    before = sorted(path.name for path in output(finished).iterdir())
    refused = rollbook(finished, "sft", "config.yaml", check=False)
    assert refused.returncode == 2
    assert "--resume continues from step 60, --overwrite sets aside" in refused.stderr
    both = rollbook(finished, "sft", "config.yaml", "--resume", "--overwrite", check=False)
    assert both.returncode == 2 and "choose one" in both.stderr
    assert sorted(path.name for path in output(finished).iterdir()) == before


def test_overwrite_leaves_what_is_not_ours_in_an_absolute_directory(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "x"
    config = write_config(
        tmp_path, training__max_steps=2, training__save_steps=1, training__output_dir=str(there)
    )
    train(load_settings(config), tmp_path / "artifacts", log=lambda _: None)
    assert len(list(there.glob("checkpoint-*"))) == 2
    (there / "notes.txt").write_text("mine")
    rollbook(tmp_path, "sft", "config.yaml", "training.max_steps=1", "--overwrite")
    assert (there / "notes.txt").read_text() == "mine"
    assert [path.name for path in there.glob("checkpoint-*")] == ["checkpoint-1"]
    lines = [json.loads(line) for line in (there / "trainer_log.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "loss" in line]) == 1
    assert not (tmp_path / "artifacts" / "model").exists()


def test_a_dry_run_shows_the_mask_and_leaves_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    shown = rollbook(tmp_path, "sft", "config.yaml", "--dry-run").stdout
    assert "[[It is 0.<|im_end|>]]" in shown
    assert "60 of 60 rows" in shown and "60 steps; packing on" in shown
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_counts_the_steps_of_all_processes(tmp_path: Path) -> None:
    config = write_config(tmp_path, training__num_train_epochs=1)
    assert preview(load_settings(config)).total_steps == 15
    assert preview(load_settings(config, ["processes=2"])).total_steps == 8


def test_on_and_off_are_words_also_in_yaml(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    settings = load_settings(config, ["data.packing=off", "model.compile=on"])
    assert (settings.data.packing, settings.model.compile) == ("off", "on")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.learning_rat=1", "did you mean 'learning_rate'?"),
        ("training.save_steps=0", "save_steps: must be at least 1"),
        ("data.train=missing.jsonl", "missing.jsonl: no such file"),
        ("model.path=somewhere", "give exactly one of path (a directory), from"),
        ("data.train=[]", "data.train is empty"),
        ("training.output_dir=..", "output_dir '..' has no name of its own"),
        ("training.learning_rate=-1", "learning_rate: must be at least 0"),
        ("model.lora={rank: 4, alpha: 0}", "model.lora.alpha"),
        ("data.eval=[]", "data.eval is empty"),
        ("model.lora={rank: 4}", "adapters are saved without the weights below them; set path"),
    ],
)
def test_bad_settings_are_named_before_anything_happens(
    tmp_path: Path,
    word: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sft", "config.yaml", "training.eval_steps=2", word])
    assert ended.value.code in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "artifacts").exists()


def test_a_run_whose_gradients_burst_says_so_and_leaves_them_out(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        training__max_steps=4,
        training__save_steps=3,
        training__learning_rate=1e30,
        training__warmup_steps=1,
        data__eval=[],
    )
    said: list[str] = []
    with pytest.raises(DivergedError, match="the last optimiser step was not finite"):
        train(load_settings(config), tmp_path / "artifacts", resume=False, log=said.append)
    assert sum(line.startswith("NOT FINITE: step ") for line in said) == 3
    output = tmp_path / "artifacts/model/demo"
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    assert [line.get("nonfinite") for line in lines[1:4]] == [["grad_norm"]] * 3
    assert len((output / "alerts.jsonl").read_text().splitlines()) == 4  # and one for the run
    saved = json.loads((output / "checkpoint-3/training_state.json").read_text())
    assert saved["sft"]["progress"]["skipped_steps"] == 2
    assert saved["sft"]["progress"]["left_out"] == [2, 3]
