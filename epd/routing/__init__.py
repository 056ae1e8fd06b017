"""Which replica runs each stage of a request: cost model, placement policy, admission.

Pure functions over ``ReplicaLoad`` records. Knows nothing of Ray, HTTP, clocks or files.
"""

from epd.routing.admission import AdmissionLimits, admit
from epd.routing.correction import Correction, correct, observe
from epd.routing.cost_model import CostModel, CostStage, ProfileKey
from epd.routing.policy import Decision, Dispatch, anticipate, decide, place
from epd.routing.predict import Affinity, Prediction
from epd.routing.priors import guess_device, priors_from_shapes, shapes_from_config
from epd.routing.residency import Residency

__all__ = [
    "AdmissionLimits",
    "Affinity",
    "Correction",
    "CostModel",
    "CostStage",
    "Decision",
    "Dispatch",
    "Prediction",
    "ProfileKey",
    "Residency",
    "admit",
    "anticipate",
    "correct",
    "decide",
    "guess_device",
    "observe",
    "place",
    "priors_from_shapes",
    "shapes_from_config",
]
