"""What `etude data view` does: a page of one episode or of a whole dataset, a server of it, a file for Rerun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from etude.cli.datasets import find
from etude.cli.output import in_terminal, say
from etude.errors import ConfigError

if TYPE_CHECKING:
    from etude.data.lerobot.survey import Survey
    from etude.data.lerobot.viewed import ViewedDataset


def view(
    root: str,
    *,
    episode: int | None,
    output: Path | None,
    open_page: bool,
    serve: bool,
    port: int,
    rerun: Path | None,
) -> None:
    """Show a dataset in the way that is asked for, or else in the one that its size allows."""
    asked = [name for name, given in (("--serve", serve), ("--rerun", rerun is not None)) if given]
    if len(asked) > 1 or (asked and output is not None):
        raise ConfigError(f"{' and '.join([*asked, *(['--output'] if output else [])])}: give one of them")
    if rerun is not None:
        if open_page:
            raise ConfigError("--open opens pages; leave it out with --rerun, and run: rerun FILE")
        _write_rerun(root, episode, rerun)
    elif episode is not None:
        if serve:
            raise ConfigError("--serve shows every episode; leave out --episode")
        _view_episode(root, episode, output, open_page=open_page)
    else:
        _view_dataset(root, output, open_page=open_page, serve=serve, port=port)


def _view_episode(root: str, episode: int, output: Path | None, *, open_page: bool) -> None:
    from etude.data.lerobot.page import write_page

    dataset = _read(root)
    target = output or Path("views", f"{dataset.name}-episode-{episode}.html")
    say(str(write_page(dataset, episode, target)))
    if open_page:
        _open_in_browser(target.resolve().as_uri())


def _view_dataset(root: str, output: Path | None, *, open_page: bool, serve: bool, port: int) -> None:
    from etude.data.lerobot.view_page import why_too_large, write_view
    from etude.runs.durable import require_place

    dataset = _read(root)
    if output is not None:
        require_place(output)
    found = dataset.survey(_progress("looking at {done} of {total} dimensions"))
    reason = "" if serve or output is not None else why_too_large(dataset)
    if reason:
        say(f"{reason} are more than one file should hold, so the dataset is served (--output FILE writes a part)")
    if serve or reason:
        _serve(dataset, found, port, open_page=open_page)
        return
    target = output or Path("views", f"{dataset.name}.html")
    note = write_view(dataset, found, target, _progress("writing {done} of {total} episodes"))
    say(str(target))
    if note:
        say(note)
    if open_page:
        _open_in_browser(target.resolve().as_uri())


def _serve(dataset: ViewedDataset, found: Survey, port: int, *, open_page: bool) -> None:
    from etude.data.lerobot.view_server import make_view_server
    from etude.runs.local_server import HOST

    server = make_view_server(dataset, found, port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    with server:
        say(f"showing {dataset.root} at {address} (Ctrl-C ends it)")
        sys.stdout.flush()
        if open_page:
            _open_in_browser(address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


def _write_rerun(root: str, episode: int | None, target: Path) -> None:
    from etude.data.lerobot.rerun_file import import_rerun, write_rerun

    import_rerun()  # before a dataset is read that may be large
    dataset = _read(root)
    notes = write_rerun(dataset, None if episode is None else [episode], target, _progress("writing {done} of {total}"))
    say(f"{target} ({target.stat().st_size / 1e6:.1f} MB); look at it: rerun {target}")
    for note in notes:
        say(note)


def _read(root: str) -> ViewedDataset:
    from etude.data.lerobot.viewed import ViewedDataset

    advance = _progress("reading the dataset")
    advance(0, 1)
    try:
        return ViewedDataset(find(root))
    finally:
        advance(1, 1)


def _progress(text: str) -> Callable[[int, int], None]:
    """Return what keeps one line of a terminal up to date, and is silent elsewhere."""

    def advance(done: int, total: int) -> None:
        if in_terminal():
            line = text.format(done=f"{done:,}", total=f"{total:,}")
            sys.stdout.write(f"\r{line}" if done < total else f"\r{' ' * len(line)}\r")
            sys.stdout.flush()

    return advance


def _open_in_browser(address: str) -> None:
    import webbrowser

    webbrowser.open(address)
