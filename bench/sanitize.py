"""Runs compute-sanitizer over generated kernels, one process, one time limit and one log each.

    python bench/sanitize.py FOLDER --tool racecheck [--kernels NAME,...] [--rows N] [--out DIR]
    python bench/sanitize.py reproducer --tool racecheck [--kernels CASE,...] [--out DIR]

FOLDER is a generated folder; each of its kernels is launched once by `kpipe.runtime.launch_check`,
at the smallest declared number of rows from `--rows` on, and judged by its oracle.
`reproducer` takes the cases of `racecheck_reproducer.py` instead. Only launches whose kernel name
has the kernel's in it are instrumented, not those that make its inputs or its oracle. Prints a
line a kernel and writes DIR/<tool>_<kernel>.txt. With `--every-lane` the kernels are those of
`every_lane.py`, the logs DIR/<tool>_<kernel>_every_lane.txt. Exit code 1 where anything was found,
was wrong or did not end in time, 4 where there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REPRODUCER = "reproducer"
CASES = "abcdefghij"
KERNEL_NAMES = {"mla_query_split": "mla_query"}
"""Kernels whose function is not called as their file is."""
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of one kernel."""

    clean: bool
    text: str


def tool_command(options: argparse.Namespace, function: str) -> list[str]:
    """compute-sanitizer with its options; `function` is what it instruments."""
    command = ["compute-sanitizer", "--tool", options.tool]
    command += ["--kernel-name", f"kns={function}"]
    if options.tool == "memcheck":  # libraries ask the driver for functions that it lacks
        command += ["--report-api-errors", "no"]
    if options.launch_count:
        command += ["--launch-count", str(options.launch_count)]
    if options.num_cuda_barriers:
        command += ["--num-cuda-barriers", str(options.num_cuda_barriers)]
    if options.racecheck_indirect_barrier_dependency and options.tool == "racecheck":
        command += ["--racecheck-indirect-barrier-dependency"]
    return command


def command_of(options: argparse.Namespace, name: str) -> list[str]:
    """The whole command for a kernel, or for a case of the reproducer."""
    if options.folder == REPRODUCER:
        program = [str(HERE / "racecheck_reproducer.py"), "--case", name]
        return [*tool_command(options, "hand_over"), sys.executable, *program]
    every_lane = [str(HERE / "every_lane.py")]
    program = every_lane if options.every_lane else ["-m", "kpipe.runtime.launch_check"]
    program += [options.folder, "--rows", str(options.rows), "--kernels", name]
    function = KERNEL_NAMES.get(name, name)
    return [*tool_command(options, function), sys.executable, *program]


def names_of(options: argparse.Namespace) -> list[str]:
    """What is to run, in order."""
    if options.kernels:
        return options.kernels.split(",")
    if options.folder == REPRODUCER:
        return list(CASES)
    files = Path(options.folder, "kernels").glob("*.py")
    return sorted(path.stem for path in files if path.stem != "__init__")


def shown(word: str) -> str:
    """A word of a command as its log has it: the same wherever the project lies."""
    if word == sys.executable:
        return "python3"
    root = HERE.parent
    return str(Path(word).relative_to(root)) if Path(word).is_relative_to(root) else word


def bounded(command: list[str], log: Path, seconds: float) -> int | None:
    """Exit code of a command whose output goes to `log`; None if it had to be stopped."""
    with log.open("w") as file:
        file.write(" ".join(map(shown, command)) + "\n")
        file.flush()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # the tool and what it started
                process.wait()


def verdict_of(output: str, code: int | None) -> Verdict:
    """What the tool's output and exit code say."""
    found = SUMMARY.findall(output)
    if code is None:
        reports = len(re.findall(r"^=+ (?:Error|Warning): ", output, re.MULTILINE))
        return Verdict(False, f"did not end in time, {reports} reports so far")
    if not found:
        return Verdict(False, f"exit code {code} without a summary")
    clean = bool(re.match(r"0 (?:errors|hazards)", found[-1]))
    if code and clean:
        return Verdict(False, f"{found[-1]}, but exit code {code}: see the log")
    return Verdict(clean, found[-1])


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help=f"a generated folder, or `{REPRODUCER}`")
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--kernels", default="", metavar="NAME,...")
    parser.add_argument("--rows", type=int, default=1, help="smallest number of rows to launch")
    parser.add_argument("--out", type=Path, default=Path("sanitizer"), help="folder of the logs")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of a kernel")
    parser.add_argument("--launch-count", type=int, default=0, help="launches to look at; 0: all")
    parser.add_argument("--num-cuda-barriers", type=int, default=0, help="0: the tool's default")
    parser.add_argument("--racecheck-indirect-barrier-dependency", action="store_true")
    parser.add_argument("--every-lane", action="store_true", help="see every_lane.py")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 4
    if options.every_lane and options.folder == REPRODUCER:
        print("--every-lane: the reproducer's cases say themselves who arrives", file=sys.stderr)
        return 2
    names = names_of(options)
    if not names:
        print(f"{options.folder} has no kernels", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    clean = True
    for name in names:
        form = "_every_lane" if options.every_lane else ""
        log = options.out / f"{options.tool}_{name}{form}.txt"
        began = time.monotonic()
        code = bounded(command_of(options, name), log, options.seconds)
        verdict = verdict_of(log.read_text(errors="replace"), code)
        clean &= verdict.clean
        seconds = time.monotonic() - began
        print(f"{options.tool} {name}: {verdict.text} ({seconds:.0f} s)", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
