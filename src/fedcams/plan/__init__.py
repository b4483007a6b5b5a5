"""Plans: what a federation will send and store, estimated before anything is trained."""

from fedcams.plan.planner import CANDIDATES, Plan, Setting, plan, recommend
from fedcams.sampler import Contacts, expected_contacts, simulated_contacts

__all__ = [
    "CANDIDATES",
    "Contacts",
    "Plan",
    "Setting",
    "expected_contacts",
    "plan",
    "recommend",
    "simulated_contacts",
]
