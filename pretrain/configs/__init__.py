"""Shipped configurations, one YAML each, and `grids` of runs for sweeps."""
