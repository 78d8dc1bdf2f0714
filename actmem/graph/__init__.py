"""What one region call does, as data: ops, values, storages. No torch in here."""

from actmem.graph.region import Op, RegionGraph, Storage, Value

__all__ = ["Op", "RegionGraph", "Storage", "Value"]
