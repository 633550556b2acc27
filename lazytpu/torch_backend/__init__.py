"""What torch asks a device for besides kernels: streams, saving, printing, forks, versions."""
