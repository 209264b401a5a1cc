"""The ``normswap`` command."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from tabulate import tabulate

from normswap import checkpoint, native
from normswap.factory import load_strictly
from normswap.inputs import make_inputs
from normswap.optimize import OnEmpty, OnMismatch, Validate, plan
from normswap.plan import MismatchError, NormswapError, NothingSwappedError, Plan
from normswap.summary import Summary, summarize
from normswap.tensors import one_line

FAILED, USAGE, MISMATCH, EMPTY, ENVIRONMENT = 1, 2, 3, 4, 5

_F = TypeVar("_F", bound=Callable[..., Any])


class _Commands(click.Group):
    """A group that tells every error in one line and ends with the code its kind has."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with _told_warnings(), _importable_folder():
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
            except click.ClickException as error:
                _say(error.format_message())
                code = error.exit_code
            except click.Abort:
                _say("interrupted")
                code = FAILED
            except native.BuildError as error:
                _say(str(error))
                code = ENVIRONMENT
            except NormswapError as error:
                _say(str(error))
                code = _exit_code(error)
            except (ValueError, OSError) as error:
                _say(one_line(error))
                code = FAILED
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(checkpoint.versions()["normswap"], prog_name="normswap")
def main() -> None:
    """Swap a model's normalisation layers for fast CUDA kernels, with proof that nothing else changed.

    Exit codes: 0 done; 1 refused or failed, nothing written; 2 usage; 3 the proof failed under --on-mismatch raise,
    nothing written; 4 nothing to swap under --on-empty raise; 5 no compiler, or a compiler error.
    """


def _patterns(_context: click.Context, _parameter: click.Parameter, patterns: tuple[str, ...]) -> list[str] | None:
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[len("re:") :])
            except re.error as error:
                raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}") from error
    return list(patterns) or None


def _filters(command: _F) -> _F:
    help_ = "glob or re:... over module names; may be repeated"
    for name, verb in (("--exclude", "Leave out sites"), ("--include", "Take only sites")):
        option = click.option(
            name, multiple=True, metavar="PATTERN", callback=_patterns, help=f"{verb} that match this {help_}."
        )
        command = option(command)
    return command


def _choice(name: str, literal: Any, default: str, text: str) -> Callable[[_F], _F]:
    return click.option(name, type=click.Choice(get_args(literal)), default=default, show_default=True, help=text)


_MODEL = click.option(
    "--model",
    "factory",
    metavar="PKG.MODULE:FUNCTION",
    help="The function that returns the model the checkpoint belongs to. It is imported and run.",
)


@main.command()
@click.argument("source", metavar="IN")
@_MODEL
@_filters
def inspect(source: str, factory: str | None, include: list[str] | None, exclude: list[str] | None) -> None:
    """Show what the checkpoint IN holds and, with --model, what would be swapped."""
    tensors, _ = checkpoint.read_tensors(source)
    summary = summarize(tensors)
    if factory is None:
        table = _norm_table(summary)
    else:
        model = checkpoint.build_model(factory)
        load_strictly(model, tensors, source)
        table = _plan_table(plan(model.eval(), include=include, exclude=exclude))
    click.echo(f"{source}: {summary}\n{table}")


@main.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT")
@_MODEL
@click.option(
    "--input",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="An example input: [name=]float32[8,3,224,224], [name=]int64[2,128]:0..30521 or FILE.safetensors. "
    "Repeat for more; those without a name are positional.",
)
@click.option("--device", help="Where to prove: cpu, cuda, cuda:1. [default: cuda where there is any]")
@_filters
@_choice(
    "--validate", Validate, "auto", "What to prove: outputs (forward), gradients too (grad), or as trained (auto)."
)
@_choice("--on-mismatch", OnMismatch, "rollback", "What to do with a site that fails its proof.")
@_choice("--on-empty", OnEmpty, "warn", "What to do when there is nothing to swap.")
@click.option("--force", is_flag=True, help="Replace an existing OUT.")
def convert(
    source: str,
    out: str,
    factory: str | None,
    specs: tuple[str, ...],
    device: str | None,
    include: list[str] | None,
    exclude: list[str] | None,
    validate: Validate,
    on_mismatch: OnMismatch,
    on_empty: OnEmpty,
    force: bool,
) -> None:
    """Write to OUT the tensors of IN, bit for bit, and normswap.json beside them.

    normswap.load_model(OUT) then opens the model with its norms swapped. OUT ends in .pt, .pth or .safetensors, or
    is a folder.
    """
    if factory is None:
        raise click.UsageError(_needs_model(source))
    try:
        inputs, input_kwargs = make_inputs(specs)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = checkpoint.convert(
        source,
        out,
        factory,
        inputs=inputs or None,
        input_kwargs=input_kwargs,
        device=device,
        include=include,
        exclude=exclude,
        validate=validate,
        on_mismatch=on_mismatch,
        on_empty=on_empty,
        force=force,
    )
    click.echo(str(report))


@main.command()
def env() -> None:
    """Show the versions, the GPU and the kernel library, and what is missing."""
    click.echo(tabulate(native.environment().items(), tablefmt="plain"))


@main.command()
@click.option("--arch", metavar="LIST", help="GPU architectures, as in 80,90,100. [default: the local GPU's]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for it. [default: the user cache]"
)
def build(arch: str | None, out: Path | None) -> None:
    """Compile the kernel library ahead of its first use."""
    architectures = [a.strip() for a in arch.split(",")] if arch is not None else None
    try:
        click.echo(native.build(architectures, out, progress=_say))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error


def _needs_model(source: str) -> str:
    summary = summarize(checkpoint.read_tensors(source)[0])
    names = (
        f" ({', '.join(summary.norm_names[:10])}{', ...' if len(summary.norms) > 10 else ''})" if summary.norms else ""
    )
    return (
        f"{source} holds tensors and no model: {summary}{names}; pass --model pkg.module:function, "
        "a function without arguments that returns the model they belong to"
    )


def _norm_table(summary: Summary) -> str:
    rows = [(norm.name or "(root)", norm.guess, norm.size) for norm in summary.norms]
    return tabulate(rows, ["module", "likely a", "size"], disable_numparse=[0]) if rows else "no likely norms by name"


def _plan_table(found: Plan) -> str:
    rows = [(s.site.name or "(root)", s.site.type_name, s.match.kind, "swap") for s in found.swaps]
    rows += [
        (r.site.name or "(root)", r.site.type_name, r.refusal.kind, f"leave: {r.refusal}; {r.refusal.reason.cure}")
        for r in found.refused
    ]
    return tabulate(rows, ["module", "type", "kind", "what"], disable_numparse=True) if rows else "nothing to swap"


def _exit_code(error: NormswapError) -> int:
    if isinstance(error, MismatchError):
        return MISMATCH
    return EMPTY if isinstance(error, NothingSwappedError) else FAILED


def _say(message: str) -> None:
    click.echo(f"normswap: {message.removeprefix('normswap: ')}", err=True)


@contextmanager
def _told_warnings() -> Iterator[None]:
    """Warnings as lines of ours, without the file and source line that Python adds."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: _say(
            f"warning: {str(message).removeprefix('normswap: ')}"
        )
        yield


@contextmanager
def _importable_folder() -> Iterator[None]:
    """Modules in the current folder can be imported, as under ``python -m``."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


if __name__ == "__main__":
    main()
