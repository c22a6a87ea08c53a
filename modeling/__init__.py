"""Hugging Face causal language models, prepared for DeepSpeed."""

import logging

# peft imports bitsandbytes wherever it is installed, which warns of a CPU kernel that no quantised base here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
