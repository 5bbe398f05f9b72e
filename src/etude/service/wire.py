"""A training service over http with the calls that `RemoteApiTrainer` makes: those of the service in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from etude.engines.remote.connection import RemoteService, numbers
from etude.service.datums import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, numbers_of, tokens_of

_BY_TOKEN: Final = ("target_tokens", "weights", "advantages", "logprobs")
"""What every service takes; numbers are zero already where a mask would leave tokens out."""


class WireService:
    """What stands in the place of `InProcessService` when a service is called.

    Args:
        remote: The connection, shared with the policy that draws.
    """

    def __init__(self, remote: RemoteService) -> None:
        self.remote, self.temperature = remote, remote.temperature

    def create_training_client(self, base_model: str | None = None, **_: Any) -> WireTrainingClient:
        """Return a client that trains the model of the connection."""
        return WireTrainingClient(self.remote)


class WireTrainingClient:
    """Trains the model of a connection; answers are read when they are asked for."""

    def __init__(self, remote: RemoteService) -> None:
        self.remote = remote

    def forward(self, data: Sequence[Datum], loss_fn: str = "cross_entropy", loss_fn_config: Any = None) -> Answer:
        """Return what the service finds for each target, and leave gradients alone."""
        targets = [self._datum(one, ("target_tokens",)) for one in data]
        return Answer(lambda: _passed(self.remote.forward(targets)))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Answer:
        """Send a loss to differentiate; the answer is waited for later."""
        names = (*_BY_TOKEN, "mask") if loss_fn == "dro" else _BY_TOKEN  # whose square would count everywhere
        sent = self.remote.send([self._datum(one, names) for one in data], loss_fn, loss_fn_config)
        return Answer(lambda: _passed(self.remote.receive(sent)))

    def optim_step(self, adam_params: AdamParams | None = None) -> Answer:
        """Send a step of Adam; the answer is waited for later."""
        sent = self.remote.send_step(asdict(adam_params or AdamParams()))
        return Answer(lambda: OptimStepResponse(dict(self.remote.receive(sent).metrics or {})))

    def _datum(self, given: Datum, names: Sequence[str]) -> Any:
        inputs = {name: numbers_of(value) for name, value in given.loss_fn_inputs.items() if name in names}
        return self.remote.datum(tokens_of(given.model_input), inputs)


class Answer:
    """An answer that is read when it is asked for."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, as long as the connection allows."""
        return self._read()


def _passed(answer: Any) -> ForwardBackwardOutput:
    outputs = [{name: numbers(value) for name, value in one.items()} for one in answer.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(answer.metrics))
