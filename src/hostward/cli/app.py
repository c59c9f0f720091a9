"""Declare the commands of `hostward`, run one, and turn its end into an exit code (`hostward.errors.ExitCode`)."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from hostward import __version__
from hostward.checkpoint.files import LATEST, is_checkpoint
from hostward.cli import dry_run, machine, output, plan, ranks, run_files
from hostward.cli.options import complete_override, complete_recipe, options
from hostward.cli.output import (
    Marked,
    circumstances,
    command_words,
    print_tables,
    removed_on_failure,
    require_apart,
    require_folder,
    require_replaceable,
    require_writable,
    text_stream,
    wrapped,
    write_json,
    write_report,
)
from hostward.cli.recipe import DEFAULT_RECIPE, checked, listing
from hostward.cli.usage import asks_for_help, require_values, usage_error, usage_errors
from hostward.config.rules.table import captured
from hostward.config.schema import Config
from hostward.core.full_device import ALLOCATOR_VARIABLES, EXPANDABLE, fix_of
from hostward.core.startup import Startup
from hostward.errors import EXIT_CODES, ConfigError, ExitCode, HostwardError, MemoryLimitError
from hostward.report.schema import PAGE_FILE, REPORT_FILE, TRACE_FILE, read_report

_LESS_MEMORY = "raise optimizer.optimizer_offload_fraction, or lower train.micro_batch_size or model.seq_length"
P = ParamSpec("P")

log = logging.getLogger("hostward")

app = typer.Typer(
    name="hostward",
    help="CPU offloading for PyTorch training with bitwise identical results.",
    epilog="Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Options as namespace.option=value; `hostward options` lists them.", autocompletion=complete_override
    ),
]
Recipe = Annotated[
    str,
    typer.Option("--recipe", help="A recipe by name; `hostward recipes` lists them.", autocompletion=complete_recipe),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the report to this file as well; - is standard output."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write what the last iterations did, operation by operation, for ui.perfetto.dev."),
]
Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="DIR/iter_NNNNNNN, or DIR: the one that DIR/latest names.")
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hostward {__version__}")
        raise typer.Exit


@app.callback()
def _face(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Accept the options that stand before a command."""


def _deferred(command: Callable[P, None]) -> Callable[P, Callable[[], None]]:
    """Let typer parse the words and return the command to be run outside: typer turns Ctrl-C into an exit code."""

    @wraps(command)
    def chosen(*arguments: P.args, **options: P.kwargs) -> Callable[[], None]:
        return partial(command, *arguments, **options)

    return chosen


