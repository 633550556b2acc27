"""Libraries and public scripts that train in several processes: ``python -m tests.distributed.libraries``."""
