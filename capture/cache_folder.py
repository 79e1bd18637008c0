"""The folder of compiled code: whether it is ours alone, and what an interrupted compiler left.

Why: what lies there is loaded as code, pickles among it, so whoever can write there runs as us.
And Inductor takes a file that exists for a whole one, while a linker that is killed leaves an empty
one: every later start would fail to load it, or die of it.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian


def others_can_write(path: Path) -> str | None:
    """Why a file or folder is not ours alone; None where it is, or is not there yet.

    A group may write where it is our own: that is what a umask of 002 gives a user's own group.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    group = 0 if found.st_gid == os.getegid() else stat.S_IWGRP
    is_open = found.st_mode & (stat.S_IWOTH | group)
    return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})" if is_open else None


def drop_damaged(folder: Path, headers: Path | None = None) -> int:
    """Removes what a linker or compiler did not finish, unless another process compiles just now.

    Mutates: Inductor's folder.

    Args:
        headers: a folder of precompiled headers, which go too, whole or not: nothing tells, and gcc
            does without.

    Returns:
        How many files were removed.
    """
    names = [*folder.glob("*/*.so"), *folder.glob("*/*.o")]
    found = [path for path in names if not _is_whole(path)]
    folders = [folder]
    if headers is not None:
        found += headers.glob("*.gch")
        folders.append(headers)
    if not found or any(map(_is_compiling, folders)):
        return 0
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _is_whole(path: Path) -> bool:
    """An object's or library's last part is the table of its sections."""
    try:
        with path.open("rb") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return True  # not ours to judge
    if not head.startswith(_ELF):
        return bool(head.strip(b"\0"))
    if len(head) < 64:
        return False
    start, width, count = struct.unpack_from("<Q10xHH", head, 40)
    return size >= start + width * count


def _is_compiling(folder: Path) -> bool:
    """Whether a process holds one of Inductor's locks; one that was killed does not."""
    with suppress(ImportError):
        import fcntl  # on POSIX alone

        for path in folder.glob("locks/*.lock"):
            with suppress(OSError), path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False
