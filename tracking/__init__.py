"""What happened, written down once and fanned out to sinks."""
