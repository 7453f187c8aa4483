"""`kpipe.runtime.launch_check` with kernels in which every lane arrives, not one for its warp.

    python bench/sanitize.py FOLDER --tool racecheck --every-lane [--kernels NAME,...] [--rows N]

racecheck takes an arrival for that of one lane: what the other lanes of its warp have stored or
read counts as unordered, though `sync_warp` lies before it. Here each lane arrives behind its own
accesses and nothing else is changed. A report that is left is of another kind, and wants a reason.
"""

from __future__ import annotations

import sys

from kpipe.runtime.device import barrier, reduce, wgmma, wide_stages

ONE_LANE, ANY_LANE = "setp.eq.u32 lead, lane, 0;", "setp.ge.u32 lead, lane, 0;"


def every_lane_arrives() -> None:
    """Lets all kernels that are compiled from here on have reduce.WARP arrivals a warp.

    Raises ValueError where the products of a warpgroup do not name their arriving lane as here.
    """
    initialise = wide_stages.Stages.initialise

    def of_lanes(stages: wide_stages.Stages, *warps: int) -> None:
        initialise(stages, *(count * reduce.WARP for count in warps))

    if ONE_LANE not in wgmma._HEAD:
        raise ValueError(f"no {ONE_LANE!r} in the products of a warpgroup")
    wgmma._HEAD = wgmma._HEAD.replace(ONE_LANE, ANY_LANE)
    barrier.WARP_ARRIVALS, barrier.arrive_as_warp = reduce.WARP, barrier.arrive
    wide_stages.Stages.initialise = of_lanes


def main(arguments: list[str]) -> int:
    """Exit code of `launch_check`."""
    every_lane_arrives()
    from kpipe.runtime.launch_check import main as launch_check  # with torch, behind the change

    return launch_check(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
