"""`hostward report`: a page about a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hostward.checkpoint.files import LATEST, is_checkpoint
from hostward.errors import ConfigError
from hostward.report.schema import REPORT_FILE, TRACE_FILE, read_report

PAGE = "report.html"


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, its report.json, or a file that --json wrote.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help=f"The page to write; {PAGE} beside the report.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Write the charts as PNGs too; needs matplotlib.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="The trace of the run; trace.json beside the report by default."),
    ] = None,
) -> None:
    """Render the report of a run as one HTML page: memory, a step's lanes, predictions, loss and speed."""
    from hostward.files.atomic_file import replace_text
    from hostward.report.page import render
    from hostward.runtime.step_trace import from_chrome

    _require_no_checkpoint(run)
    found = read_report(run)
    folder = run if run.is_dir() else run.parent
    if trace is None and run.is_dir() and (run / TRACE_FILE).is_file():
        trace = run / TRACE_FILE
    spans = None if trace is None else from_chrome(trace)
    page = folder / PAGE if html is None else html
    replace_text(page, render(found, spans), what="page")
    typer.echo(f"written to {page}")
    if png is None:
        return
    from hostward.report.png import draw_all

    try:
        png.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"--png {png} cannot be made", why=why, fix="name a folder") from error
    for file in draw_all(found, spans, png):
        typer.echo(f"written to {file}")


def _require_no_checkpoint(run: Path) -> None:
    """Raises ConfigError for a checkpoint, or the file that names the newest: neither says anything of the run."""
    names_one = run.name == LATEST and run.is_file()
    if (run / REPORT_FILE).is_file() or not (names_one or is_checkpoint(run)):
        return
    what = f"names a checkpoint of {run.parent}" if names_one else "is a checkpoint"
    raise ConfigError(
        f"{run} {what}, and no report",
        why=f"the report of a run is {REPORT_FILE} in its folder: --run-dir, else checkpoint.save",
        fix=f"hostward report {shlex.quote(str(run.parent))}"
        if (run.parent / REPORT_FILE).is_file()
        else "name that folder",
    )
