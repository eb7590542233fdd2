"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw them: .html, .png or .svg.")]
RivalPython = Annotated[
    str | None, typer.Option(metavar="FILE", help="The interpreter that has them; this one by default.")
]
BlockSize = Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a block.")]
Order = Annotated[str, typer.Option(help="Of a block: NHD or HND.")]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Of a CPU; torch's choice by default.")]
CaseSeconds = Annotated[float, typer.Option(min=0.01, max=3600, help="Measure each case for so long.")]
