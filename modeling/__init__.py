"""Hugging Face causal language models, prepared for DeepSpeed."""

import logging

# peft imports bitsandbytes if it is installed, which then warns about a CPU kernel that no quantised base here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
