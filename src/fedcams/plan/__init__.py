"""Plans: what a federation will send and keep, worked out before anything is trained."""

from fedcams.plan.participation import Contacts, expected_contacts, simulated_contacts
from fedcams.plan.plan import CANDIDATES, Plan, Setting, plan, recommend

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
