"""A Flower app that trains with fedcams."""
