"""A trial against the oracle, stage by stage: selections first, then everything behind them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from kpipe.runtime.generated_folder import launches
from kpipe.runtime.oracle.byte_formats import decode_index, decode_latent
from kpipe.runtime.oracle.caches import index_planes
from kpipe.runtime.oracle.compare import (
    Bound,
    declared_bounds,
    relative_error,
    selection_violation,
    tie_violations,
)
from kpipe.runtime.oracle.dsa_layer import oracle_layer
from kpipe.runtime.oracle.residual import attn_res, residual_stream, stream_bound
from kpipe.runtime.oracle.result import Result, Rounding
from kpipe.runtime.prepared import RankRun
from kpipe.runtime.trial import Trial


@dataclass(frozen=True)
class StageError:
    """One line of the table: the worst rank's error of a stage against its bound."""

    stage: str
    what: str
    error: float
    bound: float
    reason: str
    rank: int

    @property
    def ok(self) -> bool:
        """False for NaN as well."""
        return self.error <= self.bound


def compare_trial(trial: Trial, rounding: Rounding | None = None) -> tuple[StageError, ...]:
    """Errors of every stage that the trial has entered.

    The oracle continues from the trial's own selection; the selection itself is compared by
    score.  Buffers that still hold poison were not written and are left out, but a stage of which
    nothing was written has the error inf.  Without `rounding` every declared point rounds, except
    that the index query stays in FP32 where no op wrote `index_q`.  Raises AssertionError where
    `selected` and `valid` contradict each other.
    """
    layer = trial.ranks[0].layer
    latent_format = layer.MEMORY.caches["latent_kv"].format
    selection = selection_of(trial)
    oracle = oracle_layer(
        trial.geometry,
        trial.weights,
        trial.batch,
        cache_format=latent_format,
        selection=selection,
        tp=layer.RANKS,
        interleave=layer.INTERLEAVE if layer.CONTEXT_PARALLEL else None,
        rounding=rounding or Rounding(index_query=_materialised(trial, "index_q")),
        sends_values=_sends_values(trial),
    )
    found: dict[tuple[str, str], StageError] = {}
    for run in trial.ranks:
        for error in _rank_errors(trial, run, oracle, selection):
            key = (error.stage, error.what)
            if key not in found or not error.error <= found[key].error:
                found[key] = error
    if bool(oracle.active.any()):
        for stage in trial.stages:
            if all(error.stage != stage for error in found.values()):
                reason = "a stage that was entered has written something"
                found[stage, "nothing"] = StageError(stage, "nothing", inf, 0.0, reason, 0)
    order = {stage: place for place, stage in enumerate(trial.stages)}
    return tuple(sorted(found.values(), key=lambda error: order.get(error.stage, len(order))))


def _sends_values(trial: Trial) -> bool:
    """Whether the ranks' rows travelled behind W_UV."""
    run = trial.ranks[0]
    ops = launches(type(run.layer), run.method)
    return any("w_uv_all" in op.weights for op in ops)


def _materialised(trial: Trial, buffer: str) -> bool:
    """Whether an op wrote that buffer, that is, rounded the intermediate to its dtype."""
    view = getattr(trial.ranks[0].views, buffer, None)
    return view is not None and _written(view[: trial.batch.rows])


