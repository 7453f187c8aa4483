"""Words that come while a launch is polling for them.

Nothing that the device has to stop for may come behind the launch: the driver may wait for whatever
runs before it creates a stream or loads a kernel for the first time, and what runs here waits for
the words.  So all of it is done once ahead of the launch, on the very memory, and undone.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

PARTS = 4
"""Copies that bring the words; neighbouring rows come with different ones."""


class Arrival:
    """Brings `content`, int32 [..., words], into the mailbox `box` of as many bytes, once a call.

    Made ahead of the launch, on an armed mailbox, which is armed again when the constructor
    returns.  A call returns at once; its copies run on a stream that waits for no other.
    """

    def __init__(self, box: Tensor, content: Tensor) -> None:
        self._words = box.view(torch.int32).view(-1, content.shape[-1])
        self._content = content.view(-1, content.shape[-1])
        self._device = box.device
        on_device = box.device.type == "cuda"
        self._stream = torch.cuda.Stream(box.device) if on_device else None
        armed = self._words.clone()
        self._wait()
        self()
        self._wait()
        self._words.copy_(armed)
        self._wait()

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for part in range(PARTS):
                self._words[part::PARTS].copy_(self._content[part::PARTS])

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
