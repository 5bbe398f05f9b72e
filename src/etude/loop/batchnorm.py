"""Batch normalisation over all ranks, so that two ranks normalise as one process with the whole batch would."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _SumOverRanks(torch.autograd.Function):
    """Sum a tensor over all ranks; the gradient is summed over all ranks too."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _sum(value: Tensor) -> Tensor:
    result: Tensor = _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]
    return result


class GroupBatchNorm(_BatchNorm):
    """SyncBatchNorm for devices where torch has none (its own needs CUDA)."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch normalisation needs (B, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over the batches of all ranks."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        axes = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = _sum(torch.tensor([float(input.numel() // input.shape[1])], dtype=input.dtype, device=input.device))
        mean = _sum(input.sum(axes)) / count
        centred = input - mean.view(shape)
        variance = _sum((centred * centred).sum(axes)) / count
        self._track(mean.detach(), variance.detach(), count)
        normed = centred / torch.sqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


def synchronise_batch_norm(policy: nn.Module, device: torch.device) -> nn.Module:
    """Replace every batch norm of a policy by one that spans the group; returns the policy."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(policy)  # type: ignore[no-untyped-call]
        return converted
    for name, child in policy.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, GroupBatchNorm):
            synced = GroupBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            synced.load_state_dict(child.state_dict())
            synced.to(device).train(child.training)
            for own, theirs in zip(synced.parameters(), child.parameters(), strict=True):
                own.requires_grad_(theirs.requires_grad)
            setattr(policy, name, synced)
        else:
            synchronise_batch_norm(child, device)
    return policy
