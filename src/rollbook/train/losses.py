"""Log-probabilities of chosen tokens without ever holding the logits of a batch.

The head of a small model is wider than everything below it: 16,384 tokens over 49,152 entries are 3.2 GB of
float32. Here a chunk of rows is multiplied with the head, reduced to one number a row, and forgotten; the
backward pass makes each chunk again. Only rows whose token is trained come in at all.

What comes out is the log-probability of every trained token, so SFT, RL and their records use the same
tensor; the loss is a sum over it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Rows a chunk: large enough to keep the matrix units busy, small enough that a chunk of logits is nothing.
CHUNK_ROWS = 2048


def _normalized(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    logits_CV = logits_CV.float()
    normalizers_C = torch.logsumexp(logits_CV, dim=-1)
    return normalizers_C, logits_CV.gather(1, targets_C[:, None]).squeeze(1) - normalizers_C


def _gradient(logits_CV: Tensor, normalizers_C: Tensor, targets_C: Tensor, grad_C: Tensor) -> Tensor:
    """d logprob / d logits = onehot - softmax, times what comes from above."""
    softmax_CV = (logits_CV.float() - normalizers_C[:, None]).exp()
    vocabulary = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    onehot_CV = (vocabulary[None, :] == targets_C[:, None]).float()
    return ((onehot_CV - softmax_CV) * grad_C[:, None]).to(logits_CV.dtype)


class _Fused:
    """The same two functions, each one kernel on a GPU: a chunk of logits is read once and not six times."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __call__(self, function: Any, *arguments: Tensor) -> Any:
        if not arguments[0].is_cuda:
            return function(*arguments)
        if function.__name__ not in self._made:
            self._made[function.__name__] = torch.compile(function, dynamic=True)
        return self._made[function.__name__](*arguments)


_fused = _Fused()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        normalizers_N = torch.empty_like(logprobs_N)
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            logits_CV = hidden_NH[part] @ head_VH.T
            normalizers_N[part], logprobs_N[part] = _fused(_normalized, logits_CV, targets_N[part])
        ctx.save_for_backward(hidden_NH, head_VH, targets_N, normalizers_N)
        ctx.rows = rows
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Each chunk of logits once more, and from it the gradients."""
        (grad_N,) = gradients
        hidden_NH, head_VH, targets_N, normalizers_N = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if wants_head else None
        for start in range(0, len(targets_N), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits_CV = hidden_NH[part] @ head_VH.T
            grad_CV = _fused(_gradient, logits_CV, normalizers_N[part], targets_N[part], grad_N[part])
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, head_VH, out=grad_hidden_NH[part])
            if grad_head_VH is not None:
                grad_head_VH += grad_CV.T @ hidden_NH[part]
        head = None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype)
        return grad_hidden_NH, head, None, None


def token_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, targets_N: Tensor, *, rows: int = CHUNK_ROWS
) -> Tensor:
    """The log-probability of each target under a softmax over `hidden @ head.T`, in float32."""
    apply: Any = _TokenLogprobs.apply
    result: Tensor = apply(hidden_NH, head_VH, targets_N, rows)
    return result
