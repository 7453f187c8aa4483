"""Checks and times sparse_decode_wide at 64, 96 and 128 heads, in both cache formats.

    python bench/wide_core.py --render FOLDER                  # where the templates can be rendered
    python bench/wide_core.py --kernels FOLDER [--out FILE]    # on the GPU machine

Every form is judged by the oracle of launch_cases/sparse.py at several numbers of rows: with ragged
lists and NaN in every cache row that is not selected, and with full lists. Times are medians over
graph replays that walk through inputs larger than the L2 cache, one launch behind the other under
PDL. `--sweep` times every number of splits that fits on the GPU, `--quick` checks without timing,
`--diagnose` says for two splits which part of a wrong merge is wrong (wide_diagnosis.py) and ends.
Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

HEADS = (64, 96, 128)
FORMATS = ("fp8_tensor", "fp8_ds_mla")
PARALLEL = (None, 8)
ROWS = (1, 4, 16, 64)
USUAL = (
    *((1, 16, 4), (3, 16, 2), (7, 8, 2)),
    *((15, 8, 1), (20, 6, 1), (43, 3, 1), (66, 2, 1)),
)
"""Most rows times tiles, splits and parts: what is fastest of what fits on an H200 at once."""
SWEPT = (1, 2, 3, 4, 6, 8, 12, 16)
PEERS = {
    64: {1: 15.5, 4: 18.2, 16: 28.4, 64: 57.7},
    128: {1: 16.3, 4: 19.4, 16: 31.8, 64: 69.8},
}
"""Microseconds of the fastest public kernel on an H200 (docs/numbers.md)."""
SMS = 132
ARCH = "sm_90a"
MIN_SETS, MAX_SETS = 16, 160
"""Sets of inputs that a timing walks through; together larger than the L2 cache."""


def load(path: Path) -> ModuleType:
    """The module in a file that belongs to no package.

    Modules in a folder `device` beside it stand in for those of runtime/device.
    """
    import kpipe.runtime.device as device

    instead = str(path.parent / "device")
    if instead not in device.__path__:
        device.__path__.insert(0, instead)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def render(folder: Path) -> None:
    """Writes the kernel of every form."""
    from kpipe.codegen.render.api import environment

    template = environment(()).get_template("kernels/sparse_decode_wide.py.jinja")
    folder.mkdir(parents=True, exist_ok=True)
    for heads, form, dcp in itertools.product(HEADS, FORMATS, PARALLEL):
        given = {
            "spec": "bench/wide_core.py",
            "dims": {"heads": heads, "tp": 1, "kv_lora": 512, "latent": 576, "top_k": 2048},
            "pages": {"latent_kv": 64},
            "formats": {"latent_kv": form},
            "parallel": {"tp": 1, "dcp": dcp},
            "scalars": {"softmax_scale": 192**-0.5},
        }
        (folder / f"{name_of(heads, form, dcp)}.py").write_text(template.render(given))


def name_of(heads: int, form: str, dcp: int | None) -> str:
    """The file of a form."""
    return f"wide_h{heads}_{form}{'_dcp' if dcp else ''}"


@dataclass(frozen=True)
class Flags:
    """Of a kernel."""

    splits: int
    parts: int

    def kernel(self, module: ModuleType):
        """The kernel of a form."""
        parts = {"parts": self.parts} if self.parts > 1 else {}
        return module.SparseDecodeWide(splits=self.splits, **parts)

    def __str__(self) -> str:
        return f"splits {self.splits} parts {self.parts}"


def usual_for(module: ModuleType, rows: int) -> Flags:
    """What USUAL says."""
    tiles = rows * module.TILES
    found = ((splits, parts) for most, splits, parts in USUAL if tiles <= most)
    return Flags(*next(found, (1, 1)))


def flags_of(module: ModuleType, rows: int, splits: tuple, parts: tuple) -> list[Flags]:
    """What is timed: of the wanted splits and parts those that fit, else what USUAL says."""
    fits = [
        Flags(count, shares)
        for count, shares in itertools.product(splits, parts)
        if rows * module.TILES * count * shares <= SMS
    ]
    return fits or [usual_for(module, rows)]


def numbers(text: str) -> tuple[int, ...]:
    """An option's list of numbers."""
    return tuple(int(part) for part in text.split(","))


def compile_to_file(file: str, flags: Flags, target: str) -> None:
    """One kernel into an object file; runs in a process of its own."""
    from kpipe.runtime.host.compile import compile_kernel
    from kpipe.runtime.tune_compile import export

    module = load(Path(file))
    export(compile_kernel(flags.kernel(module), module.operands(), ARCH), target)


