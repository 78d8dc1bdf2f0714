"""Peak memory, step time and equality of gradients, measured side by side."""

from actmem.measuring.bench import run_bench
from actmem.measuring.result import BenchResult, PolicyResult
from actmem.memory import Peak, measure_peak

__all__ = ["BenchResult", "Peak", "PolicyResult", "measure_peak", "run_bench"]
