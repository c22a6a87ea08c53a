"""A checkpoint as a Hugging Face folder: `python -m training.export_hf CHECKPOINT OUT`.

Read export.py, tensors.py (every tensor, compared with the masters), facts.py (what is recorded of the run), then
card.py (the model card).
"""
