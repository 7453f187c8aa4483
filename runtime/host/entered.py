"""Launching on a side stream for a while, at less of the host's time than torch takes for it.

torch's own block looks up device and stream when it is entered, and makes two objects for them.  A
layer knows its streams; what is left is to make one current and then the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class Entered:
    """`with` this block, `stream` is torch's current stream; behind it, `main` is.

    Both are streams of the current device.
    """

    __slots__ = ("_main", "_stream")

    def __init__(self, stream: torch.cuda.Stream, main: torch.cuda.Stream) -> None:
        self._stream, self._main = stream, main

    def __enter__(self) -> torch.cuda.Stream:
        torch.cuda.set_stream(self._stream)
        return self._stream

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._main)


def entered(stream: torch.cuda.Stream, main: torch.cuda.Stream) -> AbstractContextManager[object]:
    """A block whose launches go to `stream`, entered and left with `main` current.

    Where they are not both of the current device, torch's own, which changes it for the
    block: to make a stream current makes its device current, and nothing would undo that.
    """
    if stream.device_index == main.device_index == torch.cuda.current_device():
        return Entered(stream, main)
    return torch.cuda.stream(stream)
