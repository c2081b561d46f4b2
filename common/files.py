"""For every command: files that are never half written, and errors in one line.

This module imports no other module of this repository.
"""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path

# also a full quota, or a limit on a file's size
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path, mode="wb"):
    """Write a file under a temporary name and rename it once it is complete: nobody ever reads half
    a file. Temporary files of this path that killed processes have left are deleted, because a
    checkpoint may be large. Links, folders, and files of running processes stay."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*.tmp"):
        found = re.fullmatch(rf"\.{re.escape(path.name)}\.([0-9]+)\.tmp", left.name)
        own = found and left.is_file() and not left.is_symlink()
        if own and not is_running(int(found[1])):
            left.unlink(missing_ok=True)
    # in the same folder, so the rename is atomic
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())  # on the disk before it gets its final name
        os.replace(temporary, path)
    except OSError as e:
        if e.errno in FULL_DISK and e.filename is None:
            raise OSError(
                f"{path} could not be written ({e.strerror}): free some space there"
            ) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def is_running(process):
    """Does this machine have a process with this id?"""
    try:
        os.kill(process, 0)  # the signal 0 is never delivered
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        pass
    return True


def regular(path):
    """The same path. Raises ValueError if it names a folder, a pipe or a device: reading a pipe may
    wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file: remove it and put the file there")
    return path


def check_name(name, what):
    """The same name. Raises ValueError if it cannot be a part of a file's name: one that was read
    from a file must not lead to another folder. what: the name's role, for the message."""
    if not re.fullmatch(r"\w[\w .,+=@()-]*", name) or len(name.encode()) > 100:
        shown = name[:100].encode("utf-8", "backslashreplace").decode()
        raise ValueError(
            f"{what}={shown} must be a plain name: at most 100 letters, digits and _ "
            ".,+=@()-, the first a letter or a digit"
        )
    return name


def write_json(path, value):
    """Write a value as indented JSON, with lists of numbers on one line."""
    text = json.dumps(value, indent=2)
    text = re.sub(r"\[\n([^][{}\"]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    with replacing(path, "w") as f:
        f.write(text + "\n")


def parsed(text):
    """The value of a JSON text (or bytes). Raises ValueError if it is not valid."""
    try:
        return json.loads(text)
    except RecursionError:  # a thousand lists inside each other
        raise ValueError("its lists are nested too deeply") from None


def read_json(path):
    regular(path)
    try:
        return parsed(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:  # not JSON, or not even text
        raise ValueError(f"{path} is not valid JSON ({e}): delete it and make it again") from None


def has(entry, **types):
    """Is this content of a file a dict with entries of these types?"""
    return isinstance(entry, dict) and all(
        isinstance(entry.get(name), kind) for name, kind in types.items()
    )


def sha256(path):
    """The hash of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with open(regular(path), "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def optional(module):
    """Import a package that not every installation has. Raises ValueError with the command that
    installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(
            f"this needs the package {package}, which is not installed: pip install {package}"
        ) from None


# torch's words if float32 cannot hold a number
TOO_LARGE = "cannot be converted to type float without overflow"
# torch's words if a tensor does not fit into this memory, and (the last two) into any memory
NO_MEMORY = (
    "out of memory|can't allocate memory|not enough memory|size calculation overflowed|"
    "multiplication overflow"
)


@contextlib.contextmanager
def one_line_errors():
    """End a command with one sentence instead of a traceback if the input or the disk is at fault.

    stdout and stderr accept any text: they write characters that their encoding lacks as escapes.
    If one of them is closed (>&-), its text is lost, and the command continues."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Python's mark of a closed stream
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it, as head does
        # Python still flushes its buffer there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, KeyboardInterrupt, RuntimeError, MemoryError, OverflowError) as e:
        why = (str(e) or "an allocation failed").splitlines()[0]
        if isinstance(e, OverflowError) or TOO_LARGE in why:
            flags = "--learning_rate or --attn_args"
            e = f"a number is too large ({why}): use smaller ones, such as {flags}"
        elif isinstance(e, RuntimeError | MemoryError):  # to explain: not enough memory
            if isinstance(e, RuntimeError) and not re.search(NO_MEMORY, str(e)):
                raise
            sizes = "--batch_size, --block_size or --lengths"
            e = f"there is not enough memory ({why}): use smaller sizes, such as {sizes}"
        if os.environ.get("TRACEBACK"):  # TRACEBACK=1 python train.py ... prints the traceback
            raise
        stopped = isinstance(e, KeyboardInterrupt)
        said, code = ("interrupted", 130) if stopped else (f"error: {e}", 1)
        fail(Path(sys.argv[0]).name, said, code)


def fail(command, message, code):
    """End a command with one line on stderr, which names the rank unless it is the first, and an
    exit code."""
    rank = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
    if sys.stderr:  # None if it is closed
        print(f"{command}{rank}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
