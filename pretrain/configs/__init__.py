"""Shipped configurations, one YAML each."""
