"""Runs a generated layer with its library core on this GPU against the oracle, and times it.

    python bench/library_core.py [FOLDER] [--package DIR] [--beside FOLDER] [--out FILE]

FOLDER is generated/dsa_tp_flashmla by default; DIR holds the Python package of the library and is
searched behind everything that is installed.  Every case is `kpipe verify` on the cuda backend:
all stages of every layer, eagerly and from one CUDA graph over three layers.  The layer is then
timed at 32K context beside the same layer with our own core.  Exit code 1 where a stage is beyond
its bound, 4 where the library is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from kpipe.runtime.bench import LAYERS, graph_us
from kpipe.runtime.bench_inputs import build
from kpipe.runtime.host.launch import arch_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.trial import Case, geometry_of, load_layer
from kpipe.runtime.verify import Report, as_text, default_lengths, verdict, verify

CONTEXT = 32768
TIMED_ROWS = (1, 4, 16, 64)
REQUESTS = ((1, 1), (6, 1), (16, 1), (64, 1), (16, 4))
"""(requests, query rows of each) of the cases; lengths go round those of `kpipe verify`."""


def cases(layer_class: type[Layer], arch: str) -> list[Case]:
    """Each declared kind of step eagerly, and the first, the middle and the last captured."""
    found = []
    for number, (requests, q) in enumerate(REQUESTS):
        edges = default_lengths(geometry_of(layer_class).top_k, q)
        lengths = tuple(edges[place % len(edges)] for place in range(requests))
        common = {"q": q, "arch": arch, "seed": number, "backend": "cuda"}
        found.append(Case(lengths, **common))
        if number % 2 == 0:
            found.append(Case(lengths, layers=3, captured=True, **common))
    return found


def record(report: Report) -> dict:
    """What one case found, with the worst error of every stage beside its bound."""
    worst: dict[str, float] = {}
    for _, error in report.checks:
        if error.bound:
            name = f"{error.stage} {error.what}"
            worst[name] = max(worst.get(name, 0.0), error.error / error.bound)
    return {
        "rows": len(report.case.lengths) * report.case.q,
        "q": report.case.q,
        "captured": report.case.captured,
        "layers": report.case.layers,
        "method": report.methods[0],
        "of_bound": worst,
        "ok": report.ok,
    }


def times(folder: Path, arch: str) -> dict[str, float]:
    """Median microseconds a layer by rows, captured."""
    found = {}
    for rows in TIMED_ROWS:
        layer_class = load_layer(folder)
        timed = build(layer_class, arch=arch, rows=rows, q=1, context=CONTEXT, count=LAYERS - 1)
        found[str(rows)] = graph_us([one.run for one in timed])
        del timed
        torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("generated/dsa_tp_flashmla"))
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--beside", type=Path, default=Path("generated/dsa_tp_ds"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.package:
        sys.path.append(str(options.package))
    if not torch.cuda.is_available():
        print("error: this machine has no CUDA device", file=sys.stderr)
        return 4
    arch = arch_of(torch.device("cuda"))
    layer_class, records = load_layer(options.folder), []
    try:
        for case in cases(layer_class, arch):
            report = verify(layer_class, case)
            records.append(record(report))
            how = "captured" if case.captured else "eager"
            print(f"rows {records[-1]['rows']} q {case.q} {how}: {verdict(report)}", flush=True)
            if not report.ok:
                print(as_text(report))
        measured = {f.name: times(f, arch) for f in (options.folder, options.beside)}
    except LayerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    for name, by_rows in measured.items():
        print(f"{name}: " + "  ".join(f"{rows} rows {us:.1f} us" for rows, us in by_rows.items()))
    if options.out:
        gpu = torch.cuda.get_device_name()
        document = {"gpu": gpu, "context": CONTEXT, "records": records, "us": measured}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(entry["ok"] for entry in records) else 1


if __name__ == "__main__":
    sys.exit(main())
