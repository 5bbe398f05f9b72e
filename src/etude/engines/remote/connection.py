"""`RemoteService`: a training service behind the official client, each call bounded, an absent service waited for.

This is the one module that imports `tinker`. The client repeats lost calls by itself, each applied once; here the whole
is bounded. Waiting happens in a thread of its own, because a client's future that is given up is cancelled.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from etude.errors import ConfigError, ServiceError, one_line
from etude.extras import import_extra
from etude.secrets import redact, register_secret

log = logging.getLogger("etude")
T = TypeVar("T")
KEY_VARIABLE: Final = "TINKER_API_KEY"
_NO_KEY: Final = "tml-no-key"
"""What the client sends to a service that asks for none: it refuses to send nothing."""
_GLANCE_S: Final = 1.0
_KNOCK_S: Final = 2.0
_MOST_DELAY_S: Final = 30.0


@dataclass(frozen=True)
class Wanted:
    """Which model of a service is trained."""

    base_model: str | None = None
    """Its name there; None takes the only one that the service offers."""
    lora_rank: int = 32
    """Rank of the adapters; 0 trains all weights."""
    seed: int | None = None
    """Seed of the adapters; None lets the service draw one."""


def is_reachable(url: str, timeout_s: float = _KNOCK_S) -> bool:
    """Tell whether anything listens where an address points."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


