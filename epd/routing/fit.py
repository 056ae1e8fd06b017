"""Fit cost-model parameters to measured samples: non-negative least squares on the relative error.

Owns the numerics and the hold-out error. Knows nothing of how samples were taken. Relative error, because a 10 ms stage
off by 5 ms misplaces as many requests as a 1 s stage off by 0.5 s; non-negative, because a negative parameter predicts
negative times outside the measured range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: the terms of a stage's cost form, e.g. ``(1, N, N^2)``, and the seconds it took."""

    terms: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``parameters`` multiply the terms. ``hold_out_error``: median relative error on every fifth sample, kept out of
    the fit that is judged; the parameters returned come from all samples."""

    parameters: tuple[float, ...]
    hold_out_error: float
    num_samples: int


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit a stage. Raises ``ValueError`` if there are fewer samples than parameters, or none took any time."""
    usable = [sample for sample in samples if 0.0 < sample.seconds < math.inf]
    num_terms = len(samples[0].terms) if samples else 0
    if len(usable) < max(1, num_terms):
        raise ValueError(f"{len(usable)} usable samples cannot determine {num_terms} parameters")
    training = [sample for index, sample in enumerate(usable) if index % 5 != 4]
    held_out = usable[4::5]
    if held_out and len(training) >= num_terms:
        judged = _solve(training)
        errors = [abs(_predict(judged, sample) - sample.seconds) / sample.seconds for sample in held_out]
        error = float(np.median(errors))
    else:
        error = math.nan
    return Fit(_solve(usable), error, len(usable))


def _predict(parameters: Sequence[float], sample: Sample) -> float:
    return sum(parameter * term for parameter, term in zip(parameters, sample.terms, strict=True))


def _solve(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Solve twice: the second time without the tenth of the samples that fits worst (a disturbed machine)."""
    first = _solve_non_negative(samples)
    num_kept = max(len(first), math.ceil(len(samples) * 0.9))
    ranked = sorted(samples, key=lambda sample: abs(_predict(first, sample) - sample.seconds) / sample.seconds)
    return _solve_non_negative(ranked[:num_kept])


def _solve_non_negative(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Try every set of parameters that may be zero (there are at most a few), keep the best feasible solution."""
    terms = np.array([sample.terms for sample in samples], dtype=np.float64)
    weighted = terms / np.array([[sample.seconds] for sample in samples])
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0.0] = 1.0
    weighted /= scale
    target = np.ones(len(samples))
    num_terms = weighted.shape[1]
    best, best_residual = np.zeros(num_terms), float(target @ target)
    for size in range(num_terms, 0, -1):
        for active in itertools.combinations(range(num_terms), size):
            columns = weighted[:, active]
            solution = np.linalg.lstsq(columns, target, rcond=None)[0]
            residual = float(np.sum((columns @ solution - target) ** 2))
            if (solution >= 0.0).all() and residual < best_residual - 1e-12:
                best, best_residual = np.zeros(num_terms), residual
                best[list(active)] = solution
    return tuple(float(value) for value in best / scale)
