"""The command `hyper-parallel`: what it takes, and what it answers to mistakes.

    exit code      meaning
    0              done
    1              a rank ended early
    2              asked for something that can't be done; one line on stderr says what
    128 + signal   ended by a signal; all ranks have ended too

Importing this imports no framework.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer looks it up
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from hyper_parallel._version import __version__
from hyper_parallel.demo.options import TRANSPORTS, DemoOptions, ModelShape
from hyper_parallel.demo.run import run_demo
from hyper_parallel.errors import DemoError, DemoInterrupted, RankError

app = typer.Typer(
    name="hyper-parallel",
    help="Train models that do not fit one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULTS = DemoOptions()
_SHAPE = ModelShape()


def main() -> None:
    """Run the command with the arguments of this process."""
    app(prog_name="hyper-parallel")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def demo(  # noqa: PLR0917 - typer makes options of them
    ranks: Annotated[int, typer.Option(help="Ranks of the first phase.")] = _DEFAULTS.ranks,
    resume_ranks: Annotated[
        int,
        typer.Option(help="Ranks that go on from the checkpoint; 0: one more, or a single one."),
    ] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for report, picture and checkpoint.")
    ] = _DEFAULTS.out,
    text: Annotated[
        Path | None, typer.Option(help="Folder whose text is learnt; default: Python's library.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of both phases.")] = _DEFAULTS.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = _DEFAULTS.batch,
    learning_rate: Annotated[
        float, typer.Option(help="The highest learning rate.")
    ] = _DEFAULTS.learning_rate,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = _SHAPE.layers,
    width: Annotated[int, typer.Option(help="Features, a multiple of 64.")] = _SHAPE.width,
    context: Annotated[int, typer.Option(help="Bytes per sequence.")] = _SHAPE.context,
    seed: Annotated[int, typer.Option(help="Decides weights, order and sample.")] = _DEFAULTS.seed,
    transport: Annotated[
        str, typer.Option(help=f"How bytes move: {', '.join(TRANSPORTS)}.")
    ] = _DEFAULTS.transport,
) -> None:
    """Train a byte-level GPT on real text with fully_shard, save it, and go on with other ranks."""
    try:
        options = DemoOptions(
            out=out,
            text=text,
            ranks=ranks,
            resume_ranks=resume_ranks,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            seed=seed,
            transport=transport,
            model=ModelShape(layers=layers, width=width, context=context),
        )
        run_demo(options, Console())
    except DemoError as error:
        _end(error, 2)
    except RankError as error:
        _end(error, 1)
    except DemoInterrupted as error:
        _end(error, error.exit_code)


def _end(error: BaseException, exit_code: int) -> NoReturn:
    typer.echo(f"hyper-parallel demo: {error}", err=True)
    raise typer.Exit(exit_code) from None
