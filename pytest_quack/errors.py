"""What can go wrong, one class for each thing that a caller may want to tell apart.

Every argument reaches `BaseException.__init__`, so that each error can be pickled between processes.
"""

from __future__ import annotations


class QuackError(Exception):
    """Base of the errors that pytest-quack raises."""


class SettingsError(QuackError):
    """A setting from the command line, an ini file or the environment cannot be used; the text says what to write."""


class CacheDirectoryError(QuackError):
    """The cache directory that was asked for cannot be used or cannot be trusted; the text says what to do."""


class UnkeyableError(QuackError):
    """A value has no canonical form, so nothing that depends on it can be cached safely."""


class ArtifactError(QuackError):
    """A stored artifact is damaged, foreign to this machine, or cannot be loaded."""


class ExportError(QuackError):
    """A compile function returned something that cannot be turned into an artifact."""


class TargetArchError(QuackError):
    """Device code was compiled, but nothing says for which GPU architecture."""


class InterceptionError(QuackError):
    """The compiler's own compiles cannot be taken over in this run; the text says why."""


class GpuError(QuackError):
    """The xdist workers cannot have the GPUs that were asked for; the text says why and what to do."""


class CompileError(QuackError):
    """The kernel could not be compiled outside this process, and must not be tried inside it.

    Raised for a compile that killed its worker or ran over its time limit: tried in the test process it would take
    pytest down or hang it.
    """


class CompilePending(BaseException):
    """The kernel is being compiled by the pool: abandon this attempt and come back when it is done.

    A `BaseException`, because test code that catches `Exception` must not mistake it for a result.

    Attributes:
        key: the key that is pending: a direct key, or the content key of a trace.
        description: the compile function's name and arguments, or the traced function's name, for people.
    """

    def __init__(self, key: str, description: str = "") -> None:
        super().__init__(key, description)
        self.key = key
        self.description = description

    def __str__(self) -> str:
        return f"{self.description or 'a kernel'} (key {self.key[:12]}) is being compiled by the pool"
