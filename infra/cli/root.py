"""The commands' names and options; each is carried out in a module of its own, imported when it is used."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from ..role import EXIT_CONFIGURATION
from ..settings import DEV_PAID_KEY, SettingsError, load
from ..stack.errors import StackError
from ..stack.state import default_data_dir

ROLE_NAMES = ("gateway", "moderation", "scheduler", "history", "worker", "edge", "batch-runner")

_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir,
    help="Folder of the stack's state, logs and Redis data.",
    show_default="$HEADRACE_DATA_DIR or ~/.local/share/headrace/dev",
)
_KEY = click.option(
    "--key",
    envvar="HEADRACE_API_KEY",
    default=DEV_PAID_KEY,
    help="API key.  [default: the development key]",
)


def _calls_the_api(command: Any) -> Any:
    """The options of a command that calls the gateway."""
    for option in (
        _DATA_DIR,
        _KEY,
        click.option("--url", metavar="URL", help="Gateway to call.  [default: the running stack's]"),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Headrace: event-driven serving of chat with large language models."""


@cli.command("up")
@click.option(
    "--engine", type=click.Choice(["vllm", "sim"]), help="Engine of the workers.  [default: vllm]"
)
@click.option("--port", type=click.IntRange(1, 65535), help="Page and HTTP API.  [default: 8000 or any]")
@click.option("--ws-port", type=click.IntRange(1, 65535), help="Websockets.  [default: 8001 or any]")
@click.option(
    "--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Of each pool."
)
@_DATA_DIR
@click.option("--kafka", metavar="HOST:PORT", help="A Kafka to use instead of the embedded broker.")
@click.option("--redis", metavar="URL", help="A Redis to use instead of the embedded one.")
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML or JSON).")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Model folder of the default configuration."
)
@click.option("--sim-ttft-ms", type=float, help="Simulated engine: time to the first token.")
@click.option("--sim-tpot-ms", type=float, help="Simulated engine: time per token.")
@click.option("--sim-slowdown", type=float, help="Simulated engine: slower by this share per reply.")
@click.option(
    "--sim-script", type=click.Path(path_type=Path), help="Simulated engine: script file (JSON)."
)
@click.option("--ask", metavar="QUESTION", help="Ask this once everything is ready.")
def up_command(**options: Any) -> int:
    """Start everything on this machine, in the foreground; Ctrl-C drains and stops."""
    from .up import run_up

    return run_up(options)


@cli.command("status")
@_DATA_DIR
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status_command(data_dir: Path, as_json: bool) -> int:
    """Show each process of the running stack; exit code 1 when none runs."""
    from .status import show_status

    return show_status(data_dir, as_json=as_json)


@cli.command("down")
@_DATA_DIR
def down_command(data_dir: Path) -> int:
    """Drain and stop the running stack."""
    from .status import stop_stack

    return stop_stack(data_dir)


@cli.command("restart")
@click.argument("roles", nargs=-1, type=click.Choice(ROLE_NAMES))
@_DATA_DIR
def restart_command(roles: tuple[str, ...], data_dir: Path) -> int:
    """Restart these roles (all, if none is named) of the running stack, one process after another.

    Each drains first, and the next one waits until its successor is ready, so users notice nothing.
    """
    from .restart import restart_roles

    return restart_roles(data_dir, roles)


@cli.command("reload")
@_DATA_DIR
def reload_command(data_dir: Path) -> int:
    """Have the running stack read its configuration file again, without a restart.

    Keys, tiers, limits, weights and the overload ladder can change; docs/CONFIGURATION.md has the list.
    """
    from .reload import reload_stack

    return reload_stack(data_dir)


@cli.command("ask")
@click.argument("question")
@_DATA_DIR
@click.option("--url", metavar="WS_URL", help="Websocket to ask.  [default: the running stack's]")
@_KEY
@click.option("--model", default="default", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help="Longest reply.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 gives the likeliest reply.")
def ask_command(question: str, **options: Any) -> int:
    """Stream a reply into the terminal; Ctrl-C cancels it."""
    from .ask import ask

    return ask(question, **options)


