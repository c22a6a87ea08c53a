"""Mantissa's version, the only place that says it: CHANGELOG.md's newest entry is its description."""

VERSION = "0.2.0"
