"""``torch.distributed`` on the device: a backend of process groups whose collectives are recorded."""