def _time(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    from .export import unix_ms

    try:
        return unix_ms(text) if text is not None else None
    except ValueError:
        raise click.BadParameter("must be a time in ISO 8601, as 2026-12-01T10:00") from None


def _offsets(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[int, tuple[int, int | None]]:
    parts: dict[int, tuple[int, int | None]] = {}
    for text in texts:
        found = re.fullmatch(r"(\d+):(\d+)-(\d*)", text, re.ASCII)
        if found is None or int(found[1]) in parts:
            raise click.BadParameter("must be PARTITION:FIRST-LAST, once for each partition")
        parts[int(found[1])] = int(found[2]), int(found[3]) if found[3] else None
    return parts


_CONFIG = click.option(
    "--config", type=click.Path(path_type=Path), help="Whose Kafka and Redis are read, instead."
)
_OUTPUT = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Instead of standard output."
)
_REDACT = click.option("--redact", is_flag=True, help="Letters become x, digits 0, names digests.")
_TENANT = click.option("--tenant", help="Only of this one.")
_CONVERSATION = click.option("--conversation", help="Only this one (or the request with this id).")
_SERVED_BY = "Only requests that this model served."


def _reads_the_log(command: Any) -> Any:
    """The options of a command that reads conversations from the log."""
    since = click.option(
        "--since", "since_ms", callback=_time, metavar="TIME", help="Only what was accepted since."
    )
    until = click.option(
        "--until", "until_ms", callback=_time, metavar="TIME", help="Only what was accepted before."
    )
    offsets = click.option(
        "--offsets",
        callback=_offsets,
        multiple=True,
        metavar="PARTITION:FIRST-LAST",
        help="Only these records; without LAST to the end.",
    )
    for option in (offsets, until, since, _CONVERSATION, _TENANT, _CONFIG):
        command = option(command)
    return command


@cli.command("export")
@_DATA_DIR
@_reads_the_log
@click.option("--model", help=_SERVED_BY)
@_OUTPUT
@click.option("--streams", is_flag=True, help="Replies as headrace play takes them.")
@_REDACT
def export_command(
    data_dir: Path, config: Path | None, output: Path | None, streams: bool, redact: bool, **wanted: Any
) -> int:
    """Write the conversations in the log as JSON lines, one each (docs/REPLAY.md)."""
    from ..replay.turns import Wanted
    from .export import export

    return export(
        config=config,
        data_dir=data_dir,
        output=output,
        wanted=Wanted(**wanted),
        redact=redact,
        streams=streams,
    )


@cli.command("record")
@_DATA_DIR
@_CONFIG
@_TENANT
@_CONVERSATION
@click.option("--model", help=_SERVED_BY)
@_OUTPUT
@_REDACT
@click.option("--limit", type=click.IntRange(1), help="Stop after so many replies.")
def record_command(
    data_dir: Path,
    config: Path | None,
    output: Path | None,
    redact: bool,
    limit: int | None,
    **wanted: Any,
) -> int:
    """Record replies with the time of each piece, from now on, for headrace play (docs/REPLAY.md)."""
    from ..replay.turns import Wanted
    from .record import record

    return record(
        config=config,
        data_dir=data_dir,
        output=output,
        wanted=Wanted(**wanted),
        redact=redact,
        limit=limit,
    )


def _speed(_context: click.Context, _option: click.Parameter, text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise click.BadParameter("must be max, or how many times faster than recorded")
    return speed


@cli.command("replay")
@click.argument(
    "path",
    metavar="[FILE]",
    required=False,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@_reads_the_log
@click.option("--recorded-model", help=_SERVED_BY)
@click.option("--model", default="default", show_default=True, help="Asked now.")
@click.option("--temperature", type=click.FloatRange(0, 2))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("--max-tokens", type=click.IntRange(1), help="Longest reply.")
@click.option("--seed", type=int)
@click.option(
    "--speed", default="max", callback=_speed, show_default=True, help="1 = as recorded, 4 = four times."
)
@click.option("--concurrency", type=click.IntRange(1, 1_000), default=8, show_default=True)
@click.option(
    "--service-tier",
    type=click.Choice(["flex", "default"]),
    default="flex",
    show_default=True,
    help="flex waits behind everybody who waits for a reply.",
)
@click.option("--own-replies", is_flag=True, help="Go on after the new replies, not the recorded ones.")
@click.option("--limit", type=click.IntRange(1), help="Only so many conversations.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("replay"),
    show_default=True,
    help="Folder of the report.",
)
@_calls_the_api
def replay_command(
    path: Path | None,
    config: Path | None,
    tenant: str | None,
    conversation: str | None,
    recorded_model: str | None,
    since_ms: int | None,
    until_ms: int | None,
    offsets: dict[int, tuple[int, int | None]],
    speed: float | None,
    concurrency: int,
    own_replies: bool,
    limit: int | None,
    out: Path,
    url: str | None,
    key: str,
    data_dir: Path,
    **body: Any,
) -> int:
    """Run the conversations of FILE, or of the log, again, and compare (docs/REPLAY.md)."""
    from ..replay.runner import ReplayOptions
    from ..replay.turns import Wanted
    from .replay import conversations_of_file, conversations_of_log, run_replay

    wanted = Wanted(tenant, conversation, recorded_model, since_ms, until_ms, offsets)
    if path is None:
        source = partial(conversations_of_log, config, data_dir, wanted)
    elif config is not None or wanted != Wanted():
        raise click.UsageError(
            "these filters choose from the log: leave FILE out, or choose with export"
        )
    else:
        source = partial(conversations_of_file, path)
    asked = {name: value for name, value in body.items() if value is not None}
    options = ReplayOptions(asked, speed, concurrency, own_replies)
    return run_replay(source, options, limit=limit, out=out, url=url, key=key, data_dir=data_dir)


@cli.command("play")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--speed", default="1", callback=_speed, show_default=True, help="4 = four times as fast; or max."
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="HTTP API.")
@click.option(
    "--ws-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="Websockets."
)
@_KEY
@_REDACT
def play_command(path: Path, **options: Any) -> int:
    """Serve the replies recorded in FILE to a front end, at their own times (docs/REPLAY.md)."""
    from .play import PlayOptions, play

    return play(path, PlayOptions(**options))


@cli.group("batch")
def batch_group() -> None:
    """Batch jobs: files of prompts, answered behind everybody who waits."""


@batch_group.command("submit")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--wait", is_flag=True, help="Show its progress until it has ended.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Wait, and write the answers here."
)
@click.option("--column", help="Of a CSV or Parquet file: where its prompts are.")
@click.option("--model", default="default", show_default=True, help="For prompts.")
@click.option("--system", help="What is said before each prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest reply to a prompt.")
@_calls_the_api
def batch_submit_command(
    path: Path,
    column: str | None,
    model: str,
    system: str | None,
    max_tokens: int | None,
    **options: Any,
) -> int:
    """Run FILE as a batch: lines in the batch format, or prompts (one a line, or a column)."""
    from .batch import submit
    from .batch_input import PromptOptions

    return submit(path, PromptOptions(model, system, max_tokens, column), **options)


@batch_group.command("status")
@click.argument("batch_id")
@click.option("--wait", is_flag=True, help="Show its progress until it has ended.")
@_calls_the_api
def batch_status_command(batch_id: str, **options: Any) -> int:
    """How far a batch is."""
    from .batch import status

    return status(batch_id, **options)


@batch_group.command("cancel")
@click.argument("batch_id")
@_calls_the_api
def batch_cancel_command(batch_id: str, **options: Any) -> int:
    """End a batch; what is done can be fetched."""
    from .batch import cancel

    return cancel(batch_id, **options)


@batch_group.command("results")
@click.argument("batch_id")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Instead of standard output."
)
@_calls_the_api
def batch_results_command(batch_id: str, **options: Any) -> int:
    """Fetch what a batch has come to."""
    from .batch import results

    return results(batch_id, **options)


