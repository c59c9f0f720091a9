"""`hostward checkpoint inspect | convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="DIR/iter_NNNNNNN, or DIR: the one that DIR/latest names.")
]


def inspect(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a checkpoint holds."""
    from hostward.trainer import export

    contents = export.inspect(folder, verify=verify)
    typer.echo(json.dumps(contents.to_dict(), indent=1) if as_json else contents.to_text())


def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    form: Annotated[
        str, typer.Option("--to", metavar="safetensors|torch", help="Weights for transformers, or all for torch.optim.")
    ] = "safetensors",
) -> None:
    """Write the weights as transformers loads them, or weights and state for torch.optim.AdamW."""
    from hostward.trainer import export

    for path in export.convert(folder, out, form):
        typer.echo(path)
