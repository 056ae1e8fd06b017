"""The ``epd bench`` and ``epd profile`` commands: options in, tables or JSON out.

Owns argument parsing and the terminal. ``--json`` prints one JSON document on stdout and nothing else there; progress
goes to stderr. Knows nothing of how load is made or figures are derived.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from epd import __version__
from epd.bench.client import Contender, first_model
from epd.bench.metrics import Summary
from epd.bench.profiler import ProfilePlan, fit_cost_model, measure, num_samples
from epd.bench.report import as_json, max_goodput_table, summary_table
from epd.bench.runner import BenchPlan, BenchResult, Progress, WorkloadOf, run_bench
from epd.bench.workload import (
    RequestShape,
    Workload,
    builtin_workload,
    fixed_workload,
    read_servegen,
    servegen_workload,
)
from epd.errors import ConfigError, EpdError
from epd.routing.cost_model import CostModel, ProfileKey
from epd.types import SLO

_Result = TypeVar("_Result")


def bench(
    url: Annotated[
        str, typer.Option(help="Base URL of the deployment, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    mode: Annotated[
        list[str] | None,
        typer.Option(help="A mode to measure, or none to send no epd field; repeat to compare. Default: auto."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of another OpenAI-compatible server to compare with; repeat.")
    ] = None,
    workload: Annotated[str, typer.Option(help="fixed, builtin, or a directory of ServeGen populations.")] = "fixed",
    rate: Annotated[list[float] | None, typer.Option(help="Offered requests per second; repeat. Default: 1.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds of arrivals a round.")] = 30.0,
    rounds: Annotated[int, typer.Option(help="Rounds a rate; contenders alternate within each.", min=1)] = 1,
    cv: Annotated[float, typer.Option(help="Burstiness of arrivals: 1 Poisson, 2-4 bursty, 0 even.", min=0.0)] = 1.0,
    images: Annotated[int, typer.Option(help="Images a request (fixed workload).", min=0)] = 1,
    image_size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels (fixed workload).")] = "448x448",
    text_tokens: Annotated[int, typer.Option(help="Words of text a request (fixed workload).", min=1)] = 100,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate (fixed workload).", min=1)] = 64,
    image_share: Annotated[float, typer.Option(help="Share of requests with images (fixed).", min=0, max=1)] = 1.0,
    image_reuse: Annotated[float, typer.Option(help="Share of images that repeat an earlier one.", min=0, max=1)] = 0.0,
    scale: Annotated[float, typer.Option(help="Factor on the sizes of builtin and ServeGen workloads.")] = 1.0,
    slo_ttft: Annotated[float, typer.Option(help="Objective: seconds to the first token.")] = 1.0,
    slo_itl: Annotated[float, typer.Option(help="Objective: seconds between tokens, p99 of each request.")] = 0.05,
    max_goodput: Annotated[bool, typer.Option(help="Also search the highest rate with 90 % attainment.")] = False,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before measuring, each contender.", min=0)] = 2,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals and sizes.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds without data before a request counts as failed.")] = 120.0,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON report here.")] = None,
    as_json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure goodput under an SLO: open-loop load, modes and peers side by side.

    Example: epd bench --mode auto --mode aggregated --mode epd --rate 1 --rate 2 --duration 60 --rounds 3
    """
    with _errors_as_exit():
        slo = SLO(slo_ttft, slo_itl)
        shape = RequestShape(images, *_parse_size(image_size), text_tokens, output_tokens)
        workload_of = _workload_of(workload, duration, cv, shape, image_share, image_reuse, scale)
        rates = tuple(rate or [1.0])
        peers = [_parse_peer(each) for each in peer or []]

        async def run(on_progress: Callable[[Progress], None]) -> BenchResult:
            async with _http_client(timeout) as client:
                contenders = await _contenders(client, url, tuple(mode or ["auto"]), peers, model, api_key)
                plan = BenchPlan(
                    contenders,
                    workload_of,
                    slo,
                    rates,
                    num_rounds=rounds,
                    num_warmup=warmup,
                    seed=seed,
                    start_rate=rates[0] if max_goodput else None,
                )
                return await run_bench(client, plan, on_progress)

        result = _with_progress(run)
    described = {"name": workload, "rates": rates, "duration_s": duration, "rounds": rounds, "cv": cv, "seed": seed}
    if workload == "fixed":
        described |= {"images": images, "image_size": image_size, "text_tokens": text_tokens}
        described |= {"output_tokens": output_tokens, "image_share": image_share}
    described |= {"image_reuse": image_reuse, "scale": scale}
    report = as_json(
        result.summaries, slo, workload=described, max_goodputs=result.max_goodputs, errors=dict(result.errors)
    )
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")
    if as_json_output:
        typer.echo(json.dumps(report))
    else:
        _print_bench(result, result.summaries, slo)


