"""The Hugging Face hub: policies are pushed to it, pulled from it, and found in its cache."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from etude.errors import CheckpointError, ConfigError, one_line
from etude.extras import import_extra
from etude.secrets import redact, register_secret

if TYPE_CHECKING:
    from torch import nn

HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
PATIENCE_S: Final = 3.0
"""Seconds that the hub may take to answer; its client tries again for a minute."""
WANTED: Final = ("*.json", "*.jinja", "*.md", "*.model", "*.mp4", "*.safetensors", "*.txt")
"""What is pulled: never a pickle, nor what somebody keeps beside a policy."""


def push_to_hub(
    policy: nn.Module, repo_id: str, *, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Save a policy with its card and upload it; return the address of the commit.

    Args:
        policy: What has a `save_pretrained`.
        repo_id: Where it goes, as owner/name; made if it is not there.
        private: Whether a repository that is made is private.
        revision: Branch to write to; the main one unless given.
        message: What the commit says.
    """
    hub = _client(repo_id)
    save: Any = getattr(policy, "save_pretrained", None)
    if save is None:
        raise ConfigError(f"a {type(policy).__name__} has no save_pretrained, so it cannot be pushed")
    with tempfile.TemporaryDirectory(prefix="etude-push-") as folder:
        save(Path(folder))
        with _refusals(f"cannot push to {repo_id}"):
            api = hub.HfApi(library_name="etude")
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message or "Push a policy"
            )
    return str(done.commit_url)


def pull_from_hub(repo_id: str, *, revision: str | None = None, directory: str | Path | None = None) -> Path:
    """Download a policy, or find it in the hub's cache; return its folder.

    Args:
        repo_id: Where it is, as owner/name.
        revision: Branch, tag or commit; the newest of the main branch unless given.
        directory: Where to put it; the hub's cache unless given.
    """
    hub = _client(repo_id, offline=True)
    with _refusals(f"cannot pull {repo_id}"):
        found = hub.snapshot_download(
            repo_id, revision=revision, local_dir=directory, allow_patterns=list(WANTED), library_name="etude",
            local_files_only=why_no_hub() is not None,
        )  # fmt: skip
    folder = Path(found)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{repo_id} has no config.json: it holds no policy that was pushed")
    return folder


def is_hub_id(name: str) -> bool:
    """Return whether a name may be that of a repository, and not that of something in a folder that is here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name.split("/")[0]).is_dir()


def is_cached(name: str) -> bool:
    """Return whether the hub's cache holds a model by this name."""
    hub = import_extra("huggingface_hub", "llm")
    try:
        return isinstance(hub.try_to_load_from_cache(name, "config.json"), str)
    except (ValueError, OSError):  # not an id at all
        return False


def why_no_hub() -> str | None:
    """Return why the hub cannot be asked, or None where it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return None  # whether it can be reached through a proxy is for the proxy to say
    place = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = place.port or (80 if place.scheme == "http" else 443)
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((place.hostname or "", port), timeout=PATIENCE_S).close()
        except OSError:
            return
        answered.set()

    # In a thread: looking up a name cannot be given a time limit.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return None if answered.is_set() else f"{place.hostname} does not answer"


def _client(repo_id: str, *, offline: bool = False) -> Any:
    """Import the hub's client; refuse what is no id, and a hub that cannot be reached where it must be."""
    if HUB_ID.fullmatch(repo_id) is None:
        raise ConfigError(f"a repository on the Hugging Face hub is named owner/name, got {repo_id!r}")
    hub = import_extra("huggingface_hub", "llm")
    register_secret(hub.get_token() or "")
    if not offline and (reason := why_no_hub()):
        raise CheckpointError(f"the Hugging Face hub cannot be reached: {reason}")
    return hub


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn what the hub's client raises into one sentence."""
    errors = import_extra("huggingface_hub.errors", "llm")
    try:
        yield
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{what}: {_reason(error)} (a private one needs `hf auth login` or HF_TOKEN)") from None
    except errors.LocalEntryNotFoundError:
        reason = why_no_hub() or "the hub does not answer"
        raise CheckpointError(f"{what}: it is not in the cache, and {reason}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = "; log in with `hf auth login`, or set HF_TOKEN" if status in (401, 403) else ""
        raise CheckpointError(f"{what}: {_reason(error)}{hint}") from None
    except (errors.HFValidationError, ValueError, OSError) as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return redact(one_line(error, 300)).rstrip(".")
