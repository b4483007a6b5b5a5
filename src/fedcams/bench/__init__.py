"""How long rounds take on this machine, where the time goes, and what they take when written by hand."""
