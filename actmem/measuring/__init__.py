"""Peak memory, step time and equality of gradients, measured side by side."""

from actmem.measuring.bench import run_bench
from actmem.measuring.peak import Peak, measure_peak
from actmem.measuring.result import BenchResult, PolicyResult

__all__ = ["BenchResult", "Peak", "PolicyResult", "measure_peak", "run_bench"]
