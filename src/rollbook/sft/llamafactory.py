"""`engine: llamafactory`: the same settings, trained by LLaMA-Factory's own command.

Every setting becomes the key that means the same there, or is refused by its name; none is dropped. The keys
are written to `llamafactory.yaml` in the output directory, from data converted as `lf_data.py` says, and the
command is supervised like any other: history, log and handoff come from the files it leaves.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollbook.data.llamafactory import dataset_name
from rollbook.errors import UsageError
from rollbook.records.atomic import make_directory, write_atomic
from rollbook.runs.divergence import MOST
from rollbook.runs.jobs.finish import record_result, why_diverged
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import RunEnd, Status
from rollbook.runs.launch import GRACE_S
from rollbook.sft.lf_data import lf_directory, lf_file, write_lf_data
from rollbook.sft.places import LF_ARGUMENTS, set_aside_run
from rollbook.sft.settings import SftSettings, TrainingSettings

FINISHER = "rollbook.sft.llamafactory:record_llamafactory_result"  # for its Job
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
_PLACEHOLDERS = ("IMAGE_PLACEHOLDER", "VIDEO_PLACEHOLDER", "AUDIO_PLACEHOLDER")
# The keys of its YAML that follow from our settings: `llamafactory.arguments` must not say otherwise.
_FOLLOWS_FROM = {
    "stage": "`rollbook sft`", "do_train": "`rollbook sft`", "do_predict": "`rollbook sft`",
    "resume_from_checkpoint": "--resume", "overwrite_output_dir": "--overwrite",
    "plot_loss": "`rollbook sft`", "run_name": "name", "output_dir": "training.output_dir",
    "model_name_or_path": "model.path", "bf16": "model.dtype", "fp16": "model.dtype",
    "torch_compile": "model.compile", "disable_gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing": "model.gradient_checkpointing", "finetuning_type": "model.lora",
    "lora_rank": "model.lora.rank", "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout", "lora_target": "model.lora",
    "dataset": "data.train", "eval_dataset": "data.eval", "val_size": "data.eval", "do_eval": "data.eval",
    "dataset_dir": "data.train", "tokenized_path": "data.train", "streaming": "data.train",
    "mix_strategy": "data.train[].weight", "interleave_probs": "data.train[].weight",
    "cutoff_len": "data.max_length", "mask_history": "data.train_on", "train_on_prompt": "data.train_on",
    "packing": "data.packing", "neat_packing": "data.packing", "template": "llamafactory.template",
    "eval_strategy": "training.eval_steps", "evaluation_strategy": "training.eval_steps",
    "save_strategy": "training.save_steps", "logging_strategy": "training.logging_steps",
    "per_device_eval_batch_size": "training.per_device_train_batch_size",
    **{name: f"training.{name}" for name in TrainingSettings.__struct_fields__ if name != "output_dir"},
}  # fmt: skip


def llamafactory_job(
    settings: SftSettings,
    artifacts: Path,
    config: Path,
    *,
    resume_from: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Job:
    """Convert the data, set aside a run that is not resumed, write its YAML, and say what is to be run."""
    check_supported(settings)
    data = write_lf_data(settings, artifacts)
    log(f"LLaMA-Factory cuts rows off after {settings.data.max_length} tokens, and does not count them")
    for part in (data.train, data.eval):
        if part is not None:
            log(f"{part.path.name}: {part.report.summary()}")
            if not part.report.samples:
                raise UsageError(f"{part.path}: nothing to learn from is left; {part.report.summary()}")
            _refuse_plain_text(settings, part.report.plain_text)
    directory = settings.output_dir(artifacts)
    path = directory.absolute() / LF_ARGUMENTS
    if settings.processes > 1 and any(character.isspace() for character in str(path)):
        raise UsageError(
            f"{path}: LLaMA-Factory's launcher of several processes takes no path with spaces; "
            "choose another training.output_dir"
        )
    make_directory(directory)
    if resume_from is None and (kept := set_aside_run(directory)):
        log(f"the files of the run that was here are now in {kept}")
    arguments = llamafactory_arguments(settings, artifacts, resume_from=resume_from)
    write_atomic(path, yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True).encode())
    return Job(
        name=settings.run_name,
        command=[*_command(settings), "train", str(path)],
        env=llamafactory_environment(settings),
        artifacts=artifacts,
        kind="sft",
        config=msgspec.to_builtins(settings),
        config_path=config.absolute(),
        output_dir=directory.absolute(),
        resumed_from=str(resume_from) if resume_from else None,
        grace_s=GRACE_S,
        finisher="rollbook.sft.llamafactory:record_llamafactory_result",
    )


def llamafactory_environment(settings: SftSettings) -> dict[str, str]:
    """What its launcher reads from the environment, beside what is there already."""
    beside = str(Path(_command(settings)[0]).parent)  # it starts `torchrun` by name, which is there
    return {
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "NPROC_PER_NODE": str(settings.processes),
        "FORCE_TORCHRUN": "1" if settings.processes > 1 else "0",
        "USE_V1": "0",  # its second trainer, with other keys
        # The data is text: `<image>` in it is a word, not a place for a picture.
        **{name: f"<|no_{name.partition('_')[0].lower()}|>" for name in _PLACEHOLDERS},
    }


def record_llamafactory_result(job: Job, started: Started, end: RunEnd) -> None:
    """As for any job, once its weights can be read by whoever can read the rest of the directory.

    Its safetensors are written for their owner alone, and the next stage may run as somebody else.
    """
    if job.output_dir is not None and (job.output_dir / LF_ARGUMENTS).exists():
        readers = (job.output_dir / LF_ARGUMENTS).stat().st_mode & 0o444
        for pattern in ("*.safetensors", "checkpoint-*/*.safetensors"):
            for weights in job.output_dir.glob(pattern):
                weights.chmod(weights.stat().st_mode | readers)
        _judge_numbers(job, job.output_dir, end)
    record_result(job, started, end)


def _judge_numbers(job: Job, directory: Path, end: RunEnd) -> None:
    """It goes on where nothing is finite any more, and ends with 0."""
    most = (job.config or {}).get("training", {}).get("max_nonfinite_steps", MOST)
    why = why_diverged(directory, most, "training.max_nonfinite_steps")
    if end.status is Status.COMPLETED and why is not None:
        end.status, end.exit_code, end.reason = Status.FAILED, 1, why


def llamafactory_arguments(
    settings: SftSettings, artifacts: Path, *, resume_from: Path | None = None
) -> dict[str, Any]:
    """The whole YAML; nothing is written."""
    return {
        **_model(settings),
        **_data(settings, artifacts),
        **_training(settings),
        **_files(settings, artifacts, resume_from),
        **settings.llamafactory.arguments,
    }


def check_supported(settings: SftSettings) -> None:
    """Settings without a counterpart there, by name, with what to write instead; and its absence."""
    _command(settings)
    for key in settings.llamafactory.arguments:
        if key in _FOLLOWS_FROM:
            raise UsageError(f"llamafactory.arguments.{key} follows from {_FOLLOWS_FROM[key]}; set that")
    if settings.trackers is not None:
        raise _refusal("trackers", "set llamafactory.arguments.report_to")
    _refuse_data(settings)
    model = settings.model
    if model.config is not None:
        raise _refusal("model.config", "it starts from weights in a directory: set model.path")
    if model.tokenizer is not None and model.tokenizer != model.path:
        raise _refusal("model.tokenizer", "it takes the tokenizer of model.path; put it there")
    if model.chat_template is not None:
        raise _refusal("model.chat_template", "it has templates of its own: set llamafactory.template")
    if model.lora is not None and model.lora.alpha is not None and model.lora.alpha != int(model.lora.alpha):
        raise _refusal(f"model.lora.alpha {model.lora.alpha}", "it takes a whole number")
    if model.dtype == "float32" and _has_gpu():
        raise _refusal(
            "model.dtype float32", "on a GPU it loads weights in half precision: write bfloat16, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES="
        )  # fmt: skip
    _weights(settings)


def _refuse_data(settings: SftSettings) -> None:
    data = settings.data
    if data.too_long == "drop":
        raise _refusal("data.too_long drop", "it cuts off what is too long: leave that to it, or truncate")
    for place, dataset in enumerate(data.train):
        if dataset.weight != int(dataset.weight):
            raise _refusal(
                f"data.train[{place}].weight {dataset.weight}",
                "every epoch would see the same part: make that part with `rollbook data sample`",
            )


def _model(settings: SftSettings) -> dict[str, Any]:
    model, lora = settings.model, settings.model.lora
    made: dict[str, Any] = {
        "model_name_or_path": str(_weights(settings)),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if lora is None else "lora",
        "bf16": model.dtype == "bfloat16",
        "disable_gradient_checkpointing": not model.gradient_checkpointing,
    }
    if model.compile == "on":
        made["torch_compile"] = True
    if lora is not None:
        alpha = 2 * lora.rank if lora.alpha is None else int(lora.alpha)
        made |= {"lora_rank": lora.rank, "lora_alpha": alpha, "lora_dropout": lora.dropout}
        made["lora_target"] = "all"
    return made


def _weights(settings: SftSettings) -> Path:
    model = settings.model
    if model.handed_over is not None:
        from rollbook.runs.handoff import resolve_checkpoint

        path, setting = Path(resolve_checkpoint(Path(model.handed_over))), "model.from"
    else:
        path, setting = Path(str(model.path)), "model.path"
    if not path.is_dir():
        raise UsageError(f"{setting}: {path}: no such directory")
    if (path / "adapter_config.json").exists():
        raise _refusal(f"{setting} {path}", "these are adapters: `llamafactory-cli export` merges them first")
    return path.absolute()


def _data(settings: SftSettings, artifacts: Path) -> dict[str, Any]:
    data = settings.data
    made: dict[str, Any] = {
        "dataset": dataset_name(lf_file(settings, artifacts, "train")),
        "dataset_dir": str(lf_directory(artifacts).absolute()),
        "template": settings.llamafactory.template,
        "cutoff_len": data.max_length,
        "mask_history": data.train_on == "last",
        "packing": data.packing == "on",
        "neat_packing": data.packing == "on",  # else packed samples see each other
    }
    if data.eval:
        made |= {"eval_dataset": dataset_name(lf_file(settings, artifacts, "eval")), "do_eval": True}
    return made


def _training(settings: SftSettings) -> dict[str, Any]:
    training = settings.training
    plain = (
        "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps",
        "save_steps", "seed",
    )  # fmt: skip
    made: dict[str, Any] = {name: getattr(training, name) for name in plain}
    made["lr_scheduler_type"] = _SCHEDULES[training.lr_scheduler_type]
    if training.warmup_steps is None:
        made["warmup_ratio"] = training.warmup_ratio
    else:
        made["warmup_steps"] = training.warmup_steps
    for name in ("max_steps", "save_total_limit"):
        if getattr(training, name) is not None:
            made[name] = getattr(training, name)
    if settings.data.eval:
        made["per_device_eval_batch_size"] = training.per_device_train_batch_size
        if training.eval_steps is not None:
            made |= {"eval_strategy": "steps", "eval_steps": training.eval_steps}
    return made


def _files(settings: SftSettings, artifacts: Path, resume_from: Path | None) -> dict[str, Any]:
    directory = settings.output_dir(artifacts).absolute()
    made: dict[str, Any] = {
        "output_dir": str(directory),
        "run_name": settings.run_name,
        "plot_loss": True,
        "report_to": "none",
        "include_num_input_tokens_seen": True,
    }
    # Told outright: left to itself it resumes whatever it finds, whether or not it was asked to.
    if resume_from is None:
        return made | {"overwrite_output_dir": True}
    return made | {"resume_from_checkpoint": str(resume_from.absolute())}


def _command(settings: SftSettings) -> list[str]:
    words = shlex.split(settings.llamafactory.command)
    found = shutil.which(str(Path(words[0]).expanduser())) if words else None
    if found is None:
        raise UsageError(
            f"llamafactory.command {settings.llamafactory.command!r}: not found. Install LLaMA-Factory in an "
            "environment of its own (python -m venv lf; lf/bin/pip install llamafactory) and set "
            "llamafactory.command to its lf/bin/llamafactory-cli"
        )
    return [str(Path(found).absolute()), *words[1:]]


def _refuse_plain_text(settings: SftSettings, rows: int) -> None:
    if rows and settings.llamafactory.template != "empty":
        raise UsageError(
            f"{rows} rows are a plain prompt and its completion, and llamafactory.template "
            f"{settings.llamafactory.template!r} would write roles around them: set it to empty"
        )


def _has_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def _refusal(setting: str, why: str) -> UsageError:
    return UsageError(f"{setting} is not supported by engine: llamafactory; {why}")
