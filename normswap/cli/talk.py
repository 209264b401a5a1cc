"""How the command talks: results to stdout, remarks, errors and progress to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

_LONG = 100_000_000  # bytes, which take longer than a person looks


def say(message: str) -> None:
    """One remark on stderr."""
    click.echo(f"normswap: {message.removeprefix('normswap: ')}", err=True)


def fail(message: str) -> None:
    """An error on stderr, in red where a person looks and does not ask for NO_COLOR."""
    text = f"normswap: {message.removeprefix('normswap: ')}"
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    click.echo(click.style(text, fg="red") if coloured else text, err=True)


@contextmanager
def told_warnings() -> Iterator[None]:
    """Warnings as lines of ours, without the file and source line that Python adds."""

    def show(message: Warning | str, *_args: object, **_kwargs: object) -> None:
        say(f"warning: {str(message).removeprefix('normswap: ')}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class Progress:
    """A bar on stderr for what is long; nothing with ``quiet`` or where stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self._silent = quiet or not sys.stderr.isatty()
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._silent or total < _LONG:
            return
        if what not in self._bars:
            self._bars[what] = click.progressbar(length=total, label=what, file=sys.stderr)
        bar = self._bars[what]
        bar.update(done - bar.pos)
        if done >= total:
            bar.render_finish()
