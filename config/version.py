"""Mantissa's version, defined only here; CHANGELOG.md's newest entry describes it."""

VERSION = "0.2.0"
