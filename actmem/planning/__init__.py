"""Plans: what they say, fixed policies that make them, and what becomes of a region under one. No torch in here."""

from actmem.graph import Fingerprint
from actmem.planning.fates import Fates, resolve
from actmem.planning.plan import Action, Plan, Rule
from actmem.planning.policies import POLICIES, Policy

__all__ = ["POLICIES", "Action", "Fates", "Fingerprint", "Plan", "Policy", "Rule", "resolve"]
