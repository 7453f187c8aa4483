"""What a poll does when a word never comes: it gives up, says which word of whom, and traps.

`python -m kpipe.runtime.timeout_check FOLDER`, on a GPU: all words of a query mailbox arrive but
one, and `query_wait` is launched.  The device is lost to the process afterwards, so this runs in
one of its own.  Exit code 0 where the error names the word, 1 where it does not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host.launch import CudaOp, arch_of
from kpipe.runtime.layer import Layer

ROWS = 2


def missing_word(layer_class: type[Layer]) -> tuple[tuple[int, ...], MailboxTimeout | None]:
    """The place of the one word that never comes, and the time-out that was raised for it."""
    group = DeviceRanks(layer_class.RANKS)
    comm = group.rank(0)
    box = comm.mailbox(layer_class.MEMORY.mailboxes["q_mail"], 0)
    words = box.local.view(torch.int32)
    place = (ROWS - 1, words.shape[1] - 1, words.shape[2] // 2)
    words.zero_()
    words[place] = box.spec.signed_sentinel
    (op,) = (op for op in layer_class.OPS if op.name == "query_wait")
    arch = arch_of(torch.device("cuda"))
    wait = CudaOp(op, layer_class.PACKAGE, {}, arch, lambda op: ROWS, comm)
    wait(box, pdl=False)
    try:
        group.synchronize()
    except MailboxTimeout as error:
        return place, error
    return place, None


def main(argv: list[str]) -> int:
    """Run the check of a folder; returns 0, or 1 where the poll did not say what it missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    layer_class = load_layer(parser.parse_args(argv).folder)
    place, error = missing_word(layer_class)
    last = layer_class.RANKS - 1
    ok = error is not None and (error.word, error.peers) == (place, (last,))
    print(f"{'ok' if ok else 'FAILED'}: word {place} of rank {last} never came; {error}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
