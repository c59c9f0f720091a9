"""Define every error that hostward raises on purpose.

An error states the fact (`what`), the reason (`why`) and the fix (`fix`: the call or option to change). The command
line prints the three and exits with `exit_code`; a traceback is shown only with `--debug`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping


class ExitCode(enum.IntEnum):
    """List the exit codes of the command line; EXIT_CODES says what each means."""

    SUCCESS = 0
    FAILED = 1
    ERROR = 2
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


EXIT_CODES: Mapping[ExitCode, str] = {
    ExitCode.SUCCESS: "success",
    ExitCode.FAILED: "the answer is no: `verify` found a difference, no `plan` fits, the plans of `plan diff` differ, "
    "`doctor` found an error or a known failure; or a fault of hostward, with a traceback",
    ExitCode.ERROR: "an error, with its fix: bad input, or a machine, file, limit or other rank that is in the way",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C (SIGINT)",
    ExitCode.BROKEN_PIPE: "the reader of the output is gone, as `head` is after its lines",
    ExitCode.TERMINATED: "terminated by SIGTERM",
}


class HostwardError(Exception):
    """Serve as the base class of all errors of hostward.

    Args:
        what: the fact, one sentence, naming the option, parameter, file or budget concerned.
        why: the reason, where it is not obvious from the fact.
        fix: the change that removes the cause.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        self.everywhere = False
        """True if every rank of the run raises the error, so that one rank is enough to print it."""
        super().__init__("\n".join(filter(None, (what, why and f"  why: {why}", fix and f"  fix: {fix}"))))


class ConfigError(HostwardError, ValueError):
    """Report an option's value, or a combination of options, that is not possible."""


class UnknownNameError(ConfigError):
    """Report an option, namespace or recipe that does not exist; the text proposes the nearest one."""


class NotBuiltError(ConfigError):
    """Report an option that exists and that this version does not support yet."""


class MissingPackageError(ConfigError, ImportError):
    """Report a package that is not installed, and the extra of hostward that brings it."""


class DataError(HostwardError):
    """Report training data that is missing, empty, unreadable or malformed."""


class CheckpointError(HostwardError):
    """Report a checkpoint that is missing, incomplete, corrupt, of another model, or that cannot be written."""


class ModelError(HostwardError):
    """Report a model or parameter that the optimizer does not support, or a change of one that it cannot follow."""


class AsleepError(ModelError):
    """Report a use of weights, gradients or state that `AdamW.sleep` has moved to the host."""


class PlacementError(HostwardError):
    """Report an operand in the wrong memory: host memory given to a device kernel, or the reverse."""


class MemoryLimitError(HostwardError):
    """Report a byte budget (device, host, pinned, cgroup) that the plan exceeds, or an allocation that failed."""


class PageLockError(MemoryLimitError):
    """Report host memory that the driver does not pin for copies to and from the device."""


class NativeError(HostwardError):
    """Report a native host library that is missing, was built for another version, or reported an error."""


class DeviceError(HostwardError):
    """Report a requested accelerator that is missing, or an error of its driver."""


class RankError(HostwardError):
    """Report that another process of the run ended, or did not answer in time."""


class OrderingError(HostwardError):
    """Report two operations that use the same bytes, one of them writing, without an order between them."""


@contextlib.contextmanager
def needed_for(use: str, extra: str, *, otherwise: str = "") -> Iterator[None]:
    """Return a context for imports of packages that an extra of hostward brings.

    Args:
        use: what needs them: the start of the error's first line.
        extra: the extra, a key of `optional-dependencies` in pyproject.toml; several are separated by commas.
        otherwise: another way out, besides installing.

    Raises:
        MissingPackageError: one of them, or a package that it needs itself, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{use} needs the package {error.name}, which is not installed",
            why=f"the extra [{extra}] of hostward brings it",
            fix=install(extra) + (otherwise and f"; or {otherwise}"),
        ) from error


def install(extra: str) -> str:
    """Return the command that installs an extra, beside an installed hostward and in a clone."""
    return f"pip install 'hostward[{extra}]' (in a clone that is not installed: '.[{extra}]')"
