"""``kvferry config check | show | schema``: a cluster's file, before anything is started by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

config_app = typer.Typer(name="config", help="Look at a cluster's YAML file.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The cluster's YAML file.")]


@config_app.command("check")
def check_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Clusters' YAML files.")],
) -> None:
    """Check files, down to each component's own settings; the first that is wrong is named with its key and value.

    A model's directory need not be on this machine.
    """
    from cluster.config_file import load_config
    from cluster.model_store import model_is_elsewhere
    from cluster.plan import check_orders, planned_orders

    for file in files:
        config = load_config(file)
        check_orders(planned_orders(config), Path(config.model))
        elsewhere = model_is_elsewhere(config.model)
        workers = f"{config.prefill.replicas} prefill, {config.decode.replicas} decode"
        remark = "; the model is not on this machine, and must be on each of the cluster's" if elsewhere else ""
        typer.echo(f"{file}: {config.model}, 1 router, {workers}: ok{remark}")


@config_app.command("show")
def show_command(file: File) -> None:
    """Print a file with every key that was left out, and its default. A null is left to the component itself."""
    import msgspec
    import yaml

    from cluster.config_file import load_config

    typer.echo(yaml.safe_dump(msgspec.to_builtins(load_config(file)), sort_keys=False, allow_unicode=True), nl=False)


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of such files, for editors."""
    from cluster.display import print_json
    from cluster.schema import config_schema

    print_json(config_schema())
