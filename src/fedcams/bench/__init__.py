"""How long rounds take, and where the time goes."""
