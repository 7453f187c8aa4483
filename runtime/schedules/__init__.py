"""Schedules run with stand-ins for kernels: to look at what the hardware does with an order."""
