"""The ingress's side of placement: feeds ``epd.routing`` with live loads, its own dispatches, and what it has learned.

Holds the only state that placement has. Knows nothing of HTTP or Ray, and decides nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deployments.cluster_view import ClusterView
from encoders import checkpoint_dir
from encoders.checkpoint import read_json
from epd import __version__
from epd.config import AppConfig
from epd.errors import ConfigError
from epd.routing import (
    AdmissionLimits,
    Correction,
    CostModel,
    CostStage,
    Dispatch,
    ProfileKey,
    Residency,
    admit,
    anticipate,
    correct,
    decide,
    guess_device,
    observe,
    priors_from_shapes,
    shapes_from_config,
)
from epd.types import SLO, Mode, Placement, ReplicaLoad, Request, StageReport


class Placer:
    """Places the requests of one ingress replica. Belongs to one event loop."""

    def __init__(
        self, config: AppConfig, view: ClusterView, cost_model: CostModel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._view = view
        self._prior = cost_model
        self._corrected = cost_model
        self._corrections: dict[CostStage, Correction] = {}
        self._pools = {name: pool.role_set for name, pool in config.pools.items()}
        self._limits = AdmissionLimits(config.router.max_queued_requests, config.router.admission)
        self._clock = clock
        self._dispatched: dict[str, Dispatch] = {}
        self._num_waiting = 0
        self._residency = Residency()

    @contextmanager
    def taking_in(self, request_id: str) -> Iterator[Callable[[], None]]:
        """Count a request as waiting until it calls what this yields (at its first token) or ends."""
        self._num_waiting += 1
        is_waiting = True

        def first_token() -> None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                self._num_waiting -= 1
                if (dispatch := self._dispatched.get(request_id)) is not None:
                    self._dispatched[request_id] = replace(dispatch, first_token_at_s=self._clock())

        try:
            yield first_token
        finally:
            first_token()

    async def ready(self) -> None:
        """Look again, now, if replicas of some pool are missing: they may have come back since the last poll."""
        if self._view.missing_pools:
            await self._view.refresh()

    def place(self, request: Request, excluded: frozenset[str], *, mode: Mode, slo: SLO) -> Placement:
        """Choose replicas; admission is decided at the first attempt only.

        Raises ``AdmissionRejectedError``, ``UnsupportedModeError`` or ``StageFailedError``.
        """
        loads = self._anticipated_loads()
        decision = decide(
            request,
            loads,
            mode=self._config.router.mode if mode is Mode.AUTO else mode,
            slo=slo,
            cost_model=self._corrected,
            excluded=excluded,
            affinity=self._residency.affinity(request, loads),
            pools=self._pools,
            max_num_batched_tokens=self._config.engine.max_num_batched_tokens,
        )
        if not excluded and not request.output_token_ids:
            # The request itself is among those that wait.
            admit(decision.prediction, slo, self._limits, num_queued_requests=max(0, self._num_waiting - 1))
        self._dispatched[request.request_id] = Dispatch(request, decision.placement, self._clock())
        return decision.placement

    def finished(self, request: Request, placement: Placement | None, report: StageReport, num_tokens: int) -> None:
        """Forget a request, and learn from it if it ran to its end (``placement`` given)."""
        self._dispatched.pop(request.request_id, None)
        if placement is None:
            return
        self._residency.learn(request, placement)
        decode = next((load for load in self._view.loads if load.replica_id == placement.decode), None)
        num_running = max(1, decode.num_running) if decode is not None else 1
        num_context = max(decode.num_context_tokens if decode is not None else 0, request.num_prefill_tokens)
        self._corrections = observe(
            self._corrections,
            self._prior,
            request,
            placement,
            report,
            predicted_step_s=self._prior.decode_step_s(num_running, num_context),
            num_output_tokens=num_tokens,
        )
        self._corrected = correct(self._prior, self._corrections)

    def _anticipated_loads(self) -> list[ReplicaLoad]:
        return anticipate(self._view.loads, list(self._dispatched.values()))


def build_cost_model(config: AppConfig) -> CostModel:
    """Read the configured profile, or guess from the checkpoint's shapes. Raises ``ConfigError``."""
    if config.router.profile is not None:
        try:
            text = Path(config.router.profile).read_text()
        except OSError as error:
            message = f"{config.router.profile} cannot be read: {error.strerror}"
            raise ConfigError("args.router.profile", message) from error
        return CostModel.from_json(text)
    model, engine = config.model, config.engine
    shapes = shapes_from_config(read_json(checkpoint_dir(model) / "config.json"), model.dtype)
    key = ProfileKey(model.served_name, engine.device, model.dtype, __version__)
    return priors_from_shapes(key, shapes, guess_device(engine.device, model.dtype, engine.num_threads or 1))
