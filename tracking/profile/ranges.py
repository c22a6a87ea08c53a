"""Prefixes of the ranges that Mantissa adds to a trace."""

STEP, STAGE, MODULE = "mantissa step ", "mantissa stage ", "mantissa module "
