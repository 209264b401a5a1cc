"""The options that commands share, and what checks them before anything is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

import normswap
from normswap.progress import silent

if TYPE_CHECKING:
    from normswap.cli.inputs import Inputs

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _silenced(context: click.Context, _parameter: click.Parameter, quiet: bool) -> None:
    if quiet:
        context.with_resource(silent())


def _patterns(_context: click.Context, _parameter: click.Parameter, patterns: tuple[str, ...]) -> list[str] | None:
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[len("re:") :])
            except re.error as error:
                raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}") from error
    return list(patterns) or None


def _json_object(_context: click.Context, _parameter: click.Parameter, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    from normswap.checkpoint.errors import strict_json

    try:
        found = strict_json(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f'{text!r} is not a JSON object, as in {{"depth": 12}}')
    return found


def _inputs(_context: click.Context, _parameter: click.Parameter, specs: tuple[str, ...]) -> Inputs:
    normswap.complete()
    from normswap.cli.inputs import make_inputs

    try:
        return make_inputs(specs)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def finite(_context: click.Context, _parameter: click.Parameter, number: float) -> float:
    """The number, which click's ranges let be NaN."""
    if not math.isfinite(number):
        raise click.BadParameter(f"{number} is not a finite number")
    return number


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator of several, whose options are shown in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def choice(name: str, values: Sequence[str], default: str, text: str) -> Callable[[F], F]:
    """An option with these values."""
    return click.option(name, type=click.Choice(values), default=default, show_default=True, help=text)


_SITES = "sites that match this glob or re:... over module names; may be repeated."
_NAMES: dict[str, Any] = {"multiple": True, "metavar": "PATTERN", "callback": _patterns}
filters = _together(
    click.option("--include", **_NAMES, help=f"Take only {_SITES}"),
    click.option("--exclude", **_NAMES, help=f"Leave out {_SITES}"),
)

model = _together(
    click.option(
        "--model",
        "factory",
        metavar="FACTORY",
        help="What builds the model: pkg.module:function or ./file.py:function (imported and run), timm:NAME or "
        "hf:DIR. A folder with config.json needs none.",
    ),
    click.option("--kwargs", callback=_json_object, metavar="JSON", help="Keyword arguments for it, as a JSON object."),
    click.option("--key", metavar="KEY", help="Where in the file the state_dict is, as in ema or a.b; . is the file."),
    click.option(
        "--strip-prefix",
        multiple=True,
        metavar="PREFIX",
        help="Remove this from the tensors' names (often module., _orig_mod., model.); may be repeated.",
    ),
    click.option("--allow-pickle", is_flag=True, help="Run what a pickle asks for. Only for files you trust."),
)
"""What finds the tensors in a checkpoint and the model they belong to."""

inputs = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SPEC",
    callback=_inputs,
    help="An example input: [name=]float32[8,3,224,224], [name=]int64[2,128]:0..30521, [name=]FILE "
    "(.safetensors, .npy, .pt) or [name=]pkg.module:function. Repeat for more; those without a name are positional.",
)
"""As Inputs."""

device = _together(
    click.option("--device", help="Where to run: cpu, cuda, cuda:1. [default: cuda where there is any]"),
    click.option("--dtype", type=click.Choice(DTYPES), help="Convert the model to this dtype first."),
)

quiet = _together(
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option(
        *("-q", "--quiet"), is_flag=True, expose_value=False, callback=_silenced, help="No progress and no remarks."
    ),
)
