"""Manifests for running train.py in Kubernetes, and the two programs that they call."""
