"""Differential privacy of whole clients: the pieces that a method names, the accountant and the secret randomness."""

from fedcams.privacy.base import Participation, Privacy, Spent
from fedcams.privacy.client_noise import ClientNoise
from fedcams.privacy.server_noise import ServerNoise

__all__ = ["ClientNoise", "Participation", "Privacy", "ServerNoise", "Spent"]