class Forms:
    """Runs every form and keeps one record a check or time."""

    def __init__(self, folder: Path) -> None:
        self.modules = {path.stem: load(path) for path in sorted(folder.glob("wide_*.py"))}
        self.records: list[dict] = []

    def compiled(self, module: ModuleType, flags: Flags):
        from kpipe.runtime.host.compile import compile_kernel

        return compile_kernel(flags.kernel(module), module.operands(), ARCH)

    def check(self, name: str, rows: int, flags: Flags) -> None:
        """Ragged lists, full ones, and once rows behind 2^32 bytes, against the oracle."""
        import torch

        from kpipe.runtime.launch_cases.sparse import EDGES, SparseDecodeWideCase
        from kpipe.runtime.launch_check import run_eager

        module = self.modules[name]
        case = SparseDecodeWideCase(module)
        kernel = self.compiled(module, flags)
        ragged = case.inputs(rows, 1)
        full = case.timed_inputs(rows, 1)[0]
        given_by_how = {"ragged": ragged, "full": full}
        if rows == ROWS[0]:
            given_by_how["far"] = case.inputs(len(EDGES), 1, far=True)
        for how, given in given_by_how.items():
            print(f"{name} rows {rows} {flags} {how}: ", end="", flush=True)
            for output in case.outputs:
                given[output].fill_(torch.nan)
            done = run_eager(kernel, given, case.outputs)
            again = run_eager(kernel, given, case.outputs)
            verdict = case.check(given, done, 1)
            for output in case.outputs:
                raw = [one[output].view(torch.uint8) for one in (done, again)]
                verdict.equal(f"{output} of a second launch", *raw)
            self.records.append(
                {
                    "form": name,
                    "rows": rows,
                    **asdict(flags),
                    "how": how,
                    "error": verdict.error,
                    "bound": verdict.bound,
                    "wrong": verdict.wrong,
                }
            )
            share = verdict.error / verdict.bound if verdict.bound else 0.0
            print(verdict.wrong or f"ok, {share:.3f} of the bound", flush=True)

    def time(self, name: str, rows: int, wanted: list[Flags]) -> None:
        """Medians over graph replays."""
        import torch

        from kpipe.runtime.bench import graph_us
        from kpipe.runtime.launch_cases.sparse import SparseDecodeWideCase

        module = self.modules[name]
        case = SparseDecodeWideCase(module)
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        enough = 4 * cache // case.touched_bytes(rows) + 1
        sets = case.timed_inputs(rows, min(MAX_SETS, max(MIN_SETS, enough)))
        for flags in wanted:
            kernel = self.compiled(module, flags)
            us = graph_us([partial(kernel, *given.values()) for given in sets])
            peer = PEERS.get(module.HEADS, PEERS[128]).get(rows)
            self.records.append(
                {"form": name, "rows": rows, **asdict(flags), "us": us, "peer_us": peer}
            )
            print(f"{name} rows {rows} {flags}: {us:.1f} us, peer {peer}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", type=Path, metavar="FOLDER", help="write the kernels and end")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="where they are")
    parser.add_argument("--only", default="", metavar="PATTERN", help="forms whose name matches")
    parser.add_argument("--rows", type=numbers, default=ROWS, metavar="N,..", help="of a launch")
    parser.add_argument("--splits", type=numbers, metavar="N,..", help="time these where they fit")
    parser.add_argument("--parts", type=numbers, default=(1,), metavar="N,..", help="with these")
    parser.add_argument("--sweep", action="store_true", help="time all numbers of splits")
    parser.add_argument("--quick", action="store_true", help="check only")
    parser.add_argument("--unchecked", action="store_true", help="time only")
    parser.add_argument("--diagnose", action="store_true", help="say what is wrong, and end")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records as JSON")
    options = parser.parse_args()
    if options.render:
        render(options.render)
        return 0
    if not options.kernels:
        parser.error("give --render FOLDER or --kernels FOLDER")
    import torch

    from kpipe.runtime.tune_compile import compile_ahead

    torch.manual_seed(torch.seed() % 2**31)
    forms = Forms(options.kernels)
    names = [name for name in forms.modules if re.search(options.only, name)]
    if options.diagnose:
        from wide_diagnosis import SPLITS as DIAGNOSED
        from wide_diagnosis import diagnose

        for name in names:
            print(name)
            module = forms.modules[name]
            diagnose(module, forms.compiled(module, Flags(DIAGNOSED, 1)))
        return 0
    splits = SWEPT if options.sweep else options.splits or ()
    counts = {
        (name, rows): flags_of(forms.modules[name], rows, splits, options.parts)
        for name, rows in itertools.product(names, options.rows)
    }
    jobs = {
        flags.kernel(forms.modules[name]): partial(
            compile_to_file, str(forms.modules[name].__file__), flags
        )
        for (name, _), found in counts.items()
        for flags in found
    }
    with compile_ahead(jobs, ARCH, 0, partial(print, flush=True)):
        for (name, rows), found in counts.items() if not options.unchecked else ():
            for flags in found:
                forms.check(name, rows, flags)
        if not options.quick:
            for (name, rows), found in counts.items():
                forms.time(name, rows, found)
    if options.out:
        document = {"gpu": torch.cuda.get_device_name(), "records": forms.records}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    failed = [record for record in forms.records if record.get("wrong")]
    print("FAILED" if failed else "ok", len(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
