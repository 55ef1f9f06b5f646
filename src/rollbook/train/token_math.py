"""Log-probability and entropy of each trained token, without ever holding the logits of a batch.

The head of a small model is wider than everything below it: 16,384 tokens over 49,152 entries are 3.2 GB of
float32. Here a chunk of rows is multiplied with the head, reduced to two numbers a row, and forgotten; the
backward pass makes each chunk again. Only rows whose token is trained come in at all.

Everything is that of softmax(logits / temperature), the distribution that was sampled from. SFT, RL and their
records use the same tensors; a loss is a sum over them. The entropy is a metric and has no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenOutputs(NamedTuple):
    """One value per trained token, float32."""

    logprob_N: Tensor
    entropy_N: Tensor | None  # None: nobody asked


# Rows of a chunk: large enough to keep the matrix units busy, small enough that a chunk of logits is nothing.
CHUNK_ROWS = 2048
_LOWEST = -1e30  # a forbidden token has log-probability -inf, and 0 * -inf is not a number


def head_outputs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    target_N: Tensor,
    *,
    temperature_N: Tensor | None = None,
    entropy: bool = False,
    rows: int = CHUNK_ROWS,
) -> TokenOutputs:
    """The outputs of a softmax over `hidden @ head.T / temperature`."""
    inverse_N = None if temperature_N is None else temperature_N.float().reciprocal()
    apply: Any = _HeadOutputs.apply
    logprob_N, entropy_N = apply(hidden_NH, head_VH, target_N, inverse_N, entropy, rows)
    return TokenOutputs(logprob_N, entropy_N if entropy else None)


def logit_outputs(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    temperature_N: Tensor | None = None,
    entropy: bool = False,
    rows: int = CHUNK_ROWS,
) -> TokenOutputs:
    """The same from logits that a model made in its own way: capped, scaled, with a bias."""
    inverse_N = None if temperature_N is None else temperature_N.float().reciprocal()
    apply: Any = _LogitOutputs.apply
    logprob_N, entropy_N = apply(logits_NV, target_N, inverse_N, entropy, rows)
    return TokenOutputs(logprob_N, entropy_N if entropy else None)


def _scaled(logits_CV: Tensor, inverse_C: Tensor | None) -> Tensor:
    logits_CV = logits_CV.float()
    return logits_CV if inverse_C is None else logits_CV * inverse_C[:, None]


def _normalized(logits_CV: Tensor, target_C: Tensor, inverse_C: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_CV = _scaled(logits_CV, inverse_C)
    normalizer_C = torch.logsumexp(logits_CV, dim=-1)
    return normalizer_C, logits_CV.gather(1, target_C[:, None]).squeeze(1) - normalizer_C


def _entropy(logits_CV: Tensor, normalizer_C: Tensor, inverse_C: Tensor | None) -> Tensor:
    logprob_CV = (_scaled(logits_CV, inverse_C) - normalizer_C[:, None]).clamp(min=_LOWEST)
    return -(logprob_CV.exp() * logprob_CV).sum(-1)


def _gradient(
    logits_CV: Tensor, normalizer_C: Tensor, target_C: Tensor, grad_C: Tensor, inverse_C: Tensor | None
) -> Tensor:
    """d logprob / d logits = (onehot - softmax) / temperature, times what comes from above."""
    softmax_CV = (_scaled(logits_CV, inverse_C) - normalizer_C[:, None]).exp()
    vocabulary = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    onehot_CV = (vocabulary[None, :] == target_C[:, None]).float()
    scale_C = grad_C if inverse_C is None else grad_C * inverse_C
    return ((onehot_CV - softmax_CV) * scale_C[:, None]).to(logits_CV.dtype)


class _Fused:
    """The same functions, each one kernel on a GPU: a chunk of logits is read once and not six times."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __call__(self, function: Any, *arguments: Tensor | None) -> Any:
        first = arguments[0]
        if first is None or not first.is_cuda:
            return function(*arguments)
        if function.__name__ not in self._made:
            self._made[function.__name__] = torch.compile(function, dynamic=True)
        return self._made[function.__name__](*arguments)


_fused = _Fused()


class _Reduced:
    """The rows reduced so far."""

    def __init__(self, target_N: Tensor, inverse_N: Tensor | None, *, entropy: bool) -> None:
        self.target_N, self.inverse_N = target_N, inverse_N
        self.logprob_N = torch.empty(len(target_N), dtype=torch.float32, device=target_N.device)
        self.normalizer_N = torch.empty_like(self.logprob_N)
        self.entropy_N = torch.empty_like(self.logprob_N) if entropy else None

    def add(self, part: slice, logits_CV: Tensor) -> None:
        inverse_C = _cut(self.inverse_N, part)
        normalizer_C, logprob_C = _fused(_normalized, logits_CV, self.target_N[part], inverse_C)
        self.normalizer_N[part], self.logprob_N[part] = normalizer_C, logprob_C
        if self.entropy_N is not None:
            self.entropy_N[part] = _fused(_entropy, logits_CV, normalizer_C, inverse_C)


class _HeadOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        target_N: Tensor,
        inverse_N: Tensor | None,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        reduced = _Reduced(target_N, inverse_N, entropy=entropy)
        for part in _chunks(len(target_N), rows):
            reduced.add(part, hidden_NH[part] @ head_VH.T)
        ctx.save_for_backward(hidden_NH, head_VH, target_N, inverse_N, reduced.normalizer_N)
        ctx.rows = rows
        if reduced.entropy_N is not None:
            ctx.mark_non_differentiable(reduced.entropy_N)
        return reduced.logprob_N, reduced.entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each chunk of logits once more, and from it the gradients."""
        grad_N = gradients[0]
        hidden_NH, head_VH, target_N, inverse_N, normalizer_N = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if wants_head else None
        for part in _chunks(len(target_N), ctx.rows):
            grad_CV = _fused(
                _gradient,
                hidden_NH[part] @ head_VH.T,
                normalizer_N[part],
                target_N[part],
                grad_N[part],
                _cut(inverse_N, part),
            )
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, head_VH, out=grad_hidden_NH[part])
            if grad_head_VH is not None:
                grad_head_VH += grad_CV.T @ hidden_NH[part]
        head = None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype)
        return grad_hidden_NH, head, None, None, None, None


class _LogitOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, inverse_N: Tensor | None, entropy: bool, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        reduced = _Reduced(target_N, inverse_N, entropy=entropy)
        for part in _chunks(len(target_N), rows):
            reduced.add(part, logits_NV[part])
        ctx.save_for_backward(logits_NV, target_N, inverse_N, reduced.normalizer_N)
        ctx.rows = rows
        if reduced.entropy_N is not None:
            ctx.mark_non_differentiable(reduced.entropy_N)
        return reduced.logprob_N, reduced.entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = gradients[0]
        logits_NV, target_N, inverse_N, normalizer_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for part in _chunks(len(target_N), ctx.rows):
            grad_NV[part] = _fused(
                _gradient,
                logits_NV[part],
                normalizer_N[part],
                target_N[part],
                grad_N[part],
                _cut(inverse_N, part),
            )
        return grad_NV, None, None, None, None


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _cut(values_N: Tensor | None, part: slice) -> Tensor | None:
    return None if values_N is None else values_N[part]
