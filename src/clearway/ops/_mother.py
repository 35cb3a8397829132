"""The process that others are forked from: PyTorch, Triton and the ops are read once for all of them.

It is told over a socket what to become, with the three streams of it, and says over the same socket under
which number it began and how it ended: see forks.py. It never touches a device, since nothing forked from a
process that has may use one. Everybody waits for it to be ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import Any

from clearway.ops import forks
from clearway.ops.forks import LARGEST, SPARE_S

ROUND_S = 0.05
"""So often it looks who has ended."""
DEVICES = ("/dev/nvidia", "/dev/dxg")
"""How the names of GPUs' files begin; the latter within Windows."""


def main(fd: int) -> int:
    """Serves the socket until its other end is closed and all have ended that were forked."""
    read()
    if touches_a_device():
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored nobody is told of an end
    with socket.socket(fileno=fd) as line:
        line.send(json.dumps({"ready": True}).encode())
        asked, last = True, time.monotonic()
        while asked or _has_children():
            if asked and select.select([line], [], [], ROUND_S)[0]:
                last = time.monotonic()
                data, streams, _, _ = socket.recv_fds(line, LARGEST, 3)
                if data:
                    line.send(json.dumps(_forked(json.loads(data), streams, line)).encode())
                else:  # nothing more to fork; how those end that there are is still told
                    asked = False
            elif not asked:
                time.sleep(ROUND_S)
            for ended in _ended():
                line.send(json.dumps(ended).encode())
            if time.monotonic() - last > 2 * SPARE_S:  # somebody keeps a copy of the other end
                asked = False
    return 0


def read() -> None:
    """Reads PyTorch, Triton and the ops. Triton's key, a digest of a large file, is computed meanwhile."""
    key = threading.Thread(target=forks.key_of_triton)
    key.start()
    from clearway.ops import _builders

    _builders.get_ready()
    key.join()  # nothing is forked from a process of several threads


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def touches_a_device() -> bool:
    """Whether something that was read has opened a GPU."""
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{one}").startswith(DEVICES):
                return True
    return False


def _forked(asked: dict[str, Any], streams: list[int], line: socket.socket) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        _become(asked, streams, line)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # here too: whoever is told its number may end its group at once
    for one in streams:
        os.close(one)
    return {"began": child, "number": asked["number"]}


def _become(asked: dict[str, Any], streams: list[int], line: socket.socket) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        line.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, buffering=1, closefd=False) for number, mode in enumerate("rww")
        )
        os.environ.clear()
        os.environ.update(asked["environment"])
        with contextlib.suppress(OSError):
            os.chdir(asked["folder"])
        import torch

        from clearway.ops._allowance import cores

        threads = os.environ.get("OMP_NUM_THREADS", "")  # read when PyTorch was: here that of another
        torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else cores())
        code = import_module(asked["module"]).process()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended() -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            found.append({"ended": child, "code": os.waitstatus_to_exitcode(status)})
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
