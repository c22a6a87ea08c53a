"""A checkpoint as a Hugging Face folder: `python -m tools.export_hf CHECKPOINT OUT`.

Read command.py, export.py, tensors.py (every tensor, compared with the masters), facts.py (what the folder says about
the run), card.py (the model card), then hub.py (the upload).
"""
