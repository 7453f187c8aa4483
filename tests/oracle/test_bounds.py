"""The declared bounds hold for FP32-sized noise and legal variants, and refuse wrong roundings."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from kpipe.runtime.oracle import dsa_layer
from kpipe.runtime.oracle.byte_formats import decode_index, decode_latent
from kpipe.runtime.oracle.compare import declared_bounds, relative_error, selection_violation
from kpipe.runtime.oracle.dsa_layer import oracle_layer
from kpipe.runtime.oracle.geometry import SMALL
from kpipe.runtime.oracle.inputs import Weights, make_batch, make_weights
from kpipe.runtime.oracle.number_formats import round_bf16, round_e4m3
from kpipe.runtime.oracle.result import Result, Rounding

# FP32 accumulation over a few thousand products: sqrt(7168) * 2^-24 of the row's typical value.
FP32_NOISE = 5e-6


@cache
def weights() -> Weights:
    """One set of weights for the file."""
    return make_weights(SMALL)


def _layer(name: str = "fp8_tensor", **options: object) -> Result:
    batch = make_batch(SMALL, [120, 60, 0, 200, 17, 90], 4)
    return oracle_layer(SMALL, weights(), batch, cache_format=name, **options)


def _inserted(result: Result, name: str) -> torch.Tensor:
    return decode_latent(SMALL, name, result.latent_bytes, float(weights().k_scale))


def _index_keys(result: Result) -> torch.Tensor:
    values, scale = decode_index(result.index_bytes)
    return values * scale[:, None]


def _errors(actual: Result, expected: Result, name: str) -> dict[str, float]:
    """Error of each declared stage between two results that continued from one selection."""
    fp8 = name == "fp8_tensor"
    both = (actual, expected)
    pairs = {
        "projected": [torch.cat(list(r.projected.values()), 1) for r in both],
        "query_e4m3" if fp8 else "query_bf16": [r.query for r in both],
        "index_bytes": [_index_keys(r) for r in both],
        "latent_bytes": [_inserted(r, name) for r in both],
        "out": [r.out_reduced for r in both],
        "merged" if expected.partials is not None else "latent": [r.latent for r in both],
    }
    for stage in ("q_c", "new_latent", "index_q", "index_q8", "index_w", "gated"):
        pairs[stage] = [getattr(r, stage) for r in both]
    errors = {stage: relative_error(*pair) for stage, pair in pairs.items()}
    active = [row for row, on in enumerate(expected.active.tolist()) if on]
    errors["scores"] = max(_score_error(actual, expected, row) for row in active)
    errors["selection"] = max(
        selection_violation(expected, row, dsa_layer._exact_selection(actual.scores[row], 16)[0])
        for row in active
    )
    return errors


def _score_error(actual: Result, expected: Result, row: int) -> float:
    worst = (actual.scores[row] - expected.scores[row]).abs().max()
    return float(worst / expected.scores[row].abs().max())


def _within(errors: dict[str, float]) -> dict[str, float]:
    """The stages that break their bound."""
    bounds = declared_bounds()
    return {stage: error for stage, error in errors.items() if error > bounds[stage]}


def _with_noise(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Perturbs what is about to be rounded, as a different summation order would."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(value: torch.Tensor) -> torch.Tensor:
        size = value.square().mean(-1, keepdim=True).sqrt()
        return value + FP32_NOISE * size * torch.randn(value.shape, generator=generator)

    norm = dsa_layer._layer_norm
    monkeypatch.setattr(dsa_layer, "round_bf16", lambda value: round_bf16(noisy(value)))
    monkeypatch.setattr(dsa_layer, "_layer_norm", lambda *operands: noisy(norm(*operands)))


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_ds_mla"])
@pytest.mark.parametrize("interleave", [None, 4])
def test_fp32_noise_stays_inside_every_bound(
    name: str, interleave: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _layer(name, tp=4, interleave=interleave)
    for seed in range(3):
        with monkeypatch.context() as patch:
            _with_noise(patch, seed)
            options = {"tp": 4, "interleave": interleave, "selection": expected.selection}
            actual = _layer(name, **options)
        errors = _errors(actual, expected, name)
        assert _within(errors) == {}
        assert errors["query_e4m3" if name == "fp8_tensor" else "query_bf16"] > 0


def _attend_e4m3(
    query: torch.Tensor, keys: torch.Tensor, kv_lora: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 core: unnormalised probabilities to E4M3, their sum kept exact."""
    exact = _ATTEND(query, keys, kv_lora, scale)
    if keys.shape[0] == 0:
        return exact
    logits = scale * (query @ keys.T)
    weight = (logits - logits.amax(1, keepdim=True)).exp()
    return round_e4m3(weight) @ keys[:, :kv_lora] / weight.sum(1, keepdim=True), exact[1]


