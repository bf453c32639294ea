"""Shared memory without a name: a descriptor that is mapped here and sent to the other ranks.

A segment is a memfd: no file, no limit by /dev/shm, and it is gone when the last process that
holds or maps it is gone, however that ended. Where memfd is missing, it is a temporary file that
never had a name (O_TMPFILE) or lost it before anything was written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile

from hp_comm._shm.kernel import PAGE_BYTES, Mapping

_NO_EXECUTION = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3


def round_to_pages(num_bytes: int) -> int:
    """Return the number of bytes of the whole pages that hold `num_bytes`, at least one page."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


def align(offset_bytes: int, boundary_bytes: int = 64) -> int:
    """Return the first multiple of a boundary at or after an offset.

    Example:
        >>> align(0), align(1), align(64)
        (0, 64, 64)
    """
    return -(-offset_bytes // boundary_bytes) * boundary_bytes


class Segment:
    """A piece of memory that several processes can map.

    Args:
        descriptor: An open descriptor; the segment closes it.
        num_bytes: Its length, a multiple of the page size.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Make a new segment of zeros whose size nobody can change.

        Args:
            num_bytes: Length wanted; rounded up to whole pages. Pages take memory once written.

        Raises:
            OSError: The system has no descriptor or no memory left.
        """
        num_bytes = round_to_pages(num_bytes)
        descriptor, sealable = _open_anonymous()
        segment = cls(descriptor, num_bytes)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, num_bytes)
            if sealable:
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            segment.close()
            raise
        return segment

    @classmethod
    def adopt(cls, descriptor: int, num_bytes: int) -> Segment:
        """Take a descriptor that another process sent.

        Raises:
            OSError: It is shorter than announced; reading it would kill this process.
        """
        num_bytes = round_to_pages(num_bytes)
        segment = cls(descriptor, num_bytes)
        found = os.fstat(descriptor).st_size
        if found < num_bytes:
            segment.close()
            raise OSError(
                errno.EINVAL, f"the segment that was handed over has {found} of {num_bytes} bytes"
            )
        return segment

    def map(self, *, private: bool = False, offset_bytes: int = 0) -> Mapping:
        """Map the segment from an offset to its end.

        Raises:
            OSError: The system has no room for the mapping.
        """
        return Mapping(
            self.descriptor,
            self.num_bytes - offset_bytes,
            offset_bytes=offset_bytes,
            private=private,
        )

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _open_anonymous() -> tuple[int, bool]:
    """Return a new descriptor and whether it takes seals."""
    if not hasattr(os, "memfd_create"):
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno()), False
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("hyper-parallel", flags | _NO_EXECUTION), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("hyper-parallel", flags), True
