"""Manifests that run train.py in Kubernetes, and the two programs they call."""
