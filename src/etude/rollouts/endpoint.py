"""Completions from any server that speaks the OpenAI protocol, in the shape that `LanguageModel.generate` has.

Every completion is a request of its own with a seed of its own, a function of (seed, key, index): a server that honours
seeds gives the same completions however they are scheduled.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from etude.errors import ConfigError, DataError
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import fold
from etude.secrets import redact, register_secret

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_WAIT_S = 30.0
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class EndpointError(DataError):
    """A server cannot be reached, refuses a request, or answers with something else than completions."""


class _Endpoint:
    """What both kinds share: requests side by side, repeated where that may help, and errors that say who failed."""

    path = ""

    def __init__(
        self,
        url: str,
        model: str = "default",
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        concurrency: int = 8,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Name a server; nothing is sent before `generate`.

        Args:
            url: Where the protocol begins, such as http://127.0.0.1:8080/v1.
            model: The name the server knows the model by.
            api_key: Sent as a bearer token; never printed.
            timeout_s: How long one request may take.
            retries: How often a request is repeated after a refused connection, a timeout, or an answer that says
                "later" (429, 5xx).
            backoff_s: Wait before the first repetition; doubled for each further one, and never less than the server
                asks for.
            concurrency: Requests at a time.
            extra: More fields for every request; `{return_token_ids: true}` asks vLLM for the tokens.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"an endpoint's url starts with http:// or https://, got {url!r}")
        if concurrency < 1 or retries < 0 or timeout_s <= 0:
            raise ConfigError(
                f"an endpoint needs concurrency >= 1, retries >= 0 and timeout_s > 0, "
                f"got {concurrency}, {retries} and {timeout_s}"
            )
        if api_key:
            register_secret(api_key)
        self.url, self.model = url.rstrip("/"), model
        self._api_key = api_key
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._concurrency, self._extra = concurrency, dict(extra or {})

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        keys: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions of every prompt; log-probabilities and tokens are there if the server gives them.

        Log-probabilities are the server's own, most often those of temperature 1.
        """
        sampling = sampling or Sampling()
        keys = range(len(prompts)) if keys is None else keys
        if len(keys) != len(prompts):
            raise DataError(f"generate needs one key per prompt, got {len(keys)} keys for {len(prompts)} prompts")
        requests = [
            {**self.payload(prompt), **self._settings(sampling, key, index)}
            for prompt, key in zip(prompts, keys, strict=True)
            for index in range(n)
        ]
        if not requests:
            return []
        with ThreadPoolExecutor(min(self._concurrency, len(requests)), thread_name_prefix="etude-endpoint") as pool:
            futures = [pool.submit(self._complete, request) for request in requests]
            try:
                found = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        return [found[start : start + n] for start in range(0, len(found), n)]

    def payload(self, prompt: Prompt) -> dict[str, Any]:
        """Return the fields that carry the prompt."""
        raise NotImplementedError

    def text_of(self, choice: Mapping[str, Any]) -> str:
        """Return the text of an answer."""
        raise NotImplementedError

    def _settings(self, sampling: Sampling, key: int, index: int) -> dict[str, Any]:
        limits: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
        if sampling.stop:
            limits["stop"] = list(sampling.stop)
        return {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": fold(sampling.seed, key, index) & 0x7FFFFFFF,
            **limits,
            **self._extra,
        }

    def _complete(self, request: Mapping[str, Any]) -> Completion:
        answer = self._post(json.dumps(request).encode())
        try:
            choice = answer["choices"][0]
            tokens, logprobs = read_logprobs(choice.get("logprobs"))
            tokens = [int(token) for token in choice.get("token_ids") or tokens]
            if tokens and logprobs and len(tokens) != len(logprobs):
                raise ValueError(f"{len(tokens)} tokens, but {len(logprobs)} log-probabilities")
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            return Completion(tokens, logprobs, self.text_of(choice), reason)  # type: ignore[arg-type]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            shown = json.dumps(answer)[:200]
            raise EndpointError(
                redact(f"{self.url}{self.path} answered with no completion ({error!r}): {shown}")
            ) from error

    def _post(self, body: bytes) -> Any:
        """Send a request until it is answered, or not worth repeating."""
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        for attempt in range(self._retries + 1):
            request = urllib.request.Request(self.url + self.path, body, headers)
            asked_s = 0.0
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"HTTP {error.code}: {_message(error.read())}"
                    asked_s = _seconds(error.headers.get("Retry-After"))
                if error.code not in RETRIED:
                    raise EndpointError(redact(f"{self.url}{self.path} refused a request: {reason}")) from None
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                raise EndpointError(f"{self.url}{self.path} did not answer with JSON: {error}") from None
            if attempt < self._retries:
                time.sleep(min(MAX_WAIT_S, max(asked_s, self._backoff_s * 2**attempt)))
        raise EndpointError(redact(f"{self.url}{self.path} failed {self._retries + 1} times; at last: {reason}"))


class CompletionEndpoint(_Endpoint):
    """A server that speaks the OpenAI protocol: texts or tokens go to its `/completions`."""

    path = "/completions"

    def payload(self, prompt: Prompt) -> dict[str, Any]:
        """Return the fields that carry the prompt."""
        if not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt):
            raise DataError("a conversation needs a ChatEndpoint; give CompletionEndpoint text or tokens")
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "logprobs": 1}

    def text_of(self, choice: Mapping[str, Any]) -> str:
        """Return the text of an answer."""
        return str(choice["text"])


class ChatEndpoint(_Endpoint):
    """Answer conversations with `/chat/completions`; a plain text is what the user says."""

    path = "/chat/completions"

    def payload(self, prompt: Prompt) -> dict[str, Any]:
        """Return the fields that carry the conversation."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(message, Mapping) for message in messages):
            raise DataError("a ChatEndpoint takes texts or lists of messages, no tokens")
        return {"messages": messages, "logprobs": True}

    def text_of(self, choice: Mapping[str, Any]) -> str:
        """Return the text of an answer."""
        return str(choice["message"]["content"] or "")


def read_logprobs(found: Any) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities from either form of the protocol, each empty if it is not given."""
    if not found:
        return [], []
    if found.get("content") is not None:
        entries = found["content"]
        logprobs = [float(entry["logprob"]) for entry in entries]
        has_ids = all(isinstance(entry.get("id"), int) for entry in entries)
        return ([entry["id"] for entry in entries] if has_ids else []), logprobs
    return [], [float(value) for value in found.get("token_logprobs") or [] if value is not None]


def _message(body: bytes) -> str:
    """Return what a server says about an error, in one line."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        pass
    return " ".join(text.split())[:300] or "no reason given"


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0
