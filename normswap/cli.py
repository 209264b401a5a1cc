"""The ``normswap`` command."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from tabulate import tabulate

from normswap import checkpoint, native
from normswap.factory import load_strictly
from normswap.inputs import make_inputs
from normswap.optimize import plan
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


def _filters(command: _F) -> _F:
    help_ = "glob or re:... over module names; may be repeated"
    for name, verb in (("--exclude", "Leave out sites"), ("--include", "Take only sites")):
        command = click.option(name, multiple=True, metavar="PATTERN", help=f"{verb} that match this {help_}.")(command)
    return command


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
def inspect(source: str, factory: str | None, include: tuple[str, ...], exclude: tuple[str, ...]) -> None:
    """Show what the checkpoint IN holds and, with --model, what would be swapped."""
    tensors, _ = checkpoint.read_tensors(source)
    summary = summarize(tensors)
    if factory is None:
        table = _norm_table(summary)
    else:
        model = checkpoint.build_model(factory)
        load_strictly(model, tensors, source)
        table = _plan_table(plan(model.eval(), include=_some(include), exclude=_some(exclude)))
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
@click.option("--validate", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--on-mismatch", type=click.Choice(["rollback", "raise", "warn"]), default="rollback", show_default=True)
@click.option("--on-empty", type=click.Choice(["warn", "raise", "ignore"]), default="warn", show_default=True)
@click.option("--force", is_flag=True, help="Replace an existing OUT.")
def convert(
    source: str,
    out: str,
    factory: str | None,
    specs: tuple[str, ...],
    device: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    validate: str,
    on_mismatch: Any,
    on_empty: Any,
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
        include=_some(include),
        exclude=_some(exclude),
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
    click.echo(native.build(architectures, out, progress=_say))


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
    return tabulate(rows, ["module", "likely a", "size"]) if rows else "no likely norms by name"


def _plan_table(found: Plan) -> str:
    rows = [(s.site.name or "(root)", s.site.type_name, s.match.kind, "swap") for s in found.swaps]
    rows += [
        (r.site.name or "(root)", r.site.type_name, r.refusal.kind, f"leave: {r.refusal}; {r.refusal.reason.cure}")
        for r in found.refused
    ]
    return tabulate(rows, ["module", "type", "kind", "what"]) if rows else "nothing to swap"


def _some(patterns: tuple[str, ...]) -> list[str] | None:
    return list(patterns) or None


def _exit_code(error: NormswapError) -> int:
    if isinstance(error, MismatchError):
        return MISMATCH
    return EMPTY if isinstance(error, NothingSwappedError) else FAILED


def _say(message: str) -> None:
    click.echo(f"normswap: {message}", err=True)


@contextmanager
def _told_warnings() -> Iterator[None]:
    """Warnings as lines of ours, without the file and source line that Python adds."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: _say(f"warning: {message}")
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
