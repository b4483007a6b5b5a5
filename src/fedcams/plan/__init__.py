"""Plans: what a federation will send and store, estimated before anything is trained."""

from fedcams.plan.advice import Advice, Option, advise, plan_recipes
from fedcams.plan.planner import CANDIDATES, Plan, Setting, plan, recommend
from fedcams.sampler import Contacts, expected_contacts, simulated_contacts

__all__ = [
    "CANDIDATES",
    "Advice",
    "Contacts",
    "Option",
    "Plan",
    "Setting",
    "advise",
    "expected_contacts",
    "plan",
    "plan_recipes",
    "recommend",
    "simulated_contacts",
]
