"""The ``normswap`` command. PyTorch is imported by what needs it, so that help and completion come at once."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tabulate import tabulate

import normswap
from normswap.cli import options
from normswap.cli.talk import fail, remark, result, say, told_warnings

if TYPE_CHECKING:
    from normswap.checkpoint.reading import Checkpoint
    from normswap.cli.inputs import Inputs
    from normswap.cli.summary import Summary
    from normswap.plans import Plan

FAILED, MISMATCH, EMPTY, ENVIRONMENT = 1, 3, 4, 5  # 2 is click's, of a wrong call


class _Command(click.Command):
    """One whose results alone go to stdout, and which a model's own code does not end as if it were done."""

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = sys.stdout
        with redirect_stdout(sys.stderr):
            try:
                return super().invoke(ctx)
            except SystemExit as error:
                return _told(error)


class _Commands(click.Group):
    """A group that tells every error in one line and ends with the code its kind has."""

    command_class = _Command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with told_warnings():
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
            except click.ClickException as error:
                fail(error.format_message())
                code = error.exit_code
            except (click.Abort, KeyboardInterrupt):
                fail("interrupted")
                code = FAILED
            except Exception as error:  # a model's own code may raise anything, anywhere
                code = _told(error)
        sys.exit(code if isinstance(code, int) else 0)


