"""What the layers of a model do, and a training step around them, as data: ops, values, storages. No torch in here."""

from actmem.graph.fingerprint import Fingerprint
from actmem.graph.model import Graph
from actmem.graph.region import COMMUNICATION, Op, RegionGraph, Storage, Value
from actmem.graph.step import Call, Constant, Escape, Gap, Standing, Step, StepOp, signature_of

__all__ = [
    "COMMUNICATION",
    "Call",
    "Constant",
    "Escape",
    "Fingerprint",
    "Gap",
    "Graph",
    "Op",
    "RegionGraph",
    "Standing",
    "Step",
    "StepOp",
    "Storage",
    "Value",
    "signature_of",
]