def profile(
    url: Annotated[str, typer.Option(help="Base URL of an idle deployment.")] = "http://127.0.0.1:8000",
    output: Annotated[Path, typer.Option(help="Where to write; set router.profile to this path.")] = Path(
        "profile.json"
    ),
    device: Annotated[str, typer.Option(help="Device that the deployment runs on, for the record.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Its dtype, for the record.")] = "float32",
    points: Annotated[int, typer.Option(help="Measurements a stage, about.", min=5)] = 60,
    max_prompt: Annotated[int | None, typer.Option(help="Longest prompt in words. Default: from the model.")] = None,
    max_image_side: Annotated[int, typer.Option(help="Largest image side in pixels.", min=112)] = 672,
    max_batch: Annotated[int, typer.Option(help="Most streams decoding at once.", min=1)] = 8,
    patches_per_token: Annotated[int, typer.Option(help="Vision patches merged into one token.", min=1)] = 4,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without data before giving up.")] = 120.0,
    as_json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure each stage of a running deployment and write the cost model that its router reads.

    Example: epd profile --url http://127.0.0.1:8000 --output profile.json
    """
    with _errors_as_exit():

        async def run(on_progress: Callable[[Progress], None]) -> tuple[CostModel, dict[str, int]]:
            async with _http_client(timeout) as client:
                entry = await _first_model(client, url, api_key)
                name = model or str(entry.get("id"))
                # Half of the context: words are often more than one token.
                max_words = max_prompt or int(entry.get("max_model_len") or 2048) // 2
                plan = ProfilePlan.of(points, max_words, max_image_side, max_batch)
                contender = Contender("profile", url, name, api_key=api_key)
                measurements = await measure(
                    client, contender, plan, patches_per_token=patches_per_token, on_progress=on_progress
                )
                key = ProfileKey(name, device, dtype, __version__)
                return fit_cost_model(measurements, key), dict(num_samples(measurements))

        cost_model, counts = _with_progress(run)
        output.write_text(cost_model.to_json())
    if as_json_output:
        errors = dict(cost_model.hold_out_error)
        typer.echo(json.dumps({"output": str(output), "hold_out_error": errors, "num_samples": counts}))
        return
    table = Table(title=f"{cost_model.key.model} on {cost_model.key.device}: written to {output}")
    table.add_column("stage")
    table.add_column("samples", justify="right")
    table.add_column("hold-out error", justify="right")
    for stage, count in counts.items():
        error = cost_model.hold_out_error.get(stage)
        table.add_row(stage, str(count), "guessed" if error is None else f"{error:.1%}")
    Console().print(table)


# --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _errors_as_exit() -> Iterator[None]:
    """Print deliberate errors in one line on stderr and exit with 1."""
    try:
        yield
    except (EpdError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _with_progress(run: Callable[[Callable[[Progress], None]], Coroutine[Any, Any, _Result]]) -> _Result:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, description=progress.label, completed=progress.num_done, total=progress.num_total)

        return asyncio.run(run(show))


def _http_client(timeout_s: float) -> httpx.AsyncClient:
    # Proxies of the environment are ignored: they would be measured too.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits, trust_env=False)


async def _first_model(client: httpx.AsyncClient, url: str, api_key: str | None) -> dict[str, Any]:
    try:
        return await first_model(client, url, api_key)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EpdError(f"no server answers at {url}: {error}") from error


async def _contenders(
    client: httpx.AsyncClient,
    url: str,
    modes: tuple[str, ...],
    peers: list[tuple[str, str]],
    model: str | None,
    api_key: str | None,
) -> tuple[Contender, ...]:
    name = model or str((await _first_model(client, url, api_key)).get("id"))
    contenders = [
        Contender(mode, url, name, mode=None if mode == "none" else mode, api_key=api_key)
        for mode in dict.fromkeys(modes)
    ]
    for peer_name, peer_url in peers:
        peer_model = model or str((await _first_model(client, peer_url, api_key)).get("id"))
        contenders.append(Contender(peer_name, peer_url, peer_model, api_key=api_key))
    return tuple(contenders)


def _workload_of(
    name: str,
    duration_s: float,
    cv: float,
    shape: RequestShape,
    image_share: float,
    image_reuse: float,
    scale: float,
) -> WorkloadOf:
    def fixed(rate: float, seed: int) -> Workload:
        return fixed_workload(
            [shape],
            rate=rate,
            duration_s=duration_s,
            cv=cv,
            seed=seed,
            image_share=image_share,
            image_reuse=image_reuse,
        )

    def builtin(rate: float, seed: int) -> Workload:
        return builtin_workload(
            rate=rate, duration_s=duration_s, cv=cv, seed=seed, image_reuse=image_reuse, scale=scale
        )

    if name == "fixed":
        return fixed
    if name == "builtin":
        return builtin
    if not Path(name).is_dir():
        raise ConfigError("--workload", f"{name!r} is not fixed, builtin or a directory")
    clients = read_servegen(Path(name))
    return lambda rate, seed: servegen_workload(
        clients, rate=rate, duration_s=duration_s, seed=seed, image_reuse=image_reuse, scale=scale
    )


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ConfigError("--image-size", f"{text!r} is not WIDTHxHEIGHT")
    return int(width), int(height)


def _parse_peer(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not (name and separator and url.startswith(("http://", "https://"))):
        raise ConfigError("--peer", f"{text!r} is not NAME=URL")
    return name, url


def _print_bench(result: BenchResult, summaries: list[Summary], slo: SLO) -> None:
    console = Console()
    console.print(summary_table(summaries, slo))
    if result.max_goodputs:
        console.print(max_goodput_table(result.max_goodputs))
    for error, count in result.errors.most_common(5):
        console.print(f"{count} x {error}", style="red", markup=False)