@app.command()
@_deferred
def train(
    overrides: Overrides = None,
    recipe: Recipe = DEFAULT_RECIPE,
    json_file: JsonFile = None,
    trace_file: TraceFile = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="FOLDER",
            help="The run's folder, for report.json and trace.json; checkpoint.save by default.",
        ),
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="All placements, from `hostward plan --json`.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if by the estimate it does not fit the memory, or the disk.")
    ] = False,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Prepare all, checks included, say what the run would do, and do not train."),
    ] = False,
) -> None:
    """Train a recipe, and report what was moved, the memory use and the speed."""
    config = checked(recipe, overrides)
    _require_outputs(json_file, trace_file, {"--plan": plan_file}, dry=dry)
    planned = None
    if plan_file is not None:
        from hostward.plan.plan_file import load

        planned = load(plan_file)
    log.info("hostward %s: %s, %d iterations; loading PyTorch", __version__, recipe, config.train.train_iters)
    _prepare_environment(config, config.model.deterministic_mode)
    startup = Startup()
    with startup.phase("import", "loading PyTorch", "loaded PyTorch"):
        from hostward.trainer import loop, setup
        from hostward.trainer.report import render

    # About gathered logits, which are never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    first_rank, tensorboard_dir = ranks.is_first(), config.logger.tensorboard_dir
    with _output_folders(run_dir, tensorboard_dir):
        run = setup.prepare(recipe, config, plan=planned, run_dir=run_dir, force=force, startup=startup)
        if dry:
            dry_run.finish(run, run_dir, json_file)
            raise typer.Exit(ExitCode.SUCCESS)  # as after a failure, the folders are as they were
    startup.log_total()
    run.keeps_folders = True
    over = loop.is_over(run)  # for example restarted by a scheduler: its files report the iterations of the first start
    folder = run_files.run_folder(run_dir, config.checkpoint.save) if first_rank and not over else None
    timed = trace_file is not None or run.optimizer.plan.offloaded_bytes > 0
    with ExitStack() as stack:
        stack.callback(run.release_folders)
        stack.enter_context(run_files.noting_resume_point(config.checkpoint))
        asked = partial(setattr, run, "stop_asked", True) if config.train.exit_signal_handler else None
        stack.enter_context(run_files.terminable(asked))
        files = stack.enter_context(run_files.RunFiles(run, folder, circumstances))
        callbacks: list[Callable[[Any], None]] = [files.going_on] if first_rank else []
        if first_rank:
            callbacks.append(stack.enter_context(output.Progress(sys.stderr)).show)
        if first_rank and tensorboard_dir is not None:
            callbacks.append(stack.enter_context(run_files.Scalars(run_files.open_writer(tensorboard_dir))).write)
        metered = loop.METERED_ITERATIONS if timed else 0
        loop.train(run, progress=partial(_call_all, callbacks), metered=metered)
    told = text_stream(json_file)
    with ExitStack() as stack:  # also if the table's reader closes the pipe, as in `hostward train | head`
        stack.callback(run.ranks.gather, None)  # `main` ends each rank after all have arrived here
        if first_rank and files.report is not None:
            stack.callback(write_json, json_file, files.report.to_json())
            if trace_file is not None and run.trace is not None:
                stack.callback(run.trace.write, trace_file)
            if not over:
                print_tables(render(files.report), told)
            if folder is not None:
                print(f"report in {folder}; to see it: hostward report {shlex.quote(str(folder))}", file=told)
            if run.stopped:
                print(_stopped(run), file=sys.stderr)
    if run.stopped:
        raise typer.Exit(ExitCode.TERMINATED)


def _require_outputs(
    json_file: Path | None, trace_file: Path | None, read: Mapping[str, Path | None], *, dry: bool
) -> None:
    """Raise ConfigError if a file cannot be written, or will not be."""
    if ranks.is_first():  # no other writes them: another machine may lack the folder
        require_writable("--json", json_file)
        require_replaceable("--trace", trace_file)
    with ranks.same_errors_on_all_ranks():
        require_apart({"--json": json_file, "--trace": trace_file}, read)
        if dry and trace_file is not None:
            raise ConfigError("--trace has no effect with --dry-run", why="no step is run", fix="leave one of them out")


@contextmanager
def _output_folders(run_dir: Path | None, tensorboard_dir: str | None) -> Iterator[None]:
    """Make the folders, on the first rank; if the body raises, remove those that were made and are empty."""
    if not ranks.is_first():
        yield
        return
    board = None if tensorboard_dir is None else Path(tensorboard_dir)
    with removed_on_failure(run_dir), removed_on_failure(board):
        if run_dir is not None:
            require_folder(f"--run-dir {run_dir}", run_dir)
        if board is not None:
            run_files.require_tensorboard(str(board))
            require_folder(f"logger.tensorboard_dir={board}", board)
        yield


def _stopped(run: Any) -> str:
    done = f"{run.iteration} of {run.config.train.train_iters} iterations"
    return f"terminated after {done}; saved {run.saved}; {run_files.going_on(run.config.checkpoint)}"


def _call_all(those: Sequence[Callable[[Any], None]], run: Any) -> None:
    for each in those:
        each(run)