def _told(error: BaseException) -> int:
    """Tell an error in one line, and where it arose if it is not ours or the machine's; returns its exit code."""
    from normswap import native
    from normswap.checkpoint.errors import MissingError, one_line, told
    from normswap.plans import MismatchError, NormswapError, NothingSwappedError

    ours, machine = (NormswapError, native.BuildError), (ValueError, OSError, MemoryError)
    fail(str(error) if isinstance(error, ours) else one_line(error) if isinstance(error, machine) else told(error))
    codes = {MissingError: ENVIRONMENT, native.BuildError: ENVIRONMENT, MismatchError: MISMATCH}
    return next((c for kind, c in {**codes, NothingSwappedError: EMPTY}.items() if isinstance(error, kind)), FAILED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(normswap.__version__, prog_name="normswap")
def main() -> None:
    """Swap a model's normalisation layers for fast CUDA kernels, with proof that nothing else changed.

    Results go to stdout, everything else to stderr.

    \b
    Exit codes:
      0  done
      1  refused or failed, nothing written; or verify found other tensors
      2  usage
      3  the proof failed under --on-mismatch raise, nothing written; or verify found other outputs
      4  nothing to swap under --on-empty raise, nothing written
      5  this machine lacks what is asked for: a device, a library, a compiler that works
    """


@main.command()
@click.argument("source", metavar="IN")
@options.model
@options.filters
@options.quiet
def inspect(source: str, factory: str | None, kwargs: dict[str, Any], as_json: bool, **where: Any) -> None:
    """Show what the checkpoint IN holds and, where its model is known, what would be swapped."""
    normswap.complete()
    from normswap.checkpoint.errors import running
    from normswap.checkpoint.models import factory_for, open_model
    from normswap.checkpoint.reading import CONFIG
    from normswap.cli.summary import summarize

    filters = {name: where.pop(name) for name in ("include", "exclude")}
    found = _open(source, **where)
    summary = summarize(found.tensors)
    data: dict[str, Any]
    if factory is None and found.module is None and not Path(source, CONFIG).is_file():
        table, data = _norm_table(summary), {"norms": [vars(norm) for norm in summary.norms]}
    else:
        model = open_model(found, factory or factory_for(Path(source), found), kwargs)
        with running(type(model).__name__):
            planned = normswap.plan(model, **filters)
        table, data = _plan_table(planned), {"plan": planned.to_dict()}
    shown = {"tensors": summary.tensors, "size": summary.size, "dtypes": summary.dtypes, **data}
    result(_json(shown) if as_json else f"{source}: {summary}\n{table}")


@main.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="[OUT]", required=False)
@options.model
@options.inputs
@options.device
@options.filters
@options.choice(
    "--validate",
    ("auto", "forward", "grad", "off"),
    "auto",
    "What to prove: outputs (forward), gradients too (grad), or as trained (auto).",
)
@options.choice(
    "--on-mismatch", ("rollback", "raise", "warn"), "rollback", "What to do with a site that fails its proof."
)
@options.choice("--on-empty", ("warn", "raise", "ignore"), "warn", "What to do when there is nothing to swap.")
@click.option(
    "--min-speedup",
    type=click.FloatRange(min=0, min_open=True),
    callback=options.finite,
    default=1.0,
    show_default=True,
    help="On a GPU, keep a site only if it is so many times as fast.",
)
@click.option(
    "--fold", is_flag=True, help="Write a plain model instead, its BatchNorms folded into Linears and convolutions."
)
@click.option("--export", metavar="OUT.pt2", help="Write a torch.export program of the result, too.")
@click.option("--report", "report_file", metavar="FILE", help="Write the proof there, too, as JSON.")
@click.option("--in-place", is_flag=True, help="Add normswap.json beside IN, and write nothing else.")
@click.option("--force", is_flag=True, help="Replace an existing OUT.")
@click.option("--dry-run", is_flag=True, help="Do all but write.")
@options.quiet
def convert(source: str, out: str | None, inputs: Inputs, in_place: bool, as_json: bool, **settings: Any) -> None:
    """Write to OUT the tensors of IN, bit for bit, and normswap.json beside them.

    normswap.load_model(OUT) then opens the model with its norms swapped. IN is a file (.pt, .pth, .bin, .ckpt,
    .safetensors) or a folder of them with an index, as transformers writes it. OUT is a file that ends in one of these,
    or a folder, which takes over what the model in the folder IN needs.
    """
    if in_place is (out is not None):
        raise click.UsageError("give either OUT or --in-place")
    normswap.complete()
    from normswap import checkpoint
    from normswap.checkpoint.models import in_dtype, is_code
    from normswap.checkpoint.reading import CONFIG

    if settings["factory"] is None and not Path(source, CONFIG).is_file() and not settings["allow_pickle"]:
        raise click.UsageError(_needs_model(source, settings["key"], settings["strip_prefix"]))
    given = in_dtype(inputs, settings["dtype"])
    made = checkpoint.convert(
        source,
        out,
        factory_kwargs=settings.pop("kwargs"),
        inputs=given.positional or None,
        input_kwargs=given.named,
        say=remark,
        **settings,
    )
    place = source if out is None else out
    proved_by = f"normswap verify {place}{' --trust-factory' * is_code(settings['factory'] or '')} --input ... there"
    result(made.to_json() if as_json else _for_the_command_line(str(made), proved_by))
    if not as_json and not settings["dry_run"]:
        result(_written(place))


@main.command()
@click.argument("one", metavar="A")
@click.argument("other", metavar="[B]", required=False)
@click.option("--key", metavar="KEY", help="Where in a file the state_dict is, as in ema or a.b.")
@click.option("--strip-prefix", multiple=True, metavar="PREFIX", help="Remove this from the tensors' names.")
@options.inputs
@click.option("--trust-factory", is_flag=True, help="Import and run the function that normswap.json names.")
@click.option("--device", help="Where to run: cpu, cuda, cuda:1. [default: cuda where there is any]")
@options.quiet
def verify(one: str, other: str | None, inputs: Inputs, as_json: bool, **settings: Any) -> None:
    """Compare the checkpoints A and B: the same tensors and, with --input, the same outputs?

    A converted one is also held to the digests in its normswap.json; A alone is held to nothing else.
    """
    normswap.complete()
    from normswap import checkpoint

    found = checkpoint.verify(one, other, inputs=inputs.positional, input_kwargs=inputs.named, **settings)
    result(_json(found.to_dict()) if as_json else str(found))
    if not found.same:
        click.get_current_context().exit(FAILED if found.tensors else MISMATCH)


