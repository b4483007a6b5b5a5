"""`python -m fedcams` is `fedcams`."""

from fedcams.cli import app

if __name__ == "__main__":
    app(prog_name="fedcams")