class RemoteService:
    """A model in training on a service.

    Args:
        url: Where the service is.
        wanted: Which model is trained there.
        api_key: The key; None reads TINKER_API_KEY.
        timeout_s: How long one call may take, an absence of the service included.
    """

    temperature = 1.0
    """What services compute log-probabilities at."""

    def __init__(self, url: str, wanted: Wanted, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"the url of a training service starts with http:// or https://, got {url!r}")
        if timeout_s <= 0 or wanted.lora_rank < 0:
            raise ConfigError(
                f"timeout_s must be positive and lora_rank not negative, got {timeout_s}, {wanted.lora_rank}"
            )
        api_key = api_key or os.environ.get(KEY_VARIABLE)
        if api_key:
            register_secret(api_key)
        self.url, self.wanted, self.timeout_s = url.rstrip("/"), wanted, timeout_s
        self.glance: Callable[[bool], None] = lambda is_away: None
        """Called about once a second while an answer is waited for, with whether the service is away."""
        self._api_key = api_key or _NO_KEY
        self._model: Any = None
        self._saved: str | None = None
        self._sampler: Any = None
        self._reference: Any = None
        self._jitter = random.Random()

    # ---- connecting --------------------------------------------------------------------------------------------------

    @cached_property
    def tinker(self) -> Any:
        """The package of the client."""
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        return import_extra("tinker", "service")

    @cached_property
    def _client(self) -> Any:
        tinker = self.tinker
        client = self.call("connecting", lambda: tinker.ServiceClient(base_url=self.url, api_key=self._api_key))
        offered = self.call("asking what is offered", client.get_server_capabilities).supported_models
        self.offered = [str(model.model_name) for model in offered]
        return client

    @property
    def base_model(self) -> str:
        """The name of the model that is trained, on the service."""
        name = self.wanted.base_model
        assert self._client is not None
        if name is None and len(self.offered) == 1:
            return self.offered[0]
        if name is None or (self.offered and name not in self.offered):
            said = "name one of them as base_model" if name is None else f"base_model {name!r} is not one of them"
            raise ConfigError(f"the service at {self.url} offers {', '.join(self.offered) or 'no models'}; {said}")
        return name

    @property
    def model(self) -> Any:
        """The client's model in training, made when it is first asked for."""
        if self._model is None:
            client, name, wanted = self._client, self.base_model, self.wanted
            self._model = self.call(
                "creating the model",
                lambda: client.create_lora_training_client(name, rank=wanted.lora_rank, seed=wanted.seed),
            )
        return self._model

    def restore(self, path: str) -> None:
        """Go on from what was saved on the service."""
        client = self._client
        self._model = self.call(
            f"taking up {path}", lambda: client.create_training_client_from_state_with_optimizer(path)
        )
        self._saved, self._sampler = path, None

    def close(self) -> None:
        """End the session there, if the service is there to hear it."""
        client = self.__dict__.pop("_client", None)
        self._model = self._sampler = self._reference = None
        if client is not None and is_reachable(self.url):
            done: Future[Any] = _in_thread(lambda: client.close("success").result())
            try:
                done.result(10.0)
            except Exception as error:  # noqa: BLE001 - whatever the client raises, training is over
                log.info("the session on %s was not ended: %s", self.url, one_line(error))

    # ---- training ----------------------------------------------------------------------------------------------------

    def datum(self, tokens: Sequence[int], inputs: Mapping[str, Any]) -> Any:
        """Return one row to send: N tokens, and N numbers of each kind."""
        tinker = self.tinker
        sent = {name: tinker.TensorData.from_torch(_sendable(value)) for name, value in inputs.items()}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=sent)

    def forward(self, data: Sequence[Any]) -> Any:
        """Return the answer to a forward pass."""
        model = self.model
        return self.call("a forward pass", lambda: model.forward(list(data), "cross_entropy").result())

    def send(self, data: Sequence[Any], loss_fn: str, config: Mapping[str, float] | None) -> Any:
        """Send a forward and backward pass, and return the client's future."""
        return self.model.forward_backward(list(data), loss_fn, dict(config) if config else None)

    def send_step(self, adam: Mapping[str, float]) -> Any:
        """Send a step of Adam, and return the client's future."""
        self._saved = self._sampler = None
        return self.model.optim_step(self.tinker.AdamParams(**adam))

    def receive(self, future: Any) -> Any:
        """Return the answer to what was sent; it is not sent again, for order matters to the service."""
        return self.call("an update", future.result, repeat=False)

    def saved(self, name: str) -> str:
        """Save weights and optimizer on the service, unless they are, and return the path."""
        if self._saved is None:
            model = self.model
            done = self.call("saving", lambda: model.save_state(name).result(), repeat=False)
            self._saved = str(done.path)
        return self._saved

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def sampler(self) -> Any:
        """Return a client that draws from the weights as they are now."""
        if self._sampler is None:
            model = self.model
            self._sampler = self.call("getting weights to draw from", model.save_weights_and_get_sampling_client)
        return self._sampler

    def reference(self) -> Any:
        """Return a client of the model before training."""
        if self._reference is None:
            client, name = self._client, self.base_model
            self._reference = self.call(
                "getting the base model", lambda: client.create_sampling_client(base_model=name)
            )
        return self._reference

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def call(self, what: str, function: Callable[[], T], *, repeat: bool = True) -> T:
        """Return what a call of the client gives; say once that the service is away, and once that it is back."""
        deadline_s, attempt = time.monotonic() + self.timeout_s, 0
        while True:
            future: Future[T] = _in_thread(function)
            self._await(what, future, deadline_s)
            error = future.exception()
            if error is None:
                return future.result()
            if not (repeat and isinstance(error, self.tinker.APIConnectionError)):
                raise self._told(what, error)
            delay_s = min(_MOST_DELAY_S, 2.0**attempt) * self._jitter.uniform(0.5, 1.5)
            attempt += 1
            if time.monotonic() + delay_s > deadline_s:
                raise self._told(what, error)
            time.sleep(delay_s)

    def _await(self, what: str, future: Future[Any], deadline_s: float) -> None:
        is_away = False
        while True:
            try:
                future.exception(_GLANCE_S)
                break
            except TimeoutError:
                pass
            if is_away != (not is_reachable(self.url)):
                is_away = not is_away
                if is_away:
                    log.warning("the service at %s does not answer: the run waits for it", self.url)
                else:
                    log.warning("the service at %s is back: the run goes on", self.url)
            if time.monotonic() > deadline_s:
                raise ServiceError(
                    f"the service at {self.url} gave no answer to {what} within {self.timeout_s:g} s; run again once "
                    "it does: training goes on from the last checkpoint"
                )
            self.glance(is_away)
        if is_away:
            log.warning("the service at %s is back: the run goes on", self.url)

    def _told(self, what: str, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        said = redact(one_line(error))
        return ServiceError(f"the service at {self.url} did not do what was asked ({what}): {said}")


def numbers(value: Any) -> Tensor:
    """Return a tensor of what the client gives."""
    return torch.as_tensor(value.to_torch() if hasattr(value, "to_torch") else value)


def _sendable(value: Any) -> Tensor:
    found = torch.as_tensor(value).detach().cpu().contiguous()
    return found.float() if found.is_floating_point() else found.long()


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that no exit waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="etude-remote", daemon=True).start()
    return future
