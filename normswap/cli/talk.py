"""How the command talks: results to stdout, remarks, errors and progress to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from normswap.progress import SILENT


def result(text: object) -> None:
    """A result on the stdout that the command began with: what else is printed there goes to stderr."""
    click.echo(text, file=click.get_current_context().obj)


def say(message: str) -> None:
    """One remark on stderr."""
    click.echo(f"normswap: {message.removeprefix('normswap: ')}", err=True)


def remark(message: str) -> None:
    """One that ``-q`` does without."""
    if not SILENT.get():
        say(message)


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
