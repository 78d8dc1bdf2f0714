"""What the layers of a model do, as data: ops, values, storages. No torch in here."""

from actmem.graph.model import Graph
from actmem.graph.region import COMMUNICATION, Op, RegionGraph, Storage, Value

__all__ = ["COMMUNICATION", "Graph", "Op", "RegionGraph", "Storage", "Value"]
