"""Checkpoints, complete or absent: `python -m training.checkpoint verify|list|inspect|prune`.

Read checkpoints.py (save, find, load), contents.py (what is saved), writer.py, commit.py and manifest.py (how it
becomes a checkpoint), save.py and outcome.py (in the background), choice.py (which is the newest), run_record.py (which
run it belongs to), reader.py, partitions.py and reshard.py (how it is loaded), retention.py, encryption.py and key.py;
store/ for object stores, tool.py and inventory.py for the command.
"""
