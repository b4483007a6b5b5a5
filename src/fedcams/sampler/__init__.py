"""Samplers, one per file: every module in this folder is imported, which registers its sampler."""

from fedcams.registry import import_folder
from fedcams.sampler.base import Sampler, sampler
from fedcams.sampler.contacts import Contacts, expected_contacts, simulated_contacts

import_folder(__name__, __path__)

__all__ = ["Contacts", "Sampler", "expected_contacts", "sampler", "simulated_contacts"]
