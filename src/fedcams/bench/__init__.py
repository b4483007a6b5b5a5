"""How fast fedcams is on this machine, against what one would write by hand, timed side by side."""
