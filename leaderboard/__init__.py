"""The leaderboard: accuracy against all bytes, one small file per entry, and the page in docs/ made from them."""
