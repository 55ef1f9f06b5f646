"""`policy: {kind: local, path: DIR}`: a model is sampled in this process, without a server.

It is the entry of the policy table for jobs that do not train. PyTorch is imported when a policy is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import xxhash

from rollbook.errors import UsageError
from rollbook.policies.registry import PolicyKind
from rollbook.samplers.sampling import Sampling

if TYPE_CHECKING:
    from rollbook.samplers.local import LocalPolicy

_Count = Annotated[int, msgspec.Meta(ge=1)]
_READ = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")  # what a model is loaded from


class LocalSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`slots` sequences decode together. A row's own sampling parameters win over these."""

    path: str | None = None  # a directory with a model or with adapters, and a tokenizer
    handed_over: str | None = msgspec.field(default=None, name="from")  # a config.yaml with a result in it
    kind: Literal["local"] = "local"
    chat_template: str | None = None  # a file; the tokenizer's own by default
    response_template: str | None = None  # how replies are read: hermes, llama3 or plain; found by default
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # bfloat16 on a GPU, float32 on a CPU
    slots: _Count = 64
    max_length: _Count | None = None  # prompts and replies of a conversation; all that the model takes
    max_tokens: _Count = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] = []

    def __post_init__(self) -> None:
        if (self.path is None) == (self.handed_over is None):
            raise ValueError("name the model by one of path and from")
        self.sampling()

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
        )

    def directory(self) -> Path:
        if self.handed_over is not None:
            from rollbook.runs.handoff import resolve_checkpoint

            return Path(resolve_checkpoint(Path(self.handed_over)))
        directory = Path(str(self.path))
        if not directory.is_dir():
            raise UsageError(f"policy.path {directory}: no such directory")
        return directory


def _build(settings: LocalSettings) -> LocalPolicy:
    try:
        from rollbook.samplers.local import open_local
    except ImportError as error:
        raise UsageError(
            f"a local policy needs PyTorch and transformers ({error}); pip install 'rollbook[train]'"
        ) from error
    return open_local(settings)


def _describe(settings: LocalSettings) -> dict[str, Any]:
    """All but how many sequences decode together, with a digest of the model's files."""
    described = msgspec.to_builtins(settings)
    for name in ("slots", "path", "from"):
        described.pop(name)
    return {**described, "files": _digest(settings.directory())}


def _digest(directory: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted({path for pattern in _READ for path in directory.glob(pattern)}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


LOCAL = PolicyKind(LocalSettings, _build, _describe)