@app.command()
@_deferred
def verify(
    overrides: Overrides = None,
    recipe: Recipe = DEFAULT_RECIPE,
    fraction: Annotated[
        list[str] | None,
        typer.Option("--fraction", metavar="FRACTION", help="Share of the state to offload; repeatable."),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option("--placement", metavar="host|streamed|mixed", help="Where that share is stepped; repeatable."),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", metavar="hidden|serial", help="When it is stepped; repeatable."),
    ] = None,
    microbatches: Annotated[
        list[int] | None,
        typer.Option(
            "--microbatches", metavar="COUNT", help="Microbatches of a rank per step, each compared; repeatable."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train without and with offloading on the same data, and compare every loss, weight and moment, bit for bit.

    Without options: 0.25 of the state on the host with the serial schedule, 0.5 half streamed, all on the host, and
    all streamed; with options that offload something, be it activations or weights of layers alone: these. --fraction,
    --placement, --schedule and --microbatches are combined with each other. A second pair of runs reads, copies and
    changes the weights after each step. Under torchrun each rank compares its own part, and all end with one verdict.
    The verdict is the first line; details follow.
    """
    config = checked(recipe, overrides)
    _require_outputs(json_file, None, {}, dry=False)
    # Several runs, which are not timed. Threads that spin while they wait take several times as long where other
    # programs use the cores, and gain a little where none does.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    log.info("hostward %s: comparing runs of %s; loading PyTorch", __version__, recipe)
    _prepare_environment(config, True)
    from hostward.trainer.process_group import Ranks
    from hostward.trainer.verify import command as verification
    from hostward.trainer.verify.cases import choose

    here = Ranks.of(os.environ)
    with ranks.same_errors_on_all_ranks():
        fractions = [_number("--fraction", text) for text in fraction or []]
        given = placement or [], schedule or [], microbatches or []
        sized = any(word.partition("=")[0].strip() == "train.micro_batch_size" for word in overrides or [])
        chosen = choose(config, fractions, *given, world_size=here.size, divide=not sized)
    verdict = verification.verify(recipe, config, chosen)
    with ExitStack() as stack:
        # If one rank ends with an exit code the launcher ends the rest.
        stack.callback(here.gather, None)
        if here.first:
            stack.callback(write_report, json_file, verdict.to_dict())
            told = text_stream(json_file)
            print(verdict.sentence, file=told)
            print_tables(verification.render(verdict), told)
    if not verdict.passed:
        ranks.leave_for_launcher(verdict.sentence if here.first else ranks.AS_THE_FIRST)
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@_deferred
def recipes() -> None:
    """List the recipes: name, layers, length of sequences, dtype, and what has to be named."""
    typer.echo(wrapped("\n".join(listing())))


app.command()(_deferred(options))


def inspect(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Print the contents of a checkpoint."""
    require_writable("--json", json_file)
    from hostward.trainer import export

    contents = export.inspect(folder, verify=verify)
    print(contents.to_text(), file=text_stream(json_file))
    write_json(json_file, json.dumps(contents.to_dict(), indent=1) + "\n")


def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    form: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="safetensors|torch|bf16-moments|fp8-moments|bf16-main-params",
            help="Weights for transformers, all for torch.optim, or a checkpoint with its moments rounded to bf16 or "
            "FP8, or without the fp32 main weights of its bf16 weights.",
        ),
    ] = "safetensors",
) -> None:
    """Write weights as transformers loads them, weights and state for torch.optim.AdamW, or a state of fewer bytes."""
    from hostward.trainer import export

    for path in export.convert(folder, out, form):
        typer.echo(path)


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, its report.json, or a file that --json wrote.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help=f"The page to write; {PAGE_FILE} next to the report.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Write the charts as PNGs too; needs matplotlib.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="The trace of the run; trace.json next to the report by default."),
    ] = None,
) -> None:
    """Render the report of a run as one HTML page: memory, a step's streams, predictions, loss and speed."""
    from hostward.files.atomic_file import replace_text
    from hostward.report.page import render
    from hostward.runtime.step_trace import from_chrome

    _require_no_checkpoint(run)
    found = read_report(run)
    folder = run if run.is_dir() else run.parent
    if trace is None and run.is_dir() and (run / TRACE_FILE).is_file():
        trace = run / TRACE_FILE
    spans = None if trace is None else from_chrome(trace)
    page = folder / PAGE_FILE if html is None else html
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
    """Raise ConfigError for a checkpoint, or the file that names the newest: neither has a run's report."""
    names_one = run.name == LATEST and run.is_file()
    if (run / REPORT_FILE).is_file() or not (names_one or is_checkpoint(run)):
        return
    what = f"names a checkpoint of {run.parent}" if names_one else "is a checkpoint"
    raise ConfigError(
        f"{run} {what}, not a report",
        why=f"the report of a run is {REPORT_FILE} in its folder: --run-dir, else checkpoint.save",
        fix=f"hostward report {shlex.quote(str(run.parent))}"
        if (run.parent / REPORT_FILE).is_file()
        else "name that folder",
    )