@cli.command("simulate")
@click.option("--load", "load_spec", metavar="SPEC", help="A TOML file, or a preset: overload,load=1.5")
@click.option("--trace", type=click.Path(path_type=Path), help="Requests to replay (JSON lines).")
@click.option(
    "--policy",
    "policies",
    type=click.Choice(["fair", "strict", "fcfs"]),
    multiple=True,
    default=["fair"],
    show_default=True,
    help="Can be given more than once; all meet the same requests.",
)
@click.option("--workers", type=click.IntRange(1, 100_000), help="How many.  [default: the load's]")
@click.option(
    "--worker",
    "worker_changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="What they are like: max_seqs=32",
)
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML or JSON).")
@click.option("--seed", type=int, default=1, show_default=True, help="Equal seeds give equal loads.")
@click.option(
    "--kill", "kills", metavar="SECONDS", type=float, multiple=True, help="Kill a worker then."
)
@click.option(
    "--restart", "restarts", metavar="SECONDS", type=float, multiple=True, help="Restart one then."
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for PNG, HTML, JSON."
)
def simulate_command(**options: Any) -> int:
    """Try scheduling policies on a model of workers, in virtual time."""
    if (options["load_spec"] is None) == (options["trace"] is None):
        raise click.UsageError("give either --load or --trace")
    from .simulate import simulate

    return simulate(**options)


