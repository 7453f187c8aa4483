"""`kpipe verify --processes`: every rank a process, on a GPU of its own or on the CPU.

Under torchrun this process is one of the ranks; otherwise it starts them all.  Rank 0 compares
what all have left with the oracle and prints the one report; every rank exits with the worst code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from kpipe.runtime.case_report import report_of
from kpipe.runtime.case_text import as_json, as_text, raised_text
from kpipe.runtime.comm import launcher, multicast
from kpipe.runtime.comm.device_processes import DeviceProcesses, too_few
from kpipe.runtime.comm.host_processes import HostProcesses
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.trial import run_case
from kpipe.runtime.verify_all import CaseReport, FullReport
from kpipe.runtime.verify_all import as_json as suite_as_json
from kpipe.runtime.verify_all import as_text as suite_as_text
from kpipe.runtime.verify_suite import NamedCase

MODULE = "kpipe.runtime.verify"
FINE, FINDINGS, USAGE, ENVIRONMENT = 0, 1, 2, 4


def refusal(layer_class: type[Layer], options: argparse.Namespace) -> str:
    """Why the options do not go together; empty where they do."""
    if not layer_class.CONTEXT_PARALLEL:
        return f"--processes: the ranks of {layer_class.NAME} exchange nothing"
    for name in ("virtual_ranks", "concurrent", "launches"):
        if getattr(options, name) not in (None, False):
            word = name.replace("_", "-")
            return f"--processes runs every rank in a process; leave out --{word}"
    return ""


def run(
    layer_class: type[Layer],
    cases: Sequence[NamedCase],
    options: argparse.Namespace,
    argv: Sequence[str],
) -> int:
    """The cases on all ranks; one without a name is reported alone.  Returns the exit code.

    Raises LayerError where the environment asks for multicast.
    """
    cuda = cases[0].case.backend == "cuda"
    if cuda and torch.cuda.device_count() < layer_class.RANKS:
        complain(too_few(layer_class.RANKS, torch.cuda.device_count()))
        return ENVIRONMENT
    if not launcher.started_here():
        return _start(layer_class, argv)
    multicast.turn_off(os.environ)
    if int(os.environ["WORLD_SIZE"]) != layer_class.RANKS:
        complain(
            f"{layer_class.NAME} is generated for {layer_class.RANKS} ranks, this group has "
            f"{os.environ['WORLD_SIZE']}"
        )
        return USAGE
    return _as_rank(layer_class, cases, options)


def complain(text: str) -> None:
    """An error that all ranks find alike: one of them says it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {text}", file=sys.stderr)


def _start(layer_class: type[Layer], argv: Sequence[str]) -> int:
    """All ranks as processes of this machine; their worst code."""
    ended = launcher.launch(["-m", MODULE, *argv], layer_class.RANKS)
    for one in ended:
        if one.code < 0:
            print(f"error: {one.text}", file=sys.stderr)
    return max(one.code if one.code >= 0 else FINDINGS for one in ended)


def _as_rank(
    layer_class: type[Layer], cases: Sequence[NamedCase], options: argparse.Namespace
) -> int:
    try:
        with Processes.join() as processes:
            group = _group(processes, cases[0].case.backend, options.transport)
            report = FullReport(layer_class, cases[0].case.arch, cases[0].case.backend)
            if isinstance(group, DeviceProcesses):
                report.gpu = f"{layer_class.RANKS} x {torch.cuda.get_device_name(group.device)}"
            for named in cases:
                if named.name and not processes.rank:
                    print(f"layers: {named.name} ...", file=sys.stderr)
                report.cases.append(_case(layer_class, named, group))
            code = 0
            if not processes.rank:
                print(_text(report, options.format))
                code = FINE if report.ok else FINDINGS
            return max(processes.exchange("verdict", code))
    except LayerError as error:
        _say(f"error: {error}", sys.stderr)
        return USAGE
    except (ValueError, RuntimeError, AssertionError) as error:  # out of the layer's own ops
        _say(raised_text(error, options.format), sys.stdout)
        return FINDINGS


def _group(processes: Processes, backend: str, transport: str) -> HostProcesses | DeviceProcesses:
    if backend != "cuda":
        return HostProcesses(processes)
    group = DeviceProcesses(processes, transport)
    if not processes.rank:
        why = f" ({group.left_out})" if group.left_out else ""
        print(f"mailboxes by {group.transport}{why}", file=sys.stderr)
    return group


def _case(
    layer_class: type[Layer], named: NamedCase, group: HostProcesses | DeviceProcesses
) -> CaseReport:
    """The case on this rank; what was found of it stands in the report of rank 0 alone."""
    trials = run_case(layer_class, named.case, group)
    return CaseReport(named, report_of(layer_class, named.case, trials) if trials else None)


def _text(report: FullReport, form: str) -> str:
    (first, *more) = report.cases
    if not first.named.name and not more and first.report is not None:
        alone = as_json if form == "json" else as_text
        return alone(first.report)
    return suite_as_json(report) if form == "json" else suite_as_text(report)


def _say(text: str, stream: object) -> None:
    """Rank 0 where it is due, the others beside it, with their number."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(text, file=stream)  # type: ignore[call-overload]
    else:
        print(f"rank {rank}: {text}", file=sys.stderr)
