"""How the programs of tests are compiled."""

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Without LLVM's optimizations, and with XLA's older emitters of loops: in half the time, or less."""

AS_USERS = {"xla_backend_optimization_level": "3", "xla_cpu_use_fusion_emitters": True}
"""Options that make a program what it is for users, in tests about numerics."""


def devices(count: int) -> str:
    """Return the flags of a process with virtual devices."""
    return f"--xla_force_host_platform_device_count={count} {QUICK}"
