"""Tuning: what to measure, and what a measurement changes in the specification."""
