"""`python -m seedance.daemon` is `seedanced`."""

from seedance.daemon.app import main

if __name__ == "__main__":
    main()
