"""The ``epd`` command: thin, each subcommand with an example in its help."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epd.bench.cli import bench, profile
from epd.errors import ConfigError

app = typer.Typer(
    name="epd",
    help="Encode-prefill-decode serving of vision-language models on Ray Serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(profile)

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]"}


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A `serve run` file.", exists=True, dir_okay=False)],
    port: Annotated[int | None, typer.Option(help="Listen here instead of on the file's http_options.port.")] = None,
    timeout: Annotated[float, typer.Option(help="Give up if the server does not answer after so many seconds.")] = 600,
    verbose: Annotated[bool, typer.Option(help="Show the server's log here instead of in a file.")] = False,
) -> None:
    """Serve a configuration on this machine, in a Ray cluster of its own, until Ctrl-C or SIGTERM.

    Waits until the server answers, and prints a curl line and a Python snippet to try it with. To deploy to an existing
    cluster use `serve run` or `serve deploy` with the same file.

    Example: epd serve configs/quickstart.yaml --port 8000
    """
    from deployments.local_server import serve_until_stopped

    try:
        code = serve_until_stopped(config, port=port, timeout_s=timeout, verbose=verbose)
    except ConfigError as error:
        Console(stderr=True).print(f"[red]error:[/red] {config}: {error.message}", highlight=False, soft_wrap=True)
        code = 2
    raise typer.Exit(code)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A `serve run` file to check as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Check what serving needs on this machine: versions, NIXL, shared memory, ports, GPUs, and a configuration.

    Exits with 1 if a check failed; warnings do not count.

    Example: epd doctor configs/quickstart.yaml
    """
    from deployments.doctor import run_checks

    checks = run_checks(config)
    if as_json:
        findings = [{"name": each.name, "status": each.status, "detail": each.detail} for each in checks]
        sys.stdout.write(json.dumps({"checks": findings}, indent=2) + "\n")
    else:
        table = Table("check", "status", "detail", box=None)
        for each in checks:
            table.add_row(each.name, _MARKS[each.status], each.detail)
        Console().print(table)
    raise typer.Exit(1 if any(each.status == "failed" for each in checks) else 0)


if __name__ == "__main__":
    app()
