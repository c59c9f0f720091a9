"""Every error that hostward raises on purpose.

An error states the fact (`what`), the reason (`why`) and the cure (`fix`: the call or option to change). The command
line prints the three and exits with `exit_code`; a traceback is shown only with `--debug`.
"""

from __future__ import annotations


class HostwardError(Exception):
    """Base of all errors of hostward.

    Args:
        what: the fact, one sentence, naming the option, parameter, file or budget concerned.
        why: the reason, where it is not obvious from the fact.
        fix: the change that cures it.
    """

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        self.everywhere = False
        """Every rank of the run raises it, so that one of them need tell it."""
        super().__init__("\n".join(filter(None, (what, why and f"  why: {why}", fix and f"  fix: {fix}"))))


class ConfigError(HostwardError, ValueError):
    """An option has a value, or a mix of options a combination, that cannot be met."""


class UnknownNameError(ConfigError):
    """An option, namespace or recipe that does not exist; the text proposes the nearest one."""


class NotBuiltError(ConfigError):
    """An option that is known, and that this version does not carry out yet."""


class DataError(HostwardError):
    """Training data that is missing, empty, unreadable or malformed."""


class CheckpointError(HostwardError):
    """A checkpoint that is missing, incomplete, corrupt, of another model, or that cannot be written."""


class ModelError(HostwardError):
    """A model or parameter that the optimizer cannot take, or that changed in a way it cannot follow."""


class PlacementError(HostwardError):
    """An operand that lies on the wrong side: a device kernel given host memory, or the reverse."""


class MemoryLimitError(HostwardError):
    """A byte budget (device, host, pinned, cgroup) that the plan exceeds, or an allocation that failed."""


class PageLockError(MemoryLimitError):
    """Host memory that the driver refuses to page-lock, for copies to and from the device."""


class NativeError(HostwardError):
    """The native host library is missing, was built for another version, or reported an error."""


class DeviceError(HostwardError):
    """The accelerator that was asked for is missing, or its driver reported an error."""


class RankError(HostwardError):
    """Another process of the run ended, or did not answer in time."""


class OrderingError(HostwardError):
    """Two operations touch the same bytes, one of them writes, and nothing orders them."""