def selection_of(trial: Trial) -> list[Tensor] | None:
    """Global positions that each row attends to, over all ranks; None where not selected yet."""
    rows = trial.batch.rows
    chosen: list[list[Tensor]] = [[] for _ in range(rows)]
    ranks = trial.ranks if trial.ranks[0].layer.CONTEXT_PARALLEL else trial.ranks[:1]
    for run in ranks:
        if not _written(run.views.valid):
            return None
        for row in range(rows):
            count = int(run.views.valid[row])
            request, position = run.latent.locate(run.views.selected[row, :count])
            if count and not bool((request == row // trial.batch.q).all()):
                raise AssertionError(f"row {row} selects keys of another request, rank {run.rank}")
            if bool((run.views.selected[row, count:] != -1).any()):
                raise AssertionError(
                    f"row {row}: entries behind `valid` are not -1, rank {run.rank}"
                )
            chosen[row].append(position)
    return [torch.cat(parts) for parts in chosen]


def _written(buffer: Tensor) -> bool:
    if buffer.dtype.is_floating_point:
        return not bool(buffer.float().isnan().all())
    return not bool((buffer == 0x7F7F7F7F).all())


def _rank_errors(
    trial: Trial, run: RankRun, oracle: Result, selection: list[Tensor] | None
) -> list[StageError]:
    bounds = declared_bounds()
    errors: list[StageError] = []
    active = oracle.active
    rows = trial.batch.rows

    def add(stage: str, what: str, actual: Tensor, expected: Tensor, bound: str) -> None:
        if _written(actual):
            error = relative_error(actual.double()[active], expected.double()[active])
            limit = bounds[bound]
            errors.append(StageError(stage, what, error, float(limit), limit.reason, run.rank))

    heads = trial.geometry.heads(run.layer.RANKS)
    own = slice(run.rank * heads, (run.rank + 1) * heads)
    value = slice(own.start * trial.geometry.v_dim, own.stop * trial.geometry.v_dim)
    views = {
        name: view[:rows] for name, view in vars(run.views).items() if isinstance(view, Tensor)
    }
    for column in ("q_a", "kv_a", "wk", "wv"):
        add("projection", column, views[column], oracle.projected[column], "projected")
    add("projection", "gate", views["gate"], oracle.projected["gate"][:, value], "projected")
    add("query", "q_c", views["q_c"], oracle.q_c, "q_c")
    fp8 = run.layer.MEMORY.caches["latent_kv"].format == "fp8_tensor"
    if "query" in views:
        bound = "query_e4m3" if fp8 else "query_bf16"
        add("query", "query", views["query"].float(), oracle.query[:, own], bound)
    errors += _inserted(trial, run, oracle)
    add("indexer", "index_q8", views["index_q8"].float(), oracle.index_q8, "index_q8")
    add("indexer", "index_w", views["index_w"], oracle.index_w, "index_w")
    if selection is not None:
        worst = max(
            (selection_violation(oracle, row, selection[row]) for row in range(rows)), default=0.0
        )
        limit = bounds["selection"]
        errors.append(
            StageError("indexer", "selection", worst, float(limit), limit.reason, run.rank)
        )
        if trial.tied and not run.layer.CONTEXT_PARALLEL:
            broken = float(
                sum(_tie_violations(trial, run, row, selection[row]) for row in range(rows))
            )
            reason = "of keys with equal scores the preferred ids come first"
            errors.append(StageError("indexer", "tie rule", broken, 0.0, reason, run.rank))
        _attention_errors(run, oracle, views, value, own, add)
    if "value" in trial.stages and not bool(active.all()):
        exact = bool((views["gated"][~active] == 0).all())
        errors.append(_inactive("value", exact, "exactly zero", run))
    return errors + _output_errors(trial, run, oracle)


def _output_errors(trial: Trial, run: RankRun, oracle: Result) -> list[StageError]:
    """What the layer hands on; rows that are not active leave the residual stream as it was."""
    errors, active = [], oracle.active
    owed = _owed(trial, run, oracle)
    for what, expected, limit in owed:
        actual = getattr(run, what)
        if trial.complete or _written(actual):  # a complete run owes its outputs
            error = relative_error(actual[active], expected[active])
            errors.append(StageError("o_proj", what, error, float(limit), limit.reason, run.rank))
    if run.unstable is not None:
        reason = "every further run leaves the same bits"
        errors.append(StageError("o_proj", "replays", float(run.unstable), 0.0, reason, run.rank))
    if "o_proj" in trial.stages and not bool(active.all()):
        what, stream, _ = owed[0]
        reason = "exactly what was there before, or zero"
        exact = bool((getattr(run, what)[~active] == stream[~active]).all())
        errors.append(_inactive("o_proj", exact, reason, run))
    return errors


def _owed(trial: Trial, run: RankRun, oracle: Result) -> list[tuple[str, Tensor, Bound]]:
    """Outputs that a rank owes, float64, with their bounds; the sum, or the stream, comes first."""
    reduced = oracle.out_reduced if oracle.partials is not None else oracle.out_partials[run.rank]
    taken, bound = trial.carried, declared_bounds()["out"]
    limit, stream = bound, reduced
    if taken is not None and taken.prefix is not None:
        stream = residual_stream(taken.prefix, reduced)
        limit = stream_bound(bound, reduced[oracle.active], stream[oracle.active])
    if trial.mix is None:
        return [("out", stream, limit)]
    rounds = any(op.constants.get("round_mix") == "bf16" for op in run.layer.OPS)
    mixed = attn_res(taken.saved, stream, trial.mix, trial.geometry.rms_eps, rounds)
    return [("new_prefix", stream, limit), ("out", mixed, bound)]


def _inactive(stage: str, exact: bool, reason: str, run: RankRun) -> StageError:
    return StageError(stage, "inactive rows", 0.0 if exact else inf, 0.0, reason, run.rank)


def _tie_violations(trial: Trial, run: RankRun, row: int, chosen: Tensor) -> int:
    """Places of a row's selection that break the tie rule of the layer's top-k."""
    here = (run.index.request == row // trial.batch.q) & (run.index.position >= 0)
    here &= run.index.position < trial.batch.visible(row)
    block, offset = here.nonzero(as_tuple=True)
    order = run.index.position[block, offset].argsort()
    block, offset = block[order], offset[order]
    keys, scales = index_planes(run.index.data)
    seen = torch.cat([keys[block, offset], scales[block, offset]], -1)
    rules = {op.constants.get("tie", "low_id") for op in run.layer.OPS}
    return tie_violations(seen, chosen, low_id="high_id" not in rules)


def _attention_errors(run, oracle, views, value, own, add) -> None:  # type: ignore[no-untyped-def]
    if "latent" in views:
        add("sparse_core", "latent", views["latent"], oracle.latent[:, own], "latent")
    if "partial" in views:  # one rank alone holds the whole row
        part = oracle.latent if oracle.partials is None else oracle.partials[run.rank]
        add("sparse_core", "partial", views["partial"], part, "latent")
    bound = "gated"
    add("value", "gated", views["gated"], oracle.gated[:, value], bound)


def _inserted(trial: Trial, run: RankRun, oracle: Result) -> list[StageError]:
    """Cache rows written this step, dequantised; slots below zero insert nothing."""
    errors = []
    bounds = declared_bounds()
    for name, cache in (("latent_kv", run.latent), ("index_kv", run.index)):
        kept = cache.slots >= 0
        if not bool(kept.any()):
            continue
        slots = cache.slots[kept]
        block, offset = slots // cache.page, slots % cache.page
        if name == "latent_kv":
            expected_bytes, stage, bound = oracle.latent_bytes[kept], "query", "latent_bytes"
            actual_bytes = cache.data[block, offset]
            k_scale = float(trial.weights.k_scale)
            actual, expected = (
                decode_latent(trial.geometry, cache.cache_format, rows, k_scale)
                for rows in (actual_bytes, expected_bytes)
            )
        else:
            expected_bytes, stage, bound = oracle.index_bytes[kept], "indexer", "index_bytes"
            keys, scales = index_planes(cache.data)
            actual_bytes = torch.cat([keys[block, offset], scales[block, offset]], -1)
            actual, expected = (
                key.double() * scale.double().reshape(-1, 1)
                for key, scale in (decode_index(actual_bytes), decode_index(expected_bytes))
            )
        if bool(actual.isnan().all()):
            continue  # not reached
        error = relative_error(actual.double(), expected.double())
        limit = bounds[bound]
        errors.append(
            StageError(stage, f"{name} rows", error, float(limit), limit.reason, run.rank)
        )
    return errors