app.command("report")(_deferred(report))
app.command()(_deferred(plan.plan))
app.command()(_deferred(machine.doctor))
bench = typer.Typer(no_args_is_help=True, help="Measure.")
bench.command("machine")(_deferred(machine.bench_machine))
app.add_typer(bench, name="bench")
saved = typer.Typer(no_args_is_help=True, help="Inspect checkpoints, and convert them.")
saved.command("inspect")(_deferred(inspect))
saved.command("convert")(_deferred(convert))
app.add_typer(saved, name="checkpoint")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `--debug` anywhere shows tracebacks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    command_words.set(words)
    level = logging.INFO if ranks.is_first() else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Marked(ranks.prefix()))
    logging.basicConfig(level=level, handlers=[handler])
    try:
        code = _run(words, debug)
    except BaseException:
        if ranks.met():
            sys.excepthook(*sys.exc_info())
            ranks.end_at_once(ExitCode.FAILED)
        raise
    if ranks.met():
        ranks.end_at_once(code)
    return code


def _run(words: list[str], debug: bool) -> int:
    try:
        chosen = _parsed(words)
        if isinstance(chosen, int):
            return chosen
        chosen()
        return ExitCode.SUCCESS
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, run_files.Terminated) as ended:
        if debug:
            raise
        interrupted = isinstance(ended, KeyboardInterrupt)
        print("; ".join(["interrupted" if interrupted else "terminated", *_notes(ended)]), file=sys.stderr)
        return ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
    except BrokenPipeError:
        # The reader has closed the pipe, as in `hostward train | head`. Flushing at exit would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except HostwardError as error:
        if debug:
            raise
        if ranks.reports_error(error.everywhere):
            ranks.report_error(f"error: {error}")
        if error.everywhere:
            ranks.wait_for_others()
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        lost = None if debug else ranks.lost_rank_error(error)
        if lost is not None:
            ranks.report_error(f"error: {lost}")
            return lost.exit_code
        if debug or not _is_out_of_memory(error):
            raise
        why, *_ = (str(error) or "the process was given no more of the host's").splitlines()
        fix = fix_of(error, _LESS_MEMORY)
        ranks.report_error(f"error: out of memory\n  why: {why}\n  fix: {fix}")
        return MemoryLimitError.exit_code


def _parsed(words: list[str]) -> Callable[[], None] | int:
    """Return the command that the words are for, ready to be run, or the exit code if help has been printed instead.

    Raises:
        ConfigError: the words are no command line.
    """
    require_values(words)
    try:
        chosen: Callable[[], None] | int = app(words, standalone_mode=False, prog_name="hostward")
    except usage_errors() as error:
        if asks_for_help(error):
            error.show()
            return ExitCode.ERROR
        raise usage_error(error, app, words) from None
    return chosen


def _notes(ended: BaseException) -> list[str]:
    """Return the notes added to the error; of several ranks only the first has them, as they are the same."""
    return getattr(ended, "__notes__", []) if ranks.is_first() else []


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out.

    Torch has a class only for a full device; on the CPU only the text shows it.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "not enough memory" in text


def _prepare_environment(config: Config, deterministic: bool) -> None:
    """Set what torch and cuBLAS read once, when they first use the device; what the user has set stays."""
    allocator_variable, older_variable = ALLOCATOR_VARIABLES
    if older_variable not in os.environ and not captured(config):  # pytorch/torchtitan#3306: a graph that hangs
        # Else several GiB near the limit of a GPU are lost in pieces (docs/memory.md).
        os.environ.setdefault(allocator_variable, EXPANDABLE)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text} is no number", fix=f"write, for example, {option} 0.5") from error
