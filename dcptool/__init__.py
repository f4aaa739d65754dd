"""Give it a trained CNN and get back a smaller, faster, deployable one."""

__version__ = "0.1.0"
