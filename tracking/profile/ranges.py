"""Name prefixes of the profiler ranges that Mantissa adds to a trace."""

STEP, STAGE, MODULE = "mantissa step ", "mantissa stage ", "mantissa module "
