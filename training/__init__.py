"""The training run. The only package that imports deepspeed or torch.distributed."""
