"""Run `hostward doctor` and `hostward bench machine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hostward.cli.output import (
    STDOUT,
    print_tables,
    require_apart,
    require_replaceable,
    require_writable,
    text_stream,
    write_json,
    write_report,
)
from hostward.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hostward.doctor import Finding
    from hostward.doctor.log import Recognised
    from hostward.plan.hardware_profile import Hardware

HARDWARE_FILE = Path("hardware.json")

Log = Annotated[
    Path | None,
    typer.Option(
        "--log", metavar="FILE", help="Look for known failures in this log or traceback instead; - reads it from stdin."
    ),
]
HardwareFile = Annotated[
    Path | None,
    typer.Option("--hardware", metavar="FILE", help=f"Measured rates to check; {HARDWARE_FILE} if it exists."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write what was found to this file as well; - is standard output."),
]


def doctor(log: Log = None, hardware: HardwareFile = None, json_file: JsonFile = None) -> None:
    """Report problems of this machine and environment with their fixes; with --log, what ended a run.

    Exit code 1 if something does not work, or the log shows a known failure.
    """
    require_apart({"--json": json_file}, {"--log": log, "--hardware": hardware})
    require_writable("--json", json_file)
    if log is None:
        _examine(hardware, json_file)
        return
    if hardware is not None:
        raise ConfigError("--hardware has no effect with --log", fix="leave one of the two out")
    _read_log(log, json_file)


def bench_machine(
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="The file to write; - is standard output.")
    ] = HARDWARE_FILE,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: seconds, less exact.")] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, metavar="COUNT", help="Of the CPU optimizer; as training by default."),
    ] = None,
) -> None:
    """Measure this machine (link, host memory, CPU optimizer step, pinning, matrix products) and write a hardware
    file.
    """
    require_replaceable("--json", json_file)
    from hostward.machine.measure import measure_machine, render
    from hostward.plan.hardware_profile import save

    busy = os.getloadavg()[0]
    hardware = measure_machine(quick=quick, threads=threads, progress=lambda stage: print(stage, file=sys.stderr))
    told = text_stream(json_file)
    if json_file == STDOUT:
        write_json(json_file, hardware.to_json())
    else:
        save(hardware, json_file)
    print_tables([render(hardware)], told)
    if busy > len(os.sched_getaffinity(0)) / 4:
        print(f"the machine was busy (load average {busy:.1f}), so rates may be too low: measure again", file=told)
    if hardware.gpu is None:
        print("no GPU was found, so hostward plan cannot use this file: measure on a machine with one", file=told)
    if json_file != STDOUT:
        print(f"written to {json_file}")


def _examine(hardware_file: Path | None, json_file: Path | None) -> None:
    from hostward.doctor import examine as checks
    from hostward.machine.facts import gather, read_devices

    hardware, error = _hardware(hardware_file)
    facts = gather(os.environ, read_devices(), hardware=hardware, hardware_error=error)
    findings = checks.examine(facts)
    try:
        told = text_stream(json_file)
        print_tables(checks.render(facts, findings), told)
        print(_sentence(findings), file=told)
    finally:
        write_report(json_file, checks.to_dict(facts, findings))
    if checks.is_bad(findings):
        raise typer.Exit(ExitCode.FAILED)


def _hardware(file: Path | None) -> tuple[Hardware | None, str | None]:
    """Return the rates to check, or why there are none.

    A file given as an option must be a hardware file; a file found by default need not.
    """
    from hostward.plan.hardware_profile import PROFILES, load

    if file is not None:
        if str(file) in PROFILES and not file.exists():
            raise ConfigError(
                f"--hardware {file} is a shipped profile: {', '.join(PROFILES)} are for `hostward plan`",
                why="only rates that were measured on this machine are checked here",
                fix="hostward bench machine, then hostward doctor",
            )
        return load(file), None
    if not HARDWARE_FILE.is_file():
        return None, None
    try:
        return load(HARDWARE_FILE), None
    except ConfigError as error:
        return None, f"{error.what}: {error.why}"


def _sentence(findings: Sequence[Finding]) -> str:
    from hostward.doctor import Severity

    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    if not any(counts.values()):
        return "nothing to fix"
    return ", ".join(f"{n} {severity.value}{'s' * (n != 1)}" for severity, n in counts.items() if n)


def _read_log(log: Path, json_file: Path | None) -> None:
    from hostward.doctor import log as logs

    found = _recognised(log)
    try:
        if found:
            print_tables(logs.render(found), text_stream(json_file))
        else:
            print(logs.NOTHING, file=text_stream(json_file))
    finally:
        write_report(json_file, logs.to_dict(found))
    if logs.is_bad(found):
        raise typer.Exit(ExitCode.FAILED)


def _recognised(log: Path) -> list[Recognised]:
    from hostward.doctor.log import recognise

    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "newline": "\n"}
    try:
        if str(log) == "-":
            with open(sys.stdin.fileno(), closefd=False, **options) as file:
                return recognise(file)
        with log.open(**options) as file:
            return recognise(file)
    except OSError as error:
        raise ConfigError(
            f"--log {log} cannot be read", why=error.strerror or str(error), fix="name a text file, or - for stdin"
        ) from error
