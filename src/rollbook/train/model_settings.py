"""Where a model comes from and how it is trained: the settings that every job has, under the same names."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec

COMMIT = re.compile(r"[0-9a-f]{40}")
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class LoraSettings(msgspec.Struct, kw_only=True):
    """Adapters on all linear layers."""

    rank: Annotated[int, msgspec.Meta(ge=1)] = 32
    alpha: Annotated[float, msgspec.Meta(gt=0)] | None = None  # twice the rank
    dropout: _BelowOne = 0.0


class ModelSettings(msgspec.Struct, kw_only=True):
    """One of `path`, `from`, `hub` and `config` says where the weights come from.

    A run keeps both `from` and the `path` that it led to when the run began.
    """

    path: str | None = None
    handed_over: str | None = msgspec.field(default=None, name="from")  # a config.yaml with a result in it
    hub: str | None = None  # owner/name; safetensors only, and no code of the model's
    revision: str | None = None  # the commit of `hub`: a branch changes
    config: dict[str, Any] | None = None  # random weights: model_type and sizes, as in a config.json
    tokenizer: str | None = None
    chat_template: str | None = None  # a file; the tokenizer's own by default
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        sources = {"path": self.path, "from": self.handed_over, "hub": self.hub, "config": self.config}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1 and given != ["path", "from"]:
            found = f"; {' and '.join(given)} are set" if given else ""
            raise ValueError(
                "give exactly one of path (a directory), from (a config.yaml), hub (with revision) and "
                f"config (random weights){found}"
            )
        if self.hub is not None and not COMMIT.fullmatch(self.revision or ""):
            raise ValueError(
                f"revision is {self.revision!r}; write the 40 hex digits of a commit of {self.hub}, for a "
                "branch or a tag can change"
            )
        if self.revision is not None and self.hub is None:
            raise ValueError("revision is set without hub, which it belongs to")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("tokenizer is missing; a model built from a config has none of its own")
        if self.config is not None and self.lora is not None:
            raise ValueError("lora: adapters are saved without the weights below them; set path, not config")


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW. A step is given its own learning rate; `learning_rate` is where a schedule has its peak."""

    learning_rate: _NotNegative
    betas: tuple[_BelowOne, _BelowOne] = (0.9, 0.999)
    eps: _NotNegative = 1e-8
    weight_decay: _NotNegative = 0.0
    max_grad_norm: _NotNegative = 1.0  # 0: no clipping

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "max_grad_norm"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")
