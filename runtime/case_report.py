"""A case that has run, compared with the oracle: what `kpipe verify` reports of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kpipe.runtime.compare import StageError, compare_trial
from kpipe.runtime.layer import Layer
from kpipe.runtime.trial import Case, Trial, run_case

LOG = logging.getLogger(__name__)  # where a run is: see watch.py


@dataclass(frozen=True)
class Report:
    """A case that has run: per layer of the chain the method and the errors of its stages."""

    layer_class: type[Layer]
    case: Case
    ranks: tuple[int, ...]
    methods: tuple[str, ...]
    errors: tuple[tuple[StageError, ...], ...]

    @property
    def checks(self) -> list[tuple[int, StageError]]:
        """Every comparison with the layer that it belongs to."""
        return [(number, error) for number, errors in enumerate(self.errors) for error in errors]

    @property
    def failures(self) -> list[tuple[int, StageError]]:
        """The comparisons that are beyond their bounds."""
        return [(number, error) for number, error in self.checks if not error.ok]

    @property
    def ok(self) -> bool:
        """True where something was compared and everything is within its bounds."""
        return bool(self.checks) and not self.failures

    @property
    def worst(self) -> StageError | None:
        """The comparison nearest to its bound, or furthest beyond it; None without any."""
        return max((error for _, error in self.checks), key=_share, default=None)

    @property
    def out_error(self) -> float:
        """The largest error of a layer's output; inf where none was compared."""
        return max((e.error for _, e in self.checks if e.what == "out"), default=inf)


def reported(layer_class: type[Layer], case: Case) -> Report:
    """Run a case and compare all its layers; what the layer's own ops raise passes through."""
    return report_of(layer_class, case, run_case(layer_class, case))


def report_of(layer_class: type[Layer], case: Case, trials: Sequence[Trial]) -> Report:
    """What the comparisons of a case that has run say; one trial per layer."""
    errors = []
    for number, trial in enumerate(trials):
        errors.append(compare_trial(trial))
        LOG.info("layer %d compared with the oracle", number)
    return Report(
        layer_class,
        case,
        tuple(run.rank for run in trials[0].ranks),
        tuple(trial.ranks[0].method for trial in trials),
        tuple(errors),
    )


def _share(error: StageError) -> float:
    """How much of its bound an error takes; where nothing is allowed, 0 or inf."""
    if error.bound:
        return error.error / error.bound
    return 0.0 if error.ok else inf