_ATTEND = dsa_layer._attend


def test_e4m3_probabilities_need_their_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _layer()
    monkeypatch.setattr(dsa_layer, "_attend", _attend_e4m3)
    actual = _layer(selection=expected.selection)
    bounds = declared_bounds()
    for stage, pair in {
        "latent": (actual.latent, expected.latent),
        "gated": (actual.gated, expected.gated),
        "out": (actual.out_reduced, expected.out_reduced),
    }.items():
        assert 0.005 < relative_error(*pair) < bounds[f"{stage}_e4m3_p"]


WRONG_WEIGHTS = {
    "q_c": ("q_norm", torch.ones_like),
    "new_latent": ("kv_norm", torch.ones_like),
    "query_e4m3": ("w_uk", lambda weight: weight.roll(1, 0)),
    "index_bytes": ("index_k_bias", torch.zeros_like),
    "index_q8": ("index_q_b", lambda weight: weight.roll(SMALL.index_dim, 0)),
    "index_w": ("wv", lambda weight: weight.roll(1, 0)),
    "latent_bytes": ("k_scale", lambda scale: scale * 1.05),
    "gated": ("w_uv", lambda weight: weight.roll(1, 0)),
    "out": ("o_proj", lambda weight: weight.roll(SMALL.v_dim, 1)),
}


@pytest.mark.parametrize("stage", WRONG_WEIGHTS)
def test_a_wrong_operand_breaks_the_bound_of_its_stage(stage: str) -> None:
    expected = _layer()
    name, damage = WRONG_WEIGHTS[stage]
    wrong = replace(weights(), **{name: damage(getattr(weights(), name))})
    batch = make_batch(SMALL, [120, 60, 0, 200, 17, 90], 4)
    actual = oracle_layer(
        SMALL, wrong, batch, cache_format="fp8_tensor", selection=expected.selection
    )
    assert stage in _within(_errors(actual, expected, "fp8_tensor"))


def test_a_natural_lse_merged_in_base_two_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _layer(tp=4, interleave=4)
    merge = dsa_layer._merge
    monkeypatch.setattr(dsa_layer, "_merge", lambda rows, lse: merge(rows, lse * math.log(2)))
    actual = _layer(tp=4, interleave=4, selection=expected.selection)
    assert {"merged", "gated", "out"} <= set(_within(_errors(actual, expected, "fp8_tensor")))


def test_one_key_missing_breaks_the_bound() -> None:
    expected = _layer()
    fewer = _layer(selection=[positions[1:] for positions in expected.selection])
    assert {"latent", "gated", "out"} <= set(_within(_errors(fewer, expected, "fp8_tensor")))


def test_fewer_roundings_are_told_apart_from_all_of_them() -> None:
    expected = _layer(tp=4, interleave=4)
    for point in ("kv_norm", "query_b", "absorb", "index_query", "merged", "value"):
        actual = _layer(tp=4, interleave=4, rounding=replace(Rounding(), **{point: False}))
        stage = {
            "kv_norm": "new_latent",
            "query_b": "query_bf16",
            "absorb": "query_bf16",
            "index_query": "index_q",
            "merged": "latent",
            "value": "values",
        }[point]
        error = relative_error(getattr(actual, stage), getattr(expected, stage))
        assert 2.0**-11 < error < 2.0**-7, point


def test_every_bound_states_its_reason() -> None:
    bounds = declared_bounds()
    assert all(0 < bound < 0.06 and len(bound.reason) > 20 for bound in bounds.values())