@cli.command("plan")
@click.option(
    "--model", metavar="SPEC", help="A preset, with changes: llama-3.1-70b,layers=81; or custom,..."
)
@click.option(
    "--gpu", metavar="SPEC", help="A preset, with changes: h100,price_per_hour=2.5; or custom,..."
)
@click.option("--weights", metavar="FORMAT", help="bf16, fp8 or int4.  [default: the model's]")
@click.option("--kv", metavar="FORMAT", help="KV cache: bf16 or fp8.  [default: bf16]")
@click.option("--context", metavar="TOKENS", help="Longest conversation.  [default: the model's]")
@click.option("--users", metavar="N", help="Online at the peak.  [default: 1000]")
@click.option("--rate", metavar="PER_SECOND", help="Requests/s at the peak, instead of users.")
@click.option("--prompt", metavar="TOKENS", help="Mean prompt.  [default: 2000]")
@click.option("--reply", metavar="TOKENS", help="Mean reply.  [default: 400]")
@click.option("--prefix-hit", metavar="PART", help="Of the prompt, found in a cache.  [default: 0.5]")
@click.option("--ttft", "ttft_seconds", metavar="SECONDS", help="Target, first token.  [default: 2]")
@click.option("--tpot", "tpot_ms", metavar="MS", help="Target, each token after it.  [default: 100]")
@click.option(
    "--tier", "tiers", metavar="NAME,KEY=VALUE", multiple=True, help="Instead of the default tiers."
)
@click.option("--assume", metavar="NAME=VALUE", multiple=True, help="Another value of an assumption.")
@click.option("--file", type=click.Path(path_type=Path), help="All of these from a TOML file.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for PNG, HTML, JSON."
)
@click.option("--presets", is_flag=True, help="List models, GPUs and names of assumptions.")
def plan_command(**options: Any) -> int:
    """How many GPUs a load takes, and what Redis, Kafka and edges around them need (docs/PLANNING.md)."""
    from .plan import plan

    return plan(**options)


@cli.command("topics")
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML or JSON).")
@click.option("--kafka", metavar="HOST:PORT", help="Overrides the configuration's broker.")
@click.option("--deadline-seconds", type=float, default=30.0, show_default=True)
def topics_command(config: Path | None, kafka: str | None, deadline_seconds: float) -> int:
    """Create the Kafka topics that are missing and check those that exist."""
    from .admin import make_topics

    return make_topics(config, kafka, deadline_seconds)


@cli.group("keys")
def keys_group() -> None:
    """API keys."""


@keys_group.command("create")
@click.option("--tenant", required=True, help="Whose requests and conversations these are.")
@click.option("--tier", required=True, help="A tier of the configuration.")
@click.option("--id", "key_id", help="Public name of the key.  [default: random]")
def keys_create_command(tenant: str, tier: str, key_id: str | None) -> int:
    """Make a key: printed once, with the block that goes into the configuration."""
    from .admin import create_key

    return create_key(tenant, tier, key_id)


@cli.group("config")
def config_group() -> None:
    """Configuration files."""


@config_group.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check_command(file: Path) -> int:
    """Say whether a configuration file can be used."""
    settings = load(file)
    counts = f"{len(settings.models)} models, {len(settings.tiers)} tiers, {len(settings.keys)} keys"
    click.echo(f"{file}: fine ({counts})")
    return 0


def _role_command(name: str) -> None:
    @cli.command(
        name,
        help=f"Run a {name} alone; the options are those of {name} --help.",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def role_command(arguments: tuple[str, ...]) -> int:
        from .roles import become_role

        return become_role(name, arguments)


for _name in ROLE_NAMES:
    _role_command(_name)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors that people can mend are one line."""
    try:
        result: int | Literal[None] = cli.main(argv, prog_name="headrace", standalone_mode=False)
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SettingsError as error:
        return _say(str(error), EXIT_CONFIGURATION)
    except StackError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return result or 0


def _say(text: str, code: int) -> int:
    click.echo(f"headrace: {text}", err=True)
    return code
