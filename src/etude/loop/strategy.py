"""How a policy is spread over the ranks: alone, replicated (DDP), or sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from etude.errors import CheckpointError
from etude.loop.batchnorm import synchronise_batch_norm
from etude.loop.distributed import Group
from etude.loop.shard_by_shard import Waiting, build
from etude.loop.sharding import full_tensor, shard_like

LossFunction = Callable[[Any], Any]


class Strategy:
    """How a policy is spread; as it stands, over one process."""

    is_sharded = False
    """Whether every rank holds a part of its own, and saves it."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def build(self, policy: nn.Module, make: Callable[[], None]) -> None:
        """Have a policy that takes its shapes from the data build itself, by the function given."""
        make()

    def spread(self, policy: nn.Module, loss: LossFunction, manual: bool = False) -> None:
        """Prepare the policy and the function from batch to loss; `manual` trainers do not use the latter."""
        self.policy = policy
        self.loss = loss

    def begin(self, last: bool) -> None:
        """Say whether the coming micro-batch is the last of its step: gradients are reduced only then."""

    def settle(self, batch: Any) -> None:
        """Get anything that only a first pass decides out of the way, changing nothing that training can see."""

    def synchronise_buffers(self) -> None:
        """Make buffers equal on all ranks before they are saved or evaluated."""

    def state_dict(self) -> dict[str, Any]:
        """Return the full weights of the policy; every rank must call."""
        return {name: full_tensor(value) for name, value in self.policy.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load full weights, in memory or on disk, into however much of them this rank holds."""
        current = self.policy.state_dict()
        missing, unexpected = sorted(set(current) - set(state)), sorted(set(state) - set(current))
        differ = [
            f"{name} is {tuple(state[name].shape)} there and {tuple(value.shape)} here"
            for name, value in current.items()
            if name in state and hasattr(value, "shape") and tuple(state[name].shape) != tuple(value.shape)
        ]
        if missing or unexpected or differ:
            words = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
            words += [f"{len(unexpected)} not known here, such as {unexpected[0]}"] if unexpected else []
            words += [differ[0] + (f" and {len(differ) - 1} more differ" if len(differ) > 1 else "")] if differ else []
            raise CheckpointError(
                f"the checkpoint does not fit the policy, which has another architecture ({'; '.join(words)}); give "
                "another run, or resume='never' to start afresh"
            )
        try:
            self.policy.load_state_dict({name: shard_like(value, current[name]) for name, value in state.items()})
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint does not fit the policy: {error}") from error


class SingleProcess(Strategy):
    """One process: nothing to spread."""


class Replicated(Strategy):
    """DDP: every rank holds the whole policy and gradients are averaged.

    The whole of `compute_loss` runs inside DDP's forward, so that users are handed their own policy, with all its
    methods, and never a wrapper.
    """

    def __init__(self, group: Group, find_unused_parameters: bool, sync_batch_norm: bool) -> None:
        super().__init__(group)
        self.find_unused_parameters = find_unused_parameters
        self.sync_batch_norm = sync_batch_norm

    def spread(self, policy: nn.Module, loss: LossFunction, manual: bool = False) -> None:
        """Wrap the loss function in DDP; manual trainers have their gradients averaged before each optimizer step."""
        self.policy = policy
        if self.sync_batch_norm and any(isinstance(m, _BatchNorm) for m in policy.modules()):
            synchronise_batch_norm(policy, self.group.device)
        if manual:
            self.group.broadcast_([tensor.data for tensor in [*policy.parameters(), *policy.buffers()]])
            return
        self._ddp = DistributedDataParallel(
            _LossModule(policy, loss),
            device_ids=[self.group.device] if self.group.device.type == "cuda" else None,
            find_unused_parameters=self.find_unused_parameters,
            forward_sync_buffers=False,
        )
        self.loss = self._call

    def _call(self, batch: Any) -> Any:
        try:
            return self._ddp(batch)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error):
                raise RuntimeError(
                    "some parameters got no gradient; set engine.params.find_unused_parameters: true if the policy "
                    "has conditional paths, or freeze what the loss does not use"
                ) from error
            raise

    def settle(self, batch: Any) -> None:
        """Run one pass so that DDP arranges its buckets before the first step, not after it.

        With more than two ranks, the order in which a gradient is summed depends on its place in a bucket: a resumed
        run, whose first step would use the first arrangement again, would differ in the last bit.
        """
        if self.group.world <= 2 or self.find_unused_parameters:
            return
        kept = [buffer.clone() for buffer in self.policy.buffers()]
        self.begin(last=True)
        self._call(batch)[0].backward()
        for parameter in self.policy.parameters():
            parameter.grad = None
        for buffer, value in zip(self.policy.buffers(), kept, strict=True):
            buffer.copy_(value)

    def begin(self, last: bool) -> None:
        """Reduce gradients on the last micro-batch only."""
        self._ddp.require_backward_grad_sync = last

    def synchronise_buffers(self) -> None:
        """Take the buffers of rank 0."""
        self.group.broadcast_(list(self.policy.buffers()))


class Sharded(Strategy):
    """FSDP2: every rank holds a shard of each parameter."""

    is_sharded = True
    _waiting: Waiting | None = None

    def build(self, policy: nn.Module, make: Callable[[], None]) -> None:
        """Build the policy on the meta device, so that it is never whole; its weights come when it is sharded."""
        self._waiting = build(policy, make, says=self.group.is_main)

    def spread(self, policy: nn.Module, loss: LossFunction, manual: bool = False) -> None:
        """Shard the policy block by block, then as a whole."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        held = [tensor.data for tensor in [*policy.parameters(), *policy.buffers()]]
        self.group.broadcast_([tensor for tensor in held if not tensor.is_meta])
        mesh = init_device_mesh(self.group.device.type, (self.group.world,))
        for module in policy.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        if self._waiting is not None:
            self._waiting.fill(policy, self.group.device)
            self._waiting = None
        self.policy = policy
        self.loss = loss

    def begin(self, last: bool) -> None:
        """Reduce gradients on the last micro-batch only."""
        cast(Any, self.policy).set_requires_gradient_sync(last)

    def synchronise_buffers(self) -> None:
        """Take the buffers of rank 0."""
        self.group.broadcast_([b for b in self.policy.buffers() if not isinstance(b, DTensor)])


class _LossModule(nn.Module):
    """A module whose forward is the trainer's loss function, for DDP to wrap."""

    def __init__(self, policy: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.policy = policy
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        """Return what the loss function returns."""
        return self._loss(batch)


def make_strategy(
    name: Literal["auto", "ddp", "fsdp"], group: Group, find_unused_parameters: bool, sync_batch_norm: bool
) -> Strategy:
    """Choose how to spread a policy: alone in one process, replicated by default in several."""
    if group.world == 1:
        return SingleProcess(group)
    if name == "fsdp":
        return Sharded(group)
    return Replicated(group, find_unused_parameters, sync_batch_norm)


def count_parameters(policy: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameter counts."""
    sizes = [(p.numel(), p.requires_grad) for p in policy.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)
