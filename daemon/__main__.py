"""`python -m seedance.daemon` is `seedanced`."""

from seedance.daemon.entry import seedanced

if __name__ == "__main__":
    seedanced()