@main.command()
@click.argument("source", metavar="IN")
@options.model
@options.inputs
@options.device
@options.filters
@click.option("--rounds", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Forward passes of each.")
@options.quiet
def bench(
    source: str, factory: str | None, kwargs: dict[str, Any], inputs: Inputs, rounds: int, as_json: bool, **where: Any
) -> None:
    """Time the model of the checkpoint IN as it is against swapped, on the example inputs."""
    if not any(inputs):
        raise click.UsageError("bench needs example inputs: pass --input")
    normswap.complete()
    import copy

    from normswap.checkpoint import models
    from normswap.checkpoint.errors import running
    from normswap.cli.bench import bench as timed

    device, dtype = where.pop("device"), where.pop("dtype")
    filters = {name: where.pop(name) for name in ("include", "exclude")}
    place = models.usable_device(device)
    found = _open(source, **where)
    factory = factory or models.factory_for(Path(source), found)
    eager = models.ready(models.open_model(found, factory, kwargs, dtype), place)
    given = models.moved(models.in_dtype(inputs, dtype), place)
    with running(type(eager).__name__):
        twin = copy.deepcopy(eager)
    swapped, report = models.optimized(twin, (given.positional or None, given.named), **filters)
    made = timed(eager, swapped, report, given.positional, given.named, rounds=rounds)
    result(_json(made.to_dict()) if as_json else str(made))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Show the versions, the GPU and the kernel library, and what is missing."""
    from normswap.environment import environment

    found = environment()
    result(_json(found) if as_json else tabulate(found.items(), tablefmt="plain", disable_numparse=True))


@main.command()
@click.option("--arch", metavar="LIST", help="GPU architectures, as in 80,90,100. [default: the local GPU's]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for it. [default: the user cache]"
)
def build(arch: str | None, out: Path | None) -> None:
    """Compile the kernels, and autograd's nodes for this torch, before their first use."""
    from normswap import builder, native, nodes_library

    try:
        architectures = None if arch is None else builder.check_arch([a.strip() for a in arch.split(",")])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    with nodes_library.built_beside(out, say) as made:
        result(native.build(architectures, out, progress=say))
    result(made.result())


def _open(source: str, **where: Any) -> Checkpoint:
    from normswap.checkpoint.reading import open_checkpoint

    found = open_checkpoint(source, **where)
    for note in found.notes:
        remark(note)
    return found


def _needs_model(source: str, key: str | None, strip_prefix: tuple[str, ...]) -> str:
    from normswap.checkpoint.reading import open_checkpoint
    from normswap.cli.summary import summarize

    summary = summarize(open_checkpoint(source, key=key, strip_prefix=strip_prefix).tensors)
    names = [norm.name or "(root)" for norm in summary.norms[:10]] + ["..."] * (len(summary.norms) > 10)
    shown = f" ({', '.join(names)})" if names else ""
    return (
        f"{source} holds tensors and no model: {summary}{shown}; pass --model pkg.module:function, "
        "a function that returns the model they belong to (or timm:NAME, hf:DIR)"
    )


def _for_the_command_line(report: str, proved_by: str) -> str:
    """A report whose advice is not about a model in a Python program."""
    lines = [line for line in report.splitlines() if not line.startswith("undo: ")]
    return "\n".join(lines).replace("normswap.validate(model, inputs)", proved_by)


def _written(out: str) -> str:
    """What was written, manifest included, and the line that opens it."""
    from normswap.checkpoint.errors import listed
    from normswap.checkpoint.models import is_code
    from normswap.checkpoint.writing import find_manifest

    place, manifest = find_manifest(Path(out))
    trust = ", trust_factory=True" if is_code(manifest.factory) else ""
    names = [*dict.fromkeys((*manifest.written, place.name))]
    return f"wrote {listed(names, 4)} in {place.parent}\nopen it: normswap.load_model({out!r}{trust})"


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


def _json(data: Any) -> str:
    return json.dumps(data, indent=2)
