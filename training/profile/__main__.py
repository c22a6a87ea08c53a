"""`python -m training.profile`."""

from tracking.profile.summary import main

if __name__ == "__main__":
    raise SystemExit(main())
