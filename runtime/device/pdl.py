"""Programmatic dependent launch (PDL): the two instructions and what they order.

A kernel launched with the PDL attribute may start while its predecessor in the stream runs.
Whatever it touches before `wait` must not depend on the predecessor or on any kernel ahead of it.
"""

from __future__ import annotations

from cutlass import cute


def wait() -> None:
    """Returns once the preceding grid has ended and its writes are visible.

    Every thread that reads or writes what another kernel of the step touches calls it first.
    Without the launch attribute it returns at once.
    """
    cute.arch.griddepcontrol_wait()


def release() -> None:
    """Lets the dependent grid start as soon as every CTA of this one has called or ended.

    It publishes nothing: the dependent sees this grid's writes only behind its own `wait`.
    """
    cute.arch.griddepcontrol_launch_dependents()
